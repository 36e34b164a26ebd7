"""Encoding of arrays and tensors: the leaves of `_tree`. Each function gives the node, and tells the encoder the memory."""

import base64

from . import _dtypes, _memory, errors


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
            nbytes = _memory.span(shape, strides) * size
    e.out.keep.append(array)
    e.range(-1, interface["data"][0], nbytes, node)
    return {"$": node}


def _packed(e, array, nbytes):
    """A contiguous copy, in arena memory if we have some."""
    import numpy as np

    e.out.copies += 1
    e.out.copied_bytes += nbytes
    try:
        packed = np.asarray(_memory._Holder(_memory.block(nbytes, -1), 0, "|u1", (nbytes,), None)).view(array.dtype).reshape(array.shape)
        packed[...] = array
        return packed
    except errors.Error:
        return np.ascontiguousarray(array)


def numpy_scalar(e, value, depth):
    """A numpy scalar: its bytes, in the tree."""
    name = _dtypes.of_numpy(value.dtype)
    return {"$": ["s", name, base64.b64encode(value.tobytes()).decode("ascii")]}


def torch_tensor(e, tensor, depth):
    """A torch tensor on the CPU or a GPU, without its gradient."""
    import torch

    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        tensor = _plain_tensor(torch, tensor)
    if tensor.is_nested:
        raise No("a nested tensor: send its parts")
    if tensor.layout is not torch.strided:
        raise No(f"a tensor of layout {tensor.layout}: send its parts (indices and values)")
    if tensor.is_quantized:
        raise No(f"a quantised tensor ({tensor.dtype}): send .int_repr() with its scale and zero point")
    name = _dtypes.of_torch(tensor.dtype)
    device = tensor.get_device()
    if not (tensor.is_cuda or tensor.is_cpu):
        raise No(f"a tensor on device {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
        e.out.copies += 1
        e.out.copied_bytes += tensor.numel() * tensor.element_size()
    shape = tensor.shape
    node = ["t", "t", -1, 0, name, shape, 0]
    count = tensor.numel()
    if count == 0:
        node[3] = device_id(device)
        return {"$": node}
    if not tensor.is_contiguous():
        node[6] = tensor.stride()
        count = _memory.span(shape, node[6])
    address = tensor.data_ptr()
    if not address:
        raise No("a tensor without memory (meta, fake or functional)")
    e.out.keep.append(tensor)
    e.range(device, address, count * tensor.element_size(), node)
    return {"$": node}


def _plain_tensor(torch, tensor):
    wrapper = getattr(torch.utils, "_python_dispatch", None)
    wrapper = getattr(wrapper, "is_traceable_wrapper_subclass", None)
    if hasattr(tensor, "__tensor_flatten__") or (wrapper is not None and wrapper(tensor)):
        raise No(f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__} that wraps others: send its parts")
    return tensor.as_subclass(torch.Tensor)


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
    e.out.keep.append(value)
    e.range(device, interface["data"][0], count * row.itemsize, node)
    return {"$": node}
