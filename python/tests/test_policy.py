"""Workers that stop, and calls that do not obey: reported, or killed where the parent says so. Real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

import millpond
from conftest import HERE, eventually, native

pytestmark = native
WORKER = os.path.join(HERE, "worker_main.py")


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        yield arena


@pytest.fixture
def deaths(arena):
    seen = []
    arena.on_death(seen.append)
    yield seen
    millpond.off(seen.append)


@contextlib.contextmanager
def worker(arena, name, **policy):
    process = subprocess.Popen([sys.executable, WORKER], env=arena.worker_env(name))
    try:
        with arena.accept(timeout=60, **policy) as conn:
            yield process, conn
    finally:
        process.kill()
        process.wait()


def kills(arena):
    return arena.ledger().device().kills


def test_a_worker_that_stays_stopped_is_killed_and_everybody_is_told_why(arena, deaths):
    before = kills(arena)
    with worker(arena, "sleeper", on_stopped="kill", stopped_after=0.2) as (process, conn):
        held = conn.call("make", (1000,), "float32", 7, timeout=30)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(millpond.PeerDied, match=r"sleeper \(pid \d+\) was killed by policy: stopped for 0\.\d s"):
            conn.call("echo", 1, timeout=30)
        with pytest.raises(millpond.PeerDied, match="killed by policy"):
            conn.send("more")
        assert process.wait(20) == -signal.SIGKILL
        eventually(lambda: any(death.pid == process.pid for death in deaths))
        death = deaths[-1]
        assert (death.name, death.pid) == ("sleeper", process.pid) and death.cause.startswith("killed by policy: stopped for 0.")
        assert "sleeper" in str(death) and "was killed by policy" in str(death)
        assert kills(arena) == before + 1
        assert held[999] == 7, "what it made and was ready outlives it"


def test_a_policy_can_be_set_and_taken_back_later(arena):
    with worker(arena, "w") as (process, conn):
        conn.set_policy("kill", 0.3)
        conn.set_policy("report")
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        assert conn.call("echo", 3, timeout=30) == 3
        for wrong in (dict(on_stopped="murder"), dict(on_stopped="kill", stopped_after=0.05), dict(on_stopped="kill", stopped_after=-1)):
            with pytest.raises(millpond.InvalidArgument):
                conn.set_policy(**wrong)


def test_a_call_that_ignores_its_cancel_is_ended_with_its_process(arena, deaths):
    with worker(arena, "stubborn") as (process, conn):
        start = time.monotonic()
        with pytest.raises(millpond.PeerDied, match=r"stubborn \(pid \d+\) was killed by policy: a call did not end within 0\.2 s"):
            conn.call("spin", 60, timeout=0.1, on_timeout="kill", grace=0.2)
        assert 0.3 <= time.monotonic() - start < 10
        assert process.wait(20) == -signal.SIGKILL
        eventually(lambda: any("a call did not end" in (death.cause or "") for death in deaths))


def test_a_call_that_obeys_its_cancel_costs_nobody_his_life(arena):
    with worker(arena, "good") as (_, conn):
        with pytest.raises(millpond.Timeout, match="'obey' had no answer within 0.1 s"):
            conn.call("obey", 60, timeout=0.1, on_timeout="kill", grace=20)
        assert conn.call("echo", 3, timeout=30) == 3
        assert not conn._pending and not conn.dropped, "its late answer was awaited"
        # And the mild way: the worker is told, and is let alone if it does not listen.
        with pytest.raises(millpond.Timeout):
            conn.call("spin", 0.2, timeout=0.02)
        assert conn.call("echo", 4, timeout=30) == 4


def test_a_stopped_worker_whose_call_times_out_is_ended_too(arena):
    with worker(arena, "frozen") as (process, conn):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(millpond.PeerDied, match="killed by policy"):
            conn.call("echo", 1, timeout=0.05, on_timeout="kill", grace=0.05)
        assert process.wait(20) == -signal.SIGKILL


def test_a_worker_has_no_such_say(arena):
    with worker(arena, "w") as (_, conn):
        conn.serve("echo")(lambda x: x)
        with pytest.raises(millpond.RemoteError, match="only a parent says who is killed") as e:
            conn.call("call_back", timeout=30)
        assert e.value.remote_code == "Refused"
        with pytest.raises(millpond.InvalidArgument, match='"cancel" or "kill"'):
            conn.call("echo", 1, timeout=1, on_timeout="raise")
        with pytest.raises(millpond.InvalidArgument, match="needs timeout="):
            conn.call("echo", 1, on_timeout="kill")
