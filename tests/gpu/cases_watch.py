"""What the ledger counts, and who is told when memory is short."""
import os
import threading

from harness import GPU, Parent, check, equal, test, until, worker

MIB = 1 << 20


@worker
def replier(conn):
    import torch

    if GPU:
        torch.zeros(1, device="cuda")
    while True:
        value = conn.recv(timeout=60)
        conn.send(value["a"].numel() if isinstance(value, dict) else value)


@worker
def grower(conn):
    import millpond

    refused = []
    millpond.on_refusal(refused.append)
    nbytes = conn.recv(timeout=60)
    try:
        if GPU:
            import torch

            torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        else:
            millpond.empty((nbytes,), "uint8")
        conn.send("had it")
    except (millpond.OutOfMemory, RuntimeError) as e:
        until(lambda: refused, 10, "its own refusal")
        conn.send([type(e).__name__, refused[0].asked, refused[0].name])


@test(host=True)
def counters_by_tier():
    """Sender and receiver count the same values by the same tiers, on the device that holds them; a reader from outside sees it."""
    p = Parent()
    torch = p.torch
    conn = p.worker(replier)
    mine = torch.zeros(MIB, device="cuda") if GPU else p.arena.zeros((MIB,), kind="t")
    foreign = torch.ones(1000)  # the CPU's own memory
    for _ in range(5):
        conn.send({"a": mine, "b": foreign})
        equal(conn.recv(timeout=60), MIB)
    ledger = p.millpond.read_ledger(p.arena.socket, p.arena._key)
    figures, offsets = {}, 0
    for device in ledger.devices:
        rows = {client.pid: client for client in device.clients}
        sent, received = rows[os.getpid()].sent, rows[conn.process.pid].received
        equal(sent["arena"], received["arena"], f"{device.id}: arena")
        equal(sent["copy"], received["copy"], f"{device.id}: copy")
        figures[device.id] = {"sent": sent, "falls": rows[os.getpid()].falls}
        if device.id.startswith("HOST-"):
            check(sent["copy"] >= 5 and rows[os.getpid()].falls["foreign_host"] >= 5, f"copies on the host: {sent}")
        if device.id.startswith("HOST-") != GPU:
            offsets += sent["arena"]
    check(offsets >= 5, f"offsets: {figures}")
    p.close()
    return figures


@test(host=True)
def told_of_pressure_and_refusal():
    """The parent's callback and the worker's own are called, with who asked and for how much, from a thread of ours."""
    p = Parent(limit="256MiB")
    got = []
    p.arena.on_refusal(lambda event: got.append((event, threading.current_thread().name)))
    p.arena.on_pressure(lambda event: got.append((event, threading.current_thread().name)))
    conn = p.worker(grower)
    conn.send(1 << 30)
    answer = conn.recv(timeout=60)
    check(answer != "had it" and answer[1] >= 1 << 30 and answer[2] == "grower", f"the worker was told: {answer}")
    until(lambda: any(event.kind == "refusal" and event.asked >= 1 << 30 for event, _ in got), 10, "the parent to be told")
    event = [event for event, _ in got if event.kind == "refusal" and event.asked >= 1 << 30][0]
    equal((event.name, event.pid, event.limit), ("grower", conn.process.pid, 256 * MIB))
    equal({name for _, name in got}, {"millpond-events"})
    p.close()
    return {"error": answer[0], "free": event.free}
