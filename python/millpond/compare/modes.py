"""What is compared with what, and what cannot be on this machine, and why."""

import importlib.util
import os

#: section -> mode -> what it is. Ours comes first.
MODES = {
    "allocation": {
        "ours": "millpond.torch.install(): torch's CUDA allocator replaced",
        "native": "torch's caching allocator, as it comes",
        "expandable": "torch with expandable_segments:True",
        "async": "torch with backend:cudaMallocAsync",
        "rmm-pool": "RMM's pool through rmm_torch_allocator",
        "rmm-arena": "RMM's arena through rmm_torch_allocator",
        "rmm-async": "RMM's cudaMallocAsync through rmm_torch_allocator",
        "bump": "a pluggable allocator that only moves a pointer: the floor",
    },
    "replay": {
        "ours": "millpond.torch.install(); with --driver host the library alone",
        "native": "torch's caching allocator, as it comes",
        "expandable": "torch with expandable_segments:True",
        "async": "torch with backend:cudaMallocAsync",
        "rmm-pool": "RMM's pool, which grows from nothing",
        "rmm-arena": "RMM's arena, of twice what is live at the peak",
        "rmm-async": "RMM's cudaMallocAsync",
        "bump": "a pluggable allocator that only moves a pointer: the floor, most of it torch's own",
    },
    "handoff": {
        "ours": "millpond: a torch tensor as an offset, by a channel",
        "ours-copied": "millpond: a tensor of torch's own allocator, copied into the arena on its GPU",
        "one-copy": "one copy on the GPU in one process, waited for: the floor of a copied hand-off",
        "mp-native": "torch.multiprocessing.Queue over CUDA IPC, native allocator",
        "mp-expandable": "torch.multiprocessing.Queue, expandable_segments:True",
        "pool-pointer": "a shareable cuMemPool: export pointer, import pointer, free",
        "pinned": "copied into shared pinned host memory and out of it",
    },
    "host-handoff": {
        "ours": "millpond: a CPU tensor or array as an offset, by a channel",
        "mp-queue": "torch.multiprocessing.Queue of CPU tensors: each moved to a shared file",
        "shared-copy": "copied into shared memory that the receiver maps",
        "pipe-copy": "all bytes through a pipe (multiprocessing.Connection)",
    },
}

CONF = {
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "mp-expandable": "expandable_segments:True",
}

NO_COMPILER = "needs a C++ compiler (g++ or c++)"

#: Rounds that are enough for a section, whatever is asked for: (quick, full).
ENOUGH = {"replay": (2, 5)}

MIB = 1 << 20
#: Cases of the hand-offs: (quick, full).
HANDOFF_BYTES = ([MIB, 64 * MIB, 1 << 30], [MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1 << 30])
HOST_BYTES = ([4 << 10, MIB, 16 * MIB], [4 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB])


def sections(driver):
    """What is measured with this driver."""
    return ["allocation", "handoff", "replay"] if driver == "cuda" else ["host-handoff"]


def choose_driver(wanted):
    """"auto" is CUDA where there is a driver with a GPU."""
    if wanted != "auto":
        return wanted
    return "cuda" if no_gpu() is None else "host"


def no_gpu():
    """Why there is no GPU to be used here; None where there is one."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1) on this machine"
    count = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"the CUDA driver says error {code}"
    return None if count.value else "the CUDA driver sees no GPU"


def cannot(section, mode, built=(), driver="cuda"):
    """Why a mode cannot run here; None where it can. `built`: the libraries that were compiled, as `build` names them."""
    if section == "replay" and "replaybench" not in built:
        return NO_COMPILER
    if section == "replay" and driver == "host":
        return None if mode == "ours" else "an allocator of GPU memory: with the host driver ours alone is replayed"
    if section != "host-handoff" and no_gpu() is not None:
        return no_gpu()
    if mode in ("mp-queue",) or (section != "host-handoff" and mode != "pool-pointer"):
        if not has("torch"):
            return "needs torch in this Python: pip install torch"
    if mode.startswith("rmm") and not has("rmm"):
        return "needs RMM in this Python: pip install rmm-cu12 (or rmm-cu13)"
    if mode == "bump" and "bump" not in built:
        return NO_COMPILER
    if section == "replay" and "allocbench" not in built:
        return "needs torch's C++ interface, which could not be compiled against: see the notes"
    return None


def absent(driver):
    """Sections that this driver has nothing for: {section: why}."""
    if driver == "cuda":
        return {}
    why = no_gpu() or "measured with --driver cuda"
    cannot = {section: f"compares GPU memory: {why}" for section in ("allocation", "handoff")}
    return {**cannot, "replay": f"compares GPU memory: {why}; ours alone: --driver host -- replay"}


def has(module):
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def environment(mode):
    """The environment of a mode's processes."""
    env = dict(os.environ)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MILLPOND_SOCKET", "MILLPOND_KEY"):
        env.pop(name, None)
    if mode in CONF:
        env["PYTORCH_CUDA_ALLOC_CONF"] = CONF[mode]
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = env.get("PYTHONPATH")
    env["PYTHONPATH"] = package if not path else package + os.pathsep + path
    return env
