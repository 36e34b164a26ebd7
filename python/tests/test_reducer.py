"""`torch.multiprocessing` over the arena: queues and process arguments, between spawned processes, without ptrace."""

import ctypes
import os

import pytest

from conftest import native

torch = pytest.importorskip("torch")
import torch.multiprocessing as mp  # noqa: E402

import millpond  # noqa: E402
import millpond.torch  # noqa: E402

pytestmark = native
PR_SET_DUMPABLE = 4


def no_ptrace():
    """No process of this user may open this one's descriptors or memory from here on."""
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def double(inbox, outbox):
    no_ptrace()
    while True:
        value = inbox.get(timeout=60)
        if value is None:
            break
        tensor = value["t"]
        kind = millpond._native.control("locate", address=tensor.data_ptr())["kind"] if millpond._session._info else "none"
        tensor.mul_(2)
        outbox.put((kind, type(tensor).__name__, tensor.requires_grad, tuple(tensor.shape), tensor.stride()))
        del value, tensor


def argument(tensor, outbox):
    millpond.torch.install_reducer()
    tensor.add_(1)
    result = millpond.empty((1000,), "float32", "cpu", "t")
    result.fill_(tensor.sum().item())
    outbox.put(result)
    outbox.get_ack = None
    outbox.close()
    outbox.join_thread()
    while not os.path.exists(os.environ["DONE_FILE"]):  # torch's rule too: who puts lives until it is taken
        import time

        time.sleep(0.01)


@pytest.fixture(scope="module")
def arena():
    no_ptrace()
    before = dict(os.environ)
    with millpond.Arena(limit="256MiB", driver="host") as arena:
        millpond.torch.install_reducer()
        yield arena
        millpond.torch.uninstall_reducer()
    os.environ.clear()
    os.environ.update(before)


def arena_tensor(n=1 << 20, dtype="float32"):
    tensor = millpond.empty((n,), dtype, "cpu", "t")
    tensor.fill_(1)
    return tensor


def test_a_queue_carries_offsets(arena):
    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=double, args=(there, back))
    process.start()
    try:
        tensor = arena_tensor()
        copied = millpond.counters()["copied_bytes"]
        there.put({"t": tensor})
        assert back.get(timeout=60) == ("import", "Tensor", False, (1 << 20,), (1,))
        assert tensor[5] == 2 and tensor[-1] == 2, "the other process wrote into the same memory"
        there.put({"t": tensor.view(1024, 1024).t()[3:]})
        assert back.get(timeout=60)[3:] == ((1021, 1024), (1, 1024))
        assert tensor[3] == 4 and tensor[0] == 2
        parameter = torch.nn.Parameter(arena_tensor(16, "bfloat16"), requires_grad=False)
        there.put({"t": parameter})
        assert back.get(timeout=60)[:3] == ("import", "Parameter", False)
        assert millpond.counters()["copied_bytes"] == copied
        assert millpond.torch.reducer_counts()["tickets"] == 3
        before = millpond.torch.reducer_counts()["torch"]
        other = torch.ones(100)
        there.put({"t": other})
        assert back.get(timeout=60)[0] == "foreign", "torch carries its own"
        assert millpond.torch.reducer_counts()["torch"] == before + 1
    finally:
        there.put(None)
        process.join(60)
        assert process.exitcode == 0


def test_arguments_are_redeemed_before_the_childs_code_runs(arena, tmp_path):
    os.environ["DONE_FILE"] = str(tmp_path / "done")
    context = mp.get_context("spawn")
    back = context.Queue()
    tensor = arena_tensor(100)
    process = context.Process(target=argument, args=(tensor, back))
    process.start()
    result = back.get(timeout=60)
    assert tensor[0] == 2 and result.shape == (1000,) and result[999] == 200
    assert millpond._native.control("locate", address=result.data_ptr())["kind"] == "import"
    (tmp_path / "done").touch()
    process.join(60)
    assert process.exitcode == 0


def test_what_nobody_takes_is_let_go(arena):
    from millpond import _tickets as reducer

    millpond.torch.install_reducer(expire=0.0)
    try:
        from multiprocessing.reduction import ForkingPickler

        reducer._made.clear()
        lost = ForkingPickler.dumps(arena_tensor(1 << 18))
        assert len(reducer._made) == 1
        ForkingPickler.dumps(arena_tensor(8))
        assert len(reducer._made) == 1
        with pytest.raises(millpond.Stale):
            ForkingPickler.loads(lost)
    finally:
        millpond.torch.install_reducer()
