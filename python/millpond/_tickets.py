"""Tickets: values for a receiver that is not known yet, as text that goes any way (a queue, a file, another system's message)."""

import collections
import threading
import time
import weakref

from . import _decode, _foreign, _native, _session, _tree


def ticket(value, many=False):
    """A value as text of offsets, for whoever redeems it. Its memory lives until the ticket is redeemed and the receiver is
    done, until `cancel_ticket`, or until this process ends. `many`: it may be redeemed any number of times."""
    _session.info()
    encoded = _tree.encode(value, ["m"], "ticket")
    text, flags = _native.ticket(encoded.text, encoded.tensors, many)
    if any(flag & _native.IN_SEGMENT for flag in flags):
        _foreign.sent_from_segments(encoded, flags)
    return text


def redeem(text, lazy=False):
    """The value of a ticket, in any process that is attached to the same arena. `Stale`: it was redeemed or cancelled, its
    maker has ended, or it is another arena's."""
    _session.info()
    return _decode.Received(*_native.redeem(text.encode() if isinstance(text, str) else bytes(text))).decode(lazy)


def cancel_ticket(text):
    """Ends a ticket of this process; what was redeemed stays."""
    _native.ticket_cancel(text.encode() if isinstance(text, str) else bytes(text))


# For systems that carry text: what is made and not taken, what is taken twice.

_lock = threading.Lock()
_made = collections.deque()  # (when it expires, ticket)
_taken = weakref.WeakValueDictionary()  # ticket -> its value, while somebody has it


def kept(value, expire):
    """A ticket that is cancelled at the first one made after `expire` seconds (None: never)."""
    text = ticket(value)
    if expire is not None:
        now = time.monotonic()
        with _lock:
            while _made and _made[0][0] <= now:
                cancel_ticket(_made.popleft()[1])
            _made.append((now + expire, text))
    return text


def taken(text):
    """The value of a ticket that may stand several times in one message: while the first is alive, the same object."""
    with _lock:
        value = _taken.get(text)
        if value is None:
            value = redeem(text)
            try:
                _taken[text] = value
            except TypeError:  # bytes and the like
                pass
        return value
