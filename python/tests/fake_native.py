"""A stand-in for the functions of `millpond._native`, for tests of pure Python: every message is copied into memory of this
process, every import is counted, and memory is overwritten when it is released, so that a use after release shows."""

import collections
import ctypes
import queue

from millpond import _native, errors


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Fake:
    """Two channels, 1 and 2, that are each other's ends."""

    def __init__(self):
        self.queues = collections.defaultdict(queue.Queue)
        self.memory = {}  # handle or address -> buffer
        self.released = []
        self.sent = []
        self.next = 1
        self.managed = {}

    def install(self, monkeypatch):
        for name in (
            "control number send receive allocate deallocate import_open import_ready import_release wait_done record_stream dlpack_capsule"
        ).split():
            monkeypatch.setattr(_native, name, getattr(self, name))
        return self

    @property
    def live(self):
        return len(self.memory)

    def number(self, n):
        return n

    def control(self, op, **fields):
        if op == "close":
            for channel in (1, 2):
                self.queues[channel].put(None)
        return {}

    def send(self, channel, tree, tensors, timeout_ms):
        self.sent.append((tree, list(tensors)))
        ranges = []
        for address, nbytes, _, handle, device, flags in tensors:
            source = ctypes.addressof(self.memory[handle]) if handle else address
            copy = (ctypes.c_char * nbytes).from_buffer_copy(ctypes.string_at(source, nbytes))
            ranges.append((copy, nbytes, device, flags & _native.READ_ONLY))
        self.queues[3 - channel].put((tree, ranges))
        return [0 if t[3] or self._holds(t[0]) else _native.COPIED for t in tensors]

    def _holds(self, address):
        return any(key <= address < key + len(buffer) for key, buffer in self.memory.items())

    def receive(self, channel, timeout_ms, flags, streams):
        try:
            message = self.queues[channel].get(timeout=None if timeout_ms < 0 else timeout_ms / 1000 or 0.001)
        except queue.Empty:
            raise errors.Timeout("nothing came") from None
        if message is None:
            self.queues[channel].put(None)
            raise errors.Closed("the channel ended")
        tree, ranges = message
        out = []
        for buffer, nbytes, device, flag in ranges:
            handle = self._keep(buffer)
            address = 0 if flags & _native.LAZY else ctypes.addressof(buffer)
            out.append((address, nbytes, 0, handle, device, flag))
        return tree.decode("utf-8"), out, 7

    def _keep(self, buffer):
        handle, self.next = self.next, self.next + 1
        self.memory[handle] = buffer
        return handle

    def allocate(self, device, nbytes, stream):
        buffer = (ctypes.c_char * nbytes)()
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def deallocate(self, address):
        self._release(address)

    def import_release(self, handle):
        self._release(handle)

    def _release(self, key):
        buffer = self.memory.pop(key)  # KeyError: released twice
        ctypes.memset(ctypes.addressof(buffer), 0xDD, len(buffer))
        self.released.append((key, buffer))  # kept, so that a use after release reads 0xDD and does not crash

    def import_open(self, handle, stream, flags):
        buffer = self.memory[handle]
        return ctypes.addressof(buffer), len(buffer), stream, handle, -1, 0

    def import_ready(self, handle, timeout_ms):
        assert handle in self.memory

    def wait_done(self, address, stream, flags, timeout_ms):
        pass

    def record_stream(self, address, stream):
        pass

    def dlpack_capsule(self, address, device, code, bits, shape, strides, owner, kind):
        ndim = len(shape)
        numbers = (ctypes.c_int64 * (2 * ndim or 1))(*shape, *strides)
        base = ctypes.addressof(numbers)
        managed = _Managed(_DLTensor(address, 1, 0, ndim, code, bits, 1, base, base + 8 * ndim, 0))
        at = ctypes.addressof(managed)

        def delete(_):
            self.managed.pop(at)
            self._release(owner)

        deleter = _DELETER(delete)
        managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
        self.managed[at] = (managed, numbers, deleter)
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))
        return new(at, b"dltensor", None)
