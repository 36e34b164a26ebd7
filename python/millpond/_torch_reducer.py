"""`torch.multiprocessing`: queues and pipes carry arena tensors as offsets. See `millpond.torch.install_reducer`."""

import multiprocessing
import os
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing import reductions

from . import _native, _session, _tickets, errors

_installed = False
_expire = None
_counts = {"tickets": 0, "redeemed": 0, "torch": 0}


def install(expire):
    global _installed, _expire
    info = _session.info()
    # Children find the arena as this process did.
    os.environ.setdefault("MILLPOND_SOCKET", info["socket"])
    os.environ.setdefault("MILLPOND_KEY", info["key"])
    os.environ.setdefault("MILLPOND_LIBRARY", _native.library_path())
    _expire = expire
    if not _installed:
        for cls in (torch.Tensor, torch.nn.Parameter):
            ForkingPickler.register(cls, _reduce)
        _installed = True


def uninstall():
    global _installed
    for cls in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(cls, reductions.reduce_tensor)
    _installed = False


def counts():
    return dict(_counts)


def _reduce(tensor):
    if not _is_ours(tensor):
        _counts["torch"] += 1
        return reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        return reductions.reduce_tensor(tensor)  # says why not
    plain = tensor.detach()
    text = _tickets.kept(plain, _expire)
    _counts["tickets"] += 1
    return _rebuild, (text, tensor.requires_grad, type(tensor) is torch.nn.Parameter)


def _is_ours(tensor):
    """Arena memory; or GPU memory that torch cannot share itself, which goes by a copy into the arena."""
    if _session._info is None or _session._info["pid"] != os.getpid():
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.numel() == 0:
        return False
    if not (tensor.is_cpu or tensor.is_cuda):
        return False
    try:
        if _native.control("locate", address=tensor.data_ptr())["kind"] != "foreign":
            return True
    except errors.Error:
        return False
    return tensor.is_cuda and _torch_cannot_share()


def _torch_cannot_share():
    if torch.cuda.get_allocator_backend() != "native":
        return True
    # Expandable segments need ptrace permission on this process, which containers do not give.
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" in conf.lower().replace(" ", "")


def _rebuild(text, requires_grad, is_parameter):
    if _session._info is None:
        # A child's arguments are unpickled before its own code runs.
        _session.attach(name=f"{multiprocessing.current_process().name} ({os.getpid()})")
    tensor = _tickets.redeem(text)
    _counts["redeemed"] += 1
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor
