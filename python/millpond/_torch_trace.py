"""torch's memory history (`torch.cuda.memory._record_memory_history`), answered from our recording, in torch's format."""

from . import _native, _trace, errors

#: Frames of one stack. torch keeps all; deeper ones say nothing about memory.
DEPTH = 64
#: Events that are kept where torch's default (all there ever are) is asked for.
MOST = 1 << 20
_FEWEST = 1 << 16
_ACTIONS = {"alloc": ("alloc",), "reusable": ("free_completed",), "grow": ("segment_alloc",), "trim": ("segment_free",), "oom": ("oom",)}

# What is on: None, "state" (no traces) or "all"; how many entries a trace has, and which are left out.
_enabled = None
_entries = MOST
_skipped = frozenset()


def record(
    enabled,
    context="all",
    stacks="all",
    max_entries=MOST,
    clear_history=False,
    compile_context=False,
    annotations=False,
    skip=(),
    pinned=False,
    cuda=True,
    *newer,
):
    """`torch._C._cuda_record_memory_history`, up to torch 2.15's arguments. C++ frames are not recorded, whatever `stacks` is, nor is
    torch's pinned host memory, which is not the arena's."""
    global _enabled, _entries, _skipped
    _check("enabled", enabled, (None, "state", "all"))
    _check("context", context, (None, "state", "alloc", "all"))
    _check("stacks", stacks, ("python", "all"))
    if pinned:
        raise errors.Unsupported("record_pinned_host_memory: torch's pinned host memory is not the arena's, and is not recorded under millpond")
    if enabled is None or not cuda:
        _enabled = None
        _native.control("record_stop")
        return
    _entries, _skipped = max(int(max_entries), 1), frozenset(skip or ())
    _trace.record(
        events=min(max(_entries, _FEWEST), MOST),
        frames=DEPTH if context else 0,
        free_frames=context == "all",
        fresh=bool(clear_history) and _enabled is not None,
    )
    _enabled = enabled


def record_legacy(enabled, record_context=True, max_entries=1, trace_context=False, cpp=False, clear_history=False, *more):
    """`torch._C._cuda_record_memory_history_legacy`: traces are kept from 2 entries on, as torch does it."""
    context = None if not record_context else "alloc" if trace_context else "state"
    record(("all" if max_entries > 1 else "state") if enabled else None, context, "all" if cpp else "python", max_entries, clear_history)


def is_enabled():
    """`torch._C._cuda_isHistoryEnabled`."""
    return _enabled is not None


def _check(name, value, allowed):
    if value not in allowed:
        raise errors.InvalidArgument(f"{name}={value!r}: one of {', '.join(map(repr, allowed))}")


class History:
    """What is recorded of one device: its trace, and the frames of its live blocks and of its segments."""

    def __init__(self, device):
        answer = _native.control("recording", device=device) if _enabled else {}
        frames = {
            int(n): {"filename": file, "line": line, "name": name} for n, (file, line, name) in answer.get("frames", {}).items()
        }
        self._stacks = {int(n): [frames[f] for f in stack if f in frames] for n, stack in answer.get("stacks", {}).items()}
        self._none = []
        self._blocks, self._segments = {}, {}
        self.trace = []
        for row in answer.get("events", ()):
            self._add(device, *row)
        self.trace = self.trace[-_entries:] if _enabled == "all" else []

    def _add(self, device, event, address, size, stream, time_us, stack, pending):
        if event == "alloc":
            self._blocks[address] = stack
        elif event == "reusable" or (event == "free" and not pending):
            self._blocks.pop(address, None)
        elif event == "grow":
            self._segments[address] = stack
        elif event == "trim":
            self._segments.pop(address, None)
        if _enabled != "all":
            return
        actions = _ACTIONS.get(event) or (("free_requested",) if pending else ("free_requested", "free_completed"))
        for action in actions:
            if action in _skipped:
                continue
            entry = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time_us}
            entry.update(device=device, frames=self._stacks.get(stack, self._none), compile_context="N/A", user_metadata="")
            if action == "oom":
                del entry["addr"]
                entry["device_free"] = 0  # the driver is not asked in the middle of a malloc
            self.trace.append(entry)

    def fill(self, segments):
        """Puts the frames of segments and live blocks in their places."""
        if self._stacks:
            for segment in segments:
                self._put(segment, self._segments)
                for block in segment["blocks"]:
                    self._put(block, self._blocks)
        return segments

    def _put(self, place, stacks):
        frames = self._stacks.get(stacks.get(place["address"]))
        if frames:
            place["frames"] = frames
