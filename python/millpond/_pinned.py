"""Copies between a GPU and host memory at the bus's rate: the library registers the host arena's memory once and reuses it.

Over a channel the two copies of a value overlap: the sender's is queued in pieces (`out`), the message leaves with a signal for each
piece, and the receiver copies each as soon as it is there (`into`) while the sender waits for the end of its own (`over`).

Before its first value on a GPU the tier proves itself, in this process: bytes go there and back, and are compared. Where they differ
it is off for that GPU, and torch copies."""

import sys
import threading

from . import _native, _streams, errors
from .tiers import log

#: Below this torch copies: registering a slab of the arena would cost more.
LEAST = 256 << 10
#: How long one native wait for a piece may be before Python may handle a signal (Ctrl-C).
_SLICE_MS = 200
#: What the other side, or this one's end, did: no other copy would help.
_FINAL = (errors.PeerDied, errors.Stale, errors.Protocol, errors.Closed, errors.Forked, errors.NotAttached)
_told = False
_works = {}  # GPU -> whether the tier carries bytes there
_proving = threading.RLock()


def gpu(ordinal):
    """What torch calls a GPU."""
    return f"cuda:{ordinal}"


def works(device):
    """Whether the tier has carried bytes to this GPU and back; tries it where that is not known."""
    known = _works.get(device)
    if known is not None:
        return known
    with _proving:
        if device not in _works:
            why = _fault(device)
            if why:
                log.warning("copies through pinned host memory are off for GPU %d, torch makes them: the canary failed: %s", device, why)
            _works[device] = not why
        return _works[device]


def _fault(device):
    """What is wrong with bytes that went to a GPU and came back; empty where nothing is. What the library cannot do it raises."""
    from . import _ref, canary

    torch = sys.modules["torch"]
    data = torch.frombuffer(bytearray((canary.pattern(300) * (LEAST // 251 + 1))[:LEAST]), dtype=torch.uint8)
    sent, back = (_ref.empty((LEAST,), "uint8", -1, "t") for _ in range(2))
    there = torch.empty(LEAST, dtype=torch.uint8, device=gpu(device))
    sent.copy_(data)
    back.zero_()
    for way, to, source, seen in (("to it", there, sent, lambda: there.cpu()), ("from it", back, there, lambda: back)):
        _ask("copy_by_host", device, to.data_ptr(), source.data_ptr(), LEAST)
        wrong = (seen() != data).nonzero()
        if len(wrong):
            return f"byte {int(wrong[0])} of {LEAST} {way} is not what was sent"
    return ""


def _ask(op, device, to, source, nbytes):
    return _native.control(op, **{"device": device, "to": to, "from": source, "bytes": nbytes, "stream": _streams.current(device)})


def copy(device, to, source, nbytes):
    """Copies between GPU memory and host memory, behind the work of this thread's stream, and waits: the tier that it went by
    ("pinned", "host"). None: it did not, and the caller copies in another way."""
    if nbytes < LEAST:
        return None
    try:
        if not works(device):
            return None
        return _tier(_ask("copy_by_host", device, to, source, nbytes))
    except errors.Error as e:
        return _tell(e)


def out(device, to, source, nbytes):
    """Queues the copy of GPU memory to a block of the host arena: (its number, its pieces, the tier). `over` must follow before either
    is used again. None: nothing was queued, and the caller copies in another way."""
    if nbytes < LEAST:
        return None
    try:
        if not works(device):
            return None
        done = _ask("copy_out", device, to, source, nbytes)
    except errors.Unsupported:
        return None  # a GPU that the arena does not serve has no signals: `copy` does it
    except errors.Error as e:
        return _tell(e)
    return done["number"], done["pieces"], _tier(done)


def over(number):
    """Returns when a copy of `out` is over."""
    _native.control("copied_out", number=number)


def into(device, to, memory, offset, nbytes, pieces):
    """Copies a received value in host memory to a GPU, each piece as soon as it is there, behind the work of this thread's stream: the
    tier, or None as for `copy`. `PeerDied` if the sender ended before."""
    what = {"device": device, "import": memory.handle, "offset": offset, "bytes": nbytes, "to": to, "pieces": pieces}
    what["stream"] = _streams.current(device)
    total, done = {"pinned": 0, "pageable": 0}, 0
    try:
        if not works(device):
            return None
        while done < nbytes:
            got = _native.control("copy_in", done=done, timeout_ms=_SLICE_MS, **what)
            done = got["done"]
            for key in total:
                total[key] += got.get(key, 0)
    except _FINAL:
        raise
    except errors.Error as e:
        return _tell(e)
    return _tier(total)


def _tier(done):
    return "pinned" if done.get("pinned", 0) >= done.get("pageable", 0) else "host"


def _tell(e):
    """Says once why torch copies."""
    global _told
    if not _told:
        _told = True
        log.warning("copies through host memory are slower here, torch makes them: %s: %s", e.code, e)
