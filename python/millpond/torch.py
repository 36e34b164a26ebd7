"""`millpond.torch`: torch takes its CUDA memory from the arena.

`install()` replaces torch's CUDA allocator; `pool()` keeps torch's own in front and gives it segments of the arena.
"""

import contextlib
import warnings

import torch

from . import _native, _session, _torch_captures, _torch_pools, _torch_refusals, _torch_share, _torch_stats, errors

# method of torch's allocator object -> our function.
_HOOKS = {
    "set_init_fn": "millpond_torch_init",
    "set_reset_fn": "millpond_torch_reset",
    "set_memory_fraction_fn": "millpond_torch_memory_fraction",
    "set_base_alloc_fn": "millpond_torch_base_alloc",
    "set_record_stream_fn": "millpond_torch_record_stream",
    "set_release_pool": "millpond_torch_release_pool",
}
# What tells of captures: since torch 2.3 by pool, before by stream.
_CAPTURE_HOOKS = (
    {
        "set_begin_allocate_to_pool": "millpond_torch_begin_allocate_to_pool",
        "set_end_allocate_to_pool_fn": "millpond_torch_end_allocate_to_pool",
    },
    {
        "set_begin_allocate_stream_to_pool": "millpond_torch_begin_allocate_stream_to_pool",
        "set_end_allocate_stream_to_pool_fn": "millpond_torch_end_allocate_stream_to_pool",
    },
)

_installed = None
# torch up to 2.10 keeps a bare pointer to a pool's allocator: these must live as long as the process.
_for_ever = []
_pool_allocator = None


def install(mode="replace", stats=True):
    """From here on torch's CUDA memory in this process is arena memory. Before torch has initialised CUDA.

    `mode="replace"`: `torch.cuda.change_current_allocator`, with every hook that this torch has; `stats` answers torch's
    memory statistics from ours. `mode="pool"`: a `torch.cuda.MemPool` over the arena for this thread's allocations on the GPU that is
    current (call `torch.cuda.set_device` first; other GPUs stay torch's own); torch's caching allocator stays (torch 2.8 and later),
    and what is sent is kept until its receivers are done. A second call with the same mode does nothing."""
    global _installed
    if mode not in ("replace", "pool"):
        raise errors.InvalidArgument(f'mode={mode!r}: "replace" or "pool"')
    if _installed == mode:
        return
    if _installed is not None:
        raise errors.Refused(f"torch's allocator was installed with mode={_installed!r} in this process")
    _check_session()
    if mode == "pool":
        _check_pools()
        _torch_share.install(everything=False)
        _torch_captures.install()
        _torch_pools.install(_make_pool)
        _installed = mode
        return
    _check_replaceable()
    allocator = _make_allocator("millpond_malloc")
    _set_hooks(allocator)
    torch._C._cuda_changeCurrentAllocator(allocator)
    _for_ever.append(allocator)
    _installed = mode
    if not _native.library().torch_can_throw():
        warnings.warn(
            f"torch {torch.__version__}: its out-of-memory exception was not found in its libraries; "
            "running out of memory will raise RuntimeError instead of torch.OutOfMemoryError",
            RuntimeWarning,
            stacklevel=2,
        )
    # cudnn.benchmark asks the allocator for its largest free block, which torch's pluggable one refuses to say.
    _native.library().torch_answer_cache_info()
    _torch_refusals.install()
    _torch_captures.install(tell=True)
    _torch_share.install(everything=True)
    if stats:
        _torch_stats.install()


def installed():
    """ "replace", "pool" or None."""
    return _installed


def uninstall_stats():
    """Puts torch's own statistics functions back (they raise under a replaced allocator), and its own word for memory that it
    cannot share."""
    _torch_stats.uninstall()
    _torch_share.uninstall()


def memory_snapshot():
    """This process's arena memory by segment and block, with the history that is recorded, as `torch.cuda.memory._snapshot()` has it
    (torch's viewer opens it): also where `install(stats=False)` left torch's own functions alone."""
    _session.info()
    return _torch_stats._snapshot()


@contextlib.contextmanager
def pool():
    """This thread's allocations inside the block, on the GPU that is current, come from the arena, through torch's caching allocator.
    Gives the `torch.cuda.MemPool`: its segments go back to the arena when it and its tensors are gone; before torch 2.13 not while
    any thread is in a pool, and under `install(mode="pool")` it is the one that is installed. torch 2.8 and later (2.10, to capture
    CUDA graphs inside), native backend."""
    _check_pools()
    _torch_share.install(everything=False)
    with _torch_pools.block(_make_pool) as made:
        yield made


def _check_pools():
    _check_session()
    if _torch_pools.version() < (2, 8):
        raise errors.Unsupported(f"pool mode needs torch 2.8 or later, this is {torch.__version__}: use install(mode='replace')")
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise errors.Unsupported(f"pool mode needs torch's native allocator, this process has {backend!r}: {_how_to_unset(backend)}")


def _make_pool():
    global _pool_allocator
    if _pool_allocator is None:
        _pool_allocator = _make_allocator("millpond_pool_malloc")
    return torch.cuda.MemPool(_pool_allocator)


def _set_hooks(allocator):
    """Every hook that this torch has."""
    capture_hooks = [group for group in _CAPTURE_HOOKS if all(hasattr(allocator, method) for method in group)]
    if not capture_hooks:
        raise errors.Unsupported(
            f"torch {torch.__version__} has no hook that tells its allocator of CUDA graph captures, so what a graph frees in its "
            "capture would be others' under its replays: use install(mode='pool')"
        )
    hooks = {**_HOOKS, **capture_hooks[0]}
    for method, function in hooks.items():
        if hasattr(allocator, method):
            getattr(allocator, method)(_native.library().address_of(function))


def _make_allocator(malloc):
    library = _native.library()
    return torch._C._cuda_customAllocator(library.address_of(malloc), library.address_of("millpond_free"))


def install_reducer(expire=3600.0):
    """From here on `torch.multiprocessing` queues, pipes and process arguments carry tensors in arena memory as offsets: no
    copy, no descriptor, no ptrace permission. GPU tensors that torch cannot share (cudaMallocAsync, expandable segments, a
    replaced allocator) are copied into the arena; everything else goes as torch does it. Processes are started by "spawn" or
    "forkserver" and join the arena by themselves; a forked one cannot. What is put and never taken is let go after `expire`
    seconds (None: with this process), at the next put. A tensor can be taken once."""
    from . import _torch_reducer

    _torch_reducer.install(expire)


def uninstall_reducer():
    """`torch.multiprocessing` does everything itself again."""
    from . import _torch_reducer

    _torch_reducer.uninstall()


def reducer_counts():
    """{"tickets": tensors that went as offsets, "redeemed": that came, "torch": that torch carried}, in this process."""
    from . import _torch_reducer

    return _torch_reducer.counts()


def _check_session():
    devices = _session.info().get("devices", ())
    if torch.version.cuda is None:
        raise errors.Unsupported(f"torch {torch.__version__} is built without CUDA: there is no CUDA allocator to replace")
    if not any(d["ordinal"] != -1 for d in devices):
        raise errors.Unsupported(
            "this process is attached with the host driver, so there is no GPU memory to give to torch; CPU tensors cross without install()"
        )


def _check_replaceable():
    if torch.cuda.is_initialized():
        raise errors.Refused(
            "torch has already initialised CUDA in this process, and cannot change its allocator any more: call "
            "millpond.torch.install() right after import torch, before the first CUDA tensor, stream or torch.cuda.init()"
        )
    backend = torch.cuda.get_allocator_backend()
    if backend == "cudaMallocAsync":
        raise errors.Refused(f"torch runs with its {backend} backend: {_how_to_unset(backend)}")
    current = getattr(torch._C, "_cuda_getAllocator", lambda: None)()
    if backend == "pluggable" or type(current).__name__ == "_CUDAPluggableAllocator":
        raise errors.Refused("another allocator was installed in torch already: only one is possible in a process")


def _how_to_unset(backend):
    if backend == "cudaMallocAsync":
        return (
            "remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF before importing torch (worker_env() does), "
            "or allocate with millpond.empty() only"
        )
    return "install() and pool() exclude each other"
