"""Two GPUs: devices are named by identity, nobody makes a context where none is needed, and libraries take arena memory."""
import ctypes
import os
import socket

from harness import Parent, Skip, check, equal, test, worker

MIB = 1 << 20


def two_gpus():
    """A parent on a machine with two GPUs or more."""
    import torch

    if torch.cuda.device_count() < 2:
        raise Skip("one GPU")
    return Parent()


def visible():
    """The first two GPUs as `CUDA_VISIBLE_DEVICES` names them."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return mask.split(",")[:2] if mask else ["0", "1"]


def contexts():
    """Whether this process has a primary context on each GPU, as the driver says."""
    cuda, count, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), []
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        raise RuntimeError("the driver does not answer")
    for ordinal in range(count.value):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        if cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)):
            raise RuntimeError("cuDevicePrimaryCtxGetState")
        found.append(bool(active.value))
    return found


@worker
def answers_where(conn):
    import torch

    for _ in range(2):
        t = conn.recv(timeout=60)
        uuid = str(getattr(torch.cuda.get_device_properties(t.device), "uuid", ""))
        conn.send({"ordinal": t.device.index, "uuid": uuid, "sum": float(t.sum())})
        del t
    mine = torch.full((1000,), 4.0, device="cuda:1")
    torch.cuda.synchronize(1)
    conn.send(mine)
    conn.recv(timeout=60)


@test()
def swapped_masks():
    """The worker's mask has the GPUs the other way round: a tensor stays on the GPU that it is on, under the other ordinal."""
    p = two_gpus()
    torch = p.torch
    first, second = visible()
    conn = p.worker(answers_where, CUDA_VISIBLE_DEVICES=f"{second},{first}")
    for ordinal in (0, 1):
        t = torch.full((MIB,), ordinal + 1.0, device=f"cuda:{ordinal}")
        conn.send(t)
        said = conn.recv(timeout=60)
        equal((said["ordinal"], said["sum"]), (1 - ordinal, (ordinal + 1.0) * MIB), f"cuda:{ordinal} over there")
        equal(said["uuid"], str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", "")), "the GPU")
    back = conn.recv(timeout=60)
    equal((back.device.index, float(back.sum())), (0, 4000.0), "its cuda:1 is our cuda:0")
    del back
    conn.send("end")
    p.close()


@worker
def receives_on_the_second(conn):
    import torch

    before = contexts()
    t = conn.recv(timeout=60)
    total = float(t.sum())
    torch.cuda.synchronize(t.device)
    conn.send({"before": before, "after": contexts(), "ordinal": t.device.index, "sum": total})
    del t
    conn.recv(timeout=60)


@test()
def no_context_where_none_is_needed():
    """Receiving a tensor of the second GPU makes a context there and on no other GPU; the owner has none at all."""
    p = two_gpus()
    torch = p.torch
    conn = p.worker(receives_on_the_second)
    conn.send(torch.full((MIB,), 2.0, device="cuda:1"))
    said = conn.recv(timeout=60)
    equal((said["ordinal"], said["sum"]), (1, 2.0 * MIB))
    check(not any(said["before"]), "attaching made contexts", said)
    equal(said["after"][:2], [False, True], "contexts of the receiver on the first two GPUs")
    conn.send("end")
    p.close()
    return {"contexts": said["after"]}


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
    p = two_gpus()
    if not p.torch.distributed.is_nccl_available():
        raise Skip("torch without NCCL")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conns = [p.worker(ranks, rank, port) for rank in (0, 1)]
    for conn in conns:
        equal(conn.recv(timeout=100), [[3.0, 3.0, True]] * 3, "sums of an all-reduce")
    for conn in conns:
        conn.send("end")
    p.close()
