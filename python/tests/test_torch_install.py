"""torch's allocator and statistics, as far as that goes without a GPU: each case in a process of its own."""

import os
import subprocess
import sys

import pytest

from conftest import native

torch = pytest.importorskip("torch")
if torch.version.cuda is None:
    pytest.skip("this torch is built without CUDA", allow_module_level=True)

GPU = """
import torch, millpond
from millpond import _session, _native
_session._info = {"devices": [{"ordinal": 0, "id": "GPU-x"}, {"ordinal": -1, "id": "HOST-0"}]}
"""


def run(code, **env):
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
try:
    millpond.torch.{call}
except millpond.Error as e:
    print(type(e).__name__, e)
"""


def test_without_attach_or_gpu_it_says_so():
    assert run("import millpond" + REFUSED.format(call="install()")).startswith("NotAttached")
    host = GPU + "_session._info = {'devices': [{'ordinal': -1}]}"
    assert "host driver" in run(host + REFUSED.format(call="install()"))
    assert run(GPU + REFUSED.format(call="install(mode='other')")).startswith("InvalidArgument")


def test_after_cuda_was_initialised_it_says_how_to_fix_it():
    out = run(GPU + "torch.cuda.is_initialized = lambda: True" + REFUSED.format(call="install()"))
    assert out.startswith("Refused torch has already initialised CUDA") and "right after import torch" in out


def test_under_cuda_malloc_async_it_says_how_to_fix_it():
    out = run(GPU + REFUSED.format(call="install()"), PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert out.startswith("Refused") and "remove backend:cudaMallocAsync" in out


def test_another_allocator_is_refused():
    other = """
a = torch._C._cuda_customAllocator(1, 2)
torch._C._cuda_changeCurrentAllocator(a)
"""
    assert "another allocator" in run(GPU + other + REFUSED.format(call="install()"))


def test_pool_mode_needs_a_torch_that_has_it():
    out = run(GPU + "torch.__version__ = '2.7.1+cu126'" + REFUSED.format(call="pool().__enter__()"))
    assert "torch 2.8 or later" in out


@pytest.fixture(scope="module")
def hooks():
    """What this torch has, by its version: method -> our function."""
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    names = ["init_fn", "reset_fn", "memory_fraction_fn", "base_alloc_fn", "record_stream_fn", "release_pool"]
    names += (
        ["begin_allocate_to_pool", "end_allocate_to_pool_fn"]
        if version >= (2, 3)
        else ["begin_allocate_stream_to_pool", "end_allocate_stream_to_pool_fn"]
    )
    return {f"set_{name}": "millpond_torch_" + (name[:-3] if name.endswith("_fn") else name) for name in names}


#: An allocator that notes the hooks that it is given, over torch's own, which takes them. `HIDDEN`: what this torch is to lack.
SPY = """
calls, HIDDEN = [], {hidden!r}
real, change = torch._C._cuda_customAllocator, torch._C._cuda_changeCurrentAllocator
class Spy:
    def __init__(self, made): self.made = made
    def __getattr__(self, name):
        if name in HIDDEN:
            raise AttributeError(name)
        method = getattr(self.made, name)
        def call(*arguments):
            calls.append((name, arguments))
            return method(*arguments)
        return call
def make(*addresses):
    assert all(addresses), addresses
    return Spy(real(*addresses))
torch._C._cuda_customAllocator = make
torch._C._cuda_changeCurrentAllocator = lambda spy: change(spy.made)
address = _native.library().address_of
"""


@native
def test_install_gives_torch_every_hook_of_its_version_once(hooks):
    code = (
        GPU
        + SPY.format(hidden=())
        + f"expected = {hooks!r}"
        + """
millpond.torch.install()
millpond.torch.install()
assert sorted(calls) == sorted((method, (address(function),)) for method, function in expected.items()), calls
print(torch.cuda.get_allocator_backend(), millpond.torch.installed())
"""
        + REFUSED.format(call="install(mode='pool')")
    )
    out = run(code)
    assert out.startswith("pluggable replace\nRefused") or out.startswith("native replace\nRefused"), out


SHARE = """
from torch.multiprocessing import reductions
assert "_share_cuda_" in reductions.reduce_tensor.__code__.co_names, "this torch shares by another function"
def share(nbytes=64, of=torch.UntypedStorage):
    try:
        storage = torch.UntypedStorage(nbytes)
        (storage if of is torch.UntypedStorage else of(wrap_storage=storage, dtype=torch.uint8, _internal=True))._share_cuda_()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
torchs = share()
assert torchs and not torchs.startswith("Unsupported"), torchs
"""


@native
def test_a_torch_without_a_hook_goes_without_but_not_without_those_of_captures(hooks):
    begin, end = (next(name for name in hooks if name.startswith(f"set_{which}_allocate")) for which in ("begin", "end"))
    refused = "".join(
        f"HIDDEN = {hidden!r}" + REFUSED.format(call="install()") + "assert not calls and not millpond.torch.installed()\n"
        for hidden in ((begin,), (end,))
    )
    rest = "HIDDEN = ('set_base_alloc_fn',); millpond.torch.install(); print(*sorted(name for name, _ in calls))"
    *said, given = run(GPU + SPY.format(hidden=()) + refused + rest).splitlines()
    assert len(said) == 2 and all(line.startswith("Unsupported torch ") and "CUDA graph captures" in line for line in said), said
    assert given.split() == sorted(set(hooks) - {"set_base_alloc_fn"})


@native
def test_torch_calls_the_hooks_with_the_pool_by_value():
    """As far as torch calls them where there is no driver: what it hands over is what our functions are declared to take."""
    code = """
import ctypes, torch
made, seen = torch._C._cuda_customAllocator(1, 2), []
u64 = ctypes.c_uint64
Pool = ctypes.CFUNCTYPE(None, ctypes.c_int, u64, u64)
hooks = [Pool(lambda *arguments, name=name: seen.append((name, arguments))) for name in ("release", "begin", "end")]
at = lambda hook: ctypes.cast(hook, ctypes.c_void_p).value
made.set_release_pool(at(hooks[0]))
by_pool = hasattr(made, "set_begin_allocate_to_pool")
if by_pool:
    made.set_begin_allocate_to_pool(at(hooks[1]))
    made.set_end_allocate_to_pool_fn(at(hooks[2]))
torch._C._cuda_changeCurrentAllocator(made)
begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None) or getattr(torch._C, "_cuda_beginAllocateToPool", None)
if by_pool and begin:
    begin(0, (3, 7))
    torch._C._cuda_endAllocateToPool(0, (3, 7))
torch._C._cuda_releasePool(0, (3, 7))
expected = ["begin", "end", "release"] if by_pool and begin else ["release"]
assert seen == [(name, (0, 3, 7)) for name in expected], seen
print("fine")
"""
    assert run(code) == "fine"


ASKED = """
torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True
asked = {
    **{name: (lambda name=name: getattr(torch.cuda, name)(0)) for name in (
        "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_summary",
        "reset_peak_memory_stats", "reset_accumulated_memory_stats")},
    "memory_snapshot": torch.cuda.memory_snapshot,
    "_snapshot": torch.cuda.memory._snapshot,
}
torch.cuda.device_count = lambda: 0
raised = set()
for name, ask in asked.items():
    try:
        ask()
    except RuntimeError as e:
        assert "does not yet support" in str(e), e
        raised.add(name)
    except millpond.Error:
        pass  # ours, without an arena
"""


#: What torch.compile(mode="reduce-overhead") asks of the allocator, first what it asks first.
TREES = """
for ask in (lambda: torch._C._cuda_checkPoolLiveAllocations(0, (0, 1), set()), lambda: torch._C._cuda_getCheckpointState(0, (0, 1))):
    try:
        ask()
    except millpond.Unsupported as e:
        print(e)
"""


@native
def test_torchs_own_sharing_of_our_memory_says_what_to_do_instead():
    """What torch.multiprocessing comes to for a CUDA tensor; the storage is in host memory here, which ours does not look at."""
    out = run(
        GPU
        + SHARE
        + """
millpond.torch.install(stats=False)
for of in (torch.UntypedStorage, torch.storage.TypedStorage):
    print(share(of=of))
    assert share(of=of).startswith("Unsupported: 64 bytes of GPU memory that millpond gave to torch"), share(of=of)
assert not (share(0) or "").startswith("Unsupported"), "nothing is nothing to share"
from millpond import _torch_reducer
_torch_reducer._installed = True
assert "reducer carries no such tensor" in share(), share()
millpond.torch.uninstall_stats(); millpond.torch.uninstall_stats()
assert share() == torchs, share()
assert "_share_cuda_" not in vars(torch.UntypedStorage)
"""
    )
    assert "conn.send(t)" in out and "millpond.torch.install_reducer()" in out and "without a copy" in out


def test_in_pool_mode_only_what_is_ours_is_not_shared():
    """torch's allocator shares its own memory as ever."""
    code = (
        GPU
        + SHARE
        + """
from millpond import _torch_share
kind = "block"
def control(op, address):
    assert op == "locate" and address
    if kind is None:
        raise millpond.NotAttached("not attached any more")
    return {"kind": kind}
_native.control = control
_torch_share.install(everything=False); _torch_share.install(everything=False)
assert "install_reducer" in share()
kind = "import"
assert "install_reducer" in share()
for kind in ("foreign", None):
    assert share() == torchs, share()
_torch_share.uninstall()
kind = "block"
assert share() == torchs
print("fine")
"""
    )
    assert run(code) == "fine"


@native
@pytest.mark.parametrize("stats", [True, False])
def test_statistics_are_refused_by_torch_without_the_patch_and_graph_trees_by_us_in_any_case(stats):
    code = f"{GPU}millpond.torch.install(stats={stats}){ASKED}assert raised == (set() if {stats} else set(asked)), raised{TREES}"
    said = run(code).splitlines()
    assert len(said) == 2 and all('mode="reduce-overhead"' in line and 'mode="pool"' in line and "issue" not in line for line in said)


def test_free_memory_counts_what_is_at_hand_and_ends_at_the_limits():
    """ComfyUI's formula, right after empty_cache: what is free for the driver, and what torch has cached; no more than may be reserved."""
    code = (
        GPU
        + """
import types
from millpond import _torch_stats
runtime = types.SimpleNamespace(cudaMemGetInfo=lambda device: (1000, 5000))
torch._C._cudart, torch.cuda.cudart = runtime, lambda: runtime
at_hand = {0: (300, None), 1: (4500, 10**12), 2: (300, 1299), 3: (300, 0)}
_native.control = lambda op, device: dict(zip(("bytes", "room"), at_hand[device])) if op == "at_hand" else {}
_torch_stats.install(); _torch_stats.install()
print(torch.cuda.mem_get_info(0), torch.cuda.memory.mem_get_info(torch.device("cuda:1")))
print(torch.cuda.mem_get_info(2), torch.cuda.mem_get_info(3))
_torch_stats.uninstall()
print(torch.cuda.mem_get_info(0))
"""
    )
    assert run(code) == "(1300, 5000) (5000, 5000)\n(1299, 5000) (0, 5000)\n(1000, 5000)"


def test_statistics_are_answered_from_our_counters_under_every_name():
    code = (
        GPU
        + """
from millpond import _torch_stats
from torch.cuda import memory_stats as bound_before
flat = {"allocated_bytes.all.current": 1234, "allocated_bytes.all.peak": 5678, "reserved_bytes.all.current": 4096,
        "reserved_bytes.all.peak": 8192, "num_device_alloc": 3, "growths": 1, "num_ooms": 2, "allocation.all.current": 3, "active_bytes.all.current": 1234}
calls = []
def control(op, **fields):
    calls.append((op, fields))
    return {"stats": flat, "snapshot": [{"address": 1, "blocks": []}], "get_fraction": {"fraction": 0.5}}.get(op, {})
_native.control = control
_torch_stats.install(); _torch_stats.install()
torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True
torch.cuda.device_count = lambda: 1
for module in (torch.cuda, torch.cuda.memory):
    assert module.memory_allocated(0) == 1234 and module.max_memory_allocated(0) == 5678
    assert module.memory_reserved(0) == 4096 and module.max_memory_reserved(0) == 8192
    assert module.memory_stats(0)["num_device_alloc"] == 3 and "growths" not in module.memory_stats(0)
    assert module.memory_stats(0)["num_ooms"] == 2 and module.memory_stats(0)["active_bytes.small_pool.peak"] == 0
    assert module.memory_stats_as_nested_dict(0)["allocation"]["all"]["current"] == 3
    module.reset_peak_memory_stats(0); module.reset_accumulated_memory_stats(0); module.reset_max_memory_allocated(0)
    assert "CUDA OOMs: 2" in module.memory_summary(0) and "Allocated memory" in module.memory_summary(0, abbreviated=True)
    assert module.memory_snapshot() == [{"address": 1, "blocks": []}]
    if hasattr(module, "get_per_process_memory_fraction"):
        assert module.get_per_process_memory_fraction(0) == 0.5
assert bound_before(0)["num_ooms"] == 2
assert torch.cuda.memory._snapshot()["segments"] and torch.cuda.memory._snapshot()["device_traces"] == [[]]
import pickle, tempfile, os
path = os.path.join(tempfile.mkdtemp(), "s.pickle")
torch.cuda.memory._dump_snapshot(path)
assert pickle.load(open(path, "rb"))["segments"]
assert ("reset_peak_stats", {"device": 0}) in calls and ("reset_accumulated_stats", {"device": 0}) in calls
accelerator = getattr(torch, "accelerator", None)
if hasattr(accelerator, "memory_allocated"):
    assert torch._C._accelerator_getDeviceStats(0)["allocated_bytes"]["all"]["current"] == 1234
    assert torch._C._accelerator_isAllocatorInitialized()
millpond.torch.uninstall_stats()
assert torch._C._cuda_memoryStats is not _torch_stats._stats
print("fine")
"""
    )
    assert run(code) == "fine"
