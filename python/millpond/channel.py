"""`Channel`: messages to and from one other process, and the calls on top of them (`_calls`).

One thread reads at a time; the others wait until it has put their message where they look. Whoever waits may become the
reader, so no thread of our own is needed.
"""

import collections
import select
import threading
import time

from . import _calls, _decode, _foreign, _gpu_canary, _native, _streams, _tree, errors, tiers

Peer = collections.namedtuple("Peer", "client name pid")
Sent = collections.namedtuple("Sent", "tensors copies copied_bytes")
Sent.__doc__ = "What `send` did: how many memory ranges went, how many of them were copied first, and how many bytes that was."
#: What `send` says of so many ranges that went without a copy.
_IN_PLACE = [Sent(n, 0, 0) for n in range(9)]

#: Why a value was copied into the arena: in host memory, on a GPU.
_WHY_COPIED = ("a value in host memory that is not the arena's was copied into it", "a GPU tensor that is not arena memory was copied on its GPU")
_EAGER = _native.LAZY | _native.EAGER
_ENDED = (errors.Closed, errors.PeerDied, errors.OwnerDied, errors.NotAttached, errors.Forked)


class Channel(_calls.Calls):
    """A channel to one other process. Safe to use from several threads; a context manager."""

    def __init__(self, handle, peer):
        self._handle = handle
        self._number = _native.number(handle)
        #: Who is at the other end: (client, name, pid).
        self.peer = Peer(peer.get("client"), peer.get("name"), peer.get("pid"))
        self._serial = peer.get("serial") or handle
        #: How GPU values are to go: None (the arena), "ipc" (memory that is not the arena's goes without a copy, by a token of the
        #: driver's) or "host" (by host memory). `send(prefer=)` overrides it.
        self.prefer = None
        self._sending = threading.RLock()
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._reading = False
        self._waiting = 0  # threads that wait for the one that reads
        self._ended = None
        self._inbox = collections.deque()
        self._canaries = collections.deque()
        self._tiers = tiers.Tiers(self.peer.name)
        self._gpu = _gpu_canary.Prover(self)
        self._foreign = _foreign.Prover(self)
        self._lazy = 0  # how many threads wait for a lazy value
        self._begin_calls()

    def __repr__(self):
        return f"<millpond.Channel to {self.peer.name!r} (pid {self.peer.pid}){', closed' if self.closed else ''}>"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def closed(self):
        """Whether it was closed here, or has ended."""
        return self._ended is not None

    @property
    def tiers(self):
        """How many values went by each tier so far: {"arena", "copy", "pool", "ipc", "pinned", "host", "inline"} (see
        `millpond.tiers`). Values that share memory count as one."""
        return dict(self._tiers.counts)

    def fileno(self):
        """For `select` and `poll`: readable when a message can be received. The library owns it."""
        return _native.control("channel_fd", channel=self._handle)["fd"]

    def send(self, value, timeout=None, readonly=False, prefer=None):
        """Sends a value. It may be dropped at once: the memory lives until the receiver is done. `readonly`: the receiver maps
        the tensors read-only. `prefer`: see `Channel.prefer`. Says what was copied."""
        return self._transmit(_tree.PLAIN, value, timeout, readonly, "out", prefer)

    def recv(self, timeout=None, wait=False, lazy=False):
        """The next value: numpy arrays and torch tensors as they were sent. `lazy=True`: every tensor is a `Ref`, nothing is
        mapped. `wait=True`: returns when all the data is ready (values in host memory always are); else GPU values are
        ordered on this thread's current stream. `Timeout`, `Closed`, `PeerDied`."""
        if lazy:
            self._lazy += 1
            try:
                message = self._wait(self._next_value, timeout)
            finally:
                self._lazy -= 1
        else:
            message = self._wait(self._next_value, timeout)
        if wait:
            for memory in message.memories:
                if not memory.is_ready:
                    _native.in_slices(lambda ms, m=memory: _native.import_ready(m.handle, ms), timeout)
                    memory.is_ready = True
        return message.decode(lazy)

    def close(self):
        """Ends the channel, at both ends. Threads that wait on it get `Closed`."""
        if self._end(errors.Closed("the channel was closed here")):
            try:
                _native.control("close", channel=self._handle)
            except errors.Error:
                pass  # it had ended from the other side

    def _transmit(self, header, value, timeout=None, readonly=False, root="out", prefer=None):
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        prefer = prefer or self.prefer
        if prefer and prefer not in ("ipc", "host"):
            raise errors.InvalidArgument(f'prefer={prefer!r}: None, "ipc" or "host"')
        full = False
        while True:
            encoded = self._encode(header, value, readonly, root, prefer, full)
            try:
                flags = self._leave(encoded, (header, value, readonly, root), timeout, full)
                if flags is not None:
                    break
            except errors.OutOfMemory as e:
                # No room for a copy in the arena: without a copy if that is possible, then by host memory.
                if full == "host" or not encoded.gpus or header[0] == "k":
                    raise
                full = "ipc" if not full and prefer is None and self._foreign.kinds("ipc")[0] else "host"
                size = sum(t[1] for t in encoded.tensors if t[4] >= 0)
                self._tiers.fell("copy", full, f"the arena has no room for a copy: {e}", size, True, b"fell.arena_full")
            finally:
                if encoded.leaving:
                    encoded.finish()
        if flags and flags[0] & _native.IN_SEGMENT:
            flags = _foreign.sent_from_segments(encoded, flags)
        if encoded.tokens:
            _foreign.sent(encoded)
        if self._gpu.asked or self._foreign.out == "asked":
            self._poll()  # for the answer, where nobody receives here
        if header[0] == "k":
            if encoded.inline:
                _native.count(b"sent.inline", encoded.inline)
            return None
        return self._count(encoded, flags)

    def _leave(self, encoded, message, timeout, full):
        """Sends what is encoded: the flags that came back. None: it must be encoded again, as its GPU tier is off by now."""
        if timeout is None:
            self._sending.acquire()
        elif not self._sending.acquire(timeout=min(max(timeout, 0), _native.LONGEST)):
            raise errors.Timeout(f"another thread has been sending for {timeout} s")
        try:
            gpu = self._gpu
            if (encoded.gpus or gpu.asked) and message[0][0] != "k" and not full and not gpu.admit(encoded, message):
                return None
            return _native.send(self._number, encoded.text, encoded.tensors, -1 if timeout is None else _native.milliseconds(timeout))
        finally:
            self._sending.release()

    def _count(self, encoded, flags):
        """Counts a message that has left."""
        if not (encoded.copies or encoded.hosted or encoded.inline or encoded.tokens or any(flags)):
            ranges = len(flags)
            if ranges:
                tensors = encoded.tensors
                self._tiers.add("arena", ranges, tensors[0][1] if ranges == 1 else sum([tensor[1] for tensor in tensors]))
            return _IN_PLACE[ranges] if ranges < len(_IN_PLACE) else Sent(ranges, 0, 0)
        copies, copied_bytes, ranges_bytes = encoded.copies, encoded.copied_bytes, 0
        for tensor, flag in zip(encoded.tensors, flags):
            ranges_bytes += tensor[1]
            if flag:
                copies += 1
                copied_bytes += tensor[1]
                self._tiers.fell("arena", "copy", _WHY_COPIED[tensor[4] >= 0], tensor[1])
        for device, size in encoded.packed:
            self._tiers.fell("arena", "copy", _WHY_COPIED[device >= 0], size)
            for counter, n in ((b"fell.foreign_gpu" if device >= 0 else b"fell.foreign_host", 1), (b"copies", 1), (b"copied_bytes", size)):
                _native.count(counter, n, device)
        hosted, by_token = encoded.hosted, encoded.tokens
        ranges = len(flags) - 2 * len(by_token)  # two companions each
        in_place = ranges - copies - hosted
        add = self._tiers.add
        if in_place > 0:
            add("arena", in_place, max(0, ranges_bytes - copied_bytes))
        if copies:
            add("copy", copies, copied_bytes - sum(size for _, size in encoded.by_host.values()))
        for tier, (values, size) in encoded.by_host.items():
            add(tier, values, size)
        for kind, size, *_ in by_token:
            add(kind, 1, size)
        if encoded.inline:
            add("inline", encoded.inline, 0)
        return Sent(ranges + len(by_token), copies + hosted, copied_bytes)

    def _encode(self, header, value, readonly, root, prefer=None, full=False):
        """Encodes for this peer: GPU values by the GPU arena if it is proved, else by host memory. `full`: by what instead of a
        copy, as the arena has no room for one."""
        if header[0] == "k":
            proof = header[1] == "gpu-x"
            encoded = _tree.encode(value, header, root, readonly, kinds=_foreign.KINDS if proof else ())
            if proof and (encoded.falls or not encoded.tokens):
                raise errors.Unsupported(encoded.falls[0][2] if encoded.falls else "nothing of the proof went by token")
            return encoded
        gpu = self._gpu
        by_choice = prefer == "host" or full == "host"
        kinds, why = ((), None) if by_choice else self._foreign.kinds(full or prefer)
        encoded = _tree.encode(value, header, root, readonly, _gpu_canary.EVERY_GPU if by_choice else gpu.off, kinds, why, by_choice, True)
        for best, to, reason, nbytes in encoded.falls:
            self._tiers.fell(best, to, gpu.reason if reason is None else reason, nbytes, to != "copy", _counter(to, reason))
        return encoded

    # Reading.

    def _next_value(self):
        if self._incoming and not self._inbox:
            self._serve_one_locked()
        return self._inbox.popleft() if self._inbox else None

    def _wait(self, found, timeout):
        """Waits until `found()`, called with the state locked, gives something; reads messages meanwhile if nobody else does."""
        end = _native.deadline(timeout)
        mine, message = False, None  # whether this thread is the one that reads, and what it has read
        try:
            while True:
                with self._lock:
                    if mine:
                        if self._waiting:
                            self._state.notify_all()
                        self._reading = mine = False
                        if message is not None:
                            self._dispatch(message)
                    result = found()
                    if result is not None:
                        return result
                    if self._ended is not None:
                        self._pending.clear()
                        raise type(self._ended)(*self._ended.args)
                    left = None if end is None else end - time.monotonic()  # below zero: one look
                    if self._reading:
                        self._waiting += 1
                        try:
                            if not self._state.wait(left) and end is not None and time.monotonic() >= end:
                                raise errors.Timeout(f"nothing came within {timeout} s")
                        finally:
                            self._waiting -= 1
                        continue
                    message = None
                    self._reading = mine = True
                try:
                    message = _native.in_slices(self._receive, left, end)
                except _ENDED as e:
                    self._ended = e.with_traceback(None)
                except errors.Timeout:
                    raise errors.Timeout(f"nothing came within {timeout} s") from None
        finally:
            if mine:  # it failed, or Ctrl-C came, wherever that was
                with self._lock:
                    self._reading = False
                    self._state.notify_all()
                    if message is not None:
                        self._dispatch(message)

    def _receive(self, ms):
        # One call a message: what needs no waiting is opened in it, on this thread's streams. The rest is opened when it is
        # touched: a wait for READY under this call's time limit could lose the message, and the thread that will use the
        # values, with its streams, may be another. A parent that asks for lazy values maps nothing.
        if self._lazy:
            found = _native.receive(self._number, ms, _native.LAZY, ())
        else:
            found = _native.receive(self._number, ms, _EAGER, _streams.all_current())
        message = _decode.Received(*found, self._serial)
        kind = message.header[0]
        if kind == "k":
            if not message.header[1].startswith("gpu"):
                return message
            # Here, where no lock is held.
            (self._foreign if message.header[1].startswith("gpu-x") else self._gpu).receive(message)
            return None
        if self._gpu.dropping:
            return None  # it comes again, by host memory
        if kind == "l":
            _calls.emit_log(message.decode())  # handlers may do anything
            return None
        return message

    def _next_canary(self):
        return self._canaries.popleft() if self._canaries else None

    def _poll(self):
        """Reads what has come, if nobody else is reading. Never blocks."""
        mine = False
        try:
            with self._lock:
                if self._reading or self._ended is not None:
                    return
                self._reading = mine = True
            while True:
                try:
                    message = self._receive(0)
                except errors.Timeout:
                    return
                if message is not None:
                    with self._state:
                        self._dispatch(message)
        except _ENDED as e:
            self._end(e)
        finally:
            if mine:
                with self._lock:
                    self._reading = False
                    self._state.notify_all()

    def _dispatch(self, message):
        """Puts a message where its waiter looks. The state is locked."""
        kind = message.header[0]
        if kind == "m":
            self._inbox.append(message)
        elif kind == "k":
            self._canaries.append(message)
        else:
            self._dispatch_call(message)
        if self._waiting:
            self._state.notify_all()

    def _end(self, reason):
        with self._state:
            if self._ended is not None:
                return False
            self._ended = reason.with_traceback(None)
            self._pending.clear()
            self._state.notify_all()
            return True


def _counter(to, reason):
    """Which of the ledger's counters of falls a fall is; copies are counted by the library."""
    if to == "copy":
        return None
    return b"fell.canary" if reason is None else b"fell.other" if _streams.gpus() else b"fell.no_gpu"


def wait_any(channels, timeout=None):
    """The channels that have something to receive, out of several."""
    ready = [c for c in channels if c._inbox]
    if ready:
        return ready
    poll = select.poll()
    by_fd = {c.fileno(): c for c in channels}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(None if timeout is None else min(_native.milliseconds(timeout), 0x7FFFFFFF))]
