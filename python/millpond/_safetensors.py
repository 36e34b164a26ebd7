"""Reads the header of a safetensors or npy file, strictly, so that the bytes can be read straight into arena memory."""

import json
import os
import struct
from collections import namedtuple

from . import _dtypes, errors

#: One tensor in a file: where its bytes begin. `transposed`: they are in Fortran order.
Entry = namedtuple("Entry", "name dtype shape offset nbytes transposed")

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_MAX_HEADER = 100_000_000


def entries(path):
    """The tensors of a .safetensors or .npy file; `InvalidArgument` says what is wrong with it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _npy(path, file, size) if path.endswith(".npy") else _safetensors(path, file, size)
    except OSError as e:
        raise errors.InvalidArgument(f"cannot read {path}: {e.strerror or e}") from None


def _bad(path, reason):
    return errors.InvalidArgument(f"{path} is not a readable safetensors file: {reason}")


def _safetensors(path, file, size):
    first = file.read(8)
    if len(first) < 8:
        raise _bad(path, f"it has {size} bytes, the header's length alone takes 8")
    (length,) = struct.unpack("<Q", first)
    if length > _MAX_HEADER:
        raise _bad(path, f"its header would have {length} bytes, at most {_MAX_HEADER} are allowed")
    if 8 + length > size:
        raise _bad(path, f"it is truncated: the header ends at byte {8 + length} of {size}")
    try:
        header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
    except (ValueError, RecursionError) as e:
        raise _bad(path, f"its header is no JSON: {e}") from None
    found = []
    for name, entry in header.items():
        if name != "__metadata__":
            found.append(_entry(path, name, entry, 8 + length))
    found.sort(key=lambda e: (e.offset, e.nbytes))
    end = 8 + length
    for entry in found:
        if entry.offset != end:
            raise _bad(path, f"tensor {entry.name!r} begins at byte {entry.offset}, the one before ends at {end}")
        end += entry.nbytes
    if end != size:
        raise _bad(
            path,
            f"it is truncated: its tensors end at byte {end}, it has {size}" if end > size else f"{size - end} bytes follow its tensors",
        )
    return found


def _entry(path, name, entry, start):
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in [begin, end, *shape]):
            raise TypeError
    except (TypeError, KeyError, ValueError):
        raise _bad(path, f"tensor {name!r} has no proper dtype, shape and data_offsets") from None
    if dtype not in _DTYPES:
        raise _bad(path, f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(_DTYPES)}")
    nbytes = _dtypes.BY_NAME[_DTYPES[dtype]].itemsize
    for n in shape:
        nbytes *= n
    if end - begin != nbytes:
        raise _bad(path, f"tensor {name!r} of {dtype} {shape} needs {nbytes} bytes and has {end - begin}")
    return Entry(name, _DTYPES[dtype], tuple(shape), start + begin, nbytes, False)


def _npy(path, file, size):
    import numpy as np

    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        name = _dtypes.of_numpy(dtype)
    except (ValueError, errors.Unsupported) as e:
        raise errors.InvalidArgument(f"{path} is not a readable npy file: {e}") from None
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    offset = file.tell()
    if offset + nbytes > size:
        raise errors.InvalidArgument(f"{path} is not a readable npy file: it is truncated: needs {offset + nbytes} bytes, has {size}")
    return [Entry("array", name, shape, offset, nbytes, fortran and len(shape) > 1)]


def read_into(path, entry, buffer):
    """Reads the bytes of one tensor into a writable buffer."""
    with open(path, "rb", buffering=0) as file:
        file.seek(entry.offset)
        view = memoryview(buffer).cast("B")
        at = 0
        while at < len(view):
            count = file.readinto(view[at:])
            if not count:
                raise errors.InvalidArgument(f"{path} is truncated: it ended at byte {at} of {len(view)} of tensor {entry.name!r}")
            at += count
