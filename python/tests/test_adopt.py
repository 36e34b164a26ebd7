"""Adopting what was received: it outlives its maker, under this process's account, and goes back to the byte."""

import contextlib
import gc

import pytest

import millpond
from conftest import eventually, native
from test_end_to_end import clients, started

pytestmark = native
np = pytest.importorskip("numpy")
MIB = 1 << 20


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="256MiB", driver="host") as arena:
        yield arena


def books(arena):
    """Bytes that others have, that nobody has, and that the parent adopted."""
    device = arena.ledger()["devices"][0]
    parent = clients({"devices": [device]})["parent"]
    return device["reserved"] - parent["reserved"], device["orphaned"], parent["adopted"]


def kill(worker):
    with contextlib.suppress(millpond.PeerDied, millpond.Closed):
        worker.call("die", timeout=30)


def received(worker, lazy, value=7):
    worker.call("post", [4 * MIB], "uint8", value, timeout=30)
    return worker.recv(timeout=30, lazy=lazy)


@pytest.mark.parametrize("end", ["leaves", "is killed"])
@pytest.mark.parametrize("lazy", [False, True], ids=["array", "ref"])
def test_it_outlives_its_maker_and_goes_back_when_dropped(arena, lazy, end):
    with started(arena, "maker") as (maker,):
        value = received(maker, lazy)
        assert isinstance(value, millpond.Ref) == lazy
        assert arena.adopt(value) is value and millpond.adopt(value, timeout=1) is value
        assert books(arena)[2] == 0, "while its maker lives nothing moves"
        if end == "is killed":
            kill(maker)
    eventually(lambda: books(arena)[2] >= 4 * MIB)
    assert books(arena)[:2] == (0, 0), "nothing else of the maker is left"
    array = value.numpy() if lazy else value
    assert (array == 7).all()
    array[...] = 8
    assert (array[MIB:][:10] == 8).all()
    del array, value
    gc.collect()
    eventually(lambda: books(arena) == (0, 0, 0))


def test_a_torch_tensor_and_a_view_of_it(arena):
    torch = pytest.importorskip("torch")
    with started(arena, "maker") as (maker,):
        maker.call("post", [MIB], "float32", 3, timeout=60)
        tensor = maker.recv(timeout=30, lazy=True).torch()
        assert isinstance(tensor, torch.Tensor)
        view = tensor[1000:]
        del tensor
        assert millpond.adopt(view) is view
        kill(maker)
    eventually(lambda: books(arena)[2] >= 2 * MIB)
    assert bool((view == 3).all())
    del view
    gc.collect()
    eventually(lambda: books(arena) == (0, 0, 0))


def test_its_maker_drops_it_and_fills_the_size_again(arena):
    with started(arena, "maker") as (maker,):
        value = arena.adopt(received(maker, False, 5))
        maker.call("keep", "next", [maker.call("make", [4 * MIB], "uint8", 77, timeout=30) for _ in range(3)], timeout=30)
        assert (value == 5).all()
        kill(maker)
    assert (value == 5).all()
    del value
    gc.collect()
    eventually(lambda: books(arena) == (0, 0, 0))


def test_what_cannot_be_adopted_says_why(arena):
    with started(arena, "maker") as (maker,):
        maker.call("post", [MIB], "uint8", 1, readonly=True, timeout=30)
        shared = maker.recv(timeout=30)
        with pytest.raises(millpond.InvalidArgument, match="read-only"):
            arena.adopt(shared)
        with pytest.raises(millpond.InvalidArgument, match="own memory"):
            arena.adopt(arena.zeros(1000))
        with pytest.raises(millpond.InvalidArgument, match="own memory"):
            arena.adopt(arena.empty(1000, kind="r"))
        with pytest.raises(millpond.InvalidArgument, match="not memory of the arena"):
            arena.adopt(np.zeros(1000))
        with pytest.raises(millpond.InvalidArgument, match="no memory to speak of"):
            arena.adopt("text")
        ref = received(maker, True)
        ref.release()
        with pytest.raises(millpond.Closed):
            arena.adopt(ref)
