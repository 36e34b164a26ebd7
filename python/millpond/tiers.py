"""By which tier values crossed, and why not by a better one.

    arena   an offset: the value was in arena memory already
    copy    copied into the arena first (one copy on its own device), then an offset
    host    a GPU value that went through host memory: its GPU tier is off, or the arena serves no GPU
    inline  small bytes and numpy scalars, in the message itself

Each reason for a fall is logged once a connection (logger "millpond"; what is slow as a warning) and counted here, for this process,
and in the ledger, for everybody: `millpond ledger --counts`, `millpond metrics`.
"""

import logging
import threading

from . import _native

log = logging.getLogger("millpond")
NAMES = ("arena", "copy", "host", "inline")
#: Copies below this are ordinary, and logged as information.
_LOUD_BYTES = 1 << 20

_lock = threading.Lock()
_totals = dict.fromkeys(NAMES, 0)
_falls = {}


def totals():
    """Values by tier, over all connections of this process so far."""
    with _lock:
        return dict(_totals)


def falls():
    """How often each reason for a fall was met, over all connections of this process so far."""
    with _lock:
        return dict(_falls)


class Tiers:
    """The counts of one connection."""

    __slots__ = ("counts", "_told", "_peer")

    def __init__(self, peer):
        self.counts = dict.fromkeys(NAMES, 0)
        self._told = set()
        self._peer = peer

    def add(self, arena, copy, host, inline):
        """Counts one message."""
        with _lock:
            for counts in (self.counts, _totals):
                counts["arena"] += arena
                counts["copy"] += copy
                counts["host"] += host
                counts["inline"] += inline
        if inline:  # the library counts the others
            _native.count(b"sent.inline", inline)

    def fell(self, reason, nbytes, loud=False, counter=None):
        """Something went by a lower tier than its best. `counter`: which of the ledger's counters of falls, where the library has not
        counted it."""
        if counter:
            _native.count(counter)
        with _lock:
            _falls[reason] = _falls.get(reason, 0) + 1
            if reason in self._told:
                return
            self._told.add(reason)
        level = logging.WARNING if loud or nbytes >= _LOUD_BYTES else logging.INFO
        log.log(level, "to %s: %s (%d bytes; said once, counted in millpond.counters())", self._peer, reason, nbytes)
