"""Views with large gaps go without the gaps, unless they share memory with something else of the message or are arena memory."""

import os
import subprocess
import sys

import pytest

import millpond
from conftest import HERE, native

np = pytest.importorskip("numpy")
pytestmark = native
WORKER = os.path.join(HERE, "worker_main.py")
MIB = 1 << 20


@pytest.fixture(scope="module")
def worker():
    with millpond.Arena(limit="512MiB", driver="host") as arena:
        process = subprocess.Popen([sys.executable, WORKER], env=arena.worker_env("w"))
        conn = arena.accept(timeout=60)
        yield conn
        conn.close()
        process.wait(20)


def sent(conn, value):
    """Bytes that were copied for it, and what came back."""
    before = millpond.tiers.nbytes()["copy"]
    back = conn.call("echo", value, timeout=30)
    return millpond.tiers.nbytes()["copy"] - before, back



def wide():
    return np.arange(4 * MIB, dtype=np.uint8).reshape(4096, 1024)


def test_a_column_of_a_large_array_is_all_that_is_copied(worker):
    array = wide()
    for view, copied in ((array[:, :8], 32768), (array[::2], 2 * MIB), (array[100, ::3], 1024), (array.T, 4 * MIB)):
        size, back = sent(worker, view)
        assert np.array_equal(back, view) and size == copied, (size, copied)
    assert sent(worker, array[:, :8])[1].strides == (8, 1), "the gaps are gone"
    assert sent(worker, array[100, ::3])[1].strides == (3,), "small ones stay as they are"


def test_sharing_stays(worker):
    array = wide()
    size, back = sent(worker, {"odd": array[1::2], "even": array[::2], "column": array[:, 3]})
    assert size == 4 * MIB, "they lie among each other: one range"
    back["odd"][0, 3] = 77
    assert back["column"][1] == 77
    size, (one, two) = sent(worker, [array[:2048, :8], array[2048:, :8]])
    assert size == 2 * 16384 and np.array_equal(one, array[:2048, :8]) and np.array_equal(two, array[2048:, :8])


def test_arena_memory_goes_as_it_is(worker):
    array = millpond.empty((4096, 1024), "uint8", "cpu")
    array[...] = wide()
    size, back = sent(worker, array[:, :8])
    assert size == 0 and np.array_equal(back, array[:, :8]) and back.strides == (1024, 1)


def test_tensors_of_torch_too(worker):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4 * MIB // 2, dtype=torch.int16).view(torch.bfloat16).view(2048, 1024)
    size, back = sent(worker, {"t": tensor[:, :16].requires_grad_(), "rest": tensor.t()})
    assert size == 4 * MIB, "it lies in the rest"
    size, back = sent(worker, tensor[:, :16])
    assert size == 2048 * 16 * 2 and torch.equal(back.view(torch.int16), tensor[:, :16].view(torch.int16)) and back.stride() == (16, 1)
    tensor.requires_grad_()
    assert sent(worker, tensor[::2])[0] == 2 * MIB


def test_the_copy_is_counted_and_said_as_any_other(worker):
    falls, steps = millpond.tiers.falls(), millpond.tiers.steps()
    worker.call("hash", wide()[::2], timeout=30)
    why = "a value in host memory that is not the arena's was copied into it"
    assert millpond.tiers.falls()[why] == falls.get(why, 0) + 1
    assert millpond.tiers.steps()["arena to copy"] == steps.get("arena to copy", 0) + 1
