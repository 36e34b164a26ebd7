"""Tickets: values for whoever comes; what becomes of them when nobody does."""

import gc
import os
import subprocess
import sys

import pytest

import millpond
from conftest import HERE, eventually, native

pytestmark = native
np = pytest.importorskip("numpy")

REDEEM = """
import sys, millpond
millpond.attach()
conn = millpond.connection(timeout=30)

@conn.serve
def redeem(text):
    global held
    held = millpond.redeem(text)
    return float(held.sum())

@conn.serve
def fill(value):
    held[...] = value

@conn.serve
def make(value):
    global mine
    mine = millpond.empty((1000,), "float32")
    mine[...] = value
    return millpond.ticket(mine)

@conn.serve
def pass_on(text):
    global held
    held = millpond.redeem(text)
    return millpond.ticket(held)

@conn.serve
def drop():
    global held
    held = None

conn.serve_forever()
"""


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="256MiB", driver="host") as arena:
        yield arena


@pytest.fixture
def workers(arena):
    processes = [subprocess.Popen([sys.executable, "-c", REDEEM], env=arena.worker_env(f"w{i}")) for i in range(2)]
    conns = [arena.accept(timeout=30) for _ in processes]
    yield conns
    for conn in conns:
        conn.close()
    for process in processes:
        process.wait(20)


def filled(value, n=1 << 20):
    array = millpond.empty((n,), "float32")
    array[...] = value
    return array


def leased(arena):
    return sum(c["leased_out"] for d in arena.ledger()["devices"] for c in d["clients"] if c["name"] == "parent")


def test_a_ticket_is_offsets_and_shares_memory(workers):
    array = filled(2)
    text = millpond.ticket(array)
    assert len(text) < 500 and isinstance(text, bytes)
    assert workers[0].call("redeem", text, timeout=30) == 2.0 * (1 << 20)
    workers[0].call("fill", 3.0, timeout=30)
    assert array[17] == 3


def test_a_ticket_for_one_is_redeemed_once(workers):
    text = millpond.ticket(filled(1))
    workers[0].call("redeem", text, timeout=30)
    with pytest.raises(millpond.RemoteError, match="not good any more") as e:
        workers[1].call("redeem", text, timeout=30)
    assert e.value.remote_code == "Stale"


def test_a_ticket_for_many_is_redeemed_until_it_is_cancelled(arena, workers):
    gc.collect()
    array = filled(1)
    text = millpond.ticket(array, many=True)
    assert [w.call("redeem", text, timeout=30) for w in (*workers, workers[0])] == [float(1 << 20)] * 3
    del array
    millpond.cancel_ticket(text)
    with pytest.raises(millpond.RemoteError, match="not good any more"):
        workers[1].call("redeem", text, timeout=30)
    workers[0].call("fill", 5.0, timeout=30)
    for w in workers:
        w.call("drop", timeout=30)


def test_the_memory_lives_from_the_ticket_to_the_last_view(arena, workers):
    eventually(lambda: leased(arena) == 0)
    text = millpond.ticket(filled(7))
    gc.collect()
    others = [filled(9) for _ in range(8)]
    assert leased(arena) >= 4 << 20
    assert workers[0].call("redeem", text, timeout=30) == 7.0 * (1 << 20)
    del others
    workers[0].call("drop", timeout=30)
    eventually(lambda: leased(arena) == 0)


def test_a_cancelled_ticket_lets_go(arena):
    eventually(lambda: leased(arena) == 0)
    text = millpond.ticket(filled(7))
    assert leased(arena) >= 4 << 20
    millpond.cancel_ticket(text)
    millpond.cancel_ticket(text)
    eventually(lambda: leased(arena) == 0)
    with pytest.raises(millpond.Stale):
        millpond.redeem(text)


def test_tickets_of_the_dead_are_buried(arena):
    process = subprocess.Popen([sys.executable, "-c", REDEEM], env=arena.worker_env("mortal"))
    with arena.accept(timeout=30) as conn:
        text = conn.call("make", 4.0, timeout=30)
        lost = conn.call("make", 6.0, timeout=30)
        kept = millpond.redeem(text)
        process.kill()
        process.wait(20)

        def buried():
            rows = [c for d in arena.ledger()["devices"] for c in d["clients"] if c["name"] == "mortal"]
            return all(row["state"] not in ("alive", "dying") for row in rows)

        eventually(buried)
        with pytest.raises(millpond.Stale):
            millpond.redeem(lost)
        assert kept[999] == 4.0, "what was redeemed outlives its maker"
        del kept
        eventually(lambda: not [c for d in arena.ledger()["devices"] for c in d["clients"] if c["name"] == "mortal"])


def test_a_redeemer_that_dies_lets_go(arena):
    eventually(lambda: leased(arena) == 0)
    process = subprocess.Popen([sys.executable, "-c", REDEEM], env=arena.worker_env("mortal2"))
    with arena.accept(timeout=30) as conn:
        assert conn.call("redeem", millpond.ticket(filled(1)), timeout=30)
        text = millpond.ticket(filled(2), many=True)
        assert conn.call("redeem", text, timeout=30)
        process.kill()
        process.wait(20)
        eventually(lambda: leased(arena) < 8 << 20)
        millpond.cancel_ticket(text)
        eventually(lambda: leased(arena) == 0)


def test_what_is_no_ticket_of_this_arena_is_refused(arena):
    text = millpond.ticket(filled(1, 10))
    other = text.replace(b'"token":"', b'"token":"0')
    with pytest.raises(millpond.Stale, match="another arena"):
        millpond.redeem(other)
    with pytest.raises(millpond.Protocol, match="no ticket"):
        millpond.redeem(b"{}")
    bad = text.replace(b'"h":[', b'"h":[9')
    with pytest.raises(millpond.Error):
        millpond.redeem(bad)
    assert millpond.redeem(text)[0] == 1


def test_a_ticket_of_anothers_value_outlives_that_other(arena):
    """Its hold is in the table of the process whose bytes they are; the ticket is its maker's all the same."""
    processes = [subprocess.Popen([sys.executable, "-c", REDEEM], env=arena.worker_env(f"x{i}")) for i in range(2)]
    try:
        first, second = [arena.accept(timeout=30) for _ in processes]
        value = millpond.redeem(first.call("make", 4.0, timeout=30))
        passed_on = [millpond.ticket(value) for _ in range(2)]
        del value
        pid = first.peer.pid
        dead = next(p for p in processes if p.pid == pid)
        dead.kill()
        dead.wait(20)
        eventually(lambda: arena.ledger()["devices"][0]["orphaned"] > 0)
        assert second.call("redeem", passed_on[0], timeout=30) == 4000.0
        second.call("drop", timeout=30)
        assert arena.ledger()["devices"][0]["orphaned"] > 0, "the other ticket stands"
        millpond.cancel_ticket(passed_on[1])
        eventually(lambda: arena.ledger()["devices"][0]["orphaned"] == 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_ticket_of_anothers_value_ends_with_its_maker(arena):
    eventually(lambda: leased(arena) == 0)
    process = subprocess.Popen([sys.executable, "-c", REDEEM], env=arena.worker_env("between"))
    with arena.accept(timeout=30) as conn:
        array = filled(3)
        text = conn.call("pass_on", millpond.ticket(array), timeout=30)
        conn.call("drop", timeout=30)
        assert leased(arena) >= 4 << 20, "the ticket keeps it"
        process.kill()
        process.wait(20)
        eventually(lambda: leased(arena) == 0)
        with pytest.raises(millpond.Stale):
            millpond.redeem(text)
        assert array[9] == 3
