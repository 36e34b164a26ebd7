"""Which CUDA stream this thread works on, asked of torch and only if torch is loaded and has a context."""

import sys

#: The ordinal of a GPU that the library does not use yet in this process.
UNKNOWN = 0x7FFFFFFF

_session_gpus = 0
#: torch's own functions, once it uses CUDA here: each message asks for streams, and finding them costs more than the answer.
_raw_stream = None
_count = 0


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
    if device < 0 or (_raw_stream is None and not _find()):
        return 0
    return _raw_stream(torch_cuda().cuda.current_device() if device == UNKNOWN else device)


def all_current():
    """This thread's stream on each GPU; none where torch does not use CUDA in this process."""
    if _raw_stream is None and not _find():
        return ()
    return (_raw_stream(0),) if _count == 1 else [_raw_stream(n) for n in range(_count)]


def in_use():
    """Whether torch uses CUDA in this process."""
    return _raw_stream is not None or _find()


def _find():
    """Whether torch uses CUDA in this process. It does not stop to: in a forked child nothing here works anyway."""
    global _raw_stream, _count
    torch = torch_cuda()
    if torch is None:
        return False
    _count = torch.cuda.device_count()
    get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    _raw_stream = get if get is not None else lambda device: torch.cuda.current_stream(device).cuda_stream
    return True


def handle(stream):
    """The raw handle of what a user passes: an integer, or an object with `cuda_stream` or `ptr` or `handle`."""
    if stream is None:
        return 0
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value
    return int(stream)
