"""This process's attachment to an owner: one, at most."""

import os
import platform
import sys
import threading

from . import _events, _native, _streams, _trace, errors

_lock = threading.Lock()
_info = None
_connection = None
# Whether the program itself allows events over a GPU's context: by ordinal, and under None for the others.
_context_events = {}


def attach(socket=None, key=None, name=None, role="worker", driver="auto", limit=None, on_owner_death=None, wait=None):
    """Joins an owner. Without arguments: the one that `Arena.worker_env()` named in the environment."""
    global _info
    socket = socket or os.environ.get("MILLPOND_SOCKET")
    key = key or os.environ.get("MILLPOND_KEY")
    if not socket or not key:
        missing = "MILLPOND_SOCKET" if not socket else "MILLPOND_KEY"
        raise errors.InvalidArgument(
            f"{missing} is not set: start this process with env=arena.worker_env(name), or say attach(socket=, key=)"
        )
    with _lock:
        if _info is not None:
            if _info["pid"] != os.getpid():
                raise errors.Forked("this process is a fork of one that is attached: start workers with exec (subprocess, spawn)")
            raise errors.AlreadyAttached(f"this process is attached to {_info['socket']} already")
        answer = _native.control(
            "attach",
            socket=socket,
            key=key,
            name=name or os.environ.get("MILLPOND_NAME") or f"process {os.getpid()}",
            role=role,
            driver=driver,
            limit=limit,
            on_owner_death=on_owner_death,
            wait=wait,
            python=platform.python_version(),
            torch=getattr(sys.modules.get("torch"), "__version__", None),
        )
        answer.update(socket=socket, key=key, pid=os.getpid(), role=role)
        _info = answer
        _trace.from_environment()
        _streams.configure(sum(1 for d in answer.get("devices", ()) if d["ordinal"] != -1))
    return answer


def note_context_events(allowed, ordinal):
    """What `millpond.context_events` was told; ordinal None: of every device."""
    if ordinal is None:
        _context_events.clear()
    _context_events[ordinal] = allowed


def restore_context_events():
    """Events over a GPU's context are allowed again where the program has not said otherwise."""
    others = _context_events.get(None, True)
    if others and all(_context_events.values()):
        _native.control("context_events", allowed=True)
        return
    # Not all and then some off again: an event could come between. A GPU that is not in use yet has no ordinal, and stays as it is.
    for device in _native.control("status").get("devices", ()):
        ordinal = device["ordinal"]
        if ordinal is not None:
            _native.control("context_events", device=ordinal, allowed=_context_events.get(ordinal, others))


def detach():
    """Leaves the owner: values that are still held go with it. Nothing happens if this process is not attached."""
    global _info, _connection
    with _lock:
        if _info is None:
            return
        _info = _connection = None
        _context_events.clear()
    _events.clear()
    _native.control("detach")


def info():
    """What attach said; `NotAttached` before it."""
    if _info is None:
        raise errors.NotAttached("this process is not attached: millpond.attach() in a worker, millpond.Arena() in a parent")
    return _info


def connection(timeout=30.0):
    """A worker's channel to its parent; the same one at every call."""
    global _connection
    from . import canary
    from .channel import Channel

    info()
    with _lock:
        if _connection is None or _connection.closed:
            answer = _native.in_slices(lambda ms: _native.control("connect", peer="parent", timeout_ms=ms), timeout)
            channel = Channel(answer["channel"], answer.get("peer", {}))
            canary.greet(channel, "worker", timeout)
            _connection = channel
        return _connection


def connect(peer, timeout=30.0):
    """A channel of its own between two workers, without the parent: both ask for it, each by the other's name, in any order; a new
    one at every call. `Timeout` where the other does not ask in time."""
    from . import canary
    from .channel import Channel

    mine = info()["client"]
    answer = _native.in_slices(lambda ms: _native.control("connect", peer=str(peer), timeout_ms=ms), timeout)
    found = answer.get("peer", {})
    channel = Channel(answer["channel"], found)
    # One of the two begins: any rule will do that both know.
    canary.greet(channel, "parent" if mine < found.get("client", 0) else "worker", timeout)
    return channel


def default_device():
    """The device that new values are made on: the first GPU, or the host (-1)."""
    gpus = [d["ordinal"] for d in info().get("devices", ()) if d["ordinal"] != -1]
    known = [n for n in gpus if n is not None]
    return (min(known) if known else 0) if gpus else -1


def device_id(ordinal):
    """The identity of a GPU: another process may count them differently."""
    for device in _native.control("status").get("devices", ()):
        if device["ordinal"] == ordinal:
            return device["id"]
    return ordinal


def ordinal_of(device_id):
    """This process's ordinal of a GPU. The library knows it once the GPU is in use here; before, a single one is 0."""
    for device in _native.control("status").get("devices", ()):
        if device["id"] == device_id and device["ordinal"] is not None:
            return device["ordinal"]
    return device_id if isinstance(device_id, int) else 0


def device_ordinal(device):
    """A user's device (None, ordinal, "cpu", "cuda", "cuda:1", torch.device) as an ordinal; -1 is the host."""
    if device is None:
        return default_device()
    if isinstance(device, int):
        return device
    text = str(device)
    if text in ("cpu", "host"):
        return -1
    head, _, index = text.partition(":")
    if head == "cuda" and (not index or index.isdigit()):
        if index:
            return int(index)
        torch = _streams.torch_cuda()
        return torch.cuda.current_device() if torch is not None else 0
    raise errors.InvalidArgument(f"unknown device {device!r}: None, 'cpu', 'cuda', 'cuda:N' or an ordinal")
