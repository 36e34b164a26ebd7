"""The lower tiers on a GPU, and their figures: pinned host memory beside the bus, CUDA IPC, a shared pool, dma-buf, what an attach costs."""
import os
import statistics
import subprocess
import sys
import time

from harness import DRIVER, SUITE, Parent, Skip, at_once, check, equal, test, timed, until, worker

MIB, GIB = 1 << 20, 1 << 30


@test(timeout=150, alone=True)
def four_gib_by_pinned_host_at_the_rate_of_the_bus():
    """Tier 5, both ways in one process: the host arena's memory, registered once, beside torch's own pinned memory."""
    import millpond
    from millpond import _pinned

    p = Parent(limit="50%", replace=False)
    torch = p.torch
    free_host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    nbytes = min(4 * GIB, free_host // 6 // (64 * MIB) * (64 * MIB))
    gpu = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    gpu.view(torch.int64).copy_(torch.arange(nbytes // 8, device="cuda"))
    plain = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    bus = {}
    for way, function in (("out", lambda: plain.copy_(gpu, non_blocking=True)), ("in", lambda: gpu.copy_(plain, non_blocking=True))):
        bus[way] = nbytes / min(timed(torch, function) for _ in range(5)) / 1e9
    pageable = torch.empty(256 * MIB, dtype=torch.uint8)
    pageable_rate = pageable.numel() / min(timed(torch, lambda: pageable.copy_(gpu[: 256 * MIB])) for _ in range(3)) / 1e9
    del plain
    host = millpond.empty((nbytes,), "uint8", "cpu", "t")
    first = timed(torch, lambda: equal(_pinned.copy(0, host.data_ptr(), gpu.data_ptr(), nbytes), "pinned", "out, the first time"))
    check(torch.equal(host[-8 * MIB :], gpu[-8 * MIB :].cpu()) and torch.equal(host[: 8 * MIB], gpu[: 8 * MIB].cpu()), "the bytes, out")
    ours = {"out": nbytes / min(timed(torch, lambda: _pinned.copy(0, host.data_ptr(), gpu.data_ptr(), nbytes)) for _ in range(5)) / 1e9}
    back = torch.zeros_like(gpu)
    equal(_pinned.copy(0, back.data_ptr(), host.data_ptr(), nbytes), "pinned", "in")
    check(torch.equal(back, gpu), "the bytes, in")
    ours["in"] = nbytes / min(timed(torch, lambda: _pinned.copy(0, back.data_ptr(), host.data_ptr(), nbytes)) for _ in range(5)) / 1e9
    pinned = millpond.counters()["pinned_bytes"]
    del host
    p.close()
    ratio = {way: round(ours[way] / bus[way], 3) for way in ours}
    check(min(ratio.values()) > 0.5, "far below the bus", ratio)
    return {
        "bytes": nbytes, "bus_gb_s": {k: round(v, 1) for k, v in bus.items()}, "ours_gb_s": {k: round(v, 1) for k, v in ours.items()},
        "ratio": ratio, "target": 0.9, "first_ms": round(first * 1e3, 1), "pageable_out_gb_s": round(pageable_rate, 1), "pinned_bytes": pinned,
    }


@worker
def summer(conn):
    import torch

    from millpond import _foreign

    torch.cuda.init()  # who has not used CUDA only passes values on
    while True:
        value = conn.recv(timeout=60)
        if value is None:
            return
        if value == "kept":
            conn.send(_foreign.kept())
            continue
        t = value["t"]
        total = float(t.double().sum())
        if value.get("write"):
            t.add_(1)
        at = t.data_ptr()
        kind = sys.modules["millpond"]._native.control("locate", address=at)["kind"]
        torch.cuda.synchronize()
        del t
        conn.send({"sum": total, "device": value["t"].device.type, "kind": kind, "t": value["t"] if value.get("echo") else None})
        value = None


@test(timeout=120, alone=True, quick=False)
def a_large_value_by_host_memory_end_to_end():
    """prefer="host": 1 GiB to a worker and back by pinned host memory, on the GPU at both ends."""
    p = Parent(limit="50%")
    torch = p.torch
    conn = p.worker(summer)
    conn.prefer = "host"
    value = torch.full((GIB // 4,), 2.0, device="cuda")
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        conn.send({"t": value})
        back = conn.recv(timeout=60)
        seconds.append(time.perf_counter() - start)
        equal((back["sum"], back["device"]), (2.0 * value.numel(), "cuda"), "what came")
    equal(conn.tiers["pinned"], 4, "by pinned memory")
    conn.send(None)
    p.close()
    return {"first_ms": round(seconds[0] * 1e3, 1), "ms": round(min(seconds[1:]) * 1e3, 1), "copies_at_50_gb_s_ms": round(2 * GIB / 50e9 * 1e3, 1)}


def proved(conn, torch):
    """The tier that this connection prefers has proved itself (or is off: then this fails with its reason)."""

    def asked():
        conn.send({"t": torch.ones(1000, device="cuda")})
        equal(conn.recv(timeout=60)["sum"], 1000.0, "a value while the proof is under way")
        return conn._foreign.out in (True, False)

    until(asked, 20, lambda: f"the proof: {conn._gpu.out}, {conn._foreign.out}")
    equal(conn._foreign.out, True, conn._foreign.reason)


def let_go(conn, millpond):
    """Nothing is kept for others here, and nothing of ours is open there."""
    from millpond import _foreign

    def there():
        conn.send("kept")
        return conn.recv(timeout=30)["open"] == 0

    until(there, 20, lambda: "the worker still has something open")
    until(lambda: _foreign.kept() == {"sent": 0, "open": 0}, 20, lambda: f"still kept: {_foreign.kept()}")


@test(timeout=90)
def cuda_ipc_of_torchs_own_memory():
    """Tier 4: tensors of torch's native allocator, no copy, views, in place, kept until closed, empty_cache afterwards."""
    p = Parent(replace=False)
    torch = p.torch
    conn = p.worker(summer, "--no-install")
    conn.prefer = "ipc"
    proved(conn, torch)
    before = conn.tiers
    base = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    view = base.view(1024, 1024)[3:, ::2].t()
    conn.send({"t": view, "write": True})
    back = conn.recv(timeout=60)
    expected = float(torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)[3:, ::2].double().sum())
    equal((back["sum"], back["kind"], back["device"]), (expected, "foreign", "cuda"), "what came")
    equal(float(base.view(1024, 1024)[3, 0]), 3 * 1024 + 1.0, "written in place")
    equal(float(base.view(1024, 1024)[3, 1]), 3 * 1024 + 1.0, "its neighbour is as it was")
    equal({k: conn.tiers[k] - before[k] for k in ("ipc", "copy", "host")}, {"ipc": 1, "copy": 0, "host": 0}, "tiers")
    # The memory is recycled by torch only when the worker has closed it: until then no new tensor lies there.
    for number in range(20):
        tensor = torch.full((256 * 1024,), float(number), device="cuda")
        conn.send({"t": tensor})
        del tensor
        other = torch.full((256 * 1024,), -1.0, device="cuda")
        equal(conn.recv(timeout=60)["sum"], float(number) * 256 * 1024, f"value {number}")
        del other
    let_go(conn, p.millpond)
    del base, view
    torch.cuda.empty_cache()
    # One GiB, how long a hand-off takes.
    large = torch.ones(GIB // 4, device="cuda")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        conn.send({"t": large})
        conn.recv(timeout=60)
        times.append(time.perf_counter() - start)
    let_go(conn, p.millpond)
    conn.send(None)
    p.close()
    return {"one_gib_round_trip_with_a_sum_ms": round(statistics.median(times) * 1e3, 2)}


@test(timeout=60)
def what_ipc_cannot_share_is_copied_and_said():
    """Expandable segments are no cudaMalloc memory: the tier fails its proof, values are copied, the reason is counted."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    p = Parent(replace=False)
    torch = p.torch
    conn = p.worker(summer, "--no-install")
    conn.prefer = "ipc"

    def asked():
        conn.send({"t": torch.ones(1000, device="cuda")})
        conn.recv(timeout=60)
        return conn._foreign.out in (True, False)

    until(asked, 20, "the proof")
    equal(conn._foreign.out, False, "state of the tier")
    conn.send({"t": torch.ones(1000, device="cuda")})
    equal(conn.recv(timeout=60)["sum"], 1000.0, "copied")
    equal(conn.tiers["ipc"], 0, "by token")
    reason = next(reason for reason in p.millpond.counters()["falls"] if "a value by token" in reason)
    conn.send(None)
    p.close()
    return {"reason": reason[:200]}


POOL_PROGRAM = """
import json, os, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import millpond
millpond.pool.swap()
assert "torch" not in sys.modules
import harness
for module in ("cases_handoff", "cases_doors", "cases_tiers"):
    __import__(module)
import cases_tiers
print(json.dumps(cases_tiers.under_a_swapped_pool()))
"""


@test(timeout=110, alone=True, quick=False)
def a_swapped_pool_under_cudamallocasync():
    """Tier 3: torch keeps cudaMallocAsync over a pool of ours; tensors cross by pointer, over 128 pieces by copy."""
    import json

    env = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    done = subprocess.run([sys.executable, "-c", POOL_PROGRAM, SUITE], capture_output=True, text=True, timeout=100, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    check(done.returncode == 0 and lines, f"code {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(lines[-1])


def under_a_swapped_pool():
    import torch

    import millpond

    p = Parent(replace=False)
    conn = p.worker(summer, "--no-install")
    proved(conn, torch)
    before = conn.tiers
    tensor = torch.full((1 << 20,), 3.0, device="cuda")
    conn.send({"t": tensor, "write": True})
    back = conn.recv(timeout=60)
    equal((back["sum"], back["kind"]), (3.0 * (1 << 20), "foreign"), "what came")
    equal(float(tensor[5]), 4.0, "written in place")
    equal(conn.tiers["pool"] - before["pool"], 1, "by pointer")
    for number in range(30):
        small = torch.full((1000 + number,), float(number), device="cuda")
        conn.send({"t": small})
        del small
        equal(conn.recv(timeout=60)["sum"], float(number) * (1000 + number), f"value {number}")
    exported_at_once(torch)
    use = millpond.pool.use()
    check(use["used"] >= 4 << 20, "torch draws from our pool", use)
    millpond.pool.patch_stats()
    check(torch.cuda.memory_allocated() >= 4 << 20, "torch's statistics", torch.cuda.memory_allocated())
    figures = {}
    for mib in (64, 1024, 3072):
        if torch.cuda.mem_get_info()[0] < 4 * mib * MIB:
            break
        large = torch.ones(mib * MIB // 4, device="cuda")
        conn.send({"t": large})
        conn.recv(timeout=60)
        start = time.perf_counter()
        conn.send({"t": large})
        equal(conn.recv(timeout=60)["sum"], float(large.numel()), f"{mib} MiB")
        figures[f"{mib}_mib_ms"] = round((time.perf_counter() - start) * 1e3, 2)
        del large
    large = torch.ones(4224 * MIB // 4, device="cuda")  # 132 pieces: never imported
    conn.send({"t": large})
    equal(conn.recv(timeout=60)["sum"], float(large.numel()), "4,224 MiB by a copy")
    check(any("pieces of 32 MiB" in reason for reason in millpond.counters()["falls"]), "the guard said so", millpond.counters()["falls"])
    del large, tensor
    let_go(conn, millpond)
    conn.send(None)
    p.close()
    return {**figures, "use": use}


def exported_at_once(torch):
    """The pool and its pointers, exported by eight threads while each frees what it exported: none of that reaches the driver together."""
    from millpond import _native

    tokens = set()

    def run(number):
        for turn in range(50):
            tensor = torch.empty(4096 * (1 + number + turn % 5), dtype=torch.uint8, device="cuda")
            os.close(_native.control("pool_fd", device=0)["fd"])
            found = _native.control("foreign_export", device=0, address=tensor.data_ptr())
            equal(found["kind"], "pool", "its tier")
            tokens.add(found["token"])

    at_once(8, run)
    check(len(tokens) >= 8, "tokens of blocks that lived at the same time differ", len(tokens))


@test()
def a_dma_buf_of_a_block():
    """A dma-buf of an arena tensor and of torch's own; a named refusal where the device or kernel has none."""
    p = Parent()
    torch = p.torch
    tensor = torch.ones(1 << 20, device="cuda")
    try:
        with p.millpond.dmabuf(tensor) as made:
            size = os.lseek(made.fd, 0, os.SEEK_END)
            check(made.offset < 4096 and made.nbytes == 4 << 20 and size >= made.offset + made.nbytes, "its range", made, size)
            found = {"fd_bytes": size, "offset": made.offset}
    except p.millpond.Unsupported as e:
        found = {"refused": str(e)}
    try:
        p.millpond.dmabuf(torch.ones(4))
    except p.millpond.Unsupported as e:
        check("host memory" in str(e), e)
    p.close()
    return found


ATTACH = """
import json, sys, time
import millpond
from millpond import _native, _session, canary
start = time.perf_counter()
millpond.attach()
attached = time.perf_counter()
figures = {"attach_ms": (attached - start) * 1e3}
marks = []
greet = canary.greet
def timed(*a, **k):
    begin = time.perf_counter()
    greet(*a, **k)
    marks.append((time.perf_counter() - begin) * 1e3)
canary.greet = timed
conn = millpond.connection(timeout=30)
connected = time.perf_counter()
figures["canary_ms"] = marks[0]
figures["channel_ms"] = (connected - attached) * 1e3 - marks[0]
if sys.argv[1] == "cuda":
    import ctypes
    cuda = ctypes.CDLL("libcuda.so.1")
    begin = time.perf_counter()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    figures["cuda_context_ms"] = (time.perf_counter() - begin) * 1e3
begin = time.perf_counter()
address = _native.allocate(0 if sys.argv[1] == "cuda" else -1, 512, 0)
figures["device_open_window_reserve_first_block_ms"] = (time.perf_counter() - begin) * 1e3
_native.deallocate(address)
conn.send({k: round(v, 3) for k, v in figures.items()})
conn.recv(timeout=60)
"""


@test(timeout=90, alone=True, host=True)
def what_an_attach_costs():
    """Attach in a worker, Python's start excluded: socket and handshake, channel, canary, window; CUDA's own context apart."""
    p = Parent(torch=False)
    rows = []
    for number in range(5):
        process = subprocess.Popen([sys.executable, "-c", ATTACH, DRIVER], env=p.arena.worker_env(f"attach-{number}"), stdin=subprocess.DEVNULL)
        conn = p.arena.accept(timeout=50)
        rows.append(conn.recv(timeout=60))
        conn.send(None)
        process.wait(30)
    p.close()
    median = {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
    ours = sum(value for key, value in median.items() if key != "cuda_context_ms")
    check(ours < 200, "attach", median)
    return {**median, "without_cuda_context_ms": round(ours, 2), "target_ms": 20}


@test()
def a_full_arena_makes_way_for_lower_tiers():
    """No room for a copy in the arena: the value goes by host memory, counted with its reason, and nothing is raised."""
    p = Parent(limit=256 * MIB, replace=False)
    torch = p.torch
    conn = p.worker(summer, "--no-install")
    conn.send({"t": torch.ones(1000, device="cuda")})
    conn.recv(timeout=60)
    value = torch.ones(512 * MIB // 4, device="cuda")
    try:
        conn.send({"t": value})
    except p.millpond.OutOfMemory as e:
        raise Skip(f"the host arena has the same limit: {e}") from None
    equal(conn.recv(timeout=60)["sum"], float(value.numel()), "what came")
    check(any("no room for a copy" in reason for reason in p.millpond.counters()["falls"]), "said")
    conn.send(None)
    p.close()
    return {"tiers": conn.tiers}


