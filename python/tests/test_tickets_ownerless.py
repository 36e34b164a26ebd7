"""Tickets when the owner has gone: redeeming asks nobody, mapping asks the owner."""

import subprocess
import sys

import pytest

import millpond
from conftest import eventually, native

pytestmark = native
pytest.importorskip("numpy")

WORKER = """
import millpond
millpond.attach(on_owner_death="continue")
conn = millpond.connection(timeout=30)

@conn.serve
def redeem(text):
    try:
        return float(millpond.redeem(text)[-1])
    except millpond.Error as e:
        return e.code

@conn.serve
def make(value):
    global mine
    mine = millpond.empty((1000,), "uint8")
    mine[...] = value
    return millpond.ticket(mine)

conn.serve_forever()
"""


def test_without_an_owner_a_ticket_is_good_where_its_memory_is_mapped():
    with millpond.Arena(limit="128MiB", driver="host", on_owner_death="continue") as arena:
        process = subprocess.Popen([sys.executable, "-c", WORKER], env=arena.worker_env("w"))
        try:
            conn = arena.accept(timeout=30)
            # Chunks of their own: the second is mapped nowhere else.
            known, unknown = [millpond.empty((40 << 20,), "uint8") for _ in range(2)]
            known[...], unknown[...] = 5, 6
            assert conn.call("redeem", millpond.ticket(known), timeout=30) == 5.0
            arena._owner.process.kill()
            eventually(lambda: not millpond.status()["owner_alive"])
            assert conn.call("redeem", millpond.ticket(known), timeout=30) == 5.0
            assert conn.call("redeem", millpond.ticket(unknown), timeout=30) == "OwnerDied"
            text = millpond.ticket(known)
            millpond.cancel_ticket(text)
            assert conn.call("redeem", text, timeout=30) == "Stale"
            # What stands in a dead maker's own table nobody ends.
            assert millpond.redeem(conn.call("make", 7, timeout=30))[-1] == 7
            left = conn.call("make", 8, timeout=30)
            process.kill()
            process.wait()
            with pytest.raises((millpond.Closed, millpond.PeerDied)):
                conn.recv(timeout=30)
            assert millpond.redeem(left)[-1] == 8
        finally:
            process.kill()
            process.wait()
