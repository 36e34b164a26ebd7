"""What torch cannot do under a replaced allocator, refused by name: torch's own text asks for an issue at torch.

`torch.compile(mode="reduce-overhead")` keeps its CUDA graphs in trees over a private pool that it saves and restores, which no hook of
an allocator's can do. These functions of `torch._C` are looked up when they are called.
"""

import torch

from . import errors

_TREES = ("_cuda_checkPoolLiveAllocations", "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState")


def install():
    """Patches what this torch has."""
    for name in _TREES:
        if hasattr(torch._C, name):
            setattr(torch._C, name, _refuse_trees)


def _refuse_trees(*_, **__):
    raise errors.Unsupported(
        'torch.compile(mode="reduce-overhead") saves and restores the state of torch\'s own caching allocator, which '
        'millpond.torch.install() has replaced: compile with mode="default" or "max-autotune-no-cudagraphs", or use '
        'millpond.torch.install(mode="pool") (torch 2.8 and later)'
    )
