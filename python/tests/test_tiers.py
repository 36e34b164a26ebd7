"""By which tier values cross, counted and said; the GPU tier's canary, over a stand-in for GPU memory."""

import contextlib
import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
import types

import pytest

import millpond
from conftest import HERE, native
from millpond import _dtypes, _gpu_canary, _leaves, _memory, _ref, _streams, _tree

WORKER = os.path.join(HERE, "worker_main.py")


class Gpu(_gpu_canary._Backend):
    """GPU probes over memory that only claims to be a GPU's."""

    spoil = None

    def probes(self, device):
        memory = _memory.block(64, 0)
        ctypes.memmove(memory.address, bytes(range(64)), 64)
        return {"all": _ref.Ref(memory, 0, _dtypes.lookup("uint8"), (64,), None, "r")}

    def check(self, values):
        got = ctypes.string_at(values["all"]._memory.address or values["all"]._memory._open(0, 0) or values["all"]._memory.address, 64)
        if self.spoil == "raise":
            raise RuntimeError("an illegal memory access was encountered")
        return {"all": "its bytes differ"} if self.spoil or got != bytes(range(64)) else {}


@pytest.fixture
def gpu(monkeypatch, pair):
    """Two ends of a channel, GPU memory that is a stand-in, and a thread that reads at the far end."""
    backend = Gpu()
    monkeypatch.setattr(_gpu_canary, "gpu_backend", lambda: backend)
    monkeypatch.setattr(_gpu_canary.Prover, "_await_answer", lambda self: None)  # answers are read where a test says so
    monkeypatch.setattr(_streams, "gpus", lambda: 1)
    hosted = []

    def host(e, ref):
        data = ctypes.string_at(ref._memory.address, ref.nbytes)
        e.went_by_host("host", len(data), 0)
        e.falls.append(("arena", "host", None, len(data)))
        hosted.append(data)
        return _tree._bytes(e, data * 32, 0)

    monkeypatch.setattr(_leaves, "hosted_reference", host)
    near, far = pair
    got = []
    reader = threading.Thread(target=lambda: got.extend(far.recv(timeout=8, lazy=True) for _ in range(2)), daemon=True)
    yield backend, near, far, got, reader
    if reader.is_alive():
        reader.join(20)


def value(number=7):
    memory = _memory.block(100, 0)
    ctypes.memset(memory.address, number, 100)
    return _ref.Ref(memory, 0, _dtypes.lookup("uint8"), (100,), None, "r")


def answer(channel):
    """Reads what has come, as a recv or a call would."""
    channel._poll()


_await_answer = _gpu_canary.Prover._await_answer


def test_what_is_kept_for_a_peer_that_never_answers_is_let_go_when_the_channel_ends(gpu):
    _, near, far, got, reader = gpu
    near.send(value())
    assert near._gpu.out == "asked" and len(near._gpu._kept) == 1
    waiting = threading.Thread(target=_await_answer, args=(near._gpu,))
    waiting.start()
    near.close()
    waiting.join(20)
    assert not waiting.is_alive() and not near._gpu._kept and not near._gpu.asked


def test_a_late_answer_loses_nothing(gpu, monkeypatch):
    backend, near, far, got, reader = gpu
    backend.spoil = "bytes"
    for number in (1, 2):
        near.send(value(number))
    now = [0.0]
    monkeypatch.setattr(_gpu_canary, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)))
    waiting = threading.Thread(target=_await_answer, args=(near._gpu,))
    waiting.start()
    until(lambda: now[0] > 3600, "an hour of the thread's own clock")
    reader.start()
    reader.join(20)
    waiting.join(20)
    assert [bytes(g) for g in got] == [bytes([n]) * 3200 for n in (1, 2)]


def until(condition, what):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def test_an_answer_is_read_where_nobody_receives(gpu, monkeypatch):
    _, near, far, got, reader = gpu
    near.send(value())
    reader.start()
    near.send("x")
    reader.join(20)
    _await_answer(near._gpu)
    assert near._gpu.out is True


def test_the_gpu_tier_is_proved_at_the_first_gpu_value_and_not_before(gpu):
    _, near, far, got, reader = gpu
    reader.start()
    near.send("no GPU here")
    assert near._gpu.out is None
    near.send(value())
    assert near._gpu.out in ("asked", True)
    reader.join(20)
    answer(near)
    assert near._gpu.out is True and not near._gpu._kept
    assert got[0] == "no GPU here" and isinstance(got[1], _ref.Ref)
    assert far._gpu.out is None, "the other direction proves itself when it is used"


@pytest.mark.parametrize("spoil", ["bytes", "raise"])
def test_a_gpu_tier_that_corrupts_is_off_for_this_connection_said_once_and_work_goes_on(gpu, caplog, spoil):
    backend, near, far, got, reader = gpu
    backend.spoil = spoil
    with caplog.at_level(logging.INFO):
        near.send("before")
        near.send(value(1))
        near.send("between")
        near.send(value(2))
        assert near._gpu.out == "asked" and len(near._gpu._kept) == 3, "it did not wait for an answer"
        with pytest.raises(millpond.Timeout):
            assert far.recv(timeout=1, lazy=True) == "before"
            far.recv(timeout=0.2, lazy=True)
        assert far._gpu.dropping, "nothing that came by the bad tier is handed out"
        answer(near)
        near.send(value(3))
        after = [far.recv(timeout=5, lazy=True) for _ in range(4)]
    assert near._gpu.out is False and far._gpu.out is False and not near._gpu._kept
    assert after[1] == "between" and [bytes(a) for a in (after[0], after[2], after[3])] == [bytes([n]) * 3200 for n in (1, 2, 3)]
    assert near.tiers["host"] == 3
    said = [r for r in caplog.records if "failed its canary" in r.getMessage()]
    assert len(said) == 1 and said[0].levelno == logging.WARNING, "once for the values"
    assert any("failed its canary" in reason for reason in millpond.tiers.falls())
    reader.start()
    near.send("a")
    near.send("b")


def test_a_call_over_a_corrupting_tier_is_answered_all_the_same(gpu):
    backend, near, far, got, reader = gpu
    backend.spoil = "bytes"

    @far.serve
    def size(data):
        return len(bytes(data))

    server = threading.Thread(target=far.serve_forever, daemon=True)
    server.start()
    assert near.call("size", value(4), timeout=10) == 3200
    assert near.call("size", b"x" * 10, timeout=10) == 10
    far.stop()
    server.join(10)
    reader.start()
    near.send("a")
    near.send("b")


def test_a_side_without_torch_only_passes_values_on(gpu, monkeypatch):
    _, near, far, got, reader = gpu
    monkeypatch.setattr(_gpu_canary, "gpu_backend", lambda: None)
    reader.start()
    near.send(value())
    near.send(value())
    reader.join(20)
    answer(near)
    assert near._gpu.out == "blind" and all(isinstance(g, _ref.Ref) for g in got)


def on_gpu(device, number):
    ref = value(number)
    ref._memory.device = device
    return ref


def test_each_gpu_is_proved_by_itself(gpu, monkeypatch):
    backend, near, far, got, reader = gpu
    asked = []
    probes = backend.probes

    def of(device):
        asked.append(device)
        made = probes(device)
        for ref in made.values():
            ref._memory.device = device
        return made

    monkeypatch.setattr(backend, "probes", of)
    near.send(on_gpu(0, 1))
    near.send(on_gpu(1, 2))
    near.send("between")
    assert asked == [0, 1] and near._gpu.asked and len(near._gpu._kept) == 3
    # The answers come in any order; the first GPU's is good, the second's is not.
    near._gpu.receive(Answer("gpu-ok", 0))
    assert len(near._gpu._kept) == 2, "what was sent before the second was asked about need not be sent again"
    near._gpu.receive(Answer("gpu-bad", 1, "its bytes differ"))
    assert near._gpu.off == {1} and not near._gpu.asked and not near._gpu._kept
    before = dict(near.tiers)
    near.send(on_gpu(0, 3))
    assert near.tiers["arena"] == before["arena"] + 1, "the first GPU's values still go by the arena"
    near.send(on_gpu(1, 4))
    assert near.tiers["host"] == before["host"] + 1
    for header in (["k", "gpu-ok"], ["k", "gpu-ok", -1], ["k", "gpu-off", "0"], ["k", "gpu-bad", True]):
        with pytest.raises(millpond.Protocol):
            near._gpu.receive(types.SimpleNamespace(header=header))
    reader.start()


class Answer:
    def __init__(self, step, device, why=None):
        self.header, self.why = ["k", step, device], why

    def decode(self):
        return self.why


# On the host driver, between two processes.

np = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="256MiB", driver="host") as arena:
        yield arena


@contextlib.contextmanager
def worker(arena, name):
    process = subprocess.Popen([sys.executable, WORKER], env=arena.worker_env(name))
    with arena.accept(timeout=30) as conn:
        yield conn
    process.wait(20)


@pytest.fixture(scope="module")
def conn(arena):
    with worker(arena, "tiers") as conn:
        yield conn


@native
def test_tiers_are_counted(conn):
    before = conn.tiers
    own = millpond.empty((64, 64), "float32")
    own[...] = 1
    other = np.ones((64, 64), "float32")
    conn.call("hash", own, timeout=30)
    conn.call("hash", other, timeout=30)
    conn.call("echo", [b"small", np.float32(2), "text"], timeout=30)
    after = conn.tiers
    assert {k: after[k] - before[k] for k in after} == {"arena": 1, "copy": 1, "pool": 0, "ipc": 0, "pinned": 0, "host": 0, "inline": 2}
    assert millpond.counters()["tiers"]["copy"] >= 1


@native
def test_a_fall_is_said_once_with_its_reason(arena, caplog):
    with worker(arena, "told") as conn, caplog.at_level(logging.INFO, logger="millpond"):
        big = np.ones(1 << 20, "float32")
        for _ in range(3):
            conn.call("hash", big, timeout=30)
        said = [r for r in caplog.records if "was copied into it" in r.getMessage()]
        assert len(said) == 1 and said[0].levelno == logging.WARNING and "told" in said[0].getMessage()
        assert sum(millpond.counters()["falls"].values()) >= 3


class ArrayLike:
    """Memory by the array interface."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


class HandsOver:
    """What hands itself over by DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@native
@pytest.mark.parametrize("kind", [ArrayLike, HandsOver])
def test_arrays_of_other_libraries_cross(conn, kind):
    if kind is ArrayLike:
        ArrayLike.__array_interface__ = None  # found by the class, as numpy's is
    array = np.arange(24, dtype="int32").reshape(4, 6)[:, ::2]
    back = conn.call("echo", {"a": kind(array)}, timeout=30)["a"]
    assert type(back) is np.ndarray and (back == array).all() and back.dtype == array.dtype


@native
def test_what_is_sent_twice_shares_its_memory_on_the_other_side(conn):
    array = np.zeros((4, 4), "float32")
    first, second, view = conn.call("echo", [array, array, array[1:]], timeout=30)
    first[1, 0] = 5
    assert second[1, 0] == 5 and view[0, 0] == 5


def test_a_cycle_is_refused_with_its_path(pair):
    value = {"a": [1, {"b": None}]}
    value["a"][1]["b"] = value["a"]
    with pytest.raises(millpond.CannotCross, match=r'out\["a"\]\[1\]\["b"\] cannot cross: it contains itself: it is out\["a"\]'):
        pair[0].send(value)


@native
def test_a_keeper_can_ask_whether_receivers_are_done_without_waiting(arena):
    from millpond import _native

    with worker(arena, "keeper") as conn:
        memory = _memory.block(512, -1)
        ref = _ref.Ref(memory, 0, _dtypes.lookup("uint8"), (512,), None, "r")
        assert _native.wait_done(memory.address, 0, _native.WAIT, 0) is None, "nobody has it"
        pending = conn._transmit(["m"], ref)
        with pytest.raises(millpond.Timeout):
            _native.wait_done(memory.address, 0, _native.WAIT, 0)
        assert pending.tensors == 1 and millpond._native.control("import_parted", **{"import": 12345})["parted"]
    assert _native.wait_done(memory.address, 0, _native.WAIT, 2000) is None, "its receiver has gone"
