"""A worker whose memory does not carry bytes as they are, in the way that its argument names."""

import ctypes
import sys

import millpond
from millpond import _native, _ref

how = sys.argv[1]
real_receive = _native.receive
real_send = _native.send


def receive_and_spoil(*arguments):
    tree, tensors, sender = real_receive(*arguments)
    for address, nbytes, *_ in tensors:
        if nbytes >= 2 << 20:
            ctypes.memset(address + (1 << 20) + 12345, 0, 1)
    return tree, tensors, sender


def spoil_and_send(channel, tree, tensors, timeout_ms):
    for address, nbytes, *_ in tensors:
        if nbytes == 70:
            ctypes.memset(address + 3, 0xEE, 1)
    return real_send(channel, tree, tensors, timeout_ms)


def lose_offset(*args):
    value = real_ref(*args)
    if value._offset:
        value._offset = 0
    return value


if how == "received":
    _native.receive = receive_and_spoil
elif how == "sent":
    _native.send = spoil_and_send
elif how == "offset":
    real_ref = _ref.Ref
    from millpond import _decode

    _decode._ref = type("spoiled", (), {"Ref": staticmethod(lose_offset), "available": staticmethod(_ref.available)})

millpond.attach()
if how == "dies":
    _native.send = lambda *a: sys.exit(3)
try:
    millpond.connection(timeout=30)
except millpond.Refused as e:
    print(e)
    sys.exit(7)
