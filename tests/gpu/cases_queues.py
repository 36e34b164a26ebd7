"""Streams that share a hardware queue: what two processes that wait for each other in both directions do to one another."""
import json
import os
import subprocess
import sys
import time

from harness import GPU, Parent, check, equal, test, until, worker

PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probes", "two_way.py")
#: More than any number of hardware queues: some of them share one, whatever is set.
STREAMS = 40
ROUNDS = 40


@test(timeout=100, alone=True, quick=False)
def two_way_at_the_driver():
    """Waits queued before the writes, both ways: stuck where the streams share a hardware queue, and a store lets them go."""
    done = subprocess.run([sys.executable, PROBE], capture_output=True, text=True, timeout=95)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    check(done.returncode == 0 and rows, done.stdout[-1000:], done.stderr[-1000:])
    seen = {(row["queues"], row["gap"]): row for row in rows}
    # facts/driver.md: every 8th stream shares a queue by default, every 32nd with 32.
    for queues, gap in ((8, 1), (32, 1), (32, 8)):
        check(not seen[queues, gap]["stuck"], "of different queues, and stuck:", seen[queues, gap])
    for row in rows:
        check(not row["stuck"] or row["recovered"], "a store did not let them go:", row)
    check(any(row["stuck"] for row in rows), "no pair of streams shared a queue", rows)
    return {f"{q}_queues_gap_{g}": f"stuck, after a store {r['after_the_store_ms']} ms" if r["stuck"] else f"{r['went_on_ms']} ms" for (q, g), r in seen.items()}


def exchange(conn, on_gpu):
    """Both sides send what is not ready and then wait for what the other sent, round after round, stream after stream; nothing
    is looked at before the end."""
    import torch

    import millpond

    if on_gpu:
        streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        # What loads a kernel waits for the device: all are loaded first.
        for stream in streams:
            with torch.cuda.stream(stream):
                (torch.full((256,), 0, dtype=torch.int64, device="cuda") + 1).sum()
                torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        t = torch.full((256,), 0, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
    else:
        t = millpond.empty((256,), "int64", kind="t").fill_(0)
    conn.send("up")
    equal(conn.recv(timeout=60), "up")
    start = time.perf_counter()
    for turn in range(ROUNDS):
        if on_gpu:
            with torch.cuda.stream(streams[turn % STREAMS]):
                torch.cuda._sleep(20_000_000)
                conn.send(t)
            with torch.cuda.stream(streams[(turn + 1) % STREAMS]):
                t = conn.recv(timeout=40) + 1
        else:
            conn.send(t)
            t = conn.recv(timeout=40) + 1
    queued = time.perf_counter()
    if on_gpu:
        until(lambda: all(s.query() for s in streams), 40, "the streams of the two stand still")
    total = int(t.sum())
    equal(total, 256 * ROUNDS, "what came after all rounds")
    took = {"queued_ms": round((queued - start) * 1e3, 1), "all_ms": round((time.perf_counter() - start) * 1e3, 1)}
    del t
    return took


@worker
def exchanger(conn):
    exchange(conn, GPU)
    conn.send("done")
    conn.recv(timeout=60)


def both_ways(queues, wait=None):
    """The same over millpond, where a value is named only after its write was queued: it comes to an end, whatever is shared."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)
    p = Parent(wait=wait)
    conn = p.worker(exchanger, CUDA_DEVICE_MAX_CONNECTIONS=str(queues))
    took = exchange(conn, GPU)
    equal(conn.recv(timeout=60), "done")
    conn.send("end")
    p.close()
    return took


@test(host=True)
def two_way_with_one_queue():
    """Both ways over millpond, every stream of both in one hardware queue: it comes to an end."""
    return both_ways(1)


@test()
def two_way_with_thirty_two_queues():
    """Both ways over millpond with the driver's most, 32 queues, and 40 streams: it comes to an end."""
    return both_ways(32)


@test()
def two_way_with_the_queues_of_worker_env():
    """Both ways over millpond with what worker_env() sets, the driver's own 8 queues, and 40 streams: it comes to an end."""
    return both_ways(8)


@test(host=True)
def two_way_waiting_on_the_host():
    """Both ways with one queue and wait="host": no stream ever stands at the other's word."""
    return both_ways(1, wait="host")
