"""Callbacks on pressure, refusal and death: a growth that does not fit, a client that is gone, told of by a thread of ours.

The native library puts each event into a short queue; the thread takes it out and calls. Neither malloc nor the owner waits for
it, so a callback may take its time, allocate, send; what comes meanwhile is kept, 64 events at most (`missed` says how many were not)."""

import logging
import threading

from . import _native, errors
from ._record import Record

log = logging.getLogger("millpond")
#: How long the thread stays in one native wait.
_WAIT_MS = 60_000

_lock = threading.Lock()
_functions = {"pressure": [], "refusal": [], "death": []}
_thread = None


class Event(Record):
    """A growth that did not fit, as of that moment. Sizes are in bytes."""

    __slots__ = ()
    kind: str  # "pressure": others are asked to give back; "refusal": it was refused
    device: str  # its identity, as in the ledger
    name: str  # who asked
    pid: int
    client: int  # its slot
    asked: int
    limit: int  # the one in the way: the arena's, or the client's own
    reserved: int
    free: int
    missed: int  # events before this one that were lost, since no callback took them in time

    def __str__(self):
        from ._ledger import size

        what = "asks for" if self.kind == "pressure" else "was refused"
        return f"{self.name} (pid {self.pid}) {what} {size(self.asked)}; {size(self.free)} of {size(self.limit)} free on {self.device}"


class Death(Record):
    """A client that is gone."""

    __slots__ = ()
    name: str
    pid: int
    client: int  # its slot
    serial: int  # which client of that slot
    cause: "str | None"  # why the owner killed it, if it did: "killed by policy: stopped for 12 s"
    missed: int  # events before this one that were lost, since no callback took them in time

    def __str__(self):
        return f"{self.name} (pid {self.pid}) {'was ' + self.cause if self.cause else 'has ended'}"


def on(kind, function):
    """Registers a callback, and starts the thread with the first."""
    global _thread
    if not callable(function):
        raise errors.InvalidArgument(f"on_{kind}() takes a function of one event, not {function!r}")
    _native.control("listen")
    with _lock:
        _functions[kind].append(function)
        if _thread is None:
            _thread = threading.Thread(target=_deliver, daemon=True, name="millpond-events")
            _thread.start()
    return function


def on_refusal(function):
    """Calls `function(event)` when the owner refuses a growth: this process's own, in a worker; anybody's, in a parent. Also a
    decorator. See `Arena.on_refusal`."""
    return on("refusal", function)


def off(function):
    """Takes a callback back. Whether it was one."""
    with _lock:
        found = [functions for functions in _functions.values() if function in functions]
        for functions in found:
            functions.remove(function)
    return bool(found)


def clear():
    """Forgets all: this process leaves its owner."""
    global _thread
    with _lock:
        _thread = None
        for functions in _functions.values():
            functions.clear()


def _deliver():
    me = threading.current_thread()
    while _thread is me:
        try:
            found = _native.control("next_event", timeout_ms=_WAIT_MS)["event"]
        except errors.Error:
            return  # detached
        if found is not None and _thread is me:
            deliver(found)


def deliver(found):
    """Calls everybody who waits for such an event."""
    by = found.pop("by")
    kind, who = found["kind"], {"name": by["name"], "pid": by["pid"], "client": by["client"]}
    if kind == "death":
        event = Death(who, serial=by["serial"], cause=found.get("cause"), missed=found["missed"])
    else:
        event = Event(found, **who)
    with _lock:
        functions = list(_functions.get(kind, ()))
    for function in functions:
        try:
            function(event)
        except Exception:
            log.exception("the callback %r failed on: %s", function, event)
