"""The seam to the native library: ctypes over include/millpond.h, and nothing else.

Everything else in the package calls the functions of this module; tests replace them here and only here. Functions that may
block go through `CDLL` (the GIL is released); those that never do go through `PyDLL`, which is cheaper.
"""

import ctypes
import json
import os
import struct
import threading
import time

from . import errors

ABI_VERSION = 2
COPIED, READ_ONLY = 1, 2
#: What a range that stands for another value is counted as (millpond_tensor.flags).
WAYS = {tier: number << 8 for number, tier in enumerate(("arena", "copy", "pool", "ipc", "pinned", "host"), 1)}
UNCOUNTED = 15 << 8
LAZY, WAIT, EAGER, READY = 1, 2, 4, 8
#: Set by a send: the memory lies in a segment that torch's caching allocator cuts into tensors itself (pool mode).
IN_SEGMENT = 16
_ANY_IN_SEGMENT = 1 << 62
KIND_IMPORT, KIND_BLOCK = 0, 1

#: millpond_tensor: address, bytes, stream, import_, device, flags.
TENSOR = struct.Struct("=QQQQiI")
_Tensor = ctypes.c_char * TENSOR.size
#: What `millpond_receive` puts before the tensors: their number, the sender.
_HEAD = struct.Struct("=QQ").unpack_from
#: Where the first of the tensors behind it begins.
_BEHIND_HEAD = 16
_tensor_at, _tensors_in = TENSOR.unpack_from, TENSOR.iter_unpack
#: Packs so many streams.
_STREAMS = [struct.Struct(f"={n}Q").pack for n in range(9)]
#: Of so many tensors `millpond_send` says in its result which were copied.
_IN_RESULT = 62
#: Messages up to this size need no memory of their own to be received.
_BUFFER_BYTES = 16 << 10
#: How long the main thread stays in one native wait before Python may handle a signal (Ctrl-C).
_SLICE, _SLICE_MS = 0.2, 200
_FOR_EVER_MS = 1 << 40
#: Longer limits, in seconds, are this one: neither Python's locks nor the C API have them.
LONGEST = 1e9
#: Instead of a message that is no text: it is refused as one that is not ours, and what came with it is let go.
_NO_TEXT = ""

_lock = threading.Lock()
_loaded = None
#: The thread that Python handles signals on.
_MAIN = threading.main_thread().ident
_this_thread, _now = threading.get_ident, time.monotonic


def _in_child():
    global _MAIN
    _MAIN = threading.get_ident()  # whichever thread forked is the child's main one


os.register_at_fork(after_in_child=_in_child)


class _Message(ctypes.Structure):
    _fields_ = [
        ("tree", ctypes.c_void_p),
        ("tree_bytes", ctypes.c_size_t),
        ("tensors", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("sender", ctypes.c_uint64),
    ]


_u64, _i64, _u32, _i32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int32
_ptr, _size = ctypes.c_void_p, ctypes.c_size_t

#: A number that is C's already costs a call less than one that is to become it.
number = _u64
_COUNTS = [_size(n) for n in range(_IN_RESULT + 1)]
_FLAGS = [_u32(n) for n in range((LAZY | WAIT | EAGER | READY) + 1)]
_NO_LIMIT = _i64(-1)

# name -> (result, arguments). The allocator's own entry points are only ever handed to torch as addresses.
_BLOCKING = {
    "millpond_control": (_ptr, [ctypes.c_char_p]),
    "millpond_allocate": (_u64, [_i32, _u64, _u64]),
    "millpond_send": (_i64, [_u64, ctypes.c_char_p, _size, ctypes.c_char_p, _size, _i64, _ptr]),
    "millpond_receive": (_i64, [_u64, _i64, _u32, ctypes.c_char_p, _size, _ptr, _size, _ptr]),
    "millpond_import_open": (_i32, [_u64, _u64, _u32, _ptr]),
    "millpond_import_ready": (_i32, [_u64, _i64]),
    "millpond_adopt": (_i32, [_u64, _u64, _i64]),
    "millpond_ticket": (_ptr, [ctypes.c_char_p, _size, _ptr, _size, _u32]),
    "millpond_redeem": (_i32, [ctypes.c_char_p, _size, ctypes.POINTER(ctypes.POINTER(_Message))]),
    "millpond_torch_capture_failed": (None, []),
    "millpond_wait_done": (_i32, [_u64, _u64, _u32, _i64]),
}
_QUICK = {
    "millpond_abi_version": (_u32, []),
    "millpond_version": (ctypes.c_char_p, []),
    "millpond_last_error": (ctypes.c_char_p, []),
    "millpond_string_free": (None, [_ptr]),
    "millpond_deallocate": (_i32, [_u64]),
    "millpond_message_free": (None, [ctypes.POINTER(_Message)]),
    "millpond_count": (_i32, [_i32, ctypes.c_char_p, _u64]),
    "millpond_import_record_stream": (_i32, [_u64, _u64]),
    "millpond_import_release": (_i32, [_u64]),
    "millpond_ticket_cancel": (_i32, [ctypes.c_char_p, _size]),
    "millpond_dlpack_capsule": (ctypes.py_object, [ctypes.c_char_p]),
    "millpond_dlpack_init": (None, [_ptr, _ptr, _ptr]),
    "millpond_torch_can_throw": (_i32, []),
    "millpond_torch_answer_cache_info": (_i32, []),
}


def library_path():
    """Where the library is: `MILLPOND_LIBRARY`, else beside the package."""
    path = os.environ.get("MILLPOND_LIBRARY")
    return path or os.path.join(os.path.dirname(os.path.abspath(__file__)), "libmillpond_torch.so")


class _Library:
    """The loaded library: each function with its types set."""

    def __init__(self, path):
        self.path = path
        try:
            blocking, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        except OSError as e:
            raise errors.Unsupported(
                f"cannot load the native library: {e}; set MILLPOND_LIBRARY to the path of libmillpond_torch.so"
            ) from None
        self.cdll = blocking
        for dll, table in ((quick, _QUICK), (blocking, _BLOCKING)):
            for name, (result, arguments) in table.items():
                try:
                    function = getattr(dll, name)
                except AttributeError:
                    raise errors.Unsupported(f"{path} has no function {name}: it is not this version of millpond") from None
                function.restype, function.argtypes = result, arguments
                setattr(self, name[len("millpond_") :], function)
        version = self.abi_version()
        if version != ABI_VERSION:
            raise errors.Unsupported(f"{path} has ABI version {version}, this package needs {ABI_VERSION}")
        api = ctypes.pythonapi
        self.dlpack_init(*[ctypes.cast(f, _ptr).value for f in (api.PyCapsule_New, api.PyCapsule_IsValid, api.PyCapsule_GetPointer)])

    def address_of(self, name):
        """The address of one of the functions, for torch."""
        return ctypes.cast(getattr(self.cdll, name), _ptr).value


def library():
    """The library, loaded at the first call."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _Library(library_path())
    return _loaded


def last_error(what):
    """This thread's last error as an exception."""
    text = library().last_error()
    try:
        report = json.loads(text) if text else {}
    except ValueError:
        report = {"message": text.decode("utf-8", "replace")}
    code = report.pop("code", "Internal")
    message = report.pop("message", None) or f"{what} failed and did not say why"
    return errors.make(code, message, report)


def milliseconds(timeout):
    """A time-out in seconds (None: no limit) as the C API has it."""
    if timeout is None:
        return -1
    return 0 if timeout <= 0 else int((LONGEST if timeout > LONGEST else timeout) * 1000 + 0.999)


def deadline(timeout):
    """When a time-out in seconds is over, by the monotonic clock; None: never."""
    return None if timeout is None else _now() + (LONGEST if timeout > LONGEST else timeout)


def in_slices(step, timeout, end=None):
    """Runs `step(timeout_ms)` until it does not time out. The main thread comes back for signals now and then. `end`: the deadline of
    `timeout`, where the caller has it."""
    if _this_thread() != _MAIN:
        return step(_FOR_EVER_MS if timeout is None else milliseconds(timeout))
    if end is None:
        end = deadline(timeout)
    while True:
        try:
            return step(_SLICE_MS if timeout is None or timeout > _SLICE else milliseconds(timeout))
        except errors.Timeout:
            if end is not None:
                timeout = end - _now()
                if timeout <= 0:
                    raise


def control(op, **fields):
    """One request to the control plane. Fields that are None are left out."""
    request = {"op": op}
    request.update((k, v) for k, v in fields.items() if v is not None)
    lib = library()
    answer = lib.control(json.dumps(request).encode())
    if not answer:
        raise last_error(op)
    try:
        return json.loads(ctypes.string_at(answer))
    finally:
        lib.string_free(answer)


def count(counter, n=1, device=-1):
    """Adds to one of this process's counters in the ledger (`b"sent.inline"`). Quiet: it never stands in a value's way."""
    if _loaded is not None:
        _loaded.count(device, counter, n)


def send(channel, tree, tensors, timeout_ms):
    """Sends one message. `tensors`: tuples as in `TENSOR`. Returns for each whether it was copied first (`COPIED` or 0), all
    with `IN_SEGMENT` if the memory of one or more lies in a segment of torch's."""
    count = len(tensors)
    packed = TENSOR.pack(*tensors[0]) if count == 1 else _packed(tensors) if count else None
    copied = (ctypes.c_ubyte * count)() if count > _IN_RESULT else None
    limit = _NO_LIMIT if timeout_ms == -1 else timeout_ms
    bits = (_loaded or library()).send(channel, tree, len(tree), packed, count if copied else _COUNTS[count], limit, copied)
    if bits < 0:
        raise last_error("send")
    if not bits and copied is None:
        return [0] * count
    flags = list(copied) if copied is not None else [bits >> n & COPIED for n in range(count)]
    return [flag | IN_SEGMENT for flag in flags] if bits & _ANY_IN_SEGMENT else flags


def _packed(tensors):
    return b"".join([TENSOR.pack(*tensor) for tensor in tensors])


#: Where messages come to, as far as nobody uses these now. A receive in the middle of another one on its thread (a signal handler's) has its own.
_spare = []


def _parts():
    buffer, out = bytearray(_BUFFER_BYTES), _ptr()
    at = _ptr(ctypes.addressof((ctypes.c_char * _BUFFER_BYTES).from_buffer(buffer)))
    return buffer, at, _size(_BUFFER_BYTES), out, _ptr(ctypes.addressof(out))


def receive(channel, timeout_ms, flags, streams):
    """Receives one message: (tree as text, list of `TENSOR` tuples, sender)."""
    lib = _loaded or library()
    try:
        parts = _spare.pop()
    except IndexError:
        parts = _parts()
    try:
        buffer, at, capacity, out, out_at = parts
        count = len(streams)
        packed = _STREAMS[count](*streams) if count < len(_STREAMS) else struct.pack(f"={count}Q", *streams)
        length = lib.receive(channel, timeout_ms, _FLAGS[flags], packed, count, at, capacity, out_at)
        if length <= 0:
            if length:
                raise last_error("receive")
            return _unpacked(lib, ctypes.cast(out, ctypes.POINTER(_Message)))
        count, sender = _HEAD(buffer)
        if not count:
            tensors, end = (), _BEHIND_HEAD
        elif count == 1:
            tensors, end = (_tensor_at(buffer, _BEHIND_HEAD),), _BEHIND_HEAD + TENSOR.size
        else:
            end = _BEHIND_HEAD + count * TENSOR.size
            tensors = list(_tensors_in(buffer[_BEHIND_HEAD:end]))
        try:
            return buffer[end:length].decode("utf-8", "surrogatepass"), tensors, sender
        except UnicodeDecodeError:
            return _NO_TEXT, tensors, sender
    finally:
        _spare.append(parts)


def _unpacked(lib, out):
    try:
        message = out.contents
        count = message.count
        tensors = list(TENSOR.iter_unpack(ctypes.string_at(message.tensors, count * TENSOR.size))) if count else []
        try:
            tree = ctypes.string_at(message.tree, message.tree_bytes).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            tree = _NO_TEXT
        return tree, tensors, message.sender
    finally:
        lib.message_free(out)


def ticket(tree, tensors, many):
    """A message for whoever redeems it: (its text, the flags that came back)."""
    lib = library()
    size = len(tensors) * TENSOR.size
    buffer = ctypes.create_string_buffer(_packed(tensors), size) if size else None  # it is written to
    text = lib.ticket(tree, len(tree), buffer, len(tensors), 1 if many else 0)
    if not text:
        raise last_error("ticket")
    try:
        return ctypes.string_at(text), [t[5] for t in TENSOR.iter_unpack(buffer)] if tensors else []
    finally:
        lib.string_free(text)


def redeem(text):
    """Takes a ticket up: what `receive` gives."""
    lib = library()
    out = ctypes.POINTER(_Message)()
    if lib.redeem(text, len(text), ctypes.byref(out)) < 0:
        raise last_error("redeem")
    return _unpacked(lib, out)


def ticket_cancel(text):
    """Ends a ticket of ours. Quiet: finalisers call it."""
    if _loaded is not None:
        _loaded.ticket_cancel(text, len(text))


def allocate(device, nbytes, stream):
    """A block of the arena: its address."""
    address = library().allocate(device, nbytes, stream)
    if not address:
        raise last_error("allocate")
    return address


def deallocate(address):
    """Gives a block back. Quiet: it is called by finalisers."""
    if _loaded is not None:
        _loaded.deallocate(address)


def import_open(handle, stream, flags):
    """Maps an import and makes the stream wait for READY: a `TENSOR` tuple."""
    buffer = _Tensor()
    if library().import_open(handle, stream, flags, buffer) < 0:
        raise last_error("import")
    return TENSOR.unpack(buffer)


def import_ready(handle, timeout_ms):
    """Returns when READY is reached."""
    if library().import_ready(handle, timeout_ms) < 0:
        raise last_error("ready")


def adopt(handle, address, timeout_ms):
    """The import, or with 0 what is mapped at an address, outlives its maker."""
    if library().adopt(handle, address, timeout_ms) < 0:
        raise last_error("adopt")


def import_release(handle):
    """Ends an import. Quiet: it is called by finalisers."""
    if _loaded is not None:
        _loaded.import_release(handle)


def record_stream(address, stream):
    """DONE of the import that holds this address shall follow that stream too."""
    if library().import_record_stream(address, stream) < 0:
        raise last_error("record_stream")


def wait_done(address, stream, flags, timeout_ms):
    """Returns when every receiver of this block is done."""
    if library().wait_done(address, stream, flags, timeout_ms) < 0:
        raise last_error("wait_done")


def _dlpack_spec(ndim):
    """millpond_dlpack_spec with the shape and the strides right behind it."""
    return struct.Struct(f"=QiiiBBHQI4x{2 * ndim}q").pack


_DLPACK_SPECS = [_dlpack_spec(ndim) for ndim in range(9)]


def dlpack_capsule(address, device, code, bits, shape, strides, owner, kind):
    """A "dltensor" capsule over our memory, whose deleter ends the import (or frees the block) `owner`."""
    ndim = len(shape)
    pack = _DLPACK_SPECS[ndim] if ndim < 9 else _dlpack_spec(ndim)
    kind_of_device, device = (2, device) if device >= 0 else (1, 0)
    try:
        spec = pack(address, kind_of_device, device, ndim, code, bits, 1, owner, kind, *shape, *strides)
    except struct.error as e:
        raise errors.InvalidArgument(f"no tensor can have shape {shape} and strides {strides}: {e}") from None
    try:
        return (_loaded or library()).dlpack_capsule(spec)
    except ValueError:  # ctypes' word for null
        raise last_error("dlpack") from None
