"""The doors on a GPU: the canary of the GPU tier, tickets, torch.multiprocessing, the real pyisolate and comfy-env."""
from harness import GPU, Parent, Skip, check, equal, test, until, worker


@worker
def echoer(conn, spoil=""):
    import torch

    from millpond import _gpu_canary

    if spoil:
        _gpu_canary._Torch.check = lambda self, values: {"8x8 float32": "spoiled by the test"}
    while True:
        value = conn.recv(timeout=60)
        if value is None:
            return
        conn.send({"device": value["t"].device.type, "sum": float(value["t"].double().sum()), "t": value["t"], "out": str(conn._gpu.out)})


@test()
def the_gpu_tier_is_proved_at_its_first_value():
    """The canary of the GPU tier passes both ways, and values go by the arena with no copy."""
    p = Parent()
    torch = p.torch
    conn = p.worker(echoer)
    conn.send({"t": torch.ones(1000, device="cuda")})
    back = conn.recv(timeout=60)
    equal((back["device"], back["sum"]), ("cuda", 1000.0), "what came")
    equal(conn._gpu.out, True, "state of the tier")
    equal(back["out"], "None", "the worker had not sent a GPU value before")
    conn.send({"t": torch.full((5,), 2.0, device="cuda")})
    back = conn.recv(timeout=60)
    equal(back["out"], "True", "the worker's direction is proved too")
    equal(conn.tiers["arena"], 2, "by the arena")
    equal((conn.tiers["copy"], conn.tiers["host"]), (0, 0), "copies")
    conn.send(None)
    p.close()


@test()
def a_corrupting_gpu_tier_is_off_and_values_go_by_host_memory():
    """The worker finds the probes spoiled: GPU values go by host memory, come out on the GPU, and none is lost or wrong."""
    p = Parent()
    torch = p.torch
    conn = p.worker(echoer, "spoil")
    sums = []
    for number in range(4):
        conn.send({"t": torch.full((1000,), float(number), device="cuda")})
    for number in range(4):
        back = conn.recv(timeout=60)
        sums.append(back["sum"])
        equal(back["device"], "cuda", "put back on the GPU")
        equal(float(back["t"].double().sum()), number * 1000.0, "the reply")
    equal(sums, [0.0, 1000.0, 2000.0, 3000.0], "in order")
    equal(conn._gpu.out, False, "state of the tier")
    check(conn.tiers["host"] >= 4, "counted", conn.tiers)
    conn.send(None)
    p.close()


@test()
def tensors_of_torchs_own_allocator_are_copied_once():
    """Tier 2: torch's native caching allocator in the parent; one device copy, counted, then an offset."""
    p = Parent(replace=False)
    torch = p.torch
    conn = p.worker(echoer)
    sent = conn.send({"t": torch.ones(1 << 20, device="cuda")})
    equal(sent.copies, 1, "copies")
    equal(conn.recv(timeout=60)["sum"], float(1 << 20), "what came")
    equal(conn.tiers["copy"], 1, "counted")
    conn.send(None)
    p.close()


@worker
def redeemer(conn):
    import millpond

    while True:
        text = conn.recv(timeout=60)
        if text is None:
            return
        value = millpond.redeem(text)
        value += 1
        conn.send(float(value.double().sum()))


@test()
def a_ticket_carries_a_gpu_tensor():
    """A ticket's tensor is the same memory on the other side, ordered behind the kernel that fills it."""
    import millpond

    p = Parent()
    torch = p.torch
    conn = p.worker(redeemer)
    tensor = torch.zeros(1 << 20, device="cuda")
    if GPU:
        torch.cuda._sleep(300_000_000)
    tensor.fill_(1)
    conn.send(millpond.ticket(tensor))
    equal(conn.recv(timeout=60), 2.0 * (1 << 20), "the sum")
    equal(float(tensor[17]), 2.0, "written in place")
    conn.send(None)
    p.close()


@test()
def torch_multiprocessing_carries_gpu_tensors():
    """ForkingPickler: arena tensors by ticket, under a replaced allocator where torch itself raises."""
    import io
    from multiprocessing.reduction import ForkingPickler

    import millpond.torch

    p = Parent()
    torch = p.torch
    millpond.torch.install_reducer()
    tensor = torch.arange(1000.0, device="cuda")
    data = bytes(ForkingPickler.dumps(tensor))
    check(len(data) < 2000, "an offset", len(data))
    same = ForkingPickler.loads(io.BytesIO(data).getvalue())
    equal(same.data_ptr(), tensor.data_ptr(), "the same memory")
    millpond.torch.uninstall_reducer()
    p.close()


def doubles_what_comes(inbox, outbox):
    """The other end of a queue, in a process that `spawn` started."""
    import torch

    while True:
        tensor = inbox.get(timeout=60)
        if tensor is None:
            return
        tensor.mul_(2)
        torch.cuda.synchronize()
        outbox.put((str(tensor.device), float(tensor.double().sum())))
        del tensor


@test(timeout=80)
def a_real_queue_carries_gpu_tensors():
    """torch.multiprocessing's Queue between two processes: arena tensors go by ticket, are written in place over there, and come back to
    their producer when the reader has let go."""
    import torch.multiprocessing as mp

    p = Parent()
    torch, millpond = p.torch, p.millpond
    millpond.torch.install_reducer()
    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=doubles_what_comes, args=(there, back), daemon=True)
    process.start()
    copied = millpond.counters()["copied_bytes"]
    large = torch.arange(1 << 22, device="cuda", dtype=torch.float32)
    expected = 2 * float(large.double().sum())
    there.put(large)
    equal(back.get(timeout=70), ("cuda:0", expected), "all of it")
    equal(float(large.double().sum()), expected, "written in place")
    there.put(large.view(2048, 2048).t()[3:5])
    got = back.get(timeout=60)
    equal(float(large.view(2048, 2048).t()[3:5].double().sum()), got[1], "a view of it")
    check(float(large[0]) == 0 and float(large[2]) == 4, "and no more than the view", large[:6])
    equal(millpond.counters()["copied_bytes"], copied, "bytes that were copied")
    equal(millpond.torch.reducer_counts()["tickets"], 2)
    there.put(None)
    process.join(30)
    equal(process.exitcode, 0)
    del large
    until(lambda: p.mine("leased_out") == 0, 5, lambda: f"still leased out: {p.arena.ledger()}")
    millpond.torch.uninstall_reducer()
    p.close()


# The real programs, from wheels that doors.sh fetched; skipped by name where they are not there.

PYISOLATE_EXTENSION = """
import os
from pyisolate import ExtensionBase
from millpond.integrations.pyisolate import Adapter

class DoorAdapter(Adapter):
    identifier = "gpu-door"

class Door(ExtensionBase):
    async def facts(self):
        import sys, millpond
        ours = sys.modules.get("millpond.torch")
        return {"attached": millpond._session._info is not None, "installed": ours and ours.installed()}

    async def fill(self, value, number):
        import millpond
        value[...] = number
        kind = millpond._native.control("locate", address=value.data_ptr())["kind"]
        return {"kind": kind, "device": value.device.type, "shape": list(value.shape), "sum": float(value.double().sum())}

    async def make(self, n, device):
        import torch
        return {"a": torch.full((n,), 3.0, dtype=torch.bfloat16, device=device)}
"""

COMFY_PACK = """
def facts():
    import sys
    m = sys.modules.get("millpond")
    return {"attached": m is not None and m._session._info is not None}

def fill(value, number):
    import sys
    value[...] = number
    kind = sys.modules["millpond"]._native.control("locate", address=value.data_ptr())["kind"]
    return {"kind": kind, "device": value.device.type, "sum": float(value.double().sum())}

def make(n, device):
    import torch
    return {"image": torch.full((1, n, n, 3), 0.5, device=device)}
"""

UV = """#!/bin/sh
# What pyisolate asks of uv, without a network: `uv venv PATH --seed --python PYTHON`.
[ "$1" = venv ] || { echo "this uv only makes venvs: $*" >&2; exit 2; }
exec "$5" -m venv --without-pip "$2"
"""


def door(name, folder):
    """The package, from where it is installed or from carried wheels, for this process and those that it starts."""
    import glob
    import importlib.util
    import os
    import sys
    import zipfile

    wheels = os.environ.get("MILLPOND_DOORS") or os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "doors")
    found = glob.glob(os.path.join(wheels, "*.whl"))
    if importlib.util.find_spec(name) is None:
        if not found:
            raise Skip(f"{name} is not installed and {wheels} has no wheels: tests/gpu/doors.sh")
        site = os.path.join(folder, "site")
        for wheel in found:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        sys.path.append(site)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), site]))
        if importlib.util.find_spec(name) is None:
            raise Skip(f"{name} is not among the wheels in {wheels}")
    binaries = os.path.join(folder, "bin")
    os.makedirs(binaries, exist_ok=True)
    with open(os.path.join(binaries, "uv"), "w") as file:
        file.write(UV)
    os.chmod(os.path.join(binaries, "uv"), 0o755)
    os.environ["PATH"] = binaries + os.pathsep + os.environ["PATH"]
    sys.path.insert(0, folder)


def tensor_in_arena(p):
    torch = p.torch if p is not None else __import__("torch")
    if GPU:
        return torch.ones(1000, 257, device="cuda")
    import millpond

    made = millpond.empty((1000, 257), "float32", "cpu", "t")
    made.fill_(1)
    return made


@test(timeout=120, host=True, quick=False)
def the_real_pyisolate():
    """pyisolate 0.10.2: its host and child process; GPU tensors cross as offsets both ways, written in place."""
    import asyncio
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        door("pyisolate", folder)
        with open(os.path.join(folder, "gpu_door_ext.py"), "w") as file:
            file.write(PYISOLATE_EXTENSION)
        os.makedirs(os.path.join(folder, "pack"))
        open(os.path.join(folder, "pack", "__init__.py"), "w").close()
        import gpu_door_ext
        import pyisolate
        from millpond import integrations

        p = Parent()
        pyisolate.register_adapter(gpu_door_ext.DoorAdapter())
        manager = pyisolate.ExtensionManager(gpu_door_ext.Door, {"venv_root_path": os.path.join(folder, "venvs")})
        extension = manager.load_extension(
            {
                "name": "door", "module_path": os.path.join(folder, "pack"), "isolated": True, "dependencies": [], "share_torch": True,
                "share_cuda_ipc": False, "sandbox_mode": "disabled", "env": integrations.environment(p.arena, "pyisolate-child"),
            }
        )
        loop = asyncio.new_event_loop()

        def call(name, *args):
            extension.proxy
            return loop.run_until_complete(asyncio.wait_for(getattr(extension, name)(*args), 60))

        facts = call("facts")
        equal(facts["attached"], True, "the child is attached")
        if GPU:
            equal(facts["installed"], "replace", "torch's allocator in the child")
        tensor = tensor_in_arena(p)
        said = call("fill", tensor, 5.0)
        equal(said, {"kind": "import", "device": "cuda" if GPU else "cpu", "shape": [1000, 257], "sum": 5.0 * 257_000}, "in the child")
        equal(float(tensor.double().sum()), 5.0 * 257_000, "written in place")
        made = call("make", 100_000, "cuda" if GPU else "cpu")["a"]
        equal((made.device.type, float(made.double().sum())), ("cuda" if GPU else "cpu", 300_000.0), "the result")
        kind = p.millpond._native.control("locate", address=made.data_ptr())["kind"]
        equal(kind, "import" if GPU else kind, "where the result lies")
        manager.stop_all_extensions()
        loop.close()
        p.close()


@test(timeout=120, host=True, quick=False)
def the_real_comfy_env():
    """comfy-env 0.4.46: its worker process and its canary; GPU tensors cross as offsets both ways."""
    import os
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        door("comfy_env", folder)
        with open(os.path.join(folder, "gpu_packmod.py"), "w") as file:
            file.write(COMFY_PACK)
        import millpond
        from harness import DRIVER
        from millpond.integrations import comfy_env, comfyui

        comfy_env.install(limit="20%" if GPU else "256MiB", driver=DRIVER)
        import torch  # noqa: F401

        if GPU:
            millpond.torch.install()
        from comfy_env.isolation.workers import SubprocessWorker

        process = SubprocessWorker(sys.executable, working_dir=folder, name="door")
        try:
            call = lambda name, **kw: process.call_module("gpu_packmod", name, timeout=60, **kw)  # noqa: E731
            equal(call("facts"), {"attached": True}, "the worker is attached")
            check(process.verify_transport(), "comfy-env's own canary")
            tensor = tensor_in_arena(None)
            device = "cuda" if GPU else "cpu"
            equal(call("fill", value=tensor, number=4.0), {"kind": "import", "device": device, "sum": 4.0 * 257_000}, "in the worker")
            equal(float(tensor.double().sum()), 4.0 * 257_000, "written in place")
            image = call("make", n=256, device=device)["image"]
            equal((image.device.type, float(image.double().mean())), (device, 0.5), "the result")
        finally:
            process.shutdown()
            comfyui.close()
