"""pyisolate (0.10.2): tensors and arrays cross to its children as offsets.

The host's adapter, which pyisolate makes again in the child before torch:

    from millpond.integrations.pyisolate import Adapter
    class MyAdapter(Adapter):                       # or your own class with Adapter among its bases
        identifier = "myapp"

    arena = millpond.Arena(limit="4GiB")
    config["env"] = {**config.get("env", {}), **millpond.integrations.environment(arena, config["name"])}

A sandboxed child needs the folder of `MILLPOND_SOCKET`, and this package, visible: `get_sandbox_system_paths` names them.
"""

import os

from .. import _session
from . import _codec

#: The `__type__` of our values in pyisolate's JSON.
TYPE = "MillpondValue"
_TENSORS = ("Tensor", "torch.Tensor", "Parameter")
_ARRAYS = ("ndarray", "numpy.ndarray")


def register(registry=None):
    """Puts our serializers into pyisolate's registry, before its own, to which values go that are none of ours. It may be
    called again: pyisolate registers its own whenever it starts a child."""
    if registry is None:
        from pyisolate._internal.serialization_registry import SerializerRegistry

        registry = SerializerRegistry.get_instance()
    for name in (*_TENSORS, *_ARRAYS):
        before = registry.get_serializer(name)
        if not isinstance(before, _Serializer):
            registry.register(name, _Serializer(before), registry.get_deserializer(name), data_type=True)
    registry.register(TYPE, None, _deserialize)
    # pyisolate remembers what it found for a type.
    try:
        from pyisolate._internal import rpc_serialization

        rpc_serialization._SERIALIZER_BY_TYPE.clear()
    except (ImportError, AttributeError):
        pass


class _Serializer:
    """Ours, with what was there before behind it."""

    def __init__(self, otherwise):
        self.otherwise = otherwise

    def __call__(self, value):
        fields = _codec.encode(value)
        if fields is not None:
            return {"__type__": TYPE, **fields}
        if self.otherwise is not None:
            return self.otherwise(value)
        if type(value).__module__.startswith("numpy"):
            return value.tolist()  # what pyisolate does itself
        return value


def _deserialize(fields):
    if not isinstance(fields, dict):
        return fields  # pyisolate looks at results twice
    return _codec.decode(fields)


class Adapter:
    """The parts of pyisolate's `IsolationAdapter` that concern memory; the rest does nothing. Imports no torch."""

    identifier = "millpond"

    def get_path_config(self, module_path):
        return {"additional_paths": [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]}

    def setup_child_environment(self, snapshot):
        """In the child, before torch is imported: joins the arena."""
        from . import bootstrap

        bootstrap.start()

    def register_serializers(self, registry):
        """pyisolate calls this in the child, before and after its own."""
        if _session._info is not None:
            register(registry)

    def provide_rpc_services(self):
        """On the host pyisolate calls `_register` of each when a child has started, after its own serializers: where ours go
        on top again."""
        return [_service()]

    def setup_web_directory(self, module):
        return None

    def handle_api_registration(self, api, rpc):
        return None

    def setup_child_event_hooks(self, extension):
        return None

    def get_sandbox_system_paths(self):
        paths = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
        if _session._info is not None:
            paths.append(os.path.dirname(_session._info["socket"]))
        return paths

    def get_sandbox_gpu_patterns(self):
        return None


_services = []


def _service():
    if not _services:
        from pyisolate import ProxiedSingleton

        class MillpondSerializers(ProxiedSingleton):
            """Keeps our serializers in front on the host."""

            def _register(self, rpc):
                register()
                super()._register(rpc)

        MillpondSerializers.__module__ = __name__
        globals()["MillpondSerializers"] = MillpondSerializers
        _services.append(MillpondSerializers)
    return _services[0]


def __getattr__(name):
    if name == "MillpondSerializers":  # the child looks it up by this name
        return _service()
    raise AttributeError(name)
