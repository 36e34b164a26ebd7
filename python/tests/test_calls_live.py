"""Calls between real processes: many at a time, back into the caller, log records in their middle; and the beat of a process that
holds Python's lock."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import millpond
from conftest import ROOT, eventually, native

pytestmark = native

WORKER = """
import ctypes, logging, sys, threading, time
import millpond

millpond.attach(on_owner_death=sys.argv[1])
conn = millpond.connection(timeout=30)
gates = [threading.Event() for _ in range(4)]

@conn.serve
def wait(i):
    assert gates[i].wait(20)
    return i

@conn.serve
def open_gate(i):
    gates[i].set()

@conn.serve
def report(steps):
    log = logging.getLogger("a.model")
    log.setLevel(logging.INFO)
    handler = conn.forward_logs(log)
    answers = []
    for step in range(steps):
        log.info("step %d", step)
        answers.append(conn.call("progress", step, timeout=20))
    log.removeHandler(handler)
    return answers

@conn.serve
def hold_the_lock(seconds):
    "In C, and with Python's lock: no Python thread of this process runs meanwhile."
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))

@conn.serve
def keep(value):
    global kept
    kept = value

@conn.serve
def total():
    return float(kept.sum())

conn.serve_forever(threads=6)
time.sleep(60)  # the channel has ended: what is told of the owner's death ends the process
"""


@pytest.fixture
def arena():
    with millpond.Arena(limit="64MiB", driver="host", on_owner_death="continue") as arena:
        yield arena


@pytest.fixture
def start(arena, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    processes = []

    def start(name, on_owner_death="continue", **policy):
        process = subprocess.Popen([sys.executable, str(script), on_owner_death], env=arena.worker_env(name), cwd=ROOT)
        processes.append(process)
        return process, arena.accept(timeout=60, **policy)

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_replies_come_in_any_order(start):
    _, conn = start("w")
    done = []
    threads = [threading.Thread(target=lambda i=i: done.append(conn.call("wait", i, timeout=30))) for i in range(4)]
    for thread in threads:
        thread.start()
    for n, i in enumerate((2, 0, 3, 1)):
        conn.call("open_gate", i, timeout=30)
        eventually(lambda n=n: len(done) == n + 1)
    assert done == [2, 0, 3, 1]
    for thread in threads:
        thread.join(10)


def test_callbacks_and_log_records_come_in_mid_call(start, caplog):
    _, conn = start("w")
    order = []
    conn.serve("progress")(lambda step: order.append(("call", step)) or step * 10)

    class Sink(logging.Handler):
        def emit(self, record):
            order.append((record.getMessage(), record.process))

    logger = logging.getLogger("a.model")
    logger.setLevel(logging.INFO)
    logger.addHandler(Sink())
    try:
        assert conn.call("report", 3, timeout=30) == [0, 10, 20]
    finally:
        logger.handlers.clear()
    pid = conn.peer.pid
    assert order == [(f"step {n}", pid) if not back else ("call", n) for n in range(3) for back in (False, True)]


def test_a_worker_that_holds_pythons_lock_is_alive(arena, start):
    """A long kernel launch, a long import: the beat is written by a thread that needs no Python."""
    _, conn = start("busy", on_stopped="kill", stopped_after=0.2)
    states = set()
    caller = threading.Thread(target=lambda: states.add(conn.call("hold_the_lock", 0.7, timeout=30)))
    caller.start()
    ages = []
    while caller.is_alive():
        row = arena.ledger().device().client("busy")
        states.add(row.state)
        ages.append(row.beat_age_ms)
        time.sleep(0.01)
    assert states == {"alive", None} and max(ages) < 1000, ages


@pytest.mark.parametrize("policy", ["continue", "exit"])
def test_what_the_owners_death_does_is_chosen(arena, start, policy):
    np = pytest.importorskip("numpy")
    process, conn = start("w", policy)
    held = arena.zeros((1000,), "float32")
    held[...] = 3
    conn.call("keep", held, timeout=30)
    arena._owner.process.kill()
    if policy == "exit":
        assert process.wait(20) == -signal.SIGTERM
        with pytest.raises((millpond.Closed, millpond.PeerDied)):
            conn.call("total", timeout=30)
        return
    eventually(lambda: not millpond.status()["owner_alive"])
    assert conn.call("total", timeout=30) == 3000.0 and process.poll() is None
    held[...] = 4
    assert conn.call("total", timeout=30) == 4000.0
    with pytest.raises(millpond.OwnerDied):
        arena.empty((48 << 20,), np.uint8)
    assert os.getpid() != process.pid
