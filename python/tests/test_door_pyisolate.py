"""The real pyisolate: its extension manager, its child process, its JSON; our serializers. Host driver, torch CPU tensors."""

import asyncio
import os
import sys
import textwrap

import pytest

from conftest import native

pyisolate = pytest.importorskip("pyisolate", reason="pyisolate is not installed: make test-doors")
torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import millpond  # noqa: E402
from millpond import integrations  # noqa: E402
from millpond.integrations import pyisolate as door  # noqa: E402

pytestmark = native

EXTENSION = """
import os, sys
from pyisolate import ExtensionBase
from millpond.integrations.pyisolate import Adapter

class DoorAdapter(Adapter):
    identifier = "door-test"

    def setup_child_environment(self, snapshot):
        os.environ["TORCH_BEFORE"] = str("torch" in sys.modules)
        super().setup_child_environment(snapshot)

class Door(ExtensionBase):
    async def facts(self):
        import millpond
        return {"attached": millpond._session._info is not None, "torch_before": os.environ["TORCH_BEFORE"], "pid": os.getpid()}

    async def fill(self, value, number):
        import millpond
        value[...] = number
        kind = millpond._native.control("locate", address=value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data)["kind"]
        return {"type": type(value).__name__, "kind": kind, "shape": list(value.shape), "dtype": str(value.dtype)}

    async def echo(self, value):
        return value

    async def make(self, n):
        import torch
        return {"a": torch.full((n,), 3.0, dtype=torch.bfloat16), "b": [torch.arange(n)]}
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    (folder / "door_ext.py").write_text(textwrap.dedent(EXTENSION))
    module = folder / "pack"
    module.mkdir()
    (module / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # uv
    import door_ext

    pyisolate.register_adapter(door_ext.DoorAdapter())
    with millpond.Arena(limit="256MiB", driver="host", name="pyisolate-host") as arena:
        manager = pyisolate.ExtensionManager(door_ext.Door, {"venv_root_path": str(folder / "venvs")})
        extension = manager.load_extension(
            {
                "name": "door",
                "module_path": str(module),
                "isolated": True,
                "dependencies": [],
                "share_torch": True,
                "share_cuda_ipc": False,
                "sandbox_mode": "disabled",
                "env": integrations.environment(arena, "pyisolate-child"),
            }
        )
        loop = asyncio.new_event_loop()

        def call(name, *args):
            extension.proxy
            return loop.run_until_complete(asyncio.wait_for(getattr(extension, name)(*args), 60))

        yield arena, call
        manager.stop_all_extensions()
        loop.close()
    sys.path.remove(str(folder))


def test_the_child_joins_before_torch_with_nothing_installed(child):
    arena, call = child
    facts = call("facts")
    assert facts["attached"] and facts["torch_before"] == "False"
    assert facts["pid"] in [c["pid"] for d in arena.ledger()["devices"] for c in d["clients"]]


def test_an_arena_tensor_crosses_as_an_offset_and_is_shared(child):
    _, call = child
    tensor = millpond.empty((1024, 257), "float32", "cpu", "t")
    tensor.fill_(1)
    copied = millpond.counters()["copied_bytes"]
    said = call("fill", tensor, 5.0)
    assert said == {"type": "Tensor", "kind": "import", "shape": [1024, 257], "dtype": "torch.float32"}
    assert tensor[1000, 200] == 5 and millpond.counters()["copied_bytes"] == copied


def test_other_tensors_are_copied_once_and_numpy_stays_numpy(child):
    _, call = child
    said = call("fill", torch.ones(10), 2.0)
    assert said["kind"] == "import"
    said = call("fill", np.ones((3, 4), "int16"), 2)
    assert said == {"type": "ndarray", "kind": "import", "shape": [3, 4], "dtype": "int16"}
    back = call("echo", {"x": [torch.arange(6).reshape(2, 3), np.float32(2.5)], "t": ("a", None)})
    assert torch.equal(back["x"][0], torch.arange(6).reshape(2, 3)) and back["x"][1] == 2.5


def test_results_come_as_offsets_too(child):
    _, call = child
    made = call("make", 100000)
    assert made["a"].dtype == torch.bfloat16 and made["a"].sum() == torch.full((100000,), 3.0, dtype=torch.bfloat16).sum()
    assert millpond._native.control("locate", address=made["a"].data_ptr())["kind"] == "import"
    assert torch.equal(made["b"][0], torch.arange(100000))


def test_the_same_tensor_twice_in_one_message(child):
    _, call = child
    tensor = torch.arange(1000)
    back = call("echo", [tensor, tensor, {"again": tensor}])
    assert all(torch.equal(t, tensor) for t in (back[0], back[1], back[2]["again"]))


def test_what_is_none_of_ours_goes_pyisolates_own_way(child):
    from pyisolate._internal.serialization_registry import SerializerRegistry

    serializer = SerializerRegistry.get_instance().get_serializer("Tensor")
    assert isinstance(serializer, door._Serializer) and serializer.otherwise is not None
