"""torch's memory statistics, answered from our counters.

Under a replaced allocator torch's C functions raise. Every Python function on top of them (in `torch.cuda`,
`torch.cuda.memory` and `torch.accelerator`) looks them up in `torch._C` when it is called, so that is the one place to patch:
whoever has imported the Python functions already sees the change too.
"""

import torch

from . import _native, _torch_trace

_originals = {}

_METRICS = (
    "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes".split()
)
_COUNTS = "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free max_split_size".split()


def nested(flat):
    """torch's nested statistics from {"allocation.all.current": n, ...}. What is missing is 0."""
    result = {
        metric: {pool: dict.fromkeys(("current", "peak", "allocated", "freed"), 0) for pool in ("all", "large_pool", "small_pool")}
        for metric in _METRICS
    }
    for metric in ("oversize_allocations", "oversize_segments"):
        result[metric] = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    result.update(dict.fromkeys(_COUNTS, 0))
    for key, value in flat.items():
        at = result
        *parts, last = key.split(".")
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = value
    return result


def _stats(device):
    flat = _native.control("stats", device=device)
    # torch has no such key.
    flat.pop("growths", None)
    return nested(flat)


def _of_pool(segments, pool):
    """What of these segments is one pool's. A chunk may be several pools': each piece counts as a segment of its own."""
    pieces = []
    for segment in segments:
        end = None
        for block in segment["blocks"]:
            if tuple(block["segment_pool_id"]) != pool:
                continue
            if end != block["address"]:
                sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), 0)
                whose = {"address": block["address"], "stream": block["stream"], "segment_pool_id": block["segment_pool_id"], "blocks": []}
                pieces.append({**segment, **sizes, **whose})
            piece, size, state = pieces[-1], block["size"], block["state"]
            piece["blocks"].append(block)
            piece["total_size"] += size
            piece["allocated_size"] += size if state == "active_allocated" else 0
            piece["active_size"] += size if state != "inactive" else 0
            piece["requested_size"] += block["requested_size"]
            end = block["address"] + size
    return pieces


def _snapshot(asked=None):
    # (pool's two numbers, and since torch 2.9 whether traces are wanted); (0, 0): all that there is.
    pool, with_traces = tuple(asked or (0, 0))[:2], tuple(asked or ())[2:] != (False,)
    segments, traces = [], []
    for device in range(torch.cuda.device_count()):
        history = _torch_trace.History(device)
        segments += history.fill(_native.control("snapshot", device=device))
        traces.append(history.trace if with_traces else [])
    if pool != (0, 0):
        segments = _of_pool(segments, pool)
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


_PATCHES = {
    "_cuda_memoryStats": _stats,
    "_cuda_resetAccumulatedMemoryStats": lambda device: _native.control("reset_accumulated_stats", device=device) and None,
    "_cuda_resetPeakMemoryStats": lambda device: _native.control("reset_peak_stats", device=device) and None,
    "_cuda_memorySnapshot": _snapshot,
    "_cuda_record_memory_history": _torch_trace.record,
    "_cuda_record_memory_history_legacy": _torch_trace.record_legacy,
    "_cuda_isHistoryEnabled": _torch_trace.is_enabled,
    "_cuda_getMemoryFraction": lambda device: _native.control("get_fraction", device=device)["fraction"],
    # torch.accelerator asks the native allocator, which holds nothing.
    "_accelerator_getDeviceStats": _stats,
    "_accelerator_resetAccumulatedStats": lambda device: _native.control("reset_accumulated_stats", device=device) and None,
    "_accelerator_resetPeakStats": lambda device: _native.control("reset_peak_stats", device=device) and None,
    "_accelerator_emptyCache": lambda: torch._C._cuda_emptyCache(),
    "_accelerator_isAllocatorInitialized": lambda: torch.cuda.is_initialized(),
}


def _with_what_is_at_hand(function):
    """Free memory as this process sees it: what it gave back a moment ago is its own for the asking, and the driver's only later; what
    lies beyond a limit, the arena's or its own, it cannot have."""

    def memory_info(device, *rest):
        free, total = function(device, *rest)
        index = device if isinstance(device, int) else getattr(device, "index", None)
        index = torch.cuda.current_device() if index is None else index
        own = _native.control("at_hand", device=index)
        room = total if own["room"] is None else own["room"]
        return min(total, free + own["bytes"], room), total

    return memory_info


#: Where torch asks the driver for free memory: (of torch._C, a name in there or None).
_FREE = (("_cudart", "cudaMemGetInfo"), ("_accelerator_getMemoryInfo", None))


def install():
    """Patches what this torch has. Doing it twice does nothing."""
    for name, function in _PATCHES.items():
        _replace(torch._C, name, lambda _, function=function: function)
    for outer, inner in _FREE:
        where, name = (torch._C, outer) if inner is None else (getattr(torch._C, outer, None), inner)
        _replace(where, name, _with_what_is_at_hand)


def _replace(where, name, make):
    original = getattr(where, name, None)
    if original is not None and name not in _originals:
        _originals[name] = where, original
        setattr(where, name, make(original))


def install_pool(figures):
    """Answers memory statistics from a pool's figures: {"reserved", "reserved_peak", "used", "used_peak"} of a GPU, or {}."""

    def stats(device):
        found = figures(device)
        flat = {}
        used = dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), "used")
        for metric, key in {**used, "reserved_bytes": "reserved"}.items():
            flat[f"{metric}.all.current"] = found.get(key, 0)
            flat[f"{metric}.all.peak"] = found.get(f"{key}_peak", 0)
        return nested(flat)

    for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
        _replace(torch._C, name, lambda _: stats)


def uninstall():
    """Puts torch's own functions back."""
    while _originals:
        name, (where, original) = _originals.popitem()
        setattr(where, name, original)
