"""Encoding: a nested value becomes JSON text and a list of memory ranges.

JSON's own types stand for themselves. Everything else is a dict with the single key "$" whose value is a list that starts
with a tag (a user's dict with that key is written as pairs):

    ["t", kind, range, offset, dtype, shape, strides]   a value that is the only one of its range
    ["v", ...the same]                                  one of several values that share a range
    ["u", [items]]        tuple                         ["d", [[key, value], ...]]  dict with other keys than strings
    ["g", value, device]  a GPU value that came by host memory; device: its GPU's id
    ["h", [...as "t"], device, pieces]   the same, while it is being copied there: see `_pinned`; pieces: [end, timeline, value]
    ["x", ...]            a GPU value by a token of the driver's: see `_foreign`
    ["f", "nan"]          float that JSON lacks         ["i", "0x..."]              integer over 64 bits
    ["c", re, im]         complex                       ["s", dtype, base64]        numpy scalar
    ["b"|"a"|"m", base64] bytes, bytearray, memoryview  ["o", name, version, fields]  registered type
    ["p", name, version, [...as "t"]]   a value of a type that is registered for pickle: its pickle

kind: n numpy, t torch, b/a/m bytes in arena memory, r only a reference. range -1: no bytes (offset is then the device's
id, or 0 for the CPU). strides: in elements, 0 for C order. Values whose bytes overlap share one range, so they share memory
on the other side too.
"""

import base64
import ctypes
import json

from . import _leaves, _memory, _native, _ref, _streams, _types, errors
from ._encoder import Encoder
from ._leaves import No

#: bytes up to this size travel in the tree itself.
INLINE_BYTES = 1024
#: Containers deeper than this are refused.
MAX_DEPTH = 100


def _dumper(ensure_ascii):
    """JSON's own encoder. Its class sets the C function up anew for each value, which takes longer than a small message."""
    slow = json.JSONEncoder(separators=(",", ":"), ensure_ascii=ensure_ascii, allow_nan=False, check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return slow.encode
    text = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    encode = make(None, slow.default, text, None, ":", ",", False, False, False)
    return lambda value: "".join(encode(value, 0))


_dumps = _dumper(False)
_dumps_ascii = _dumper(True)


class _Deep(Exception):
    """Nested too deep, or a cycle."""


#: The header of a plain message: most are.
PLAIN = ["m"]
_PLAIN_TEXT = '["m"]'


def encode(value, header=None, root="out", readonly=False, off=(), kinds=(), why_copied=None, by_choice=False, overlap=False):
    """Encodes a value: an `Encoder` with its text. With `header` (JSON-ready) the text is `[header,value]`. Values on the GPUs in
    `off` go by host memory; for the rest see `Encoder`."""
    e = Encoder(off, kinds, why_copied, by_choice, overlap)
    try:
        try:
            body = _DISPATCH[type(value)](e, value, 0)
        except (No, _Deep, errors.Unsupported, RecursionError) as error:
            _explain(value, root, error)
        if e.leaves:
            e.place(_native.READ_ONLY if readonly else 0)
            if e.ways:
                e.mark_ways()
        if len(e.tensors) == 1:
            device = e.tensors[0][4]
            e.gpus = (device,) if device >= 0 else ()
        elif e.tensors:
            e.gpus = {t[4] for t in e.tensors if t[4] >= 0}
        try:
            e.text = _text(_dumps, header, body).encode()
        except UnicodeEncodeError:  # lone surrogates
            e.text = _text(_dumps_ascii, header, body).encode()
    except BaseException:
        e.finish()
        raise
    return e


def _text(dumps, header, body):
    if header is PLAIN:
        return f"[{_PLAIN_TEXT},{dumps(body)}]"
    return dumps(body if header is None else [header, body])


# Containers.


def _dict(e, value, depth):
    if depth > MAX_DEPTH:
        raise _Deep
    depth += 1
    out = {}
    plain = True
    for key, item in value.items():
        if type(key) is not str or key == "$":
            plain = False
            key = _Key(key)  # cannot meet a plain key of the same text
        out[key] = _DISPATCH[type(item)](e, item, depth)
    if plain:
        return out
    return {"$": ["d", [[_key(e, k), v] for k, v in zip(value, out.values())]]}


class _Key:
    """A key that JSON has not, until the dict is known to be written as pairs."""

    __slots__ = ("key",)

    def __init__(self, key):
        self.key = key


def _key(e, key):
    for part in key if type(key) is tuple else (key,):
        if not isinstance(part, (str, int, float, bytes, tuple, complex, type(None))):
            raise No(f"a dict key of type {_name(type(part))}")
    return _DISPATCH[type(key)](e, key, 0)


def _list(e, value, depth):
    if depth > MAX_DEPTH:
        raise _Deep
    depth += 1
    return [_DISPATCH[type(item)](e, item, depth) for item in value]


def _tuple(e, value, depth):
    return {"$": ["u", _list(e, value, depth)]}


def _registered(e, value, depth):
    if depth > MAX_DEPTH:
        raise _Deep
    entry = _types.of_type(type(value))
    if entry.pickle:
        return _pickled(e, entry, value)
    fields = entry.to_fields(value)
    if type(fields) is not dict:
        raise No(f"to_fields of {entry.name} gave a {_name(type(fields))}, not a dict")
    return {"$": ["o", entry.name, entry.version, _dict(e, fields, depth)]}


def _pickled(e, entry, value):
    try:
        data = _types.pickled(entry, value)
    except RecursionError:
        raise _Deep from None
    except Exception as error:  # whatever the type's own code raises
        raise No(f"a {entry.name} that cannot be pickled: {type(error).__name__}: {error}") from None
    e.falls.append(("arena", "copy", f"a {entry.name} crosses as a pickle: it is registered for that", len(data)))
    return {"$": ["p", entry.name, entry.version, _large(e, "b", ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value, len(data), data)["$"]]}


# Scalars.


def _same(e, value, depth):
    return value


def _int(e, value, depth):
    return value if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF else {"$": ["i", hex(value)]}


def _float(e, value, depth):
    return value if value - value == 0.0 else {"$": ["f", repr(value)]}


def _complex(e, value, depth):
    return {"$": ["c", _float(e, value.real, 0), _float(e, value.imag, 0)]}


def _base(cls):
    """Subclasses of the plain types cross as the plain type."""
    plain = _DISPATCH[cls]
    return lambda e, value, depth: plain(e, cls(value), depth)


# Bytes.


def _inline(e, tag, data):
    e.inline += 1
    return {"$": [tag, base64.b64encode(data).decode("ascii")]}


def _large(e, kind, address, nbytes, keep):
    node = ["t", kind, 0, 0, "uint8", [nbytes], 0]
    e.keep.append(keep)
    e.range(-1, address, nbytes, node)
    return {"$": node}


def _bytes(e, value, depth):
    if len(value) <= INLINE_BYTES:
        return _inline(e, "b", value)
    return _large(e, "b", ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value, len(value), value)


def _bytearray(e, value, depth):
    if len(value) <= INLINE_BYTES:
        return _inline(e, "a", value)
    view = (ctypes.c_char * len(value)).from_buffer(value)
    return _large(e, "a", ctypes.addressof(view), len(value), view)


def _memoryview(e, value, depth):
    if value.nbytes <= INLINE_BYTES:
        return _inline(e, "m", value.tobytes())
    if value.readonly or not value.c_contiguous:
        data = value.tobytes()
        return _large(e, "m", ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value, len(data), data)
    view = (ctypes.c_char * value.nbytes).from_buffer(value)
    return _large(e, "m", ctypes.addressof(view), value.nbytes, view)


# References.


def _reference(e, ref, depth):
    node = _referred(e, ref)
    return node if ref._gpu is None else {"$": ["g", node, ref._gpu]}


def _referred(e, ref):
    memory = ref._held()
    if memory.device >= 0 and memory.device in e.off and ref.nbytes:
        return _leaves.hosted_reference(e, ref)
    strides = ref._strides
    node = ["v", ref._kind, 0, ref._offset, ref._row.name, list(ref.shape), list(strides) if strides is not None else 0]
    e.keep.append(memory)
    if memory.kind == _native.KIND_BLOCK:
        span = _memory.span(ref.shape, strides) * ref._row.itemsize
        if span == 0:
            node[2], node[3] = -1, _leaves.device_id(memory.device)
        else:
            node[0] = "t"
            e.range(memory.device, memory.address + ref._offset, span, node)
        return {"$": node}
    index = e.imports.get(memory.handle)
    if index is None:
        if not e.imports:
            e.imports = {}
        index = e.imports[memory.handle] = len(e.tensors)
        # An import that was never opened here was not written here: it goes on as it came.
        stream = _streams.current(memory.device) if memory.address else 0
        e.tensors.append((memory.address, memory.nbytes, stream, memory.handle, memory.device, 0))
    node[2] = index
    return {"$": node}


# Which function for which type.


class _Dispatch(dict):
    def __missing__(self, cls):
        function = self[cls] = _resolve(cls)
        return function


_DISPATCH = _Dispatch()
_DISPATCH.update(
    {
        type(None): _same,
        bool: _same,
        str: _same,
        int: _int,
        float: _float,
        complex: _complex,
        bytes: _bytes,
        bytearray: _bytearray,
        memoryview: _memoryview,
        dict: _dict,
        list: _list,
        tuple: _tuple,
        _ref.Ref: _reference,
    }
)
_PLAIN = (str, int, float, complex, bytes, bytearray)


def forget(cls):
    """A type was registered: what was found for it and its subclasses before no longer holds."""
    for known in list(_DISPATCH):
        if issubclass(known, cls) and known not in (dict, list, tuple, *_PLAIN):
            del _DISPATCH[known]


def _name(cls):
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _resolve(cls):
    if _types.of_type(cls) is not None:
        return _registered
    for base in cls.__mro__:
        module, name = base.__module__, base.__name__
        if module == "numpy" or module.startswith("numpy."):
            if name == "MaskedArray":
                return _refuse("a masked array: send its data and its mask")
            if name == "ndarray":
                return _leaves.numpy_array if base is cls else lambda e, v, d: _leaves.numpy_array(e, v.view(base), d)
            if name == "generic":
                return _leaves.numpy_scalar
        elif module in ("torch", "torch._tensor") and name == "Tensor":
            return _leaves.torch_tensor
    if issubclass(cls, dict):
        return _dict
    if issubclass(cls, list):
        return _list
    if issubclass(cls, tuple):
        return _tuple
    for plain in _PLAIN:
        if issubclass(cls, plain):
            return _base(plain)
    if hasattr(cls, "__cuda_array_interface__"):
        return _leaves.cuda_array
    if hasattr(cls, "__dlpack__"):
        return _leaves.dlpack_array
    if hasattr(cls, "__array_interface__"):
        return _leaves.host_array
    if hasattr(cls, "__dataclass_fields__"):
        return _refuse(f"the dataclass {_name(cls)} is not registered: millpond.register({cls.__name__}) on both sides")
    return _refuse(f"a value of type {_name(cls)}")


def _refuse(reason):
    def refuse(e, value, depth):
        raise No(reason)

    return refuse


# The slow walk, after something was refused: where is it?


def _explain(value, path, error):
    _walk(value, path, {}, 0)
    if isinstance(error, (_Deep, RecursionError)):
        raise errors.cannot_cross(path, f"it is nested deeper than {MAX_DEPTH} levels") from None
    raise errors.cannot_cross(path, str(error)) from None


def _walk(value, path, above, depth):
    function = _DISPATCH[type(value)]
    if function in (_dict, _list, _tuple, _registered):
        if id(value) in above:
            raise errors.cannot_cross(path, f"it contains itself: it is {above[id(value)]}") from None
        if depth > MAX_DEPTH:
            raise errors.cannot_cross(path, f"it is nested deeper than {MAX_DEPTH} levels") from None
        above[id(value)] = path
        for item, at in _children(function, value, path):
            _walk(item, at, above, depth + 1)
        del above[id(value)]
        return
    try:
        function(Encoder(), value, depth)
    except (No, errors.Unsupported) as e:
        raise errors.cannot_cross(path, str(e)) from None


def _children(function, value, path):
    if function is _dict:
        for key, item in value.items():
            try:
                _key(Encoder(), key)
            except No as e:
                raise errors.cannot_cross(f"{path}[{key!r}]", str(e)) from None
            yield item, f"{path}[{_quoted(key)}]"
    elif function is _registered:
        entry = _types.of_type(type(value))
        try:
            if entry.pickle:
                _pickled(Encoder(), entry, value)
                return
            fields = entry.to_fields(value)
        except No as e:
            raise errors.cannot_cross(path, str(e)) from None
        for key, item in fields.items() if isinstance(fields, dict) else ():
            yield item, f"{path}.{key}"
    else:
        for index, item in enumerate(value):
            yield item, f"{path}[{index}]"


def _quoted(key):
    return json.dumps(key, ensure_ascii=False) if type(key) is str else repr(key)
