"""comfy-env loads this file by its path, in workers and in the parent: joins the arena and registers serializers.

Python 3.9, standard library at the top: nothing is installed in the worker.
"""

import os
import sys

TAG = "millpond.value"


def _start():
    """The package, attached; None where this process has no arena."""
    if __package__:
        from .. import _session

        return _session._info is not None
    import runpy

    bootstrap = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")
    return runpy.run_path(bootstrap)["start"](name="comfy-env %s (%d)" % (os.path.basename(os.getcwd()), os.getpid())) is not None


def _registry():
    """comfy-env's registry: beside the worker's script, or in the package."""
    shared = sys.modules.get("_ipc_shared")
    if shared is None:
        from comfy_env.isolation.workers import _ipc_shared as shared
    return shared


def register(registry=None):
    add = registry.register if registry is not None else _registry().register_serializer
    for name in ("Tensor", "ndarray", "Parameter"):
        add(name, serialize, deserialize, TAG)


def serialize(value, recurse):
    """For `register_serializer`: a ticket; where the arena cannot take it, its bytes by comfy-env's own shared memory."""
    from millpond.integrations import _codec

    parent = sys.modules.get("comfy_env.isolation.workers._ipc_parent")
    if parent is not None and getattr(value, "is_cuda", False) and parent._is_gpu_demoted():
        value = value.cpu()  # comfy-env's own canary, which goes this way too, has failed for this worker's GPU
    fields = _codec.encode(value)
    if fields is not None:
        return fields
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided" or getattr(value, "is_quantized", False) or getattr(getattr(value, "dtype", None), "hasobject", False):
        raise TypeError("a %s (%s) cannot cross: send its parts" % (type(value).__name__, layout))
    data, dtype, shape = _codec.as_bytes(value)
    kind = "t" if type(value).__module__.startswith("torch") else "n"
    return {"bytes": recurse(data), "dtype": dtype, "shape": shape, "kind": kind}


def deserialize(payload, recurse):
    from millpond.integrations import _codec

    if "ticket" in payload:
        return _codec.decode(payload)
    return _codec.from_bytes(recurse(payload["bytes"]), payload["dtype"], payload["shape"], payload["kind"])


if not __package__ and _start():
    register()
