"""`Ref`: a received value that is not touched yet. Forwarding it maps nothing."""

import sys
import threading

from . import _dtypes, _memory, _native, _streams, errors


class Ref:
    """A tensor in arena memory: shape, dtype and place are known; `.torch()` and `.numpy()` look at the memory itself."""

    __slots__ = ("_memory", "_offset", "_row", "shape", "_strides", "_kind", "_gpu", "__weakref__")

    def __init__(self, memory, offset, row, shape, strides, kind="t"):
        self._memory = memory
        self._offset = offset
        self._row = row
        #: Sizes, as a tuple.
        self.shape = tuple(shape)
        self._strides = tuple(strides) if strides is not None else None
        self._kind = kind
        #: The id of the GPU that it came from by host memory, where it did: whoever gets it next and uses a GPU has it there again.
        self._gpu = None

    def __repr__(self):
        return f"millpond.Ref(shape={self.shape}, dtype={self.dtype!r}, device={self.device!r})"

    @property
    def dtype(self):
        """The element type by its torch name, such as "bfloat16"."""
        return self._row.name

    @property
    def strides(self):
        """Strides in elements."""
        return self._strides if self._strides is not None else _memory.contiguous_strides(self.shape)

    @property
    def device(self):
        """ "cpu", or "cuda:N" as this process counts ("cuda" before its first use here)."""
        device = self._held().device
        if device < 0:
            return "cpu"
        return "cuda" if device == _streams.UNKNOWN else f"cuda:{device}"

    @property
    def nbytes(self):
        """Bytes of all elements."""
        return _memory.span(self.shape, None) * self._row.itemsize

    def _held(self):
        if self._memory is None:
            raise errors.Closed("this value was released")
        return self._memory

    def torch(self):
        """A torch tensor over the memory: no copy."""
        return _memory.torch_view(self._held(), self._offset, self._row, self.shape, self._strides)

    def numpy(self):
        """A numpy array over the memory: no copy. Host memory only."""
        return _memory.numpy_view(self._held(), self._offset, self._row, self.shape, self._strides)

    def value(self):
        """What the sender sent: a numpy array for a numpy array, a torch tensor for a torch tensor."""
        return self.numpy() if self._kind == "n" else self.torch()

    def ready(self):
        """Whether the producer's work on it is complete. `PeerDied` if it died before."""
        memory = self._held()
        if memory.kind == _native.KIND_BLOCK:
            return True
        try:
            _native.import_ready(memory.handle, 0)
        except errors.Timeout:
            return False
        return True

    def wait(self, timeout=None):
        """Blocks until it is ready: `Timeout`, `PeerDied`."""
        memory = self._held()
        if memory.kind == _native.KIND_IMPORT:
            _native.in_slices(lambda ms: _native.import_ready(memory.handle, ms), timeout)
        return self

    def release(self):
        """Lets go now; views that are out keep the memory until they die."""
        self._memory = None

    def _address(self):
        return self._held().touch().address + self._offset

    @property
    def __array_interface__(self):
        memory = self._held()
        if memory.device >= 0:
            raise AttributeError("__array_interface__: this value is in GPU memory")
        return self._interface(3)

    @property
    def __cuda_array_interface__(self):
        memory = self._held()
        if memory.device < 0:
            raise AttributeError("__cuda_array_interface__: this value is in host memory")
        interface = self._interface(3)
        interface["stream"] = memory.stream or 1
        return interface

    def _interface(self, version):
        row = self._row
        if row.numpy is None:
            raise AttributeError(f"the array interface has no name for {row.name}")
        strides = None if self._strides is None else tuple(s * row.itemsize for s in self._strides)
        return {
            "shape": self.shape,
            "typestr": row.numpy,
            "data": (self._address(), self._held().read_only),
            "strides": strides,
            "version": version,
        }

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack_device__(self):
        device = self._held().touch().device
        return (1, 0) if device < 0 else (2, device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        memory = self._held()
        if "torch" in sys.modules:
            return self.torch().__dlpack__(**({} if memory.device < 0 else {"stream": stream}))
        memory.touch()
        if not memory.owned:
            raise errors.Unsupported("without torch a value is handed over by DLPack once only")
        code, bits = self._row.dlpack
        capsule = _native.dlpack_capsule(
            memory.address + self._offset, memory.device, code, bits, self.shape, self.strides, memory.handle, memory.kind
        )
        memory.owned = False
        self._memory = None
        return capsule


def from_block(memory, row, shape, kind):
    """What a user gets for a new block: a numpy array ("n"), a torch tensor ("t") or a `Ref` ("r")."""
    if kind == "n":
        return _memory.numpy_view(memory, 0, row, shape, None)
    if kind == "t":
        return _memory.torch_whole(memory, 0, row, shape, None)
    return Ref(memory, 0, row, shape, None)


def empty(shape, dtype, device, kind=None):
    """A new value in arena memory on a GPU ordinal or -1. Without `kind`: numpy on the host where numpy has the type, torch
    where it is loaded, else a `Ref`."""
    row = _dtypes.parse(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise errors.InvalidArgument(f"negative size in shape {shape}")
    if kind is None:
        kind = default_kind(row, device, dtype)
    nbytes = _memory.span(shape, None) * row.itemsize
    if nbytes == 0 and kind != "r":
        return empty_value(kind, row, shape, device)
    return from_block(_memory.block(nbytes or 1, device), row, shape, kind)


def default_kind(row, device, dtype=None):
    """See `empty`."""
    if type(dtype).__module__ == "torch":
        return "t"
    if device >= 0:
        return "t" if "torch" in sys.modules else "r"
    if row.numpy is not None and available("numpy"):
        return "n"
    if row.ml_dtypes and "numpy" in sys.modules and "ml_dtypes" in sys.modules:
        return "n"
    return "t" if available("torch") else "r"


def empty_value(kind, row, shape, device):
    """A value without bytes."""
    if kind == "n":
        import numpy as np

        return np.empty(shape, _dtypes.to_numpy(row.name))
    import torch

    return torch.empty(shape, dtype=_dtypes.to_torch(row.name), device="cpu" if device < 0 else f"cuda:{device}")


_found = {}


def available(module):
    """Whether a module is loaded or can be: loads it."""
    if sys.modules.get(module) is not None:
        return True
    if module not in _found:
        # In a thread: what a module keeps of the frames that import it (torch 2.2 keeps them all) holds no values of ours then.
        thread = threading.Thread(target=_load, args=(module,), name="millpond-import")
        thread.start()
        thread.join()
    return _found.get(module, False)


def _load(module):
    import importlib

    try:
        importlib.import_module(module)
        _found[module] = True
    except ImportError:  # not there, or another Python's
        _found[module] = False
