"""Two and more real processes on the host driver, through the native library and the owner program."""

import contextlib
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import time

import pytest

import millpond
from conftest import HERE, eventually, native
from test_package import python39

pytestmark = native
np = pytest.importorskip("numpy")
WORKER = os.path.join(HERE, "worker_main.py")


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="256MiB", driver="host") as arena:
        yield arena


@contextlib.contextmanager
def started(arena, *names, python=sys.executable):
    """Workers and their channels, by name."""
    processes = [subprocess.Popen([python, WORKER], env=arena.worker_env(name)) for name in names]
    conns = {}
    try:
        for _ in names:
            conn = arena.accept(timeout=60)
            conns[conn.peer.name] = conn
        yield [conns[name] for name in names]
    finally:
        for conn in conns.values():
            conn.close()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


@pytest.fixture(scope="module")
def workers(arena):
    with started(arena, "a", "b") as conns:
        yield conns


@pytest.fixture
def a(workers):
    yield workers[0]
    workers[0].call("drop", timeout=30)


@pytest.fixture
def b(workers):
    yield workers[1]
    workers[1].call("drop", timeout=30)


def clients(ledger):
    return {c["name"]: c for d in ledger["devices"] for c in d["clients"]}


def held(ledger):
    return sum(c["allocated"] + c["leased_out"] + c["leased_in"] for d in ledger["devices"] for c in d["clients"])


def sha(value):
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


# Values.


def test_peer_and_devices(arena, a):
    assert a.peer.name == "a" and a.peer.pid == a.call("pid", timeout=30)
    assert arena.devices[0]["ordinal"] == -1 and arena.devices[0]["limit"] == 256 << 20
    assert isinstance(a.fileno(), int)


def test_plain_values(a):
    value = {"n": None, "t": (1, 2.5, "ä"), "big": 2**80, "nan": [float("inf")], 5: b"x" * 3000, "$": {"$": 1}}
    assert a.call("echo", value, timeout=30) == value


NUMPY = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128 >f4 <M8[ns] |S7 <U3".split()
ML = "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()


def patterned(dtype, shape=(3, 4)):
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(bytes(i % 2 if dtype == bool else i * 7 % 100 for i in range(count)), dtype).reshape(shape)


@pytest.mark.parametrize("name", NUMPY + ML)
def test_every_dtype_both_ways(a, name):
    if name in ML:
        name = getattr(pytest.importorskip("ml_dtypes"), name)
    value = patterned(np.dtype(name))
    assert a.call("hash", value, timeout=30) == sha(value)
    back = a.call("echo", value, timeout=30)
    assert type(back) is np.ndarray and back.dtype == value.dtype and back.tobytes() == value.tobytes()


def base():
    return np.arange(4 * 5 * 6, dtype="float32").reshape(4, 5, 6)


VIEWS = {
    "zero-dim": lambda: np.array(3.5),
    "zero-size": lambda: np.empty((3, 0, 2), "int16"),
    "offset": lambda: base().reshape(-1)[7:],
    "steps": lambda: base()[::2, ::3, 1::2],
    "transposed": lambda: base().transpose(2, 0, 1),
    "negative": lambda: base()[::-1, :, ::-2],
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (4, 3)),
    "large": lambda: np.arange(3 << 20, dtype="uint8"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_strides_and_sizes(a, name):
    value = VIEWS[name]()
    back = a.call("echo", {"x": value}, timeout=30)["x"]
    assert back.shape == value.shape and back.dtype == value.dtype and np.array_equal(back, value)


def test_arena_views_keep_offsets_and_go_without_a_copy(arena, a):
    block = arena.empty((100, 7), "float64")
    block[...] = np.arange(700).reshape(100, 7)
    for view in (block, block[13:], block[::3, 2:5], block.T, block[50:51, 6]):
        before = millpond.counters()["copied_bytes"]
        back = a.call("echo", view, timeout=30)
        assert np.array_equal(back, view) and millpond.counters()["copied_bytes"] == before
        back[...] = view + 1
        assert np.array_equal(back, view), "what comes back is the same memory"


def test_copies_are_counted(arena, a):
    mine, other = arena.zeros(1000), np.zeros(1000, "float32")
    with_arena = a.send({"mode": mine})
    with_copy = a.send({"mode": other})
    both = a.send([mine, other, mine[5:]])
    assert with_arena == (1, 0, 0)
    assert with_copy == (1, 1, 4000)
    assert both == (2, 1, 4000)
    for _ in range(3):
        a.call("next", timeout=30)


def test_overlapping_views_share_one_memory_on_the_other_side(arena, a):
    block = arena.zeros(100, "int32")
    a.call("keep", "pair", {"x": block[:60], "y": block[40:]}, timeout=30)
    kept = a.call("get", "pair", timeout=30)
    kept["x"][50] = 7
    assert kept["y"][10] == 7 and block[50] == 7


TORCH = [
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64 complex128",
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]


@pytest.mark.parametrize("name", " ".join(TORCH).split())
def test_every_torch_dtype(arena, a, name):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    dtype = getattr(torch, name)
    for t in (torch.arange(64, dtype=torch.uint8).remainder(2).view(dtype), arena.empty((4, 4), dtype)):
        assert isinstance(t, torch.Tensor) and t.dtype == dtype
        back = a.call("echo", [t, t[1:]], timeout=60)
        for mine, its in zip([t, t[1:]], back):
            assert isinstance(its, torch.Tensor) and its.dtype == dtype and its.shape == mine.shape
            carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[mine.element_size()]
            assert torch.equal(its.view(carrier), mine.view(carrier)) or mine.element_size() == 16


def test_numpy_stays_numpy_and_torch_stays_torch(a):
    torch = pytest.importorskip("torch")
    assert a.call("type_of", np.arange(3), timeout=30) == "numpy.ndarray"
    assert a.call("type_of", torch.arange(3), timeout=60) == "torch.Tensor"


# Lifetime.


def test_dropped_right_after_send_is_still_what_was_sent(arena, a):
    for round in range(20):
        t = arena.empty(100_000, "int64")
        t[...] = round
        address = t.ctypes.data
        a.call("keep", round, t, timeout=30)
        del t
        again = [arena.empty(100_000, "int64") for _ in range(3)]
        assert address not in [x.ctypes.data for x in again], "the block is lent: it may not be given out"
        for x in again:
            x[...] = -1
        assert a.call("total", round, timeout=30) == round * 100_000
        a.call("drop", round, timeout=30)


def test_send_then_overwrite_before_the_receiver_looks(arena, a):
    for round in range(50):
        t = arena.empty(10_000, "int64")
        t[...] = round
        a.send({"t": t})
        del t
        for _ in range(3):
            x = arena.empty(10_000, "int64")
            x[...] = -1
            del x
    assert [a.call("echo", None, timeout=30)] == [None]
    # the messages wait in the worker's inbox: taken out one by one, each is whole
    for round in range(50):
        assert a.call("next_total", timeout=30) == round * 10_000


def test_the_block_returns_when_the_receiver_lets_go(arena, a):
    gc.collect()
    eventually(lambda: clients(arena.ledger())["parent"]["leased_out"] == 0)
    before = clients(arena.ledger())["parent"]["allocated"]
    t = arena.empty(1 << 20, "uint8")
    a.call("keep", "t", t, timeout=30)
    assert clients(arena.ledger())["parent"]["leased_out"] >= 1 << 20
    eventually(lambda: clients(arena.ledger())["a"]["leased_in"] >= 1 << 20)
    del t
    gc.collect()
    row = clients(arena.ledger())["parent"]
    assert row["allocated"] == before and row["leased_out"] >= 1 << 20, "freed here, but still lent"
    a.call("drop", "t", timeout=30)
    eventually(lambda: clients(arena.ledger())["parent"]["leased_out"] == 0)
    eventually(lambda: clients(arena.ledger())["a"]["leased_in"] == 0)


def test_one_memory_for_all(arena, a, b):
    t = arena.zeros((1000,), "int32")
    a.call("keep", "t", t, timeout=30)
    b.call("keep", "t", t, timeout=30)
    b.call("fill", "t", 3, timeout=30)
    assert int(t.sum()) == 3000 and a.call("total", "t", timeout=30) == 3000


def test_a_workers_value_goes_on_to_another_by_reference(arena, a, b):
    before = millpond.counters()["copied_bytes"]
    made = a.call("make", [500], "float32", 2, timeout=30)
    assert made.sum() == 1000
    b.call("keep", "t", made, timeout=30)
    del made
    gc.collect()
    b.call("fill", "t", 4, timeout=30)
    assert b.call("total", "t", timeout=30) == 2000
    assert millpond.counters()["copied_bytes"] == before


def test_lazy_refs_are_forwarded_untouched(arena, a, b):
    made = a.call("make", [64], "int64", 9, timeout=30)
    b.send({"t": made})
    assert b.call("is_lazy", timeout=30) == (64,)


def test_results_in_the_callers_memory(arena, a):
    before = millpond.counters()["copied_bytes"]
    out = a.call("into_result", [100, 2], "float32", 5, timeout=30)
    assert out.shape == (100, 2) and float(out.sum()) == 1000
    assert millpond.counters()["copied_bytes"] == before
    row = clients(arena.ledger())["parent"]
    assert row["allocated"] + row["leased_out"] >= 800, "it is the caller's memory"


def test_a_thousand_tensors_in_one_message(arena, a):
    values = {f"layer.{i}": arena.zeros(64) for i in range(1000)}
    before = millpond.counters()["socket_bytes_sent"]
    start = time.perf_counter()
    back = a.call("echo", values, timeout=60)
    seconds = time.perf_counter() - start
    assert len(back) == 1000 and (millpond.counters()["socket_bytes_sent"] - before) / 1000 < 1024
    print(f"1,000 tensors there and back: {seconds * 1e3:.1f} ms")


@pytest.mark.parametrize("count", [1, 2, 61, 62, 63, 64, 65, 130])
def test_which_of_many_were_copied(arena, a, count):
    """The library's word for it fits in a number up to 62 tensors: every third is not the arena's."""
    np = pytest.importorskip("numpy")
    values = [np.zeros(8) if i % 3 == 0 else arena.zeros(8, "float64") for i in range(count)]
    before = a.tiers
    assert len(a.call("echo", values, timeout=30)) == count
    assert a.tiers["copy"] - before["copy"] == (count + 2) // 3
    assert a.tiers["arena"] - before["arena"] == count - (count + 2) // 3


@pytest.mark.parametrize("length", [16 << 10, (16 << 10) - 40, 1 << 20])
def test_messages_around_and_over_what_a_thread_keeps_for_them(arena, a, length):
    """One that does not fit comes by memory of its own; text in it of more than one byte a letter."""
    value = {"text": "\N{LATIN SMALL LETTER E WITH ACUTE}" * (length // 2), "t": arena.zeros(8, "int64")}
    value["t"][:] = 3
    back = a.call("echo", value, timeout=30)
    assert back["text"] == value["text"] and list(back["t"]) == [3] * 8


def test_read_only(arena, a):
    t = arena.zeros(10)
    a.send(t, readonly=True)
    assert a.call("next_writable", timeout=30) is False
    a.send(t)
    assert a.call("next_writable", timeout=30) is True


def test_wait_done_before_overwriting(arena, a):
    t = arena.zeros(1000)
    millpond.wait_done(t, timeout=5)
    a.call("keep", "t", t, timeout=30)
    with pytest.raises(millpond.Timeout):
        millpond.wait_done(t, timeout=0.05)
    a.call("drop", "t", timeout=30)
    millpond.wait_done(t, timeout=10)
    t[...] = 1
    millpond.record_stream(t, 0)


def test_refs_say_when_they_are_ready(arena, a):
    a.send(arena.zeros(10))
    back = a.call("send_back", timeout=30)
    assert back is None
    ref = a.recv(timeout=30, lazy=True, wait=True)
    assert ref.ready() is True and ref.wait(timeout=1).numpy().sum() == 0


def test_a_forked_child_disturbs_nobody(arena, a):
    mine, theirs = arena.zeros(1000), a.call("make", [1000], "float32", 2, timeout=30)
    a.call("keep", "mine", mine, timeout=30)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            del theirs
            gc.collect()
            try:
                arena.empty(10)
            except millpond.Forked:
                try:
                    millpond.attach(socket=arena.socket, key="00")
                except millpond.Forked:
                    code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    a.call("fill", "mine", 5, timeout=30)
    assert mine.sum() == 5000 and theirs.sum() == 2000 and arena.zeros(10).sum() == 0


# Other Pythons.


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.13"])
def test_a_worker_of_another_python(arena, version):
    import glob

    found = glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")) or (
        [python39()] if version == "3.9" and python39() else []
    )
    if not found:
        pytest.skip(f"no Python {version} here")
    with started(arena, "old", python=found[0]) as (old,):
        assert old.call("version", timeout=30) == [int(n) for n in version.split(".")]
        t = arena.zeros(1000)
        assert np.__file__ not in old.call("numpy_file", timeout=30), "nothing of this environment is on its path"
        assert np.array_equal(old.call("echo", [t, b"x" * 5000, {"k": (1,)}], timeout=30)[0], t)


# Bad input, each with a named error where the fault is.


def test_attach_twice(arena, a):
    with pytest.raises(millpond.AlreadyAttached):
        millpond.attach(socket=arena.socket, key="00")
    with pytest.raises(millpond.AlreadyAttached):
        millpond.Arena()
    assert "attached" in a.call("attach_again", timeout=30)


@native
def test_a_second_copy_of_the_library_is_refused_by_name(arena, tmp_path):
    import shutil

    copy = shutil.copy(os.environ["MILLPOND_LIBRARY"], tmp_path / "another.so")
    code = f"""
import ctypes, json, os
import millpond
millpond.attach()
second = ctypes.CDLL({str(copy)!r})
second.millpond_control.restype = second.millpond_last_error.restype = ctypes.c_char_p
request = dict(op="attach", socket=os.environ["MILLPOND_SOCKET"], key=os.environ["MILLPOND_KEY"])
print(second.millpond_control(json.dumps(request).encode()), second.millpond_last_error().decode())
"""
    done = subprocess.run([sys.executable, "-c", code], env=arena.worker_env("twice"), capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("None ") and '"Refused"' in done.stdout and "another copy" in done.stdout, done


def test_what_cannot_cross_is_named_by_its_path_at_the_one_at_fault(a):
    with pytest.raises(millpond.CannotCross, match=r'out\["meta"\]\["fn"\] cannot cross'):
        a.send({"meta": {"fn": print}})
    with pytest.raises(millpond.RemoteError, match=r'out\["meta"\]\["fn"\] cannot cross') as e:
        a.call("bad", timeout=30)
    assert e.value.remote_code == "CannotCross"
    assert a.call("echo", 1, timeout=30) == 1


def run(code, arena=None, **env):
    """Runs a snippet in a process of its own; (exit code, stdout, stderr)."""
    environment = {**os.environ, **env}
    if arena is not None:
        environment = arena.worker_env("snippet", **env)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


ATTACH = """
import millpond
try:
    millpond.attach()
except millpond.Error as e:
    print(type(e).__name__, e)
"""


def test_no_socket_wrong_key_long_path(arena, tmp_path):
    _, out, _ = run(ATTACH, MILLPOND_SOCKET=str(tmp_path / "none"), MILLPOND_KEY="00" * 32)
    assert out.startswith("OwnerUnavailable")
    _, out, _ = run(ATTACH, arena, MILLPOND_KEY="00" * 32)
    assert out.startswith("Refused"), out
    _, out, _ = run(ATTACH, MILLPOND_SOCKET="/tmp/" + "x" * 120, MILLPOND_KEY="00" * 32)
    assert out.split()[0] in ("InvalidArgument", "OwnerUnavailable") and "10" in out, out
    assert arena.ledger()["devices"], "the owner serves the others"


def test_limits_that_cannot_be():
    code = """
import millpond, sys
try:
    millpond.Arena(limit={limit!r}, driver="host", chunk_bytes={chunk!r})
    print("up")
except millpond.Error as e:
    print(type(e).__name__, e)
"""
    for limit, chunk in (("1000TiB", None), ("1GiB", 8 << 30), ("1GiB", 1000)):
        _, out, err = run(code.format(limit=limit, chunk=chunk))
        assert out.split()[0] in ("InvalidArgument", "OutOfMemory", "Refused"), (limit, chunk, out, err)


def test_sizes_0_1_and_huge(arena):
    assert arena.empty(0).nbytes == 0 and arena.empty((3, 0, 2), "int8").shape == (3, 0, 2)
    one = arena.empty(1, "uint8")
    one[0] = 255
    assert one[0] == 255
    for huge in (2**63, 2**62, 2**48):
        with pytest.raises((millpond.OutOfMemory, millpond.InvalidArgument)):
            arena.empty(huge, "uint8")
    with pytest.raises(millpond.InvalidArgument):
        arena.empty(-1)
    with pytest.raises(millpond.InvalidArgument, match="float7"):
        arena.empty(1, "float7")
    with pytest.raises(millpond.Error):
        arena.empty(1, "float32", device="cuda:77")


def test_out_of_memory_says_asked_limit_and_who_holds_what(arena, a):
    a.call("keep", "big", a.call("make", [50 << 20], "uint8", 1, timeout=30), timeout=30)
    with pytest.raises(millpond.OutOfMemory) as e:
        arena.empty(300 << 20, "uint8")
    text = str(e.value)
    assert "Tried to allocate 300.00 MiB" in text and "Limit: 256.00 MiB" in text, text
    
    assert re.search(rf"Held by .*\ba \(pid {a.peer.pid}\): [0-9.]+ MiB", text), (text, reserved)
    assert isinstance(e.value, MemoryError)
    assert arena.zeros(100).sum() == 0, "and all goes on"


def test_out_of_memory_of_a_client_s_own_limit_names_the_others_too(arena, a):
    a.call("keep", "big", a.call("make", [50 << 20], "uint8", 1, timeout=30), timeout=30)
    code = """
import ctypes, os, millpond
from millpond import _native
millpond.attach(name="limited", limit={limit})
if {fraction}:
    # What torch.cuda.set_per_process_memory_fraction calls.
    hook = _native.library().cdll.millpond_torch_memory_fraction
    hook.argtypes, hook.restype = (ctypes.c_double, ctypes.c_int), None
    hook({fraction}, -1)
kept = millpond.empty(1000, "uint8")
try:
    millpond.empty(100 << 20, "uint8")
except millpond.OutOfMemory as e:
    print(os.getpid(), e)
assert millpond.zeros(100).sum() == 0
"""
    total = arena.ledger()["devices"][0]["total"]
    for limit, fraction in ((64 << 20, 0), (None, (64 << 20) / total)):
        _, out, err = run(code.format(limit=limit, fraction=fraction), arena)
        pid = out.split()[0] if out else "?"
        assert "own limit" in out, (limit, out, err)
        for name, number in (("a", a.peer.pid), ("limited", pid)):
            assert re.search(rf"Held by .*\b{name} \(pid {number}\): [0-9.]+ MiB", out), (limit, name, out)


def test_free_of_foreign_and_freed_pointers_is_refused(arena):
    from millpond import _native

    lib = _native.library()
    x = np.zeros(100)
    assert lib.deallocate(x.ctypes.data) < 0
    assert isinstance(_native.last_error("free"), millpond.InvalidArgument)
    block = _native.allocate(-1, 4096, 0)
    assert lib.deallocate(block) == 0 and lib.deallocate(block) < 0
    assert lib.deallocate(0) <= 0
    assert arena.zeros(10).sum() == 0


def test_free_goes_by_the_address_whatever_size_and_stream_it_is_told(arena):
    """torch 2.5 to 2.8 pass stale sizes: the block is freed whole, its neighbours are not touched, nothing is counted as foreign."""
    code = """
import ctypes, millpond
from millpond import _native
arena = millpond.attach(name="free")
cdll = _native.library().cdll
malloc, free = cdll.millpond_malloc, cdll.millpond_free
malloc.argtypes, malloc.restype = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
free.argtypes, free.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p), None
HOST = -1

def ends(block):
    first = min(size, 512)
    return (block, first), (block + size - first, first)

def mark(block, byte):
    for at, count in ends(block):
        ctypes.memset(at, byte, count)

def is_marked(block, byte):
    return all(ctypes.string_at(at, count) == bytes([byte]) * count for at, count in ends(block))

def live():
    stats = _native.control("stats", device=HOST)
    return [stats.get(name + ".all.current", 0) for name in ("allocation", "allocated_bytes", "requested_bytes", "active")]

for size in (1, 512, 513, 4096, 1 << 20, (3 << 20) + 5, 40 << 20):
    before = live()
    left, right = malloc(size, HOST, None), None
    for wrong in (0, 1, size // 2, size - 1, size + 1, 2 * size, 512, 1 << 21, 1 << 40, 2**64 - 1):
        for device, stream in ((HOST, None), (HOST, 1), (HOST, 12345678), (0, None), (7, None), (1 << 20, None)):
            block, right = malloc(size, HOST, None), malloc(size, HOST, None)
            mark(left, 1), mark(block, 2), mark(right, 3)
            free(block, wrong, device, stream)
            now = live()
            assert now[0] == before[0] + 2 and now[2] == before[2] + 2 * size, (size, wrong, device, now, before)
            again = malloc(size, HOST, None)
            assert again == block, (size, wrong, "the whole block, and at once")
            mark(again, 4)
            assert is_marked(left, 1) and is_marked(right, 3), (size, wrong)
            free(again, wrong, device, stream), free(right, wrong, device, stream)
    free(left, 0, HOST, None)
    assert live() == before, (size, live(), before)
    # Twice, foreign, null, inside: counted at most, and nothing is freed.
    kept = malloc(size, HOST, None)
    held = live()
    for pointer in (left if left != kept else None, None, 4096, kept + 1, kept + size // 2 + 1):
        free(pointer, size, HOST, None)
        assert live() == held, (size, pointer)
    free(kept, size, HOST, None)
print("fine")
"""
    _, out, err = run(code, arena)
    assert out == "fine", (out, err)


def test_time_outs(arena, a):
    start = time.monotonic()
    with pytest.raises(millpond.Timeout):
        a.recv(timeout=0.05)
    with pytest.raises(millpond.Timeout):
        arena.accept(timeout=0.05)
    with pytest.raises(millpond.Timeout):
        a.recv(timeout=0)
    assert time.monotonic() - start < 5
    assert a.call("echo", 5, timeout=30) == 5


# Ends.


def test_a_killed_worker_gives_all_back_and_is_named(arena):
    with started(arena, "victim") as (victim,):
        victim.call("keep", "x", victim.call("make", [1 << 20], "uint8", 1, timeout=30), timeout=30)
        t = arena.zeros(1000)
        victim.call("keep", "t", t, timeout=30)
        del t
        with pytest.raises((millpond.PeerDied, millpond.Closed)):
            victim.call("die", timeout=30)
        with pytest.raises((millpond.PeerDied, millpond.Closed)):
            victim.send(1)
    gc.collect()
    eventually(lambda: "victim" not in clients(arena.ledger()))
    eventually(lambda: clients(arena.ledger())["parent"]["leased_out"] == 0)


def test_the_key_is_in_no_command_line(arena, a):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as f:
            assert arena._key.encode() not in f.read()


def test_read_ledger_without_attaching(arena):
    code = "import millpond, json, os; print(json.dumps(millpond.read_ledger(os.environ['MILLPOND_SOCKET'], os.environ['MILLPOND_KEY'])))"
    _, out, err = run(code, arena)
    assert "parent" in clients(json.loads(out)), err


PARENT = """
import millpond, sys, os
arena = millpond.Arena(limit="64MiB", driver="host")
arena.zeros(1000)
print(arena._owner.process.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "os._exit(4)", "raise SystemExit", "os.kill(os.getpid(), 9)", "arena.close()"])
def test_the_owner_ends_with_the_parent_however_it_ends(end):
    code, out, err = run(PARENT.format(end=end))
    assert code == {"sys.exit(3)": 3, "os._exit(4)": 4, "os.kill(os.getpid(), 9)": -9}.get(end, 0), err
    assert "Traceback" not in err, err
    pid = int(out)

    def gone():
        try:
            with open(f"/proc/{pid}/stat") as f:
                return f.read().rsplit(")", 1)[1].split()[0] in "ZX"
        except OSError:
            return True

    eventually(gone)


def test_an_arena_after_another_in_one_process():
    code = """
import millpond
for i in range(3):
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        assert arena.zeros(10).sum() == 0
        token = arena._info["token"]
    try:
        arena.empty(1)
    except millpond.Closed:
        print("closed")
"""
    code, out, err = run(code)
    assert code == 0 and out.split() == ["closed"] * 3, err


def test_inline_owner():
    code = """
import millpond
with millpond.Arena(limit="64MiB", driver="host", owner="inline") as arena:
    x = arena.zeros(1000)
    print(int(x.sum()), len(arena.ledger()["devices"]))
    del x
"""
    code, out, err = run(code)
    assert code == 0 and out == "0 1", err


def test_the_form_of_handles_is_a_parameter_and_what_is_missing_is_said():
    code = """
import millpond
for owner in ("process", "inline"):
    for kind, lacks in (("win32", "DuplicateHandle"), ("fabric", "IMEX channel")):
        try:
            millpond.Arena(limit="64MiB", driver="host", owner=owner, handle_kind=kind)
        except millpond.Unsupported as e:
            assert f"shared as {kind}: millpond lacks" in str(e) and lacks in str(e), e
        else:
            raise SystemExit(f"{kind} was accepted")
    try:
        millpond.Arena(handle_kind="windows")
    except millpond.InvalidArgument as e:
        assert '"posix_fd", "win32" or "fabric"' in str(e), e
millpond.Arena(limit="64MiB", driver="host", handle_kind="posix_fd").close()
print("said")
"""
    code, out, err = run(code)
    assert code == 0 and out == "said", err


def test_ctrl_c_reaches_a_waiting_recv(arena):
    code = """
import millpond, os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it for them
millpond.attach()
conn = millpond.connection()
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    conn.recv(timeout=30)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 5)
"""
    process = subprocess.Popen([sys.executable, "-c", code], env=arena.worker_env("c"), stdout=subprocess.PIPE, text=True)
    conn = arena.accept(timeout=30)
    out, _ = process.communicate(timeout=30)
    conn.close()
    assert out.strip() == "interrupted True"
