"""Every element type by its torch name: size, DLPack code, and what numpy calls it.

`name` is what travels. numpy types that torch has no name for (dates, fixed strings, other byte orders) travel as
`np:` + their typestr.
"""

import sys
from collections import namedtuple

from . import errors

#: `numpy`: typestr, or None where numpy itself has no such type; then `ml_dtypes` is what that package calls it.
#: `dlpack`: (code, bits) that every torch since 2.1 imports; types that it does not know travel as integers of the same
#: size and are viewed.
Dtype = namedtuple("Dtype", "name itemsize dlpack numpy ml_dtypes")

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6

_ROWS = [
    ("bool", 1, (_BOOL, 8), "|b1", None),
    ("uint8", 1, (_UINT, 8), "|u1", None),
    ("uint16", 2, (_UINT, 16), "<u2", None),
    ("uint32", 4, (_UINT, 32), "<u4", None),
    ("uint64", 8, (_UINT, 64), "<u8", None),
    ("int8", 1, (_INT, 8), "|i1", None),
    ("int16", 2, (_INT, 16), "<i2", None),
    ("int32", 4, (_INT, 32), "<i4", None),
    ("int64", 8, (_INT, 64), "<i8", None),
    ("float16", 2, (_FLOAT, 16), "<f2", None),
    ("float32", 4, (_FLOAT, 32), "<f4", None),
    ("float64", 8, (_FLOAT, 64), "<f8", None),
    ("bfloat16", 2, (_BFLOAT, 16), None, "bfloat16"),
    ("complex32", 4, (_INT, 32), None, None),
    ("complex64", 8, (_COMPLEX, 64), "<c8", None),
    ("complex128", 16, (_COMPLEX, 128), "<c16", None),
    ("float8_e4m3fn", 1, (_UINT, 8), None, "float8_e4m3fn"),
    ("float8_e4m3fnuz", 1, (_UINT, 8), None, "float8_e4m3fnuz"),
    ("float8_e5m2", 1, (_UINT, 8), None, "float8_e5m2"),
    ("float8_e5m2fnuz", 1, (_UINT, 8), None, "float8_e5m2fnuz"),
    ("float8_e8m0fnu", 1, (_UINT, 8), None, "float8_e8m0fnu"),
    # Two values in one byte: an element is the byte, as in torch.
    ("float4_e2m1fn_x2", 1, (_UINT, 8), None, None),
]
BY_NAME = {row[0]: Dtype(*row) for row in _ROWS}

#: DLPack types that are the type itself: anything else is imported as integers and viewed.
NATIVE_DLPACK = {name for name, d in BY_NAME.items() if not name.startswith("float8") and name not in ("float4_e2m1fn_x2", "complex32")}

_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64", "short": "int16"}

_numpy_names = {}
_numpy_types = {}
#: Those of `of_torch` that were asked for so far.
torch_names = {}


def lookup(name):
    """The row of a travelling name; `Unsupported` for a name that is not known."""
    row = BY_NAME.get(name)
    if row is None:
        row = _from_typestr(name) if name.startswith("np:") else None
        if row is None:
            raise errors.Unsupported(f"unknown dtype {name!r}; known are {', '.join(BY_NAME)}")
        BY_NAME[name] = row
    return row


def parse(dtype):
    """The row of what a user passes: a name, a numpy dtype or scalar type, a torch dtype; `InvalidArgument` otherwise."""
    if isinstance(dtype, Dtype):
        return dtype
    if isinstance(dtype, str):
        name = dtype[6:] if dtype.startswith("torch.") else dtype
        name = _ALIASES.get(name, name)
        if name in BY_NAME:
            return BY_NAME[name]
    elif type(dtype).__module__ == "torch":
        return BY_NAME[of_torch(dtype)]
    elif dtype is bool or dtype is int or dtype is float or dtype is complex:
        return BY_NAME[{bool: "bool", int: "int64", float: "float64", complex: "complex128"}[dtype]]
    if dtype is not None and (not isinstance(dtype, str) or dtype[:1] in tuple("<>|=")):
        np = sys.modules.get("numpy")
        if np is not None:
            try:
                return lookup(of_numpy(np.dtype(dtype)))
            except (TypeError, errors.Unsupported):
                pass
    raise errors.InvalidArgument(f"unknown dtype {dtype!r}; known are {', '.join(n for n in BY_NAME if n[:3] != 'np:')}")


def of_torch(dtype):
    """The travelling name of a torch dtype; `Unsupported` by name for quantised and sub-byte ones."""
    name = torch_names.get(dtype)
    if name is None:
        name = str(dtype).rpartition(".")[2]
        if name not in BY_NAME:
            raise errors.Unsupported(f"torch.{name} is {_why_not(name)}")
        torch_names[dtype] = name
    return name


def _why_not(name):
    if name.startswith(("qint", "quint")):
        return "quantised: send .int_repr() with its scale and zero point"
    return "not a type that millpond carries"


def to_torch(name):
    """The torch dtype of a travelling name; `Unsupported` where this torch has none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise errors.Unsupported(f"torch {torch.__version__} has no dtype for {name}")
    return dtype


def of_numpy(dtype):
    """The travelling name of a numpy dtype; `Unsupported` by name for objects and structures."""
    name = _numpy_names.get(dtype)
    if name is None:
        name = _numpy_names[dtype] = _name_numpy(dtype)
    return name


def _name_numpy(dtype):
    if dtype.hasobject:
        raise errors.Unsupported(f"numpy dtype {dtype} holds Python objects")
    if dtype.fields is not None or dtype.subdtype is not None:
        raise errors.Unsupported(f"numpy dtype {dtype} is structured: send its fields as arrays of their own")
    if dtype.type.__module__.startswith("ml_dtypes"):
        for row in BY_NAME.values():
            if row.ml_dtypes == dtype.name:
                return row.name
        raise errors.Unsupported(f"ml_dtypes.{dtype.name} is not a type that millpond carries")
    if dtype.kind not in "biufcMmSUV":
        raise errors.Unsupported(f"numpy dtype {dtype} is not a type that millpond carries")
    for row in BY_NAME.values():
        if row.numpy == dtype.str:
            return row.name
    return "np:" + dtype.str


def of_typestr(typestr):
    """The travelling name of an array interface's typestr."""
    for row in BY_NAME.values():
        if row.numpy == typestr:
            return row.name
    raise errors.Unsupported(f"unknown typestr {typestr!r}")


def _from_typestr(name):
    import numpy as np

    try:
        dtype = np.dtype(name[3:])
    except TypeError:
        return None
    if dtype.hasobject or dtype.fields is not None:
        return None
    return Dtype(name, dtype.itemsize, (_UINT, 8), dtype.str, None)


def to_numpy(name):
    """The numpy dtype of a travelling name; `Unsupported` where numpy has none and ml_dtypes is missing."""
    dtype = _numpy_types.get(name)
    if dtype is None:
        import numpy as np

        row = lookup(name)
        if row.numpy:
            dtype = np.dtype(row.numpy)
        elif row.ml_dtypes:
            try:
                import ml_dtypes
            except ImportError:
                raise errors.Unsupported(f"numpy has no {name}: install ml_dtypes, or take the value with .torch()") from None
            dtype = np.dtype(getattr(ml_dtypes, row.ml_dtypes))
        else:
            raise errors.Unsupported(f"numpy has no {name}: take the value with .torch()")
        _numpy_types[name] = dtype
    return dtype
