"""Going by host memory: by which tier it counts, what is said where it cannot be pinned, and that it may be asked for."""

import logging

import pytest

import millpond
from millpond import _dtypes, _leaves, _memory, _native, _pinned, _ref, _streams, _tree, errors, tiers


@pytest.fixture
def library(monkeypatch):
    """The library's copy, and what it was asked."""
    asked, answer = [], {"pinned": 1 << 20, "pageable": 0}

    def control(op, **fields):
        asked.append((op, fields))
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    monkeypatch.setattr(_native, "control", control)
    monkeypatch.setattr(_pinned, "_told", False)
    monkeypatch.setattr(_pinned, "works", lambda device: True)
    return asked, answer


def test_a_copy_is_behind_this_threads_stream_and_says_its_tier(library, monkeypatch):
    asked, answer = library
    monkeypatch.setattr(_streams, "current", lambda device: 70 + device)
    assert _pinned.copy(1, 4096, 8192, 1 << 20) == "pinned"
    assert asked == [("copy_by_host", {"device": 1, "to": 4096, "from": 8192, "bytes": 1 << 20, "stream": 71})]
    answer.update(pinned=0, pageable=1 << 20)
    assert _pinned.copy(1, 4096, 8192, 1 << 20) == "host"


def test_a_small_copy_is_torchs(library):
    asked, _ = library
    assert _pinned.copy(0, 4096, 8192, _pinned.LEAST - 1) is None and not asked


def test_what_the_library_cannot_copy_is_said_once_and_torch_does_it(monkeypatch, caplog):
    def control(op, **fields):
        raise errors.Unsupported("NVIDIA H200 can hold no arena: it lacks shareable memory handles under WSL2")

    monkeypatch.setattr(_native, "control", control)
    monkeypatch.setattr(_pinned, "_told", False)
    monkeypatch.setattr(_pinned, "works", lambda device: True)
    with caplog.at_level(logging.WARNING):
        assert [_pinned.copy(0, 1, 2, 1 << 20) for _ in range(3)] == [None] * 3
    assert len([r for r in caplog.records if "WSL2" in r.getMessage()]) == 1


def test_host_memory_by_choice_is_no_fall(pair, monkeypatch):
    near, far = pair
    seen = []

    def host(e, ref):
        seen.append((0 not in e.off, e.by_choice))
        e.went_by_host("pinned", 1 << 20, 0)
        return None

    monkeypatch.setattr(_leaves, "hosted_reference", host)
    monkeypatch.setattr(_streams, "gpus", lambda: 1)
    value = _ref.Ref(_memory.block(100, 0), 0, _dtypes.lookup("uint8"), (100,), None, "r")
    before = sum(tiers.falls().values())
    sent = near.send({"x": value}, prefer="host")
    assert seen == [(False, True)] and near.tiers["pinned"] == 1 and sum(tiers.falls().values()) == before
    assert sent.copied_bytes == 1 << 20 and near._gpu.out is None, "the GPU tier was not even asked"
    assert far.recv(timeout=2) == {"x": None}
    near.prefer = "host"
    near.send([value, value])
    assert near.tiers["pinned"] == 3 and tiers.nbytes()["pinned"] >= 3 << 20


def test_counts_are_kept_in_one_place(monkeypatch):
    counted = []
    monkeypatch.setattr(tiers, "count_tier", lambda tier, nbytes, values=1: counted.append((tier, nbytes, values)))
    monkeypatch.setattr(tiers, "count_fall", lambda best, to, reason: counted.append((best, to, reason)))
    mine = tiers.Tiers("b")
    mine.add("ipc", 2, 100)
    mine.fell("arena", "copy", "because", 100)
    assert counted == [("ipc", 100, 2), ("arena", "copy", "because")] and mine.counts["ipc"] == 2


def test_steps_are_counted_by_name():
    tiers.count_fall("ipc", "pinned", "a reason of this test")
    assert tiers.steps()["ipc to pinned"] >= 1 and tiers.falls()["a reason of this test"] == 1
    assert set(tiers.NAMES) == set(tiers.totals()) == set(tiers.nbytes()) and millpond.tiers is tiers


def test_a_value_that_is_only_passed_on_comes_out_on_a_gpu_all_the_same(pair, monkeypatch):
    torch = pytest.importorskip("torch")
    from millpond import _decode

    near, far = pair
    monkeypatch.setattr(_leaves, "device_id", lambda device: 9)
    monkeypatch.setattr(_leaves, "_on_gpu", lambda tensor: False)
    monkeypatch.setitem(_tree._DISPATCH, torch.Tensor, lambda e, tensor, depth: _leaves.hosted(e, tensor))
    near.send({"t": torch.arange(6.0)})
    passed = far.recv(timeout=2, lazy=True)["t"]
    assert passed._gpu == 9 and passed.device == "cpu"
    far.send([passed])
    put = []
    monkeypatch.setattr(_decode._Decoder, "put_back", lambda self, value, device_id: put.append(device_id) or value)
    (again,) = near.recv(timeout=2)
    assert put == [9] and again.tolist() == [0, 1, 2, 3, 4, 5]
