"""`Memory`: one import or one block of ours, given back exactly once; and the arrays and tensors that lie over it."""

import ctypes

from . import _dtypes, _native, _streams, errors


class Memory:
    """A range of arena memory that this process holds: an import (kind 0) or its own block (kind 1)."""

    __slots__ = ("handle", "kind", "address", "nbytes", "device", "flags", "stream", "is_ready", "owned", "_base", "__weakref__")

    def __init__(self, handle, kind, address, nbytes, device, flags=0, stream=0, is_ready=False):
        self.handle = handle
        self.kind = kind
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.flags = flags
        self.stream = stream
        self.is_ready = is_ready
        self.owned = True
        self._base = None

    def __del__(self, _native=_native):
        if self.owned and self.handle:
            self.owned = False
            (_native.import_release if self.kind == 0 else _native.deallocate)(self.handle)

    def touch(self):
        """Mapped, and ordered after READY on this thread's stream (on the CPU for host memory)."""
        if self.kind == _native.KIND_BLOCK:
            return self
        if not self.handle:
            raise errors.Closed("this value was released")
        if self.device < 0:
            if not self.address:
                self._open(0, _native.WAIT)
                self.is_ready = True
            elif not self.is_ready:
                _native.in_slices(lambda ms: _native.import_ready(self.handle, ms), None)
                self.is_ready = True
            return self
        stream = _streams.current(self.device)
        if not self.address or stream != self.stream:
            self._open(stream, 0)
            if _streams.current(self.device) != stream:  # it was on another device than was known before
                self._open(_streams.current(self.device), 0)
        return self

    def _open(self, stream, flags):
        address, nbytes, _, _, device, got = _native.import_open(self.handle, stream, flags)
        self.address, self.nbytes, self.device, self.stream = address, nbytes, device, stream
        self.flags |= got

    @property
    def read_only(self):
        return bool(self.flags & _native.READ_ONLY)

    def torch_base(self):
        """All of it as a torch tensor of bytes, which owns it from here on; kept for further views."""
        base = self._base
        if base is None:
            base = self._base = _torch_import(self, _dtypes.BY_NAME["uint8"], (self.nbytes,), (1,), 0)
        return base


def block(nbytes, device):
    """A new block of ours."""
    address = _native.allocate(device, nbytes, _streams.current(device))
    return Memory(address, _native.KIND_BLOCK, address, nbytes, device, is_ready=True)


class _Holder:
    """What numpy keeps as the base of an array over our memory."""

    __slots__ = ("memory", "__array_interface__")

    def __init__(self, memory, offset, typestr, shape, strides):
        self.memory = memory
        self.__array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (memory.address + offset, memory.read_only),
            "strides": strides,
            "version": 3,
        }


def contiguous_strides(shape):
    """Strides in elements of a C-contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n or 1
    return tuple(reversed(strides))


def span(shape, strides):
    """Elements between the first and one past the last of a strided array (0 if it has none)."""
    last = 0
    if strides is None:
        total = 1
        for n in shape:
            total *= n
        return total
    for n, s in zip(shape, strides):
        if n == 0:
            return 0
        last += (n - 1) * s
    return last + 1


def check_bounds(memory, offset, row, shape, strides):
    """Refuses a description that reaches outside of the memory: it came from another process."""
    last, count = 0, 1
    possible = offset >= 0
    if strides is None:
        for n in shape:
            possible &= n >= 0
            count *= n
    else:
        possible &= len(strides) == len(shape)
        for n, s in zip(shape, strides):
            possible &= n >= 0 and s >= 0
            count *= n
            last += (n - 1) * s
        count = last + 1 if count else 0
    if not possible:
        raise errors.Protocol(f"a tensor at offset {offset} with shape {shape} and strides {strides} is impossible")
    if offset + count * row.itemsize > memory.nbytes:
        raise errors.Protocol(f"a tensor ends at byte {offset + count * row.itemsize} of {memory.nbytes}")


def numpy_view(memory, offset, row, shape, strides):
    """A numpy array over (part of) host memory; the array keeps the memory alive."""
    import numpy as np

    if memory.device >= 0:
        raise errors.Unsupported(f"numpy cannot see the memory of GPU {memory.device}: take the value with .torch()")
    memory.touch()
    size = row.itemsize
    if strides is not None:
        strides = tuple([s * size for s in strides])
    if row.numpy:
        return np.asarray(_Holder(memory, offset, row.numpy, shape, strides))
    base = np.asarray(_Holder(memory, 0, "|u1", (memory.nbytes,), None))
    return np.ndarray(shape, _dtypes.to_numpy(row.name), base, offset, strides)


def torch_view(memory, offset, row, shape, strides):
    """A torch tensor over part of the memory. Views of one memory share one storage."""
    memory.touch()
    base = memory.torch_base()
    if row.name == "uint8" and not offset and shape == (memory.nbytes,):
        return base
    size = row.itemsize
    if offset % size:
        # torch has no tensor at such an address: this one gets memory of its own.
        base, offset = base[offset:].clone(), 0
    whole = base[: base.numel() // size * size] if base.numel() % size else base
    if row.name != "uint8":
        whole = whole.view(_dtypes.to_torch(row.name))
    return whole.as_strided(shape, strides if strides is not None else contiguous_strides(shape), offset // size)


def torch_contiguous(memory, offset, row, shape):
    """`check_bounds` and `torch_whole` in one, for what most values are: C-contiguous and all there is of their memory."""
    strides, count, size = [], 1, row.itemsize
    for n in reversed(shape):
        if n < 0:
            break
        strides.append(count)
        count *= n
    else:
        if count and 0 <= offset <= memory.nbytes - count * size:
            memory.touch()
            address = memory.address + offset
            if not address % size:
                strides.reverse()
                return torch_over(memory, address, memory.device, row, shape, strides)
    check_bounds(memory, offset, row, shape, None)
    return torch_whole(memory, offset, row, shape, None)


def torch_whole(memory, offset, row, shape, strides):
    """A torch tensor that takes the memory over: the fast path where one value is all there is."""
    memory.touch()
    strides = strides if strides is not None else contiguous_strides(shape)
    if (memory.address + offset) % row.itemsize:
        return torch_view(memory, offset, row, shape, strides)
    return _torch_import(memory, row, shape, strides, offset)


def _torch_import(memory, row, shape, strides, offset):
    return torch_over(memory, memory.address + offset, memory.device, row, shape, strides)


def torch_over(memory, address, device, row, shape, strides):
    """A torch tensor at an address that takes the memory over, wherever the address lies."""
    if device >= 0 and not _streams.in_use():
        import torch

        torch.cuda.init()
    if not memory.owned:
        raise errors.Closed("this value was already handed over")
    name, _, (code, bits), _, _ = row
    take = _from_dlpack or _find_from_dlpack()
    capsule = _native.dlpack_capsule(address, device, code, bits, shape, strides, memory.handle, memory.kind)
    memory.owned = False  # the capsule has it now, whatever happens below
    tensor = take(capsule)
    return tensor if name in _NATIVE else tensor.view(_dtypes.to_torch(name))


_NATIVE = _dtypes.NATIVE_DLPACK
#: torch's own, once it was needed.
_from_dlpack = None


def _find_from_dlpack():
    """What torch.utils.dlpack.from_dlpack does with a capsule, without its questions about what else it might be."""
    global _from_dlpack
    import torch

    _from_dlpack = getattr(torch._C, "_from_dlpack", None) or torch.utils.dlpack.from_dlpack
    return _from_dlpack


def buffer(memory, offset, nbytes):
    """A writable memoryview over host memory that keeps it alive."""
    memory.touch()
    holder = type("_Buffer", (ctypes.c_char * nbytes,), {}).from_address(memory.address + offset)
    holder.memory = memory
    view = memoryview(holder).cast("B")
    return view.toreadonly() if memory.read_only else view


def copy_out(memory, offset, nbytes):
    """Bytes copied out of host memory."""
    memory.touch()
    return ctypes.string_at(memory.address + offset, nbytes)
