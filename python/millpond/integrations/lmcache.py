"""LMCache: the descriptors of its `VmmCudaIPCWrapper` go over the arena's own folder.

LMCache shares memory of `cuMemCreate`, which arena memory is, by a descriptor that has to reach the importer in another way than
its messages (`set_vmm_fd_resolver`). The exporter publishes what it has wrapped, the importer resolves it; both are attached.

    wrapper = VmmCudaIPCWrapper.wrap(tensor)      # exporter: a tensor of the arena
    millpond.integrations.lmcache.publish(wrapper)

    millpond.integrations.lmcache.install()       # importer, before wrapper.to_tensor()

The hook's signature is LMCache 0.5.6's: `set_vmm_fd_resolver(Callable[[bytes], int] | None)`, ownership of the descriptor goes along.
"""

import importlib
import os
import threading

from .. import _fds, errors

_MODULES = ("lmcache.v1.platform.devices.cuda.ipc_wrapper", "lmcache.v1.platform.cuda.ipc_wrapper")
_KIND = "lmcache"

_lock = threading.Lock()
_door = None
_published = {}  # export id -> our copy of the descriptor


def publish(wrapper):
    """Gives the descriptor of a wrapper out to whoever is attached to this arena, until `withdraw`. False where it has none: it
    travels in the message itself (fabric handles)."""
    global _door
    payload = wrapper.fd_payload()
    if payload is None:
        return False
    export_id, fd = payload
    with _lock:
        if _door is None:
            _door = _fds.Door(_KIND, _fds.arena_key(_KIND), _give)
        if export_id not in _published:
            _published[export_id] = os.dup(fd)
    return True


def withdraw(wrapper_or_id):
    """Ends `publish`; what was imported stays."""
    export_id = wrapper_or_id if isinstance(wrapper_or_id, bytes) else wrapper_or_id.handle
    with _lock:
        fd = _published.pop(export_id, None)
    if fd is not None:
        os.close(fd)


def install():
    """Makes millpond LMCache's resolver in this process."""
    _wrapper_module().set_vmm_fd_resolver(resolve)


def uninstall():
    """LMCache has no resolver again."""
    _wrapper_module().set_vmm_fd_resolver(None)


def resolve(export_id):
    """The descriptor of an export id, from whichever process of the arena has published it: the caller's to close."""
    name, key = export_id.hex(), _fds.arena_key(_KIND)
    asked = 0
    for path in _fds.doors(_KIND):
        try:
            return _fds.fetch(path, key, name)
        except OSError:  # not that one's, or it has ended
            asked += 1
    raise errors.Stale(
        f"no process of this arena has published {name} ({asked} asked): its exporter calls millpond.integrations.lmcache.publish(wrapper)"
    )


def _give(name):
    with _lock:
        fd = _published.get(bytes.fromhex(name))
        return None if fd is None else os.dup(fd)


def _wrapper_module():
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "set_vmm_fd_resolver"):
            return module
    raise errors.Unsupported(f"this LMCache has no set_vmm_fd_resolver ({' or '.join(_MODULES)}): 0.5.6 has")
