"""Two GPUs: memory where it was asked for, a worker on each, masks that differ, order across devices."""
import ctypes
import os
import socket

from cases_handoff import LONG, MIB, fingerprint
from harness import Parent, Skip, check, equal, test, until, worker


def two():
    import torch

    if torch.cuda.device_count() < 2:
        raise Skip("one GPU")
    return torch


def uuid(torch, device):
    return str(torch.cuda.get_device_properties(device).uuid)


def primary_contexts():
    """For each GPU whether this process has a context there."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    check(cuda.cuDeviceGetCount(ctypes.byref(count)) == 0)
    flags, active, found = ctypes.c_uint(), ctypes.c_int(), []
    for ordinal in range(count.value):
        check(cuda.cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active)) == 0)
        found.append(bool(active.value))
    return found


@test()
def several_gpus():
    """Memory on the device asked for, while another is current and with no stream of its own; copies across, both ways."""
    two()
    p = Parent()
    torch = p.torch
    with torch.cuda.device(1):
        y = torch.full((MIB,), 2.0, device="cuda:1")
    equal(y.device.index, 1)
    x = torch.full((MIB,), 3.0, device="cuda:0")
    z = torch.empty(MIB, device="cuda:1").fill_(4.0)  # device 0 is current
    equal(torch.cuda.current_device(), 0)
    equal(float(x.to("cuda:1").sum()), 3.0 * MIB)
    equal(float((x.to("cuda:1") + y + z).sum()), 9.0 * MIB)
    equal(float(y.to("cuda:0").sum()), 2.0 * MIB)
    for ordinal in (0, 1):
        check(torch.cuda.memory_allocated(ordinal) >= 4 * MIB, ordinal, torch.cuda.memory_allocated(ordinal))
    rows = {d["id"]: sum(c["allocated"] for c in d["clients"] if c["pid"] == os.getpid()) for d in p.arena.ledger()["devices"]}
    check(sum(n >= 4 * MIB for n in rows.values()) == 2, rows)
    before = torch.cuda.memory_reserved(1)
    del y, z
    torch.cuda.synchronize(1)
    torch.cuda.empty_cache()
    until(lambda: torch.cuda.memory_reserved(1) < before, 5, lambda: torch.cuda.memory_reserved(1))
    equal(float(x.sum()), 3.0 * MIB)
    p.close()


@worker
def only_the_second(conn):
    import torch

    torch.cuda.set_device(1)
    t = torch.full((MIB,), 5.0, device="cuda:1")
    value = conn.recv(timeout=30)
    total = float(value["t"].sum())
    conn.send({"contexts": primary_contexts(), "device": value["t"].device.index, "total": total, "t": t})
    conn.recv(timeout=30)


@test()
def no_stray_context():
    """A worker that works on the second GPU alone has no context on the first."""
    two()
    p = Parent()
    conn = p.worker(only_the_second)
    conn.send({"t": p.torch.full((MIB,), 7.0, device="cuda:1")})
    answer = conn.recv(timeout=30)
    equal(answer["contexts"][:2], [False, True])
    equal((answer["device"], answer["total"]), (1, 7.0 * MIB))
    equal((answer["t"].device.index, float(answer["t"].sum())), (1, 5.0 * MIB))
    conn.send("end")
    p.close()


@worker
def doubler(conn):
    """Doubles what comes, in place, and answers with something of its own on the same GPU."""
    import torch

    while True:
        value = conn.recv(timeout=60)
        if value == "end":
            return
        t = value["t"]
        seen = fingerprint(torch, t)
        t.mul_(2)
        answer = {"uuid": uuid(torch, t.device), "ordinal": t.device.index, "seen": seen, "own": t + 1}
        del value, t
        conn.send(answer)
        del answer


def round_trips(p, conn, device, expected_ordinal):
    torch = p.torch
    t = torch.randint(0, 100, (3 * MIB,), dtype=torch.int32, device=device)
    before, first = fingerprint(torch, t), int(t[5])
    sent = conn.send({"t": t})
    equal(sent.copies, 0)
    answer = conn.recv(timeout=20)
    equal(answer["uuid"], uuid(torch, device), "the GPU that it landed on")
    equal(answer["ordinal"], expected_ordinal, "its number over there")
    equal(answer["seen"], before)
    p.millpond.wait_done(t, timeout=20)
    equal(int(t[5]), 2 * first, "written in place")
    own = answer["own"]
    equal((own.device.index, int(own[5])), (t.device.index, 2 * first + 1))


@test(timeout=50)
def a_worker_on_each():
    """One worker sees only the first GPU, another only the second: each value lands on its own card, in place, uncopied."""
    two()
    p = Parent()
    workers = [p.worker(doubler, CUDA_VISIBLE_DEVICES=str(n)) for n in (0, 1)]
    for _ in range(3):
        for n, conn in enumerate(workers):
            round_trips(p, conn, f"cuda:{n}", 0)
    gpus = [d for d in p.arena.ledger()["devices"] if d["id"].startswith("GPU-")]
    clients = [{c["pid"] for c in d["clients"] if c["reserved"]} for d in gpus]
    check([sum(conn.process.pid in pids for pids in clients) for conn in workers] == [1, 1], clients)
    # Killed on one GPU, the other works on.
    workers[1].process.kill()
    round_trips(p, workers[0], "cuda:0", 0)
    until(lambda: p.of(workers[1].process.pid, "reserved") == 0, 10, "the dead worker's memory is back")
    p.close()


@test(timeout=50)
def swapped_masks():
    """The worker counts the GPUs the other way round: values land on the card that they are on."""
    two()
    p = Parent()
    conn = p.worker(doubler, CUDA_VISIBLE_DEVICES="1,0")
    for _ in range(2):
        round_trips(p, conn, "cuda:0", 1)
        round_trips(p, conn, "cuda:1", 0)
    p.close()


@worker
def says_what_it_got(conn):
    value = conn.recv(timeout=30)
    try:
        t = value["t"]
        conn.send({"device": str(t.device), "total": float(t.sum())})
    except Exception as e:
        conn.send({"error": f"{type(e).__name__}: {e}"})
    conn.recv(timeout=30)


@test(timeout=60)
def a_gpu_that_the_other_cannot_see():
    """A value on a GPU that is masked from the receiver: it comes right on the one it has, or is refused by name; nothing hangs."""
    two()
    p = Parent()
    conn = p.worker(says_what_it_got, CUDA_VISIBLE_DEVICES="1")
    said = None
    try:
        conn.send({"t": p.torch.full((MIB,), 3.0, device="cuda:0")})
        said = conn.recv(timeout=20)
    except p.millpond.Error as e:
        said = {"error": f"{type(e).__name__}: {e}"}
    check("error" in said or said["total"] == 3.0 * MIB, said)
    p.close()
    return {"says": said}


@worker
def copies_across(conn):
    """Takes what comes on one GPU to the other by torch's own copy, at once, without waiting on the CPU."""
    import torch

    while True:
        value = conn.recv(timeout=60)
        if value == "end":
            return
        there = value["t"].to("cuda:1" if value["t"].device.index == 0 else "cuda:0", non_blocking=True)
        conn.send({"there": there})


@test(timeout=60)
def order_across_gpus():
    """A kernel that still runs on one GPU; the value handed on and copied to the other by another process: it sees the end of the kernel."""
    two()
    p = Parent()
    torch = p.torch
    conn = p.worker(copies_across)
    for turn in range(3):
        for device in ("cuda:0", "cuda:1"):
            with torch.cuda.device(device):
                t = torch.zeros(4 * MIB, dtype=torch.int32, device=device)
                torch.cuda.synchronize()
                torch.cuda._sleep(LONG // 3)
                t.fill_(turn + 7)
                conn.send({"t": t})
                there = conn.recv(timeout=30)["there"]
            check(there.device != t.device)
            with torch.cuda.device(there.device):
                equal(int(there.sum(dtype=torch.int64)), 4 * MIB * (turn + 7), f"{device} -> {there.device}, turn {turn}")
    p.close()


@test(timeout=60)
def a_block_that_the_other_gpu_reads():
    """record_stream() with a stream of the other GPU, one of its own and the default one: what is freed is not filled under its copy,
    and comes back behind it."""
    two()
    p = Parent()
    torch, cuda, count = p.torch, ctypes.CDLL("libcuda.so.1"), 16 * MIB
    for there in (torch.cuda.Stream("cuda:1"), torch.cuda.default_stream("cuda:1")):
        x = torch.full((count,), 3, dtype=torch.int32, device="cuda:0")
        y = torch.zeros(count, dtype=torch.int32, device="cuda:1")
        for ordinal in (0, 1):
            torch.cuda.synchronize(ordinal)
        with torch.cuda.stream(there):
            torch.cuda._sleep(LONG)
            to, source, bytes_ = ctypes.c_uint64(y.data_ptr()), ctypes.c_uint64(x.data_ptr()), ctypes.c_size_t(4 * count)
            equal(cuda.cuMemcpyDtoDAsync_v2(to, source, bytes_, ctypes.c_void_p(there.cuda_stream)), 0)
        x.record_stream(there)
        where = x.data_ptr()
        del x
        others = [torch.full((count,), 9, dtype=torch.int32, device="cuda:0") for _ in range(3)]
        check(where not in [t.data_ptr() for t in others], "reused while the other GPU reads it")
        for ordinal in (0, 1):
            torch.cuda.synchronize(ordinal)
        equal(int((y == 3).sum()), count, "what was copied")
        del others
        stats = lambda: torch.cuda.memory_stats(0)  # noqa: E731
        until(lambda: stats()["active.all.current"] == stats()["allocation.all.current"], 10, "the block comes back")
    p.close()


@worker
def ranks(conn, rank, port):
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE="2")
    torch.cuda.set_device(int(rank))
    dist.init_process_group("nccl", rank=int(rank), world_size=2)
    # Blocks of one chunk, and one that is larger than a chunk.
    sums = []
    for count in (1000, 4 * MIB, 96 * MIB):
        t = torch.full((count,), float(int(rank) + 1), device=f"cuda:{rank}")
        dist.all_reduce(t)
        torch.cuda.synchronize()
        sums.append([float(t[0]), float(t[-1]), bool((t == 3).all())])
        del t
    dist.destroy_process_group()
    conn.send(sums)
    conn.recv(timeout=60)


@test(timeout=120)
def nccl_all_reduce_over_arena_tensors():
    """NCCL looks at one chunk of what it is given: an all-reduce of two workers over arena memory has the right numbers."""
    torch = two()
    if not torch.distributed.is_nccl_available():
        raise Skip("torch without NCCL")
    p = Parent(chunk_bytes="64MiB")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conns = [p.worker(ranks, rank, port) for rank in (0, 1)]
    for conn in conns:
        equal(conn.recv(timeout=100), [[3.0, 3.0, True]] * 3, "sums of an all-reduce")
    for conn in conns:
        conn.send("end")
    p.close()
