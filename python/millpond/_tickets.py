"""Tickets: values for a receiver that is not known yet, as text that goes any way (a queue, a file, another system's message)."""

from . import _decode, _native, _session, _tree


def ticket(value, many=False):
    """A value as text of offsets, for whoever redeems it. Its memory lives until the ticket is redeemed and the receiver is
    done, until `cancel_ticket`, or until this process ends. `many`: it may be redeemed any number of times."""
    _session.info()
    encoded = _tree.encode(value, ["m"], "ticket")
    text, _ = _native.ticket(encoded.text, encoded.tensors, many)
    return text


def redeem(text, lazy=False):
    """The value of a ticket, in any process that is attached to the same arena. `Stale`: it was redeemed or cancelled, its
    maker has ended, or it is another arena's."""
    _session.info()
    return _decode.Received(*_native.redeem(text.encode() if isinstance(text, str) else bytes(text))).decode(lazy)


def cancel_ticket(text):
    """Ends a ticket of this process; what was redeemed stays."""
    _native.ticket_cancel(text.encode() if isinstance(text, str) else bytes(text))
