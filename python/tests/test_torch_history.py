"""torch's memory history, over real blocks of the host driver in the place of a GPU's: torch's own viewer reads it."""

import os
import subprocess
import sys

import pytest
from conftest import native

torch = pytest.importorskip("torch")
if torch.version.cuda is None:
    pytest.skip("this torch is built without CUDA", allow_module_level=True)
pytestmark = native

HOST_AS_GPU = """
import pickle, sys, tempfile, os, torch, millpond
from millpond import _native, _torch_stats, _torch_trace
arena = millpond.Arena(limit="256MiB", driver="host", chunk_bytes="32MiB")
library, real = _native.library(), _native.control
def control(op, **fields):
    if "device" in fields:
        fields["device"] = -1
    return real(op, **fields)
_native.control = control
torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True
torch.cuda.device_count = lambda: 1
_torch_stats.install()
memory = torch.cuda.memory
def innermost(size=4096):
    return library.allocate(-1, size, 0)
def actions(snapshot):
    return [e["action"] for e in snapshot["device_traces"][0]]
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", HOST_AS_GPU + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_snapshot_with_its_history_is_what_torch_s_viewer_reads():
    out = run(
        """
assert memory._snapshot()["device_traces"] == [[]]
import millpond.torch
_torch_stats.uninstall()
assert millpond.torch.memory_snapshot()["device_traces"] == [[]], "without torch's own functions patched"
_torch_stats.install()
memory._record_memory_history(max_entries=1000, stacks="python")
assert torch._C._cuda_isHistoryEnabled()
kept, gone, large = innermost(3000), innermost(5000), innermost(9 << 20)
library.deallocate(gone)
path = os.path.join(tempfile.mkdtemp(), "s.pickle")
memory._dump_snapshot(path)
snapshot = pickle.load(open(path, "rb"))
assert actions(snapshot) == ["segment_alloc", "alloc", "alloc", "alloc", "free_requested", "free_completed"], actions(snapshot)
trace = snapshot["device_traces"][0]
allocated = trace[1]
assert (allocated["addr"], allocated["size"], allocated["stream"]) == (kept, 3000, 0)
assert [f["name"] for f in allocated["frames"][:2]] == ["innermost", "<module>"] and set(allocated["frames"][0]) == {"filename", "line", "name"}
import time
assert abs(allocated["time_us"] / 1e6 - time.time()) < 60
(segment,) = snapshot["segments"]
blocks = {b["address"]: b for b in segment["blocks"]}
assert blocks[kept]["frames"] == allocated["frames"] and blocks[kept]["state"] == "active_allocated"
assert blocks[gone]["frames"] == [] and blocks[gone]["state"] == "inactive"
assert segment["frames"][0]["name"] == "innermost"

from torch.cuda import _memory_viz as viz
text = viz.trace(snapshot)
assert "6 entries" in text and "cudaMalloc" in text and "free completed" in text, text
plots = [dict(), dict(plot_segments=True)] + [dict(filter_freed=True)] * hasattr(viz, "filter_alloc_free_pairs")
for page in [viz.trace_plot(snapshot, **how) for how in plots] + [viz.segment_plot(snapshot)]:
    assert "snapshot.pickle" in page
flames = viz.memory(snapshot, format_flamegraph=lambda text: text)
assert ":innermost 3000\\n" in flames, flames
assert "innermost" in viz.segments(snapshot, format_flamegraph=lambda text: text)
assert "total_reserved" in viz.segsum(snapshot)
viz.compare(snapshot["segments"], memory._snapshot()["segments"], format_flamegraph=lambda text: text)
print("fine")
"""
    )
    assert out.endswith("fine")


def test_a_snapshot_of_one_pool_has_its_pieces_alone():
    """Chunks may be several pools'; torch's `memory_snapshot(mempool_id)` has that pool's segments."""
    from millpond import _torch_stats

    def block(address, size, state, pool, stream=5):
        used = size - 1 if state == "active_allocated" else 0
        return {"address": address, "size": size, "state": state, "requested_size": used, "segment_pool_id": list(pool), "stream": stream}

    mine, other, none = (4, 1), (4, 2), (0, 0)
    blocks = [
        block(100, 10, "active_allocated", mine),
        block(110, 20, "inactive", mine),
        block(130, 30, "active_allocated", none, 9),
        block(160, 40, "active_awaiting_free", mine),
    ]
    whole = {"device": 0, "address": 100, "total_size": 100, "stream": 9, "segment_pool_id": [0, 0], "frames": ["f"], "blocks": blocks}
    others = {**whole, "address": 500, "blocks": [block(500, 10, "inactive", other)]}
    first, second = _torch_stats._of_pool([whole, others], mine)
    sizes = ("address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_pool_id")
    assert [first[key] for key in sizes] == [100, 30, 10, 10, 9, 5, [4, 1]] and first["blocks"] == blocks[:2]
    assert [second[key] for key in sizes] == [160, 40, 0, 40, 0, 5, [4, 1]] and second["blocks"] == blocks[3:]
    assert (first["device"], first["frames"]) == (0, ["f"]) and whole["total_size"] == 100, "the chunk itself is as it was"
    assert _torch_stats._of_pool([whole, others], (9, 9)) == []


def test_snapshots_by_pool_and_without_traces():
    run(
        """
memory._record_memory_history(max_entries=1000, stacks="python")
kept = innermost(3000)
everything = memory._snapshot()["segments"]
(segment,) = everything
assert (segment["stream"], segment["segment_pool_id"]) == (0, [0, 0])
assert all((b["stream"], b["segment_pool_id"]) == (0, [0, 0]) for b in segment["blocks"])
for asked in (None, (0, 0), (0, 0, True), (0, 0, False)):
    found = torch._C._cuda_memorySnapshot(asked)
    assert found["segments"] == everything and bool(found["device_traces"][0]) == (asked != (0, 0, False)), asked
for asked in ((7, 0), (7, 0, True)):
    assert torch._C._cuda_memorySnapshot(asked)["segments"] == []
"""
    )


def test_the_arguments_mean_what_torch_means_by_them():
    run(
        """
def frames_of(event, snapshot):
    return [bool(e["frames"]) for e in snapshot["device_traces"][0] if e["action"] == event]
def pair():
    library.deallocate(innermost())
def history(*args, **more):
    # Without what this torch has not (clear_history: since 2.8), from nothing.
    if more.pop("clear_history", False):
        _torch_trace.record(*args or ("all",), more.get("context", "all"), clear_history=True)
    else:
        memory._record_memory_history(*args, **more)
innermost()
memory._record_memory_history("all", context=None)
pair()
assert frames_of("alloc", memory._snapshot()) == [False]
history("all", context="alloc", clear_history=True)
pair()
assert frames_of("alloc", memory._snapshot()) == [True] and frames_of("free_requested", memory._snapshot()) == [False]
history(clear_history=True)
pair()
s = memory._snapshot()
assert frames_of("alloc", s) == [True], s["device_traces"]
memory._record_memory_history(max_entries=3)
[pair() for _ in range(5)]
assert actions(memory._snapshot()) == ["alloc", "free_requested", "free_completed"]
_torch_trace.record("all", max_entries=100, skip=["free_requested"])  # skip_actions= since torch 2.11
assert "free_requested" not in actions(memory._snapshot()) and "free_completed" in actions(memory._snapshot())
memory._record_memory_history("state")
live = innermost()
s = memory._snapshot()
assert actions(s) == []
assert [b["frames"][0]["name"] for seg in s["segments"] for b in seg["blocks"] if b["address"] == live] == ["innermost"]
memory._record_memory_history(None)
assert not torch._C._cuda_isHistoryEnabled() and actions(memory._snapshot()) == []
pair()
assert real("recording", device=-1)["on"] is False
# The signature of before torch 2.1.
memory._record_memory_history(True, trace_alloc_max_entries=100, trace_alloc_record_context=True)
pair()
assert actions(memory._snapshot()) == ["alloc", "free_requested", "free_completed"]
memory._record_memory_history(False)
assert not torch._C._cuda_isHistoryEnabled()
for newer in ((False, True, "later"), (False, False), (True, True)):
    try:
        _torch_trace.record("all", "all", "all", 10, False, False, False, [], *newer)
    except millpond.Unsupported as e:
        assert newer[0] and "pinned" in str(e)
    assert torch._C._cuda_isHistoryEnabled() == (newer != (False, False)) or newer[0]
_torch_trace.record(None)
for bad in (dict(enabled="some"), dict(context="everything"), dict(stacks="c")):
    try:
        memory._record_memory_history(**bad)
    except millpond.InvalidArgument as e:
        assert "one of" in str(e)
    else:
        raise AssertionError(bad)
"""
    )


def test_out_of_memory_and_chunks_that_go_back_are_in_it():
    run(
        """
memory._record_memory_history()
address = innermost(20 << 20)
try:
    library.allocate(-1, 1 << 40, 0) or _native.raise_last("allocate")
except Exception:
    pass
library.deallocate(address)
import time
end = time.monotonic() + 20
while "segment_free" not in actions(memory._snapshot()):
    real("trim", device=-1)
    assert time.monotonic() < end
trace = memory._snapshot()["device_traces"][0]
oom = [e for e in trace if e["action"] == "oom"]
assert [e["size"] for e in oom] == [1 << 40] and "addr" not in oom[0] and "device_free" in oom[0]
from torch.cuda import _memory_viz as viz
assert "OutOfMemoryError" in viz.trace(memory._snapshot()) and "cudaFree" in viz.trace(memory._snapshot())
"""
    )
