"""Tensors and arrays as text for other systems' serializers: a ticket, or their bytes where the arena is full."""

import sys

from .. import _dtypes, _native, _session, _tickets, errors, tiers

#: What nobody took is let go after so many seconds.
EXPIRE = 600.0


def ready():
    """Whether this process has an arena."""
    return _session._info is not None


def encode(value):
    """A JSON-ready dict, or None where this value is none of ours (sparse, quantised, wrapping; no arena here)."""
    if not ready():
        return None
    kind = "t" if type(value).__module__.startswith("torch") else "n"
    if kind == "t":
        import torch

        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return None
        grad = value.requires_grad
        value = value.detach()
    else:
        grad = False
        if value.dtype.hasobject:
            return None
    try:
        return {"ticket": _tickets.kept(value, EXPIRE).decode(), "grad": grad}
    except errors.OutOfMemory as e:
        _native.count(b"fell.arena_full")
        tiers.log.warning("the arena is full, a value goes by copies of its bytes: %s", e)
        return None
    except (errors.CannotCross, errors.Unsupported) as e:
        tiers.log.warning("a value goes by its system's own way: %s", e)
        return None


def decode(fields):
    """The value of what `encode` gave."""
    value = _tickets.taken(fields["ticket"])
    if fields.get("grad"):
        value = value.detach().requires_grad_()
    return value


def as_bytes(value):
    """(bytes, dtype name, shape) of a dense tensor or array."""
    if type(value).__module__.startswith("torch"):
        import torch

        flat = value.detach().cpu().contiguous()
        data = bytes(flat.reshape(-1).view(torch.uint8).numpy()) if flat.numel() else b""
        return data, _dtypes.of_torch(value.dtype), list(value.shape)
    return value.tobytes(), _dtypes.of_numpy(value.dtype), list(value.shape)


def from_bytes(data, dtype, shape, kind):
    """The other way; `kind` "t" or "n"."""
    if kind == "t":
        import torch

        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(_dtypes.to_torch(dtype)).reshape(shape)
    import numpy as np

    return np.frombuffer(bytearray(data), _dtypes.to_numpy(dtype)).reshape(shape)


def torch_loaded():
    return "torch" in sys.modules
