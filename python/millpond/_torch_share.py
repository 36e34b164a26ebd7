"""Arena memory that torch is asked to share by CUDA IPC, which it cannot: an error that says so and what to do instead.

However a CUDA tensor is pickled, torch comes to `torch.UntypedStorage._share_cuda_`, which it looks up at every call.
"""

import sys

import torch

from . import _native, errors

_original = None


def install(everything):
    """`everything`: no GPU memory of this process can be shared, as torch's allocator is replaced; else only the arena's cannot.
    Doing it twice does nothing."""
    global _original
    if _original is not None:
        return
    _original = original = torch.UntypedStorage._share_cuda_

    def _share_cuda_(storage, *args, **kwargs):
        if storage.nbytes() and (everything or _is_ours(storage)):
            raise errors.Unsupported(_what_to_do(storage))
        return original(storage, *args, **kwargs)

    torch.UntypedStorage._share_cuda_ = _share_cuda_


def uninstall():
    """torch says what it says by itself."""
    global _original
    if _original is not None:
        del torch.UntypedStorage._share_cuda_  # it inherits its own
        _original = None


def _is_ours(storage):
    try:
        return _native.control("locate", address=storage.data_ptr())["kind"] != "foreign"
    except errors.Error:
        return False


def _what_to_do(storage):
    what = f"{storage.nbytes()} bytes of GPU memory that millpond gave to torch cannot be shared by torch itself (CUDA IPC)"
    reducer = sys.modules.get("millpond._torch_reducer")
    if reducer is not None and reducer._installed:
        return f"{what}, and millpond's reducer carries no such tensor (quantized, without elements, not strided): send a plain one"
    return (
        f"{what}: send the tensor by conn.send(t), or call millpond.torch.install_reducer() once, in each process that puts tensors "
        "into torch.multiprocessing's queues, pipes or process arguments; they then go as offsets, without a copy"
    )
