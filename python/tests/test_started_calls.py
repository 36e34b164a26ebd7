"""Calls that are started and asked later, between real processes: cancelled, dropped, late, from many threads, to the channel's end."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import millpond
from conftest import ROOT, eventually, native

np = pytest.importorskip("numpy")
pytestmark = native

WORKER = """
import threading, time
import millpond

millpond.attach()
conn = millpond.connection(timeout=30)
gates = [threading.Event() for _ in range(4)]
log = []

@conn.serve
def wait(i):
    assert gates[i].wait(20)
    return i

@conn.serve
def open_gate(i):
    gates[i].set()

@conn.serve
def obey():
    log.append("began")
    while not millpond.cancelled():
        time.sleep(0.002)
    time.sleep(0.05)
    log.append("ended")

@conn.serve
def deaf(i, n):
    "Does not look whether it was cancelled."
    assert gates[i].wait(20)
    return make(n)

@conn.serve
def make(n):
    out = millpond.empty((n,), "float32")
    out[...] = 7
    log.append("made")
    return out

@conn.serve
def report(steps):
    return [conn.call("progress", step, timeout=20) for step in range(steps)]

@conn.serve
def fill(n):
    out = conn.result((n,), "float32")
    out[...] = 5
    return out

@conn.serve
def logged():
    return log

conn.serve_forever(threads=6)
"""


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="128MiB", driver="host") as arena:
        yield arena


@pytest.fixture
def conn(arena, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    process = subprocess.Popen([sys.executable, str(script)], env=arena.worker_env("w"), cwd=ROOT)
    conn = arena.accept(timeout=60)
    yield conn
    conn.close()
    process.kill()
    process.wait()


def nothing_is_lent(arena):
    """Neither by the worker nor by us."""
    return all(client.leased_out == 0 for client in arena.ledger().device().clients)


def test_results_are_asked_in_any_order_and_as_often_as_one_likes(conn):
    calls = [conn.start("wait", i) for i in range(4)]
    assert not any(call.done() for call in calls)
    with pytest.raises(millpond.Timeout, match="'wait' had no answer within 0.02 s; it goes on"):
        calls[0].result(timeout=0.02)
    for i in (2, 0, 3, 1):
        conn.call("open_gate", i, timeout=20)
        assert calls[i].result(timeout=20) == i and calls[i].done()
    assert [call.result() for call in calls] == [0, 1, 2, 3] and conn.dropped == 0


def test_many_threads_get_one_result(conn):
    call, got = conn.start("deaf", 0, 1000), []
    threads = [threading.Thread(target=lambda: got.append(call.result(timeout=20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: call._waiters == 4)
    assert not call.done()
    conn.call("open_gate", 0, timeout=20)
    for thread in threads:
        thread.join(20)
    assert len(got) == 4 and all(value is got[0] for value in got) and got[0].sum() == 7000


def test_a_cancelled_call_ends_there_before_it_ends_here(conn):
    call = conn.start("obey")
    eventually(lambda: conn.call("logged", timeout=20) == ["began"])
    outcome = []
    waiting = threading.Thread(target=lambda: outcome.append(pytest.raises(millpond.Cancelled, call.result, 20)))
    waiting.start()
    eventually(lambda: call._waiters == 1)
    assert call.cancel()
    waiting.join(20)
    assert outcome and conn.call("logged", timeout=20) == ["began", "ended"]
    with pytest.raises(millpond.Cancelled):
        call.result()


def test_a_reply_that_comes_after_the_cancel_is_let_go_of(arena, conn):
    call = conn.start("deaf", 1, 1 << 20)
    assert call.cancel()
    with pytest.raises(millpond.Timeout):
        call.result(timeout=0.02)
    conn.call("open_gate", 1, timeout=20)
    eventually(call.done)
    eventually(lambda: nothing_is_lent(arena))  # though nobody has asked, and the call is here yet
    with pytest.raises(millpond.Cancelled):
        call.result()
    assert conn.call("logged", timeout=20) == ["made"] and not conn._pending


def test_a_cancel_after_the_reply_is_too_late(arena, conn):
    call = conn.start("make", 1000)
    eventually(lambda: conn.call("logged", timeout=20) == ["made"])
    eventually(call.done)
    assert not call.cancel() and call.result().sum() == 7000 and not call.cancel()
    assert not nothing_is_lent(arena), "the call keeps its result"
    del call
    eventually(lambda: nothing_is_lent(arena))


def test_calls_that_are_dropped_go_on_and_hold_nothing(arena, conn):
    for _ in range(300):
        conn.start("make", 20_000)  # 24 MB in all
    eventually(lambda: len(conn.call("logged", timeout=20)) == 300)
    conn.start("fill", 1000)
    eventually(lambda: not conn._pending or conn.start("make", 1).done())
    eventually(lambda: conn.call("logged", timeout=20) and not conn._pending)
    eventually(lambda: nothing_is_lent(arena))


def test_what_a_started_call_calls_back_is_run_by_whoever_looks(conn):
    conn.serve("progress")(lambda step: step * 10)
    call = conn.start("report", 3)
    eventually(call.done)  # nobody waits in result
    assert call.result() == [0, 10, 20]
    call = conn.start("report", 3)
    while call._reply is None:  # by another call that waits
        conn.call("logged", timeout=20)
    assert call.result() == [0, 10, 20]
    assert conn.start("report", 3).result(timeout=20) == [0, 10, 20]
    assert conn.start("fill", 100).result(timeout=20).sum() == 500, "conn.result() of a started call"


def test_the_end_of_the_channel_ends_every_call(conn):
    calls, outcomes = [conn.start("wait", i) for i in range(3)], []

    def ask(call):
        try:
            call.result(timeout=20)
        except (millpond.Closed, millpond.PeerDied) as e:
            outcomes.append(type(e))

    threads = [threading.Thread(target=ask, args=(call,)) for call in calls[:2] * 2]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(call._waiters for call in calls) == 4)
    os.kill(conn.peer.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert len(outcomes) == 4
    assert calls[2].done() and not calls[2].cancel() and not conn._pending
    with pytest.raises((millpond.Closed, millpond.PeerDied)):
        calls[2].result(timeout=20)
    with pytest.raises((millpond.Closed, millpond.PeerDied)):
        conn.start("wait", 0)


def test_a_reply_that_came_before_the_end_is_there(conn):
    call = conn.start("wait", 0)
    conn.call("open_gate", 0, timeout=20)
    eventually(call.done)
    conn.close()
    assert call.result() == 0


def test_threads_start_cancel_and_ask_at_once(conn):
    end, outcomes = time.monotonic() + 0.5, []

    def work(n):
        while time.monotonic() < end:
            call = conn.start("make", 100 + n)
            if n % 2:
                cancelled = call.cancel()
            try:
                assert len(call.result(timeout=20)) == 100 + n and not (n % 2 and cancelled)
                outcomes.append("result")
            except millpond.Cancelled:
                assert n % 2 and cancelled
                outcomes.append("cancelled")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert {"result", "cancelled"} <= set(outcomes) and not conn._pending
