"""The tiers without a copy for memory that is not the arena's: `ipc` and `pool`.

A value travels as a token of the driver's beside two tiny blocks of the arena, its companions, which carry the contract:

    ["x", kind, token, offset, dtype, shape, strides, device's id, sender's GPU, first, last]

`first` is what its tensor holds at the receiver: READY, DONE and the order of streams are those of that block. `last` is let go
of when the first is gone, no stream can reach it any more, and the driver's mapping is closed: for memory must not be freed by its
owner while somebody has it open. The sender keeps the tensor itself until both are done. All of this happens on a Python thread
of ours, never in a deleter.

Before the first value on a connection the tier proves itself: probes go, and until the other side has compared their bytes values are
copied. Where it fails it is off for the connection, and no value was at risk.
"""

import threading
import time

from . import _dtypes, _memory, _native, _ref, _segments, errors
from .tiers import log

KINDS = ("ipc", "pool")
#: Set by `pool.swap()`: values of that pool go by it without being asked for.
pool_swapped = False
_COMPANION = 512
#: How often the thread looks at what is not over yet.
_PAUSE = 0.01


# Sending.


def encode(e, keep, device, address, count, name, shape, strides):
    """The node of a GPU value by token, or None: the reason is among the encoder's falls."""
    row = _dtypes.lookup(name)
    nbytes = count * row.itemsize
    try:
        if _native.control("locate", address=address).get("kind") != "foreign":
            return None  # arena memory: an offset is better
        if not e.kinds:
            e.falls.append((*e.why_copied, nbytes))
            return None
        found = _native.control("foreign_export", device=device, address=address)
        kind = found["kind"]
        if kind not in e.kinds:
            why = f"a value by token: it is {kind} memory, and only {e.kinds[0]} was asked for"
            e.falls.append((e.kinds[0], "copy", why, nbytes))
            return None
        byte = _dtypes.lookup("uint8")
        first, last = (_ref.Ref(_memory.block(_COMPANION, device), 0, byte, (_COMPANION,), None, "r") for _ in range(2))
    except errors.Error as problem:
        e.falls.append(("pool" if e.kinds == ("pool",) else "ipc", "copy", f"a value by token: {problem}", nbytes))
        return None
    from . import _leaves, _tree

    e.tokens += ((kind, nbytes, first, last, keep),)
    e.ways[first._memory.address] = _native.WAYS[kind]
    e.ways[last._memory.address] = _native.UNCOUNTED
    strides = list(strides) if strides else 0
    node = ["x", kind, found["token"], found["offset"], name, list(shape), strides, _leaves.device_id(device), device]
    return {"$": [*node, _tree._reference(e, first, 0), _tree._reference(e, last, 0)]}


# Receiving.


def decode(decoder, node):
    """The tensor of such a node. Its parts were decoded before it."""
    _, kind, token, offset, name, shape, strides, device_id, theirs, first, last = node
    row = _dtypes.BY_NAME.get(name) or _dtypes.lookup(name)
    shape, strides = tuple(shape), tuple(strides) if strides else None
    if kind not in KINDS or type(token) is not str or not isinstance(first, _ref.Ref) or not isinstance(last, _ref.Ref):
        raise errors.Protocol(f"a value by token that is not ours: {kind!r}")
    if decoder.peer is None:
        raise errors.Protocol("a value by token came where only a channel can carry one")
    from . import _session

    memory, lasting = first._held(), last._held()
    if memory.kind != _native.KIND_IMPORT or lasting.kind != _native.KIND_IMPORT or memory.handle == lasting.handle:
        raise errors.Protocol("a value by token without companions")
    known = _session.ordinal_of(device_id)
    ours = _native.control("foreign_open", device=known, peer=decoder.peer, kind=kind, token=token, theirs=theirs)
    opening = _Opening(memory.handle, lasting, known, decoder.peer, kind, token)
    try:
        whole = _memory.Memory(0, _native.KIND_IMPORT, ours["address"], ours["bytes"], known)
        whole.owned = False
        _memory.check_bounds(whole, offset, row, shape, strides)
        memory.touch()  # this thread's stream waits for READY
        opening.start, opening.nbytes = ours["address"] + offset, _memory.span(shape, strides) * row.itemsize
        opening.companion = memory.address
        steps = strides if strides is not None else _memory.contiguous_strides(shape)
        return _memory.torch_over(memory, ours["address"] + offset, known, row, shape, steps)
    finally:
        first._memory = last._memory = None
        _keeper.add(opened=opening)


class _Opening:
    """A token that is open here for one tensor."""

    __slots__ = ("import_", "last", "device", "peer", "kind", "token", "start", "nbytes", "companion")

    def __init__(self, import_, last, device, peer, kind, token):
        self.import_, self.last, self.device, self.peer, self.kind, self.token = import_, last, device, peer, kind, token
        self.start = self.nbytes = self.companion = 0

    def over(self):
        """Closes it if nobody can reach it any more."""
        try:
            if not _native.control("import_parted", **{"import": self.import_})["parted"]:
                return False
            _native.control("foreign_close", device=self.device, peer=self.peer, kind=self.kind, token=self.token)
        except (errors.NotAttached, errors.Forked):
            pass  # the process is going down, or is not the one that opened it
        except errors.Error as e:
            log.warning("memory of a peer could not be closed: %s: %s", e.code, e)
        self.last = None  # now its owner may free it
        return True


def companion(address):
    """The arena's address that stands for an address of a value by token; None for others."""
    for opening in list(_keeper.opened):
        if opening.start <= address < opening.start + max(opening.nbytes, 1):
            return opening.companion
    return None


# What must stay until others are done.


class _Sent:
    """A tensor that others have by token."""

    __slots__ = ("first", "last", "tensor")

    def __init__(self, first, last, tensor):
        self.first, self.last, self.tensor = first, last, tensor

    def over(self):
        for ref in (self.first, self.last):
            try:
                _native.wait_done(ref._address(), 0, _native.WAIT, 0)
            except errors.Timeout:
                return False
            except errors.Error:
                pass  # whoever held it has died
        self.first = self.last = self.tensor = None
        return True


class _Keeper:
    """Looks at what was sent and what is open, on a thread that lives while there is any."""

    def __init__(self):
        self.sent, self.opened = [], []
        self.segments = _segments.Kept()
        self._lock = threading.Lock()
        self._thread = None

    def add(self, sent=(), opened=None, segments=None):
        if segments is not None:
            self.segments.add(segments)
        with self._lock:
            self.sent.extend(sent)
            if opened is not None:
                self.opened.append(opened)
            if self._thread is None and self._busy():
                self._thread = threading.Thread(target=self._run, name="millpond-keeper", daemon=True)
                self._thread.start()

    def _busy(self):
        return bool(self.sent or self.opened or len(self.segments))

    def _run(self):
        while True:
            time.sleep(_PAUSE)
            self.sweep()
            with self._lock:
                if not self._busy():
                    self._thread = None
                    return

    def sweep(self):
        """One look."""
        self.segments.sweep()
        for name in ("sent", "opened"):
            with self._lock:
                entries = list(getattr(self, name))
            over = [entry for entry in entries if entry.over()]
            if over:
                with self._lock:
                    setattr(self, name, [entry for entry in getattr(self, name) if entry not in over])


_keeper = _Keeper()


def sent(encoded):
    """A message with values by token has left: they are kept until their receivers are done."""
    _keeper.add(sent=[_Sent(first, last, keep) for _, _, first, last, keep in encoded.tokens])


def sent_from_segments(encoded, flags):
    """A message with memory of torch's segments has left: that is kept until its receivers are done. The flags without that mark."""
    _keeper.add(segments=encoded)
    return [flag & ~_native.IN_SEGMENT for flag in flags]


def kept_in_segments():
    """How many ranges of torch's segments are kept for others."""
    return len(_keeper.segments)


def kept():
    """How many tensors are kept for others by token, and how many of others' are open here."""
    return {"sent": len(_keeper.sent), "open": len(_keeper.opened)}


# The proof.


class Prover:
    """Whether this side of a connection may send by token.

    Messages: ["k", "gpu-x-pool"] this side's pools; ["k", "gpu-x"] probes; ["k", "gpu-x-ok"]; ["k", "gpu-x-bad"] why."""

    def __init__(self, channel):
        self._channel = channel
        #: None (not asked), "asked", True, False.
        self.out = None
        self.reason = None

    def kinds(self, prefer):
        """(which kinds the next message may use, where it prefers one and may not: (that, "copy", why))."""
        if prefer != "ipc" and not pool_swapped:
            return (), None
        wanted, gpu = KINDS if prefer == "ipc" else ("pool",), self._channel._gpu
        if gpu.out is None or gpu.out is False:
            return (), None  # the first GPU value proves the arena's tier, which this one stands on
        best = "pool" if wanted == ("pool",) else "ipc"
        if self.out is None and gpu.out is True:
            self._ask()
        if self.out is True:
            return wanted, None
        under_way = "the other side only passes values on" if gpu.out == "blind" else "its proof on this connection is under way"
        reason = self.reason or under_way
        return (), (best, "copy", f"a value by token: {reason}")

    def _ask(self):
        from . import _gpu_canary, pool

        backend = _gpu_canary.gpu_backend()
        self.out = "asked"
        try:
            if not isinstance(backend, _gpu_canary._Backend):
                raise errors.Unsupported(backend or "torch is not loaded in this process")
            self._channel._transmit(["k", "gpu-x-pool"], pool.offer())
            with backend.aside():
                self._channel._transmit(["k", "gpu-x"], backend.plain_probes())
        except _gpu_canary._ENDED:
            raise
        except Exception as e:  # whatever torch or the driver says
            self._off(f"{type(e).__name__}: {e}")

    def receive(self, message):
        """A message of the proof, on the reading thread, with no lock held."""
        from . import _gpu_canary, pool

        step = message.header[1]
        if step == "gpu-x-ok":
            self.out = True if self.out == "asked" else self.out
        elif step == "gpu-x-bad":
            self._off(str(message.decode()))
        elif step == "gpu-x-pool":
            pool.take(self._channel._serial, message.decode())
        elif step == "gpu-x":
            why = _gpu_canary.fault_of(_gpu_canary.gpu_backend(), message)
            self._channel._quietly(["k", "gpu-x-bad"], why) if why else self._channel._quietly(["k", "gpu-x-ok"])

    def _off(self, why):
        self.out = False
        self.reason = f"the tier failed its proof and is off for this connection: {why}"
        log.warning("values by token to %s are off, they are copied: %s", self._channel.peer.name, why)
