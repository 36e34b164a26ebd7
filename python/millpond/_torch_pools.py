"""Pools of torch's caching allocator over the arena: who is in one, and when a finished one may go.

Up to torch 2.12 a `MemPool` that dies while any thread is in one, or captures a graph, aborts the process (an assertion in a destructor).
So, there, every pool of ours is kept as long, and one that is finished meanwhile is the next block's.
"""

import collections
import contextlib
import threading
import weakref

import torch

from . import _native, _session, _torch_captures, errors

#: A block that is given up is left by whatever thread collects it, in the middle of whatever that does.
_lock = threading.RLock()
#: How many blocks each thread is in.
_blocks = collections.Counter()
#: Every pool of ours that somebody has, and its device.
_made = weakref.WeakKeyDictionary()
#: Pools that may not die now; of those, the ones that nobody is in, with their devices.
_kept, _idle = [], []
_installed = None


class _Block:
    """A thread in a pool."""

    def __init__(self, pool, device):
        self.pool, self.device, self.thread = pool, device, threading.get_ident()
        self.enter()

    def enter(self):
        self._inside = torch.cuda.use_mem_pool(self.pool, self.device)
        self._inside.__enter__()

    def leave(self):
        self._inside.__exit__(None, None, None)


@contextlib.contextmanager
def block(make):
    """This thread's allocations come from a pool, which `make` makes. Gives the pool."""
    device = torch.cuda.current_device()
    around = _installed
    if _aborts() and around is not None and (around.thread, around.device) == (threading.get_ident(), device):
        yield around.pool
        return
    entered = _enter(make, device)
    try:
        yield entered.pool
    finally:
        _leave(entered)


def install(make):
    """This thread is in a pool for good, and `torch.cuda.empty_cache()` steps out of it for as long as it takes."""
    global _installed
    _installed = _enter(make, torch.cuda.current_device())
    for name in ("_cuda_emptyCache", "_accelerator_emptyCache"):
        original = getattr(torch._C, name, None)
        if original is not None:
            setattr(torch._C, name, _stepping_out(original))


def version():
    """torch's, as far as it matters: (2, 11)."""
    return tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])


def _aborts():
    return version() < (2, 13)


def _enter(make, device):
    # torch's own allocator tells nobody of its captures, which an event of ours over the whole context would end.
    with _lock:
        thread = threading.get_ident()
        alone = not _blocks
        _blocks[thread] += 1
        try:
            if alone:
                _native.control("context_events", allowed=False)
            if _aborts():
                _keep()
                _torch_captures.install(before=_refuse_capture if version() < (2, 10) else None)
            pool = next((pool for pool, of in _idle if of == device), None)
            if pool is None:
                pool = make()
                _made[pool] = device
            if _aborts():
                _kept.append(pool)
            _idle[:] = [other for other in _idle if other[0] is not pool]
            return _Block(pool, device)
        except BaseException:
            _end(thread)
            raise


def _leave(entered):
    with _lock:
        entered.leave()
        if _aborts():
            _idle.append((entered.pool, entered.device))
        _end(entered.thread)


def _end(thread):
    _blocks[thread] -= 1
    if not _blocks[thread]:
        del _blocks[thread]
    if not _blocks:
        _let_go()
        with contextlib.suppress(errors.Error):  # nobody is attached any more
            _session.restore_context_events()


def _keep():
    """Whoever has a pool may drop it at any time."""
    _kept[:] = list(_made)


def _let_go():
    """In a capture nothing, and all when the next block ends."""
    if not _torch_captures.any_capturing():
        _idle.clear()
        _kept.clear()


def _refuse_capture():
    """torch before 2.10 gives a capture's allocations to the pool that was entered first, which is not the graph's own."""
    if _blocks.get(threading.get_ident()):
        raise errors.Unsupported(
            f"a CUDA graph that torch {torch.__version__} captures in a pool of millpond's has no memory of its own, and its replays would "
            "overwrite others': pool mode with CUDA graphs needs torch 2.10 or later; use install(mode='replace')"
        )


def _stepping_out(empty):
    """Blocks that other streams were recorded on come back in torch only while no thread is in a pool."""

    def empty_cache(*args, **kwargs):
        with _lock:
            inside, thread = _installed, threading.get_ident()
            # The innermost comes first: in another block, or in a capture, this one would be entered again above that.
            if inside.thread != thread or _blocks[thread] != 1 or _torch_captures.is_capturing():
                return empty(*args, **kwargs)
            inside.leave()
            try:
                if len(_blocks) == 1:
                    _let_go()
                return empty(*args, **kwargs)
            finally:
                if _aborts():
                    _keep()
                inside.enter()

    return empty_cache
