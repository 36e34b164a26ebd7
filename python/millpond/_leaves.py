"""Encoding of arrays and tensors: the leaves of `_tree`. Each function gives the node, and tells the encoder the memory."""

import base64
import sys

from . import _dtypes, _foreign, _memory, _native, _pinned, _ref, _streams, errors

#: A view is copied without its gaps where those are this large, and half of its data or more.
LEAST_GAPS = 1 << 20


class No(Exception):
    """Cannot cross, and why; the path is found afterwards."""


def device_id(device):
    """What stands for a device in a value without bytes."""
    if device < 0:
        return 0
    from . import _session

    return _session.device_id(device)


def numpy_array(e, array, depth):
    """A numpy array: its memory, or that of a contiguous copy if its strides are negative or odd."""
    name = _dtypes.of_numpy(array.dtype)
    interface = array.__array_interface__
    shape, strides = interface["shape"], interface["strides"]
    nbytes = array.nbytes
    node = ["t", "n", -1, 0, name, shape, 0]
    if nbytes == 0:
        if array.size:
            raise No(f"an array of dtype {array.dtype} without bytes")
        return {"$": node}
    if strides is not None:
        size = array.itemsize
        if any(s < 0 or s % size for s in strides):
            array = _packed(e, array, nbytes)
            interface = array.__array_interface__
        else:
            strides = [s // size for s in strides]
            node[6] = strides
            data, nbytes = nbytes, _memory.span(shape, strides) * size
            if _has_gaps(data, nbytes):
                e.has_gaps(array)
    e.keep.append(array)
    e.range(-1, interface["data"][0], nbytes, node)
    return {"$": node}


def _packed(e, array, nbytes):
    """A contiguous copy, in arena memory if we have some."""
    import numpy as np

    e.copies += 1
    e.copied_bytes += nbytes
    try:
        packed = np.asarray(_memory._Holder(_memory.block(nbytes, -1), 0, "|u1", (nbytes,), None)).view(array.dtype).reshape(array.shape)
        packed[...] = array
        return packed
    except errors.Error:
        return np.ascontiguousarray(array)


def _has_gaps(data, covered):
    """Whether a view of so many bytes of data is worth a copy without what else it covers."""
    return covered - data >= LEAST_GAPS and 2 * covered >= 3 * data


def without_gaps(e, view, address):
    """A view that is not arena memory, copied into the arena element by element: (address, bytes). None: it is arena memory, or there
    is no room."""
    try:
        if _native.control("locate", address=address).get("kind") != "foreign":
            return None
        if hasattr(view, "data_ptr"):
            device, nbytes = view.get_device(), view.numel() * view.element_size()
            copy = _ref.empty(tuple(view.shape), view.dtype, device, "t")
            copy.copy_(view.detach())  # on a GPU it is queued on the stream that READY follows
            at = copy.data_ptr()
        else:
            device, nbytes, copy = -1, view.nbytes, _ref.empty(view.shape, view.dtype, -1, "n")
            copy[...] = view
            at = copy.__array_interface__["data"][0]
    except errors.Error:
        return None
    e.keep.append(copy)
    e.ways[at] = _native.WAYS["copy"]
    e.packed += ((device, nbytes),)
    e.copies += 1
    e.copied_bytes += nbytes
    return at, nbytes


def numpy_scalar(e, value, depth):
    """A numpy scalar: its bytes, in the tree."""
    name = _dtypes.of_numpy(value.dtype)
    e.inline += 1
    return {"$": ["s", name, base64.b64encode(value.tobytes()).decode("ascii")]}


_torch_names = _dtypes.torch_names
#: Of these no tensor is a view that stands for another's conjugate or negative.
_INTEGERS = frozenset(("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"))


def torch_tensor(e, tensor, depth):
    """A torch tensor on the CPU or a GPU, without its gradient."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        tensor = _plain_tensor(torch, tensor)
    if tensor.is_nested:
        raise No("a nested tensor: send its parts")
    if tensor.layout is not torch.strided:
        raise No(f"a tensor of layout {tensor.layout}: send its parts (indices and values)")
    name = _torch_names.get(tensor.dtype) or _dtypes.of_torch(tensor.dtype)  # of quantised ones none
    device = tensor.get_device()
    if not (tensor.is_cuda or tensor.is_cpu):
        raise No(f"a tensor on device {tensor.device}")
    if name not in _INTEGERS and (tensor.is_neg() or tensor.is_conj()):
        tensor = tensor.detach().resolve_conj().resolve_neg()
        e.copies += 1
        e.copied_bytes += tensor.numel() * tensor.element_size()
    shape = tensor.shape
    node = ["t", "t", -1, 0, name, shape, 0]
    count = tensor.numel()
    if count == 0:
        node[3] = device_id(device)
        return {"$": node}
    if device >= 0 and (device in e.off or not _streams.gpus()):
        return hosted(e, tensor)
    nbytes = data = count * tensor.element_size()
    if not tensor.is_contiguous():
        node[6] = tensor.stride()
        count = _memory.span(shape, node[6])
        nbytes = count * tensor.element_size()
    address = tensor.data_ptr()
    if not address:
        raise No("a tensor without memory (meta, fake or functional)")
    if device >= 0 and (e.kinds or e.why_copied):
        found = _foreign.encode(e, tensor, device, address, count, name, shape, node[6])
        if found is not None:
            return found
    e.keep.append(tensor)
    leaves = e.leaves
    if nbytes > data and _has_gaps(data, nbytes):
        e.has_gaps(tensor)
    leaves.append((device, address, address + nbytes, len(leaves), node))
    return {"$": node}


def _plain_tensor(torch, tensor):
    wrapper = getattr(torch.utils, "_python_dispatch", None)
    wrapper = getattr(wrapper, "is_traceable_wrapper_subclass", None)
    if hasattr(tensor, "__tensor_flatten__") or (wrapper is not None and wrapper(tensor)):
        raise No(f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__} that wraps others: send its parts")
    return tensor.as_subclass(torch.Tensor)


def hosted(e, tensor):
    """A GPU tensor that goes by host memory: a copy in the host arena, which the other side puts back on a GPU if it uses one."""
    tensor = tensor.detach().contiguous()
    device, nbytes = tensor.get_device(), tensor.numel() * tensor.element_size()
    copy = _ref.empty(tuple(tensor.shape), tensor.dtype, -1, "t")
    leaving = _pinned.out(device, copy.data_ptr(), tensor.data_ptr(), nbytes) if e.overlap and _on_gpu(tensor) else None
    if leaving is not None:
        number, pieces, tier = leaving
        e.leaving += (number,)
        e.keep.append(tensor)
    else:
        tier = _pinned.copy(device, copy.data_ptr(), tensor.data_ptr(), nbytes) if _on_gpu(tensor) else None
        if tier is None:
            copy.copy_(tensor)  # returns when the bytes are there
            tier = "host"
    e.went_by_host(tier, nbytes, copy.data_ptr())
    if not e.by_choice:
        reason = None if _streams.gpus() else "a GPU tensor went through host memory: this arena serves no GPU"
        e.falls.append(("arena", tier, reason, nbytes))
    node = torch_tensor(e, copy, 0)
    if leaving is not None:
        return {"$": ["h", node["$"], device_id(device), pieces]}
    return {"$": ["g", node, device_id(device)]}


def _on_gpu(tensor):
    return tensor.is_cuda


def hosted_reference(e, ref):
    """The same for a value that was received and not touched."""
    if "torch" not in sys.modules:
        raise No("a GPU value whose GPU tier is off, in a process without torch: nothing here can copy it to host memory")
    return hosted(e, ref.torch())


def cuda_array(e, value, depth):
    """What shows GPU memory by `__cuda_array_interface__` (CuPy, Numba): it arrives as a torch tensor."""
    interface = value.__cuda_array_interface__
    row = _dtypes.lookup(_dtypes.of_typestr(interface["typestr"]))
    shape, strides = list(interface["shape"]), interface.get("strides")
    node = ["t", "t", -1, 0, row.name, shape, 0]
    device = getattr(getattr(value, "device", None), "id", 0)
    if strides is not None:
        if any(s < 0 or s % row.itemsize for s in strides):
            raise No("a GPU array with negative or odd strides: make it contiguous")
        strides = node[6] = [s // row.itemsize for s in strides]
    count = _memory.span(shape, strides)
    if count == 0:
        node[3] = device_id(device)
        return {"$": node}
    stream = interface.get("stream")
    if device in e.off or not _streams.gpus():
        torch = _streams.torch_cuda()
        if torch is None:
            raise No("a GPU array whose GPU tier is off, in a process without torch: nothing here can copy it to host memory")
        return hosted(e, torch.as_tensor(value, device=f"cuda:{device}"))
    if stream:
        _order_after(e, device, stream)
    if e.kinds or e.why_copied:
        found = _foreign.encode(e, value, device, interface["data"][0], count, row.name, shape, node[6])
        if found is not None:
            return found
    e.keep.append(value)
    e.range(device, interface["data"][0], count * row.itemsize, node)
    return {"$": node}


def _order_after(e, device, stream):
    """READY follows the stream that the array's owner named (1: the legacy default, 2: the thread's)."""
    torch = _streams.torch_cuda()
    if torch is None:
        e.streams[device] = 0 if stream == 1 else stream
        return
    current = torch.cuda.current_stream(device)
    if stream > 2 and stream != current.cuda_stream:
        current.wait_stream(torch.cuda.ExternalStream(stream, device=device))
    elif stream == 1 and current.cuda_stream:
        current.wait_stream(torch.cuda.default_stream(device))


def dlpack_array(e, value, depth):
    """What hands itself over by DLPack (JAX, CuPy, TensorFlow): numpy on the CPU, torch on a GPU."""
    kind, _ = value.__dlpack_device__()
    if kind in (1, 3):
        if hasattr(type(value), "__array_interface__"):
            return host_array(e, value, depth)
        if not _ref.available("numpy"):
            raise No(f"a {type(value).__name__} in host memory needs numpy here to be looked at")
        import numpy as np

        try:
            array = np.from_dlpack(value)
        except (AttributeError, BufferError, RuntimeError, TypeError):  # numpy before 1.23, read-only, a type that DLPack lacks
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise No(f"a {type(value).__name__} that numpy cannot look at") from None
        return numpy_array(e, array, depth)
    if kind == 2 and _ref.available("torch"):
        import torch

        return torch_tensor(e, torch.from_dlpack(value), depth)
    raise No(f"a {type(value).__name__} on DLPack device type {kind}" + (" needs torch here" if kind == 2 else ""))


def host_array(e, value, depth):
    """What shows host memory by `__array_interface__`: it arrives as a numpy array."""
    if _ref.available("numpy"):
        import numpy as np

        return numpy_array(e, np.asarray(value), depth)
    interface = value.__array_interface__
    row = _dtypes.lookup(_dtypes.of_typestr(interface["typestr"]))
    shape, strides = list(interface["shape"]), interface.get("strides")
    node = ["t", "n", -1, 0, row.name, shape, 0]
    if strides is not None:
        if any(s < 0 or s % row.itemsize for s in strides):
            raise No("an array with negative or odd strides, and no numpy here to make it contiguous")
        strides = node[6] = [s // row.itemsize for s in strides]
    count = _memory.span(shape, strides)
    if count:
        e.keep.append(value)
        e.range(-1, interface["data"][0], count * row.itemsize, node)
    return {"$": node}
