"""The real comfy-env: its worker process and its wire, our serializers, its own canary. Host driver."""

import os
import subprocess
import sys

import pytest

from conftest import native

pytest.importorskip("comfy_env", reason="comfy-env is not installed: make test-doors")
torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import millpond  # noqa: E402
from millpond.integrations import comfy_env as door  # noqa: E402
from millpond.integrations import comfyui  # noqa: E402
from test_package import python39  # noqa: E402

pytestmark = native

PACK = """
def facts():
    import sys
    m = sys.modules.get("millpond")
    return {"attached": m is not None and m._session._info is not None, "path": m and m.__file__,
            "version": list(sys.version_info[:2]), "torch": "torch" in sys.modules}

def fill(value, number):
    import sys
    value[...] = number
    at = value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data
    return {"type": type(value).__name__, "kind": sys.modules["millpond"]._native.control("locate", address=at)["kind"]}

def echo(value):
    return value

def make(n):
    import torch
    return {"image": torch.full((1, n, n, 3), 0.5), "masks": [torch.zeros(n, dtype=torch.float16)]}
"""


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    before = dict(os.environ)
    arena = door.install(limit="256MiB", driver="host")
    yield arena
    comfyui.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    (folder / "packmod.py").write_text(PACK)
    return folder


@pytest.fixture(scope="module")
def worker(arena, folder):
    from comfy_env.isolation.workers import SubprocessWorker

    worker = SubprocessWorker(sys.executable, working_dir=folder, name="pack")
    yield lambda name, **kw: worker.call_module("packmod", name, timeout=60, **kw)
    worker.shutdown()


def test_the_worker_joins_with_nothing_installed(arena, worker):
    facts = worker("facts")
    assert facts["attached"] and facts["path"].startswith(os.path.dirname(millpond.__file__))
    assert any(c["name"].startswith("comfy-env ") for d in arena.ledger()["devices"] for c in d["clients"])


def test_comfy_envs_own_canary_goes_our_way(arena, folder):
    from comfy_env.isolation.workers import SubprocessWorker

    worker = SubprocessWorker(sys.executable, working_dir=folder, name="canary")
    try:
        before = millpond.counters()["sent_tensors"]
        assert worker.verify_transport()
        assert millpond.counters()["sent_tensors"] > before
    finally:
        worker.shutdown()


def test_an_arena_tensor_is_shared_not_copied(worker):
    tensor = millpond.empty((64, 100), "float32", "cpu", "t")
    tensor.fill_(1)
    copied = millpond.counters()["copied_bytes"]
    assert worker("fill", value=tensor, number=4.0) == {"type": "Tensor", "kind": "import"}
    assert tensor[63, 99] == 4 and millpond.counters()["copied_bytes"] == copied


def test_numpy_and_nested_values(worker):
    value = {"a": np.arange(12).reshape(3, 4)[:, ::2], "l": [torch.arange(5, dtype=torch.bfloat16), "text", None, 1.5]}
    back = worker("echo", value=value)
    assert type(back["a"]) is np.ndarray and (back["a"] == value["a"]).all()
    assert torch.equal(back["l"][0], value["l"][0]) and back["l"][1:] == ["text", None, 1.5]
    tensor = torch.arange(9)
    first, second = worker("echo", value=[tensor, tensor])
    assert torch.equal(first, tensor) and torch.equal(second, tensor)


def test_results(worker):
    made = worker("make", n=256)
    assert made["image"].shape == (1, 256, 256, 3) and made["image"].mean() == 0.5
    assert millpond._native.control("locate", address=made["image"].data_ptr())["kind"] == "import"
    assert made["masks"][0].dtype == torch.float16


def test_a_full_arena_falls_to_comfy_envs_shared_memory(worker, caplog):
    big = torch.ones((300 << 20) // 4)  # more than the arena has
    back = worker("echo", value={"x": big[: (280 << 20) // 4]})
    assert back["x"].sum() == (280 << 20) // 4
    assert any("the arena is full" in r.getMessage() for r in caplog.records)


def test_a_parameter_and_a_gradient_flag(worker):
    back = worker("echo", value=torch.ones(4, requires_grad=True))
    assert back.requires_grad


def other_pythons():
    """Other Pythons with numpy, which comfy-env's worker needs: MILLPOND_TEST_PYTHONS (paths with : between), else what there
    is. Those with a torch are another torch's test too."""
    named = os.environ.get("MILLPOND_TEST_PYTHONS", "")
    for python in [*filter(None, named.split(os.pathsep)), *([] if named else [python39()])]:
        if python and subprocess.run([python, "-c", "import numpy"], stderr=subprocess.DEVNULL).returncode == 0:
            yield python


@pytest.mark.parametrize("python", list(other_pythons()))
def test_a_worker_of_another_python_and_torch(arena, folder, python):
    from comfy_env.isolation.workers import SubprocessWorker

    worker = SubprocessWorker(python, working_dir=folder, name="other")
    try:
        facts = worker.call_module("packmod", "facts", timeout=60)
        assert facts["attached"] and facts["version"] != list(sys.version_info[:2])
        array = np.arange(1000, dtype="float32")
        back = worker.call_module("packmod", "echo", timeout=60, value=array)
        assert (back == array).all()
        if worker.call_module("packmod", "facts", timeout=60)["torch"]:  # another torch than ours
            assert worker.verify_transport()
            for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool):
                tensor = torch.ones(5, 7).to(dtype).t()
                back = worker.call_module("packmod", "echo", timeout=60, value=tensor)
                assert back.dtype == dtype and torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))
    finally:
        worker.shutdown()


def test_announcing_and_refusing(arena, monkeypatch):
    class Mm:
        EXTRA_RESERVED_VRAM = 400 << 20

    mm = Mm()
    assert comfyui.announce(mm) == 400 << 20, "the host driver takes no VRAM"
    monkeypatch.setattr(comfyui, "_growth", lambda arena: 1 << 30)
    assert comfyui.announce(mm) == (400 << 20) + (1 << 30)
    mm.EXTRA_RESERVED_VRAM += 5  # somebody else's
    monkeypatch.setattr(comfyui, "_growth", lambda arena: 1 << 29)
    assert comfyui.announce(mm) == (400 << 20) + (1 << 29) + 5
    comfyui.refuse_beside_aimdo()
    monkeypatch.setitem(sys.modules, "comfy_aimdo.control", type("control", (), {"lib": object()}))
    with pytest.raises(millpond.Refused, match="comfy-aimdo"):
        comfyui.refuse_beside_aimdo()


def test_prestartup_makes_no_driver_call_and_imports_no_torch(tmp_path):
    code = """
import sys, os
from millpond.integrations import comfyui
with comfyui.prestartup(limit="64MiB", driver="host") as arena:
    assert "torch" not in sys.modules and "numpy" not in sys.modules
    maps = open("/proc/self/maps").read()
    assert "libcuda" not in maps, "the driver was loaded"
    assert os.environ["MILLPOND_SOCKET"] and os.environ["MILLPOND_CANARY"] and os.path.exists(os.environ["MILLPOND_BOOTSTRAP"])
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ or os.environ.get("KEEP")
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MILLPOND_") or k in ("MILLPOND_LIBRARY", "MILLPOND_PROGRAM")}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
