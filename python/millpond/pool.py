"""`millpond.pool`: a shareable `cudaMemPool` under torch's cudaMallocAsync backend. Experimental, and off unless `swap()` is called.

torch keeps its own allocator and draws from a pool of ours: its tensors cross by a pointer of that pool, with no copy. What it costs:
such a pool never gives memory back to the device (the driver trims no pool that is shared), torch's own statistics know nothing of it
(`patch_stats()`), and an allocation of over 128 pieces of 32 MiB is copied, since importing it overruns a table inside the driver.
"""

import os
import secrets
import sys
import threading

from . import _fds, _foreign, _native, errors
from .tiers import log

_swapped = {}  # ordinal -> the device's id
_door = None
_lock = threading.Lock()


def swap(device=0):
    """Makes a shareable pool the one that `cudaMallocAsync` draws from on a GPU of this process. Before torch is imported, and
    with torch's backend:cudaMallocAsync. The device mask (`CUDA_VISIBLE_DEVICES`) is settled by this. `Unsupported`, `Refused`."""
    torch = sys.modules.get("torch")
    if torch is not None:
        raise errors.Refused("torch is loaded in this process already: call millpond.pool.swap() before import torch")
    conf = os.environ.get("PYTORCH_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "backend:cudaMallocAsync" not in conf.replace(" ", ""):
        raise errors.Refused(
            "torch does not draw from a cudaMemPool here: set PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync before this process starts, "
            "or use millpond.torch.install()"
        )
    answer = _native.control("pool_swap", device=device)
    _swapped[device] = answer["id"]
    _foreign.pool_swapped = True
    log.warning(
        "the memory pool of GPU %d is millpond's in this process (experimental): torch's memory statistics read 0, and memory is not "
        "given back to the device before this process ends",
        device,
    )


def swapped():
    """Whether a pool was swapped in this process."""
    return bool(_swapped)


def use(device=0):
    """Bytes of the pool itself: {"reserved", "reserved_peak", "used", "used_peak"}."""
    return _native.control("pool_use", device=device)


def patch_stats():
    """From here on torch's memory statistics are answered from the pool's own figures. After import torch."""
    from . import _torch_stats

    _torch_stats.install_pool(lambda device: use(device) if device in _swapped else {})


# How a pool's descriptor gets to a peer: over a socket beside the owner's, to the same user, who shows a key that came by the channel.


def offer():
    """What a peer needs to take this process's pools: [[GPU here, its id, socket, key], ...]."""
    global _door
    if not _swapped:
        return []
    with _lock:
        if _door is None:
            _door = _fds.Door("pool", secrets.token_hex(32), lambda name: _native.control("pool_fd", device=int(name))["fd"])
    return [[device, name, _door.path, _door.key] for device, name in _swapped.items()]


def take(peer, offers):
    """Imports a peer's pools. What fails is said when one of its values is opened."""
    from . import _session

    for offer in offers if isinstance(offers, list) else [offers]:
        try:
            theirs, name, path, key = offer
            fd = _fds.fetch(path, key, int(theirs))
            try:
                _native.control("pool_import", device=_session.ordinal_of(name), peer=peer, theirs=theirs, fd=fd)
            finally:
                os.close(fd)
        except (errors.Error, OSError, ValueError, TypeError, AttributeError) as e:
            log.warning("a peer's pool could not be taken: %s", e)
