"""A value by host memory whose two copies overlap, between real processes: torch's CPU memory stands for a GPU's."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest

import millpond
from conftest import HERE, eventually, native
from millpond import _leaves, _native, _pinned, _session, _streams, _tree, errors

pytestmark = native
torch = pytest.importorskip("torch")
MIB = 1 << 20


@pytest.fixture(scope="module")
def worker():
    with millpond.Arena(limit="512MiB", driver="host", chunk_bytes="64MiB") as arena:
        process = subprocess.Popen([sys.executable, os.path.join(HERE, "pinned_worker.py")], env=arena.worker_env("w"))
        conn = arena.accept(timeout=60)
        yield conn
        conn.send(None)
        process.wait(20)


@pytest.fixture
def conn(worker, monkeypatch):
    """A channel to the worker; every tensor of ours goes by host memory."""
    monkeypatch.setattr(_leaves, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(_pinned, "gpu", lambda ordinal: "cpu")
    monkeypatch.setattr(_pinned, "_works", {})
    monkeypatch.setattr(_leaves, "device_id", lambda device: 1)
    monkeypatch.setitem(_tree._DISPATCH, torch.Tensor, lambda e, tensor, depth: _leaves.hosted(e, tensor))
    return worker


def echoed(conn, value):
    """What comes back, and which copies the worker made piece by piece."""
    conn.send({"t": value})
    back = conn.recv(timeout=30)
    assert torch.equal(back["t"], value)
    return [pieces for tier, pieces in back["seen"] if tier in ("pinned", "host")]


def by_host(conn):
    return sum(conn.tiers[tier] for tier in ("pinned", "host"))


def test_a_value_arrives_piece_by_piece_and_nothing_stays(conn):
    value, before = torch.arange(40 * MIB // 8), by_host(conn)
    for number in range(3):
        assert echoed(conn, value + number) == [10]
    assert by_host(conn) - before == 3
    eventually(lambda: millpond.counters()["leases"] == 0)


def test_one_that_maps_nothing_gets_host_memory_with_all_of_it(conn):
    conn.send("lazy")
    assert echoed(conn, torch.arange(8 * MIB // 8)) == []
    conn.send("eager")


def test_values_both_ways_at_once_wait_for_nobody(conn, monkeypatch):
    monkeypatch.setattr(_streams, "torch_cuda", lambda: torch)
    monkeypatch.setattr(_streams, "_find", lambda: False)
    monkeypatch.setattr(_session, "ordinal_of", lambda device_id: -1)
    conn.send("both")
    values = [torch.arange(2 * MIB) + number for number in range(6)]
    sender = threading.Thread(target=lambda: [conn.send({"t": value}) for value in values])
    sender.start()
    for value in values:
        back = conn.recv(timeout=30)
        assert torch.equal(back["t"], value) and [pieces for _, pieces in back["seen"]] == [4]
    sender.join(30)
    assert not sender.is_alive()
    conn.send("eager")


def test_small_values_and_views_cross_as_before(conn):
    assert echoed(conn, torch.arange(1000)) == []
    assert echoed(conn, torch.arange(8 * MIB // 8).view(1024, 1024).t()) == [2], "a view is made contiguous and goes in pieces"


def test_what_cannot_leave_has_no_copy_under_way(conn, monkeypatch):
    started, out = [], _pinned.out

    def noted(*what):
        made = out(*what)
        started.append(made[0])
        return made

    monkeypatch.setattr(_pinned, "out", noted)
    with pytest.raises(errors.CannotCross):
        conn.send({"t": torch.arange(MIB), "bad": object()})
    monkeypatch.setattr(_native, "send", lambda *what: (_ for _ in ()).throw(errors.Timeout("the socket is full")))
    with pytest.raises(errors.Timeout):
        conn.send({"t": torch.arange(MIB)})
    assert len(started) == 2
    for number in started:
        with pytest.raises(errors.InvalidArgument, match=f"no copy {number} is under way"):
            _pinned.over(number)


def test_where_the_library_cannot_queue_it_the_copy_is_one(conn, monkeypatch):
    real = _native.control

    def control(op, **fields):
        if op == "copy_out":
            raise errors.Unsupported("the arena does not serve Ordinal(0)")
        return real(op, **fields)

    monkeypatch.setattr(_native, "control", control)
    monkeypatch.setattr(_pinned, "copy", lambda *what: None)
    before = conn.tiers["host"]
    assert echoed(conn, torch.arange(MIB)) == [] and conn.tiers["host"] == before + 1


@pytest.mark.parametrize("way", ["to it", "from it"])
def test_where_bytes_do_not_come_through_the_tier_is_off_and_torch_copies(conn, monkeypatch, caplog, way):
    real, asked = _native.control, []

    def control(op, **fields):
        answer = real(op, **fields)
        if op.startswith("copy_"):
            asked.append(op)
            if op == "copy_by_host" and len(asked) == (1 if way == "to it" else 2):
                ctypes.memset(fields["to"] + 5000, 255, 1)
        return answer

    monkeypatch.setattr(_native, "control", control)
    before, pinned = conn.tiers["host"], conn.tiers["pinned"]
    for _ in range(2):
        assert echoed(conn, torch.arange(MIB)) == []
    assert (conn.tiers["host"], conn.tiers["pinned"]) == (before + 2, pinned) and "copy_out" not in asked
    said = [r.getMessage() for r in caplog.records if "canary failed" in r.getMessage()]
    assert len(said) == 1 and f"byte 5000 of {_pinned.LEAST} {way}" in said[0], said


def test_what_keeps_it_from_proving_itself_once_does_not_switch_it_off(conn, monkeypatch):
    real, fail = _native.control, [True, True]  # for the copy in pieces, then for the one at once

    def control(op, **fields):
        if op == "copy_by_host" and fail.pop() if fail else False:
            raise errors.Unsupported("not now")
        return real(op, **fields)

    monkeypatch.setattr(_native, "control", control)
    assert echoed(conn, torch.arange(MIB)) == [] and not _pinned._works
    assert echoed(conn, torch.arange(MIB)) == [2] and _pinned._works == {-1: True}


def test_a_wait_for_a_piece_goes_on_until_it_is_there(monkeypatch):
    asked = []

    def control(op, **fields):
        asked.append((op, fields["done"], fields["timeout_ms"]))
        return {"done": [0, MIB, 4 * MIB][len(asked) - 1], "pinned": MIB, "pageable": 0}

    class memory:
        handle = 5

    monkeypatch.setattr(_native, "control", control)
    monkeypatch.setattr(_pinned, "works", lambda device: True)
    assert _pinned.into(0, 4096, memory, 0, 4 * MIB, [[4 * MIB, 1, 1]]) == "pinned"
    assert [done for _, done, _ in asked] == [0, 0, MIB] and all(0 < ms < 1000 for _, _, ms in asked)

    def died(op, **fields):
        raise errors.PeerDied("its maker died")

    monkeypatch.setattr(_native, "control", died)
    with pytest.raises(errors.PeerDied):
        _pinned.into(0, 4096, memory, 0, 4 * MIB, [[4 * MIB, 1, 1]])
