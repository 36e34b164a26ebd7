"""The canary: a connection is proved before it is used, by values that go the way of all values.

At every `arena.accept()` and its `connection()`: both sides send 8x8 float32, a view of it, bfloat16, a value of over 2 MiB,
one of no elements, one at an offset in its block, bytes from outside of the arena and inline ones, and compare what came,
byte by byte. Where that fails the worker is refused by name. There is no switch.

The GPU tier has a canary of its own: `_gpu_canary`.
"""

import ctypes
import itertools
import time

from . import _dtypes, _memory, _native, _ref, errors
from .tiers import log

#: Over two mebibytes, and no multiple of anything.
LARGE = (2 << 20) + 4097
_PERIOD = 251
#: The worker's own large probe is written and compared every so many bytes, and at its end: its pages are new, and the kernel
#: takes longer to clear them all than the rest of the canary takes.
_STRIDE = 1 << 16
_FOREIGN = 4096

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_patterns = {}

# name: (dtype, shape, strides, first byte, bytes of the block, the block)
_SPECS = {
    "8x8 float32": ("float32", (8, 8), None, 0, 256, 0),
    "a view": ("float32", (3, 4), (1, 16), 8, 256, 0),
    "bfloat16": ("bfloat16", (5, 7), None, 0, 70, 1),
    "an offset": ("int16", (100,), None, 1000, 4096, 2),
    "over 2 MiB": ("uint8", (LARGE,), None, 0, LARGE, 3),
}


def pattern(seed):
    """The bytes of which a probe's block is made, again and again."""
    found = _patterns.get(seed)
    if found is None:
        found = _patterns[seed] = bytes([(i * 7 + seed * 31 + 1) % 256 for i in range(_PERIOD)])
    return found


def _fill(address, nbytes, seed):
    ctypes.memmove(address, pattern(seed), min(nbytes, _PERIOD))
    done = _PERIOD
    while done < nbytes:
        ctypes.memmove(address + done, address, min(done, nbytes - done))
        done *= 2


def _write(side, address, nbytes, seed):
    for at, part in _parts(side, nbytes):
        _fill(address + at, part, seed)


def _parts(side, nbytes):
    """What of a block is written: (first byte, bytes), the pattern anew in each."""
    if side == "parent" or nbytes < LARGE:
        return [(0, nbytes)]
    return [(at, min(_PERIOD, nbytes - at)) for at in (*range(0, nbytes - _PERIOD, _STRIDE), nbytes - _PERIOD)]


def _first_wrong(address, nbytes, seed, at=0):
    """The first byte that is not the pattern's, of bytes that stand `at` in their block; None if all are."""
    head = pattern(seed)[at % _PERIOD :] + pattern(seed)[: at % _PERIOD]
    here = min(nbytes, _PERIOD)
    if ctypes.string_at(address, here) == head[:here] and (
        nbytes <= _PERIOD or _memcmp(address, address + _PERIOD, nbytes - _PERIOD) == 0
    ):
        return None
    data = ctypes.string_at(address, nbytes)
    return next(i for i in range(nbytes) if data[i] != head[i % _PERIOD])


def _seed(side, block):
    return (1 if side == "parent" else 101) + block


def probes(side):
    """What this side sends: values in its own arena memory, filled; and which there was no memory for."""
    blocks, values, skipped = {}, {}, []
    for name, (dtype, shape, strides, first, nbytes, block) in _SPECS.items():
        if block not in blocks:
            try:
                blocks[block] = memory = _memory.block(nbytes, -1)
            except errors.OutOfMemory:
                skipped.append(name)
                continue
            _write(side, memory.address, nbytes, _seed(side, block))
        values[name] = _ref.Ref(blocks[block], first, _dtypes.lookup(dtype), shape, strides, "r")
    nothing = _memory.Memory(0, _native.KIND_BLOCK, 0, 0, -1)
    values["no elements"] = _ref.Ref(nothing, 0, _dtypes.lookup("float32"), (0, 3), None, "r")
    values["from outside"] = (pattern(_seed(side, 4)) * (_FOREIGN // _PERIOD + 1))[:_FOREIGN]
    values["inline"] = [pattern(_seed(side, 5)), 2**70, -1.5, "\u00e9\u2603"]
    return {"values": values, "skipped": skipped}


def check(side, found):
    """What is wrong with the probes that came from `side`: {name: why}."""
    wrong = {}
    values, skipped = found["values"], found["skipped"]
    for name in (*_SPECS, "no elements", "from outside", "inline"):
        if name in skipped:
            continue
        try:
            why = _check_one(side, name, values[name])
        except errors.Error as e:
            why = f"{e.code}: {e}"
        except (KeyError, AttributeError, TypeError, IndexError) as e:
            why = f"it did not come as it was sent ({type(e).__name__}: {e})"
        if why:
            wrong[name] = why
    return wrong


def _check_one(side, name, value):
    if name == "from outside":
        return None if bytes(value) == (pattern(_seed(side, 4)) * (_FOREIGN // _PERIOD + 1))[:_FOREIGN] else "its bytes differ"
    if name == "inline":
        return None if value == [pattern(_seed(side, 5)), 2**70, -1.5, "\u00e9\u2603"] else "it differs"
    if name == "no elements":
        return None if value.shape == (0, 3) and value.dtype == "float32" else f"it is {value!r}"
    dtype, shape, strides, first, _, block = _SPECS[name]
    if value.shape != shape or value.dtype != dtype or value.strides != (strides or _memory.contiguous_strides(shape)):
        return f"it is {value!r} with strides {value.strides}"
    address, size = value._address(), value._row.itemsize
    if strides is None:
        for start, part in _parts(side, value.nbytes):
            at = _first_wrong(address + start, part, _seed(side, block), first)
            if at is not None:
                return f"byte {start + at} of {value.nbytes} is not what was sent"
        return None
    for index in itertools.product(*map(range, shape)):
        at = sum(i * s for i, s in zip(index, strides)) * size
        if _first_wrong(address + at, size, _seed(side, block), first + at) is not None:
            return f"element {index} is not what was sent"
    return None


def greet(channel, side, timeout=None):
    """Proves a new connection; both sides call it. The parent raises `Refused` with the worker's name, the worker `Refused`
    with the reason."""
    end = time.monotonic() + (30.0 if timeout is None else max(timeout, 10.0))
    try:
        _greet_worker(channel, end) if side == "parent" else _greet_parent(channel, end)
    except errors.Refused:
        channel.close()
        raise
    except errors.Error as e:
        channel.close()
        if side == "parent":
            raise errors.Refused(f"{_who(channel)} was refused: its canary did not come to an end: {e.code}: {e}") from e
        raise


def _greet_worker(channel, end):
    channel._transmit(["k", "probes"], probes("parent"))
    answer = _take(channel, "answer", end).decode()
    wrong = [f"{name}, parent to worker: {why}" for name, why in answer["wrong"].items()]
    wrong += [f"{name}, worker to parent: {why}" for name, why in check("worker", answer).items()]
    if not wrong:
        channel._transmit(["k", "verdict"], None)
        return
    reason = "; ".join(wrong)
    channel._quietly(["k", "verdict"], reason)
    log.error("%s was refused: its canary failed: %s", _who(channel), reason)
    raise errors.Refused(f"{_who(channel)} was refused: its canary failed: {reason}")


def _greet_parent(channel, end):
    message = _take(channel, "probes", end)
    try:
        wrong = check("parent", message.decode())
    except errors.Error as e:
        wrong = {"everything": f"{e.code}: {e}"}
    channel._transmit(["k", "answer"], dict(probes("worker"), wrong=wrong))
    reason = _take(channel, "verdict", end).decode()
    if reason is not None:
        raise errors.Refused(f"the parent refused this worker, whose canary failed: {reason}")


def _take(channel, step, end):
    """The next message of the canary, which is to be this step."""
    message = channel._wait(channel._next_canary, max(0.0, end - time.monotonic()))
    if message.header[1] != step:
        raise errors.Protocol(f"expected the canary's {step!r}, received {message.header[1:]!r}")
    return message


def _who(channel):
    return f"worker {channel.peer.name!r} (pid {channel.peer.pid})"


def make_ticket():
    """The parent's probes for processes that have no channel to it: a ticket for many."""
    from . import _tickets

    return _tickets.ticket(probes("parent"), many=True)


def check_ticket(text):
    """The other end of `make_ticket`: `Refused` if what comes is not what was sent."""
    from . import _tickets

    wrong = check("parent", _tickets.redeem(text))
    if wrong:
        reason = "; ".join(f"{name}: {why}" for name, why in wrong.items())
        raise errors.Refused(f"this process cannot use the arena: its canary failed: {reason}")
