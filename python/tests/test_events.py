"""Callbacks on pressure and refusal; the ledger's counters."""

import json
import logging
import os
import subprocess
import threading

import pytest

import millpond
from conftest import eventually, native
from millpond import _encoder, _events, _native, _owner
from test_end_to_end import clients, started

MIB = 1 << 20


def event(kind="refusal", **fields):
    by = {"client": 3, "serial": 1, "name": "vae", "pid": 77}
    return dict({"kind": kind, "device": "GPU-1", "by": by, "asked": 6 << 30, "limit": 8 << 30, "reserved": 7 << 30, "free": 1 << 30, "missed": 0}, **fields)


def test_an_event_says_who_asked_for_how_much_and_what_was_free(monkeypatch):
    got = []
    monkeypatch.setattr(_events, "_functions", {"pressure": [], "refusal": [got.append]})
    _events.deliver(event())
    _events.deliver(event("pressure"))
    assert len(got) == 1
    assert (got[0].name, got[0].pid, got[0].client, got[0].asked, got[0].free) == ("vae", 77, 3, 6 << 30, 1 << 30)
    assert str(got[0]) == "vae (pid 77) was refused 6.00 GiB; 1.00 GiB of 8.00 GiB free on GPU-1"
    assert isinstance(got[0], millpond.Event) and json.loads(json.dumps(got[0]))["limit"] == 8 << 30


def test_a_callback_that_fails_is_logged_and_the_others_are_called(monkeypatch, caplog):
    got = []
    monkeypatch.setattr(_events, "_functions", {"pressure": [lambda e: 1 / 0, got.append], "refusal": []})
    with caplog.at_level(logging.ERROR, "millpond"):
        _events.deliver(event("pressure"))
    assert len(got) == 1 and "division by zero" in caplog.text and "vae (pid 77) asks for" in caplog.text
    assert millpond.off(got.append) is False or not _events._functions["pressure"][1:]


def test_what_is_no_function_is_refused(fake):
    with pytest.raises(millpond.InvalidArgument, match="takes a function of one event, not 3"):
        millpond.on_refusal(3)


@native
def test_the_parent_and_the_client_are_told_of_a_refusal():
    with millpond.Arena(limit="64MiB", driver="host") as arena, started(arena, "big") as (big,):
        got, threads = [], set()

        @arena.on_refusal
        def refused(event):
            threads.add(threading.current_thread().name)
            got.append(event)

        big.call("watch_refusals", timeout=30)
        assert big.call("grow", 96 * MIB, timeout=30) is False
        eventually(lambda: any(event.asked >= 96 * MIB for event in got))
        event = [event for event in got if event.asked >= 96 * MIB][0]
        assert (event.kind, event.name, event.pid) == ("refusal", "big", big.peer.pid) and threads == {"millpond-events"}
        assert event.limit == 64 * MIB and event.free == 64 * MIB - event.reserved
        mine = big.call("refusals", 10.0, timeout=30)
        assert mine[0]["name"] == "big" and mine[0]["asked"] == event.asked and mine[0]["free"] == 64 * MIB - mine[0]["reserved"]
        row = clients(arena.ledger())["big"]
        assert row.refusals >= 1
        assert millpond.off(refused) and not millpond.off(refused)


@native
def test_pressure_comes_before_others_give_back():
    with millpond.Arena(limit="64MiB", driver="host") as arena, started(arena, "needs") as (needs,):
        got = []
        arena.on_pressure(got.append)
        kept = arena.empty(40 * MIB, "uint8")
        del kept  # the chunk stays with the parent until somebody needs it
        assert needs.call("grow", 48 * MIB, timeout=30) is True
        eventually(lambda: any(event.name == "needs" for event in got))
        event = [event for event in got if event.name == "needs"][0]
        assert (event.kind, event.free) == ("pressure", event.limit - event.reserved) and event.free < 48 * MIB <= event.asked
        rows = clients(arena.ledger())
        assert rows["parent"].trims >= 1 and rows["parent"].trimmed_bytes >= 40 * MIB and rows["needs"].growths >= 1


@native
def test_a_new_arena_knows_nothing_of_the_old_ones_callbacks():
    got = []
    for n in range(2):
        with millpond.Arena(limit="64MiB", driver="host") as arena:
            if n == 0:
                arena.on_refusal(got.append)
            with pytest.raises(millpond.OutOfMemory):
                arena.empty(96 * MIB, "uint8")
            if n == 0:
                eventually(lambda: got)
            assert clients(arena.ledger())["parent"].refusals >= 1
        if n == 0:  # one allocation may be refused more than once
            eventually(lambda: not any(t.name == "millpond-events" for t in threading.enumerate()))
            first = got[:]
    assert got == first


@native
def test_every_reader_sees_who_sent_what_by_which_tier():
    np = pytest.importorskip("numpy")
    with millpond.Arena(limit="64MiB", driver="host") as arena, started(arena, "w") as (w,):
        mine = arena.zeros(1000)
        assert w.call("total_of", [mine, np.ones(2000, "float32"), b"small"], timeout=30) == 3
        del mine
        rows = clients(millpond.read_ledger(arena.socket, arena._key))
        sent, received = rows["parent"].sent, rows["w"].received
        assert (sent["arena"] - received["arena"], sent["copy"] - received["copy"]) == (0, 0)
        assert sent["copy"] >= 1 and sent["arena"] >= 1 and sent["inline"] == received["inline"] >= 1, (sent, received)
        assert rows["parent"].copies >= 1 and rows["parent"].copied_bytes >= 8000 and rows["parent"].falls["foreign_host"] >= 1
        assert all(row.sent["copy"] == row.copies for row in rows.values())
        _native.count(b"fell.canary", 3)
        program = _owner.program_path()
        env = dict(os.environ, MILLPOND_SOCKET=arena.socket, MILLPOND_KEY=arena._key)
        page = subprocess.run([program, "metrics"], env=env, capture_output=True, text=True, check=True, timeout=30).stdout
        line = [line for line in page.splitlines() if line.startswith("millpond_client_falls_total") and 'client="parent"' in line and "canary" in line]
        assert len(line) == 1 and line[0].endswith(" 3")
        table = subprocess.run([program, "ledger", "--counts"], env=env, capture_output=True, text=True, check=True, timeout=30).stdout
        assert "canary 3" in table and "trimmed" in table


@native
def test_a_gpu_value_by_host_memory_is_counted_as_that_at_both_ends():
    with millpond.Arena(limit="64MiB", driver="host") as arena, started(arena, "w") as (w,):
        before = clients(arena.ledger())
        value = millpond.empty((64,), "uint8", kind="r")
        text = b'[["m"],{"$":["t","n",0,0,"uint8",[64],0]}]'
        _native.send(w._handle, text, [(value._memory.address, 64, 0, 0, -1, _native.WAYS["host"])], 5000)
        w.call("next", timeout=30)
        after = clients(arena.ledger())
        grown = lambda name, way, tier: after[name][way][tier] - before[name][way][tier]  # noqa: E731
        assert (grown("parent", "sent", "host"), grown("w", "received", "host")) == (1, 1)
        assert grown("parent", "sent", "arena") == grown("parent", "sent", "copy") == 0


def test_copies_of_gpu_values_are_marked(fake):
    encoder = _encoder.Encoder()
    for address in (4096, 8192):
        encoder.range(-1, address, 64, ["t", "t", -1, 0, "uint8", [64], 0])
    encoder.place(_native.READ_ONLY)
    encoder.ways[8192] = _native.WAYS["host"]
    encoder.mark_ways()
    assert [t[5] for t in encoder.tensors] == [_native.READ_ONLY, _native.READ_ONLY | _native.WAYS["host"]]
