"""Which CUDA stream this thread works on, asked of torch and only if torch is loaded and has a context."""

import sys

#: The ordinal of a GPU that the library does not use yet in this process.
UNKNOWN = 0x7FFFFFFF

_session_gpus = 0


def configure(gpus):
    """Told by attach: how many GPUs this process has."""
    global _session_gpus
    _session_gpus = gpus


def gpus():
    """How many GPUs this process is attached with."""
    return _session_gpus


def torch_cuda():
    """torch, if it is loaded and has initialised CUDA; else None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


def current(device):
    """This thread's stream on a GPU (0: the legacy default), 0 for CPU memory."""
    if device < 0:
        return 0
    torch = torch_cuda()
    if torch is None:
        return 0
    return _raw(torch, torch.cuda.current_device() if device == UNKNOWN else device)


def all_current():
    """This thread's stream on each GPU; none where torch does not use CUDA in this process."""
    torch = torch_cuda()
    return [_raw(torch, n) for n in range(torch.cuda.device_count())] if torch is not None else ()


def _raw(torch, device):
    get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return get(device) if get is not None else torch.cuda.current_stream(device).cuda_stream


def handle(stream):
    """The raw handle of what a user passes: an integer, or an object with `cuda_stream` or `ptr` or `handle`."""
    if stream is None:
        return 0
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value
    return int(stream)
