"""By which tier values crossed, and why not by a better one.

    arena   an offset: the value was in arena memory already
    copy    copied into the arena first (one copy on its own device), then an offset
    pool    a pointer of a shared `cudaMemPool` (`millpond.pool.swap()`): no copy
    ipc     a handle of plain `cudaMalloc` memory (`prefer="ipc"`, or the arena is full): no copy
    pinned  a GPU value that went through registered host memory, at the bus's rate: by choice, or as its GPU tier is off
    host    the same through host memory that could not be registered, or a small value
    inline  small bytes and numpy scalars, in the message itself

Each reason for a fall is logged once a connection (logger "millpond"; what is slow as a warning) and counted here, for this process,
and in the ledger, for everybody: `millpond ledger --counts`, `millpond metrics`.
"""

import logging
import threading

from . import _native

log = logging.getLogger("millpond")
NAMES = ("arena", "copy", "pool", "ipc", "pinned", "host", "inline")
#: Copies below this are ordinary, and logged as information.
_LOUD_BYTES = 1 << 20

_lock = threading.Lock()
_totals = dict.fromkeys(NAMES, 0)
_bytes = dict.fromkeys(NAMES, 0)
_falls = {}
_steps = {}


def count_tier(tier, nbytes, values=1):
    """Values crossed by a tier. Everything that this process counts of tiers goes through here."""
    with _lock:
        _totals[tier] += values
        _bytes[tier] += nbytes


def count_fall(best, to, reason):
    """A value fell from one tier to a lower one. Everything that this process counts of falls goes through here."""
    with _lock:
        _falls[reason] = _falls.get(reason, 0) + 1
        _steps[(best, to)] = _steps.get((best, to), 0) + 1


def totals():
    """Values by tier, over all connections of this process so far."""
    with _lock:
        return dict(_totals)


def nbytes():
    """Bytes by tier, over all connections of this process so far."""
    with _lock:
        return dict(_bytes)


def falls():
    """How often each reason for a fall was met, over all connections of this process so far."""
    with _lock:
        return dict(_falls)


def steps():
    """How often values fell from one tier to another: {"arena to copy": n, ...}."""
    with _lock:
        return {f"{best} to {to}": n for (best, to), n in _steps.items()}


class Tiers:
    """The counts of one connection."""

    __slots__ = ("counts", "_told", "_peer")

    def __init__(self, peer):
        self.counts = dict.fromkeys(NAMES, 0)
        self._told = set()
        self._peer = peer

    def add(self, tier, values, size):
        """Counts values of one message."""
        with _lock:
            self.counts[tier] += values
        count_tier(tier, size, values)
        if tier == "inline":  # the library counts the others
            _native.count(b"sent.inline", values)

    def fell(self, best, to, reason, size, loud=False, counter=None):
        """Something went by a lower tier than its best. `counter`: which of the ledger's counters of falls, where the library has not
        counted it."""
        if counter:
            _native.count(counter)
        count_fall(best, to, reason)
        with _lock:
            if reason in self._told:
                return
            self._told.add(reason)
        level = logging.WARNING if loud or size >= _LOUD_BYTES else logging.INFO
        said = "to %s, by %s and not by %s: %s (%d bytes; said once, counted in millpond.counters())"
        log.log(level, said, self._peer, to, best, reason, size)
