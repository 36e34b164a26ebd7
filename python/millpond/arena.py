"""`Arena`: the parent's side. It starts the owner, attaches, names workers, accepts them, makes values."""

import atexit
import os
import re

from . import _events, _foreign, _ledger, _native, _owner, _ref, _session, _streams, canary, errors
from .channel import Channel

# As the program's: see `parse_bytes` in ipc/src/owner/config.rs.
_UNITS = {"": 1, "b": 1}
_UNITS.update({letter + end: 1 << 10 * n for n, letter in enumerate("kmgt", 1) for end in ("", "ib")})
_UNITS.update({letter + "b": 1000**n for n, letter in enumerate("kmgt", 1)})


def parse_bytes(text):
    """Bytes of "6GiB" or "6G" (of 1024), "6GB" (of 1000), 4096; "80%" stays as it is, for the owner knows the device."""
    if text is None:
        return None
    if isinstance(text, int) and not isinstance(text, bool):
        if text <= 0:
            raise errors.InvalidArgument(f"a limit of {text} bytes")
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b?)\s*", str(text).lower())
    if match:
        number, unit = float(match.group(1)), match.group(2)
        if unit == "%" and 0 < number <= 100:
            return f"{number:g}%"
        if unit in _UNITS and number > 0:
            return int(number * _UNITS[unit])
    raise errors.InvalidArgument(f"{text!r} is no amount of memory: write 6442450944, '6GiB' or '80%'")


class Arena:
    """One arena for this process and its workers.

    `limit`: of each device's memory, "80%", "6GiB" or bytes. `driver`: "auto", "cuda" or "host". `devices`: their UUIDs or
    ordinals (default all). `owner`: "process" starts a small program that ends with this one; "inline" runs it as a thread
    here (slower growth under CUDA: an export costs 1.1 ms instead of 31 us). `chunk_bytes`: size of a physical chunk.
    `on_owner_death`: "exit" or "continue". `handle_kind`: in what form memory is shared; "posix_fd" works, "win32" and "fabric" raise
    `Unsupported` with what millpond lacks for them. A context manager."""

    def __init__(
        self,
        limit="80%",
        driver="auto",
        devices=None,
        owner="process",
        chunk_bytes=None,
        on_owner_death=None,
        name="parent",
        wait=None,
        timeout=30.0,
        handle_kind="posix_fd",
    ):
        if handle_kind not in ("posix_fd", "win32", "fabric"):
            raise errors.InvalidArgument(f'handle_kind={handle_kind!r}: "posix_fd", "win32" or "fabric"')
        if owner not in ("process", "inline"):
            raise errors.InvalidArgument(f'owner={owner!r}: "process" or "inline"')
        if driver not in ("auto", "cuda", "host"):
            raise errors.InvalidArgument(f'driver={driver!r}: "auto", "cuda" or "host"')
        if _session._info is not None:
            raise errors.AlreadyAttached("this process has an arena already, or is a worker of one")
        limit, chunk_bytes = parse_bytes(limit), parse_bytes(chunk_bytes)
        self._owner = None
        self._open = False
        self._pid = os.getpid()
        if owner == "process":
            self._owner = _owner.Owner(limit, driver, devices, chunk_bytes, timeout, handle_kind)
            self.socket, key = self._owner.socket, self._owner.key
        else:
            if devices is not None:
                raise errors.Unsupported('devices= needs owner="process"')
            limit = None if limit is None else str(limit)
            answer = _native.control("serve_inline", driver=driver, limit=limit, chunk_bytes=chunk_bytes, handle_kind=handle_kind)
            self.socket, key = answer["socket"], answer["key"]
        self._key = key
        try:
            self._info = _session.attach(
                self.socket, key, name=name, role="parent", driver=driver, on_owner_death=on_owner_death, wait=wait
            )
        except BaseException:
            self._stop_owner()
            raise
        self._open = True
        atexit.register(self._at_exit)

    def __repr__(self):
        return f"<millpond.Arena at {self.socket}{'' if self._open else ', closed'}>"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def devices(self):
        """What attach said of the devices: id, ordinal (-1: host), name, total, limit."""
        return self._info.get("devices", [])

    def worker_env(self, name, **extra):
        """The environment for a worker: a copy of ours, the address and key of the owner, the path of this package, and what
        the allocator needs. `extra`: further variables. The key is in no command line."""
        env = dict(os.environ)
        env["MILLPOND_SOCKET"], env["MILLPOND_KEY"], env["MILLPOND_NAME"] = self.socket, self._key, name
        env["MILLPOND_LIBRARY"] = _native.library_path()
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_worker_path")
        path = env.get("PYTHONPATH")
        if not path:
            env["PYTHONPATH"] = folder
        elif folder not in path.split(os.pathsep):
            env["PYTHONPATH"] = path + os.pathsep + folder
        # The driver's own number. More end a killed process later (32: 300 ms more), and nothing waits in a circle with fewer.
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if variable in env:
                _scrub(env, variable)
        env.update((key, str(value)) for key, value in extra.items())
        return env

    def accept(self, timeout=None):
        """The channel of the next worker that connects, proved by the canary (`millpond.canary`): `Refused`, with the
        worker's name, where its memory does not carry bytes as they are."""
        self._check()
        answer = _native.in_slices(lambda ms: _native.control("accept", timeout_ms=ms), timeout)
        channel = Channel(answer["channel"], answer.get("peer", {}))
        canary.greet(channel, "parent", timeout)
        return channel

    def empty(self, shape, dtype="float32", device=None, kind=None):
        """A value in arena memory, its contents unset: on the host a numpy array (a torch tensor for types that numpy lacks),
        on a GPU a torch tensor if torch is loaded, else a `Ref`. `kind`: "n", "t" or "r" to choose."""
        self._check()
        return _ref.empty(shape, dtype, _session.device_ordinal(device), kind)

    def zeros(self, shape, dtype="float32", device=None, kind=None):
        """Like `empty`, filled with zeros."""
        value = self.empty(shape, dtype, device, kind)
        if isinstance(value, _ref.Ref):
            raise errors.Unsupported("zeros() on a GPU needs torch: import it first, or use empty()")
        value[...] = 0
        return value

    def adopt(self, value, timeout=None):
        """Makes a received value this process's own: see `millpond.adopt`."""
        self._check()
        return adopt(value, timeout)

    def ledger(self):
        """Who holds how much, by device and client."""
        self._check()
        return _ledger.ledger()

    def map(self, device=None, width=100, page=None):
        """This process's own heap on a device as text, a character a page: what lies in each of its chunks."""
        self._check()
        return _ledger.draw(_native.control("snapshot", device=_session.device_ordinal(device)), width, page)

    def scope(self, name, device=None):
        """Peaks and counts of a `with` block: see `millpond._ledger.Scope`."""
        self._check()
        return _ledger.scope(name, device)

    def on_pressure(self, function):
        """Calls `function(event)` when a growth of anybody does not fit and others are asked to give back what they do not use: time
        to let something go. Also a decorator. It runs in a thread of millpond's, never on malloc's path; `event` says who asked
        (`name`, `pid`), for how much (`asked`), and the `limit` and what was `free` under it: see `millpond.Event`. `millpond.off`
        takes it back."""
        self._check()
        return _events.on("pressure", function)

    def on_refusal(self, function):
        """The same for every growth that was refused: the process that asked runs out of memory, unless what it does next helps."""
        self._check()
        return _events.on("refusal", function)

    def trim(self, device=None):
        """Gives memory that nobody uses back to the device: bytes given."""
        self._check()
        return _native.control("trim", device=_session.device_ordinal(device))["bytes"]

    def close(self):
        """Ends the arena: detaches, and ends the owner. Workers that still run see their owner go."""
        if not self._open or os.getpid() != self._pid:
            return
        self._open = False
        atexit.unregister(self._at_exit)
        try:
            _session.detach()
        finally:
            self._stop_owner()

    def _stop_owner(self):
        if self._owner is not None:
            self._owner.stop()
        else:
            _native.control("stop_inline")

    def _check(self):
        if not self._open:
            raise errors.Closed("the arena is closed")

    def _at_exit(self):
        # No CUDA call here: the driver may be going down. The owner takes all back when this process ends.
        if self._open and os.getpid() == self._pid and self._owner is not None:
            self._open = False
            self._owner.stop(timeout=2.0)


def _scrub(env, variable):
    """torch cannot replace its allocator under cudaMallocAsync."""
    parts = [p for p in env[variable].split(",") if p.strip().replace(" ", "") != "backend:cudaMallocAsync"]
    if any(p.strip() for p in parts):
        env[variable] = ",".join(parts)
    else:
        del env[variable]


def adopt(value, timeout=None):
    """Makes a received value (tensor, array or `Ref`) this process's own, and returns it: when its maker ends or is killed,
    the chunks that it lies in are this process's, under its account, until the value is dropped. Waits until the value is
    ready. Its maker must not write it any more.

    `PeerDied` for a value that never got ready; `InvalidArgument` for one that was lent read-only, is this process's own or is
    not in arena memory; `OutOfMemory` where it exceeds this process's own limit."""
    handle, address = 0, 0
    if isinstance(value, _ref.Ref):
        memory = value._held()
        if memory.kind == _native.KIND_IMPORT:
            handle = memory.handle
        else:
            address = memory.address
    else:
        address, _ = address_of(value)
        if not address:
            return value
    _native.in_slices(lambda ms: _native.adopt(handle, address, ms), timeout)
    return value


def wait_done(value, timeout=None, wait=None):
    """Returns when every receiver of this value's memory is done with it: then it may be overwritten. `Timeout`, `PeerDied`."""
    address, device = address_of(value)
    if address:
        stream = _streams.current(device)
        _native.in_slices(lambda ms: _native.wait_done(address, stream, _native.WAIT if wait else 0, ms), timeout)


def record_stream(value, stream):
    """A received value is also used on this stream: it is not done before that stream's work so far."""
    address, _ = address_of(value)
    if address:
        _native.record_stream(_foreign.companion(address) or address, _streams.handle(stream))


def address_of(value):
    """(address, GPU ordinal or -1) of a tensor, array or `Ref`."""
    if isinstance(value, _ref.Ref):
        return value._address(), value._held().device
    pointer = getattr(value, "data_ptr", None)
    if pointer is not None:
        return pointer(), value.get_device()
    for name, device in (("__cuda_array_interface__", 0), ("__array_interface__", -1)):
        interface = getattr(value, name, None)
        if interface is not None:
            return interface["data"][0], device
    raise errors.InvalidArgument(f"a {type(value).__name__} has no memory to speak of")
