"""The ledger as objects, and scopes."""

import json
import os
import subprocess
import sys

import pytest
from conftest import native

from millpond import _ledger

ANSWER = {
    "token": "ab",
    "devices": [
        {"id": "GPU-1", "name": "card", "limit": 100, "reserved": 60, "clients": [
            {"name": "vae", "pid": 7, "state": "alive", "reserved": 60, "allocated": 20, "largest_free": 10, "new_field": 3},
        ]},
        {"id": "HOST-0", "name": "host memory", "limit": 10, "reserved": 0, "clients": []},
    ],
    "lends": [{"from": 0, "to": None, "window": 1, "bytes": 5, "holds": 1}],
}  # fmt: skip


def test_fields_are_attributes_and_keys():
    ledger = _ledger.typed(ANSWER)
    device = ledger.device()
    client = device.client("vae")
    assert ledger.devices[0] is device and device["clients"][0] is client is device.client(7)
    assert client.reserved == client["reserved"] == 60 and client.new_field == 3
    assert (client.slack, client.fragmentation, device.free) == (40, 0.75, 40)
    assert ledger.lends[0]["from"] == 0 and ledger.lends[0].to is None
    assert json.loads(json.dumps(ledger)) == ANSWER == ledger
    assert "vae (pid 7, alive): 20 allocated of 60 reserved" in str(ledger)


def test_what_is_not_there_is_named():
    ledger = _ledger.typed(ANSWER)
    with pytest.raises(AttributeError, match="has no 'resrved': id, name"):
        ledger.devices[0].resrved
    with pytest.raises(KeyError, match="no client 'x': vae"):
        ledger.device("card").client("x")
    with pytest.raises(KeyError, match="no device 'GPU-9': GPU-1, HOST-0"):
        ledger.device("GPU-9")
    assert not hasattr(ledger, "nothing")


def test_a_heap_is_drawn_a_character_a_page():
    block = lambda address, size, state: {"address": address, "size": size, "state": state}  # noqa: E731
    mib = 1 << 20
    segment = {"address": 1 << 40, "total_size": 11 * mib, "allocated_size": 5 * mib}
    states = [(0, 4, "active_allocated"), (4, 1, "active_allocated"), (5, 1, "inactive"), (6, 2, "active_awaiting_free"), (8, 3, "inactive")]
    segment["blocks"] = [block((1 << 40) + at * mib, size * mib, state) for at, size, state in states]
    text = _ledger.draw([segment])
    assert text.endswith("\n  ##+~..\n") and "2 pieces, the largest 3.0 MiB, 25% scattered" in text
    assert _ledger.draw([segment], width=4).endswith("\n  ##+~\n  ..\n")
    assert _ledger.draw([segment], width=1, lines=2).splitlines()[1:] == ["  +", "  ."]
    assert _ledger.draw([]) == "no chunks\n"


SCOPES = """
import json, millpond
with millpond.Arena(limit="512MiB", driver="host", chunk_bytes="64MiB") as arena:
    keep = arena.empty((1 << 20,), "uint8", device="cpu")
    with arena.scope("outer", device="cpu") as outer:
        a = arena.empty((4 << 20,), "uint8", device="cpu")
        with arena.scope("inner", device="cpu") as inner:
            b = arena.empty((8 << 20,), "uint8", device="cpu")
            del b
        with arena.scope("later", device="cpu") as later:
            pass
        left = arena.empty((1 << 20,), "uint8", device="cpu")
        del a
    with arena.scope("grows", device="cpu") as grows:
        arena.empty((192 << 20,), "uint8", device="cpu")
    assert (outer.growths, grows.growths, grows.stats["num_device_alloc"]) == (0, 1, 3), grows.stats
    assert "2.0 MiB allocated" in arena.map("cpu")
    ledger = arena.ledger()
    seen = millpond.read_ledger(arena.socket, arena._key)
    assert ledger.device().client("parent").allocated == seen.device().client("parent").allocated == 2 << 20
    print(json.dumps([[s.name, s.peak_bytes >> 20, s.allocations, s.frees, s.left_bytes >> 20, repr(s)] for s in (outer, inner, later)]))
"""


@native
def test_scopes_nest_and_leave_the_peaks_as_they_were():
    env = {k: v for k, v in os.environ.items() if k not in ("MILLPOND_SOCKET", "MILLPOND_KEY")}
    done = subprocess.run([sys.executable, "-c", SCOPES], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    outer, inner, later = json.loads(done.stdout)
    assert outer[:5] == ["outer", 13, 3, 2, 1]
    assert inner[:5] == ["outer/inner", 13, 1, 1, 0]
    assert later[:5] == ["outer/later", 5, 0, 0, 0]
    assert outer[5] == "outer: peak 13.0 MiB in 3 blocks, 3 allocations of 13.0 MiB, 1.0 MiB left"


@native
def test_no_owner_is_an_error_of_ours(tmp_path):
    import millpond

    with pytest.raises(millpond.OwnerUnavailable):
        millpond.read_ledger(tmp_path / "nobody")
