"""The doors on a GPU: the canary of the GPU tier, tiers, tickets, torch.multiprocessing."""
from harness import GPU, Parent, check, equal, test, worker


@worker
def echoer(conn, spoil=""):
    import torch

    from millpond import canary

    if spoil:
        canary._Torch.check = lambda self, values: {"8x8 float32": "spoiled by the test"}
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
