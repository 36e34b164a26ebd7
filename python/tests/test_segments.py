"""Pool mode: a lease pins torch's whole segment, so what is sent out of one is kept until no receiver uses its bytes. Over the real
library, with a segment of the host arena and a stand-in for torch's caching allocator, which gives what is dropped to the next."""

import ctypes
import gc
import itertools
import threading

import pytest

import millpond
from conftest import eventually, native
from millpond import _foreign, _native
from test_end_to_end import started

pytestmark = native
np = pytest.importorskip("numpy")
KIB, MIB = 1 << 10, 1 << 20
PARTS, PART = 8, 256 * KIB


class Part:
    """A tensor's memory: it goes back when nothing refers to it."""

    def __init__(self, segment, number):
        self.segment, self.number = segment, number
        address = segment.address + number * PART
        self.__array_interface__ = {"shape": (PART,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self):
        self.segment.free.insert(0, self.number)  # the next one gets it
        self.segment.freed_on.append(threading.current_thread().name)


class Segment:
    """Memory of `millpond_pool_malloc` that is cut into tensors behind the library's back."""

    def __init__(self):
        malloc = _native.library().cdll.millpond_pool_malloc
        malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.address = malloc(PARTS * PART, -1, None)
        assert self.address
        self.free, self.freed_on = list(range(PARTS)), []

    def full(self, value):
        array = np.asarray(Part(self, self.free.pop(0)))
        array[...] = value
        return array

    def overwrite_free(self, value):
        """What torch gives out next is filled."""
        everything = [self.full(value) for _ in range(len(self.free))]
        del everything


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="256MiB", driver="host") as arena:
        yield arena


@pytest.fixture(scope="module")
def workers(arena):
    with started(arena, "a", "b") as conns:
        yield conns


@pytest.fixture
def segment(arena, workers):
    segment = Segment()
    yield segment
    for worker in workers:
        if not worker.closed:
            worker.call("drop", timeout=30)
    gc.collect()
    eventually(lambda: len(segment.free) == PARTS and _foreign.kept_in_segments() == 0)
    _native.deallocate(segment.address)


def keep(worker, name, segment, value):
    """A tensor that is sent, kept there and dropped here: its part's number."""
    number = segment.free[0]
    array = segment.full(value)
    worker.call("keep", name, array, timeout=30)
    return number


def test_the_part_of_a_sent_tensor_is_nobody_elses_until_its_receiver_is_done(segment, workers):
    a, _ = workers
    number = keep(a, "x", segment, 5)
    assert number not in segment.free and _foreign.kept_in_segments() == 1
    segment.overwrite_free(9)
    assert a.call("total", "x", timeout=30) == 5.0 * PART, "the receiver reads what was sent"
    segment.freed_on.clear()
    a.call("drop", timeout=30)
    eventually(lambda: number in segment.free)
    assert segment.freed_on == ["millpond-keeper"] and _foreign.kept_in_segments() == 0


def test_each_tensor_of_a_segment_is_kept_by_itself(segment, workers):
    a, _ = workers
    first, second = keep(a, "x", segment, 1), keep(a, "y", segment, 2)
    a.call("drop", "x", timeout=30)
    eventually(lambda: first in segment.free)  # though the segment is pinned still
    segment.overwrite_free(9)
    assert second not in segment.free and a.call("total", "y", timeout=30) == 2.0 * PART


def test_a_part_of_a_tensor_keeps_all_of_it(segment, workers):
    number = segment.free[0]
    array = segment.full(3)
    workers[0].call("keep", "x", {"t": array[100:200]}["t"], timeout=30)
    del array
    segment.overwrite_free(9)
    assert number not in segment.free and workers[0].call("total", "x", timeout=30) == 300.0


def test_one_that_is_sent_often_is_kept_once_and_until_the_last_is_done(segment, workers):
    a, b = workers
    number = segment.free[0]
    array = segment.full(4)
    for worker, name in itertools.product((a, b), ("x", "y", "z")):
        worker.call("keep", name, array, timeout=30)
    assert _foreign.kept_in_segments() == 1
    del array
    a.call("drop", timeout=30)
    b.call("drop", "x", timeout=30)
    segment.overwrite_free(9)
    assert number not in segment.free and b.call("total", "z", timeout=30) == 4.0 * PART
    b.call("drop", timeout=30)
    eventually(lambda: number in segment.free)


def test_it_is_kept_for_whom_it_was_passed_on_to(segment, workers):
    a, b = workers
    number = keep(a, "x", segment, 6)
    b.call("redeem", "x", a.call("ticket", "x", timeout=30), timeout=30)
    a.call("drop", timeout=30)
    segment.overwrite_free(9)
    assert number not in segment.free and b.call("total", "x", timeout=30) == 6.0 * PART
    b.call("drop", timeout=30)
    eventually(lambda: number in segment.free)


def test_a_ticket_keeps_it_too(segment, workers):
    number = segment.free[0]
    ticket, lost = millpond.ticket(segment.full(7)), millpond.ticket(segment.full(8))
    segment.overwrite_free(9)
    assert number not in segment.free and _foreign.kept_in_segments() == 2
    workers[1].call("redeem", "x", ticket, timeout=30)
    millpond.cancel_ticket(lost)
    eventually(lambda: _foreign.kept_in_segments() == 1)
    segment.overwrite_free(9)
    assert workers[1].call("total", "x", timeout=30) == 7.0 * PART
    workers[1].call("drop", timeout=30)
    eventually(lambda: number in segment.free)


def test_a_receiver_that_dies_keeps_nothing(segment, arena):
    with started(arena, "c") as (c,):
        number = keep(c, "x", segment, 1)
        with pytest.raises((millpond.PeerDied, millpond.Closed)):
            c.call("die", timeout=30)
        eventually(lambda: number in segment.free)


def test_many_in_one_message_beyond_what_the_result_can_say(segment, workers):
    """More than 62 ranges, of which some lie in the segment, some in the arena, some are copied."""
    inside = [segment.full(n) for n in range(3)]
    values = [millpond.empty(16, "uint8") for _ in range(70)] + inside + [np.zeros(100, "uint8")]
    said = workers[0].send(values)
    assert (said.tensors, said.copies) == (74, 1)
    del inside, values
    assert _foreign.kept_in_segments() == 3
    assert workers[0].call("next", timeout=30) is None


def test_who_has_no_segment_is_told_nothing_and_keeps_nothing(arena, workers, monkeypatch):
    flags = []
    real = _native.send

    def spy(*arguments):
        flags.append(real(*arguments))
        return flags[-1]

    monkeypatch.setattr(_native, "send", spy)
    monkeypatch.setattr(_foreign._keeper.segments, "add", lambda encoded: pytest.fail("asked about segments"))
    workers[0].call("keep", "x", millpond.empty(100, "uint8"), timeout=30)
    workers[0].call("drop", timeout=30)
    assert any(flags[0]) is False and _foreign.kept_in_segments() == 0


def test_a_torch_tensor_that_is_given_other_memory_after_it_was_sent(segment, workers):
    """What is kept is the storage that was sent, not what the tensor has by now; and nothing of its graph."""
    torch = pytest.importorskip("torch")
    number = segment.free[0]
    tensor = torch.from_numpy(segment.full(5))
    said = workers[0].send({"t": tensor})
    assert said.copies == 0 and _foreign.kept_in_segments() == 1
    (kept,) = _foreign._keeper.segments._kept.values()
    assert [type(value) for value in kept] == [torch.UntypedStorage]
    tensor.data = torch.zeros(10, dtype=torch.uint8)
    gc.collect()
    segment.overwrite_free(9)
    assert number not in segment.free and workers[0].call("next_total", timeout=30) == 5.0 * PART
    del kept
    eventually(lambda: number in segment.free)
