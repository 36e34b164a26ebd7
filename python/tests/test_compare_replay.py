"""`millpond.compare`'s replays: traces read, calls replayed against made-up allocators, verdicts, a short real run on the host."""

import argparse
import ctypes
import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import PROGRAM, ROOT, native
from millpond.compare import allocators, build, cli, conductor, modes, replay, replayed, report, traces

HEADER = traces.HEADER
TRACES = os.path.join(ROOT, "benches", "traces")
compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")
shipped = pytest.mark.skipif(not os.path.isdir(TRACES), reason="no traces in this checkout")


def trace(*lines):
    return traces.parse([HEADER, *lines], "made up")


def events(of):
    return [tuple(of.events[n : n + 4]) for n in range(0, len(of.events), 4)]


def test_a_trace_is_read():
    read = traces.parse(
        f"{HEADER}\n"
        "1,15:47:02.841961,allocate,0x10012400000,1048576,0\n"
        "1,15:47:02.841962,allocate,0x10012500000,3000,0x7f00\n"
        "1,15:47:02.841963,allocate failure,(nil),99,0x0\n"
        "1,15:47:02.841964,free,0x10012400000,1048576,0\n"
        "2,15:47:02.841965,allocate,0x10012400000,512,7F00\n\n"
        "2,15:47:02.841965,allocate,0x500,0,0\n"
        "2,15:47:02.841966,deallocate,(nil),0,0\n".splitlines(),
        "made up",
    )
    # bytes, stream, block, frees: the block of what was freed is used again.
    assert events(read) == [(1048576, 0, 0, 0), (3000, 1, 1, 0), (1048576, 0, 0, 1), (512, 1, 0, 0)]
    assert read.streams == [0, 0x7F00] and list(read.lines) == [2, 3, 5, 6] and read.blocks == 2
    assert (read.count, read.recorded_failures, read.wrong, read.peak_live) == (7, 1, [], 1048576 + 3072)


def test_a_free_is_of_what_was_allocated_whatever_its_line_says():
    assert events(trace("0,0,allocate,0x1,700,5", "0,0,free,0x1,9,0")) == [(700, 1, 0, 0), (700, 1, 0, 1)]


def test_columns_are_found_by_their_names():
    read = traces.parse(["Size, Device ,stream,ACTION,Pointer", "512,1,0,allocate,0x1"])
    assert events(read) == [(512, 0, 0, 0)]


def test_what_a_trace_has_wrong_is_named_with_its_line():
    read = trace("0,0,allocate,0x1000,512,0", "0,0,free,0x2000,512,0", "0,0,allocate,0x1000,512,0")
    assert read.wrong == [(3, "the trace frees 0x2000, which is not live"), (4, "the trace allocates 0x1000, which is live")]
    assert len(read) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "line 1: a column is missing"),
        ("a,b\n", "line 1"),
        (f"{HEADER}\n0,0,record_stream,0x1,1,0\n", "line 2: 'record_stream' is no action"),
        (f"{HEADER}\n\n0,0,free,zz,1,0\n", "line 3: 'zz' is no pointer"),
        (f"{HEADER}\n0,0,free,0x1,-1,0\n", "line 2: '-1' is no size"),
        (f"{HEADER}\n0,0,free,0x1,1_0,0\n", "is no size"),
        (f"{HEADER}\n0,0,allocate,0x1,18446744073709551616,0\n", "is no size"),
        (f"{HEADER}\n0,0,allocate,0x1,1,0xq\n", "is no stream"),
    ],
)
def test_other_text_is_refused_with_its_line(text, said, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(traces.TraceError) as e:
        traces.read(str(path))
    assert said in str(e.value) and str(path) in str(e.value)


def test_files_and_folders_are_found_and_named(tmp_path):
    for folder in ("a", "b", "empty"):
        (tmp_path / folder).mkdir()
    text = f"{HEADER}\n0,0,allocate,0x1,512,0\n"
    (tmp_path / "a" / "run.csv").write_text(text)
    (tmp_path / "b" / "run.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b" / "other.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "b" / "README.md").write_text("x")
    paths = traces.find([str(tmp_path / "a" / "run.csv"), str(tmp_path / "b")])
    assert traces.names(paths) == ["a/run", "other", "b/run"]
    assert [len(traces.read(path)) for path in (paths[0], paths[2])] == [1, 1]
    for wrong in (paths[1], str(tmp_path / "nowhere.csv")):
        with pytest.raises(traces.TraceError, match="other.csv.gz|nowhere"):
            traces.read(wrong)
    for wrong in ("empty", "nowhere"):
        with pytest.raises(traces.TraceError, match=wrong):
            traces.find([str(tmp_path / wrong)])


@native
@shipped
def test_traces_are_read_as_the_program_reads_them():
    paths = [path for path in traces.find([TRACES]) if "prefetch" in path or "exchanging" in path]
    done = subprocess.run([PROGRAM, "replay", "--json", *paths], capture_output=True, text=True, timeout=60)
    told = json.loads(done.stdout)["traces"]
    assert len(told) == 3
    for path, theirs in zip(paths, told):
        mine = traces.read(path)
        assert (mine.count, mine.peak_live, mine.recorded_failures) == (theirs["events"], theirs["peak_live"], theirs["recorded_failures"])
        assert mine.wrong == theirs["failed"] == []


# ---- replays against made-up allocators


MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class MadeUp:
    """An allocator in Python: it reserves 4 KiB at a time, and fails above a size."""

    device, room, tells_growth = 3, 1.0, True

    def __init__(self, most=1 << 40):
        self.calls, self.live, self.reserved, self.next = [], {}, 0, 0x1000
        self.total = self.highest = 0
        self._most = most
        self._malloc, self._free = MALLOC(self._allocate), FREE(self._release)
        self.malloc, self.free = allocators.address(self._malloc), allocators.address(self._free)

    def _allocate(self, nbytes, device, stream):
        self.calls.append(("allocate", nbytes, device, stream or 0))
        if nbytes > self._most:
            return None
        at, self.next = self.next, self.next + 0x1000
        self.live[at] = nbytes
        while sum(self.live.values()) > self.reserved:
            self.reserved, self.total = self.reserved + 4096, self.total + 4096
        self.highest = max(self.highest, self.reserved)
        return at

    def _release(self, pointer, nbytes, device, stream):
        self.calls.append(("free", nbytes, device, stream or 0))
        del self.live[pointer]

    def streams(self, count):
        return [0, 0xAB0, 0xAC0][:count]

    def available(self):
        return 1 << 30

    def fresh(self, peak_live):
        assert not self.live, "what is left over is freed after each replay"
        self.reserved = self.highest = 0
        self.calls.clear()
        return 0

    def grown(self):
        return self.total

    def peak(self):
        return self.highest

    def said(self):
        return "no  memory\nat all"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    work, notes = str(tmp_path_factory.mktemp("compare")), {}
    assert build.build(work, notes, ("replaybench",)) == {"replaybench"}, notes
    return ctypes.CDLL(os.path.join(work, "libreplaybench.so"))


@compiler
def test_calls_come_in_the_order_of_the_file_on_their_streams(library):
    allocator, clock = MadeUp(), replay.Clock(library)
    assert 0 < clock.tick_ns <= 100 and 0 < clock.cost_ns < 1000
    lines = ["0,0,allocate,0x1,3000,0", "7,0,allocate,0x2,3000,9", "0,0,free,0x1,3000,0", "0,0,allocate,0x1,512,9"]
    one = replay.Replayed(trace(*lines), allocator, library, clock)
    n, ns = one.slice(10)
    expected = [("allocate", 3000, 3, 0), ("allocate", 3000, 3, 0xAB0), ("free", 3000, 3, 0), ("allocate", 512, 3, 0xAB0)]
    assert n == 4 and ns > 0 and allocator.calls[:4] == expected
    assert len(allocator.calls) == 6 and not allocator.live, "what the trace leaves is freed at the end"
    found = one.report()
    assert found["ns"] is None, "the first replay only finds what grows"
    assert (found["growths"], found["largest_growth"], found["peak_reserved"]) == (2, 4096, 8192)
    one.slice(10)
    one.slice(10)
    found = one.report()
    assert found["ns"]["n"] == 8 and found["ns_without_growth"]["n"] == 4 and found["replays"] == 3
    assert found["ns_without_growth_medians"]["n"] == 2, "each call once"
    assert found["ns"]["p50"] <= found["ns"]["p999"] <= found["ns"]["max"]
    assert found["ratio"] == round(8192 / 6144, 4) and found["failed"] == 0 and "replays_that_grew_otherwise" not in found


@compiler
def test_a_call_that_fails_is_counted_and_its_free_is_not_tried(library):
    allocator = MadeUp(most=1000)
    lines = ["0,0,allocate,0x1,2000,0", "0,0,allocate,0x2,100,0", "0,0,free,0x1,2000,0", "0,0,free,0x2,1,0", "0,0,free,0x3,1,0"]
    one = replay.Replayed(trace(*lines), allocator, library, replay.Clock(library))
    assert [one.slice(1)[0], one.slice(1)[0]] == [2, 2]
    assert [call[0] for call in allocator.calls] == ["allocate", "allocate", "free"]
    found = one.report()
    assert found["failed"] == 2, "one of ours, one of the trace's own"
    assert found["first_failure"] == "line 2: no memory at all" and found["ns"]["n"] == 2


@compiler
def test_an_allocator_that_does_not_tell_has_no_figures_of_growth(library):
    allocator = MadeUp()
    allocator.tells_growth = False
    allocator.peak = lambda: None
    one = replay.Replayed(trace("0,0,allocate,0x1,9000,0"), allocator, library, replay.Clock(library))
    one.slice(1)
    one.slice(1)
    found = one.report()
    assert [found[key] for key in ("peak_reserved", "ratio", "growths", "largest_growth", "ns_without_growth")] == [None] * 5
    assert found["ns"]["n"] == 1


@compiler
def test_a_replay_that_grows_at_other_calls_is_told(library):
    allocator = MadeUp()
    one = replay.Replayed(trace("0,0,allocate,0x1,9000,0"), allocator, library, replay.Clock(library))
    one.slice(1)
    fresh = allocator.fresh
    allocator.fresh = lambda peak: fresh(peak) or setattr(allocator, "reserved", 1 << 20) or 0
    one.slice(1)
    assert one.report()["replays_that_grew_otherwise"] == 1


@compiler
def test_a_trace_that_is_too_large_is_left_out_by_name(library):
    one = replay.Replayed(trace(f"0,0,allocate,0x1,{2 << 30},0"), MadeUp(), library, replay.Clock(library))
    with pytest.raises(MemoryError, match="needs 2.06 GiB of the device, 1.00 GiB are free"):
        one.slice(1)
    assert not one.tried


def test_percentiles_are_those_of_the_program():
    found = replay.percentiles(list(range(1000)), 2.0)
    assert found == {"p50": 1000, "p99": 1980, "p999": 1998, "max": 1998, "n": 1000}
    assert replay.percentiles([], 1.0) is None and replay.percentiles([7], 1.0)["p999"] == 7


def test_what_never_goes_away_is_waited_for_once():
    emptied, asked = allocators.Emptied(seconds=0.01), []
    assert emptied.until(lambda: asked.append(0) or 512) == 512 and len(asked) > 1
    del asked[:]
    assert emptied.until(lambda: asked.append(0) or 512) == 512 and len(asked) == 1
    left = [700, 300]
    assert emptied.until(lambda: left.pop(0)) == 300


def test_an_arena_of_rmms_has_room_for_the_trace():
    assert allocators.arena_size(1) == 1 << 30 and allocators.arena_size((1 << 30) + 1) == (2 << 30) + (1 << 20)


# ---- what is said


def cell(reserved, live=1000 << 20, p999=900.0, **other):
    base = {
        "events": 10,
        "recorded_failures": 0,
        "peak_live": live,
        "peak_reserved": reserved,
        "ratio": None if reserved is None else round(reserved / live, 4),
        "replays": 6,
        "failed": 0,
        "ns": {"p50": 200.0, "p99": 400.0, "p999": 50000.0, "max": 2e6, "n": 50},
        "ns_without_growth": {"p50": 200.0, "p99": 300.0, "p999": 2 * p999, "max": 9000.0, "n": 48},
        "ns_without_growth_medians": {"p50": 200.0, "p99": 300.0, "p999": p999, "max": 5000.0, "n": 8},
        "growths": 4,
        "largest_growth": 64 << 20,
        "clock_ns": 20.0,
    }
    return {**base, **other}


@pytest.fixture
def section():
    mib = 1 << 20
    dumb = {"ns_without_growth": None, "ns_without_growth_medians": None, "growths": None, "largest_growth": None}
    spread = {"median": 250.0, "q1": 240.0, "q3": 260.0, "n": 5}
    return {
        "cases": {"training": {"ours": {"ns": spread}, "native": {"ns": spread, "ours_over": {**spread, "median": 0.5}}}},
        "rounds": 5,
        "failed": {},
        "traces": {
            "training": {
                "rmm-arena": cell(None, **dumb),
                "native": cell(1150 * mib),
                "ours": cell(1120 * mib, reserved_before=2 * mib),
                "expandable": cell(1040 * mib, clock_ns=22.5),
            },
            "small": {"native": cell(1100 * mib), "ours": cell(1110 * mib, p999=1200.0, failed=1, first_failure="line 3: no room"), "expandable": cell(1100 * mib)},
        },
    }


def test_a_call_s_median_leaves_out_what_happened_once():
    assert replay.medians([[5, 9000, 7], [6, 8, 7], [4, 9, 8000]]) == [5, 9, 7]
    assert replay.medians([]) == [] and replay.medians([[1, 2], [1]]) == []


def test_verdicts(section):
    rows = {row["what"]: (row["found"], row["at_most"], row["met"]) for row in report.targets({"replay": section})}
    chunk = "in chunks of 64 MiB, the largest growth"
    assert rows == {
        "replay training: failed calls, ours": (0, 0, True),
        "replay training: peak reserved / peak live, ours (at most native's)": (1.12, 1.15, True),
        f"replay training: reserved beyond expandable's, {chunk}": (1.25, 1, False),
        "replay training: peak reserved / peak live, ours": (1.12, 1.1, False),
        "replay training: p99.9 of the calls' medians without growth, ours, ns": (900.0, 1000, True),
        "replay small: failed calls, ours": (1, 0, False),
        "replay small: peak reserved / peak live, ours (at most native's)": (1.11, 1.1, False),
        f"replay small: reserved beyond expandable's, {chunk}": (0.156, 1, True),
        "replay small: p99.9 of the calls' medians without growth, ours, ns": (1200.0, 1000, False),
    }


def test_no_verdict_without_figures(section):
    assert replayed.targets({}) == []
    section["traces"] = {"training": {"native": cell(1)}, "other": {"ours": cell(5 << 20, ns_without_growth_medians=None)}}
    assert [what for what, _, _ in replayed.targets(section)] == ["replay other: failed calls, ours"]


def test_the_table_has_a_row_for_each_trace_and_allocator(section):
    lines = report.table("replay", section)
    rows = [line.split(" | ") for line in lines if line.startswith("| training") or line.startswith("| small")]
    assert [row[1] for row in rows] == ["ours", "native", "expandable", "rmm-arena", "ours", "native", "expandable"]
    assert rows[0][0] == "| training (1000 MiB live)" and rows[0][2:4] == ["1120 MiB", "**1.120**"] and rows[0][9:11] == ["1.8 µs", "900 ns"]
    assert rows[1][-1] == "×0.5 |" and rows[3][2:5] == ["–", "–", "–"]
    text = "\n".join(lines)
    assert "20 ns to 22.5 ns" in text and "small ours: 1, the first: line 3: no room" in text and "training ours: 2 MiB" in text
    assert report.table("replay", {"cases": {}, "rounds": 0, "failed": {}, "traces": {}}) == ["Nothing was measured."]


def test_figures_have_the_ratios_and_times(section):
    figures = report.figures({"replay": section})
    assert figures["replay"]["native"] == {"training": 0.25} and figures["replay_ours_over_native"] == {"training": 0.5}
    assert figures["replay_reserved_over_live"]["ours"] == {"training": 1.12, "small": 1.11}
    assert "rmm-arena" not in figures["replay_reserved_over_live"] and figures["replay_p999_ns"]["rmm-arena"] == {"training": 50000.0}
    assert figures["replay_p999_without_growth_ns"]["ours"]["small"] == 2 * figures["replay_p999_of_medians_ns"]["ours"]["small"] == 2400.0


def test_what_cannot_replay_is_named(monkeypatch):
    monkeypatch.setattr(modes, "no_gpu", lambda: None)
    monkeypatch.setattr(modes, "has", lambda module: module == "torch")
    both = {"replaybench", "allocbench"}
    assert modes.cannot("replay", "native", both) is None and modes.cannot("replay", "ours", both) is None
    assert "RMM" in modes.cannot("replay", "rmm-pool", both) and "C++ compiler" in modes.cannot("replay", "ours", ())
    assert "torch's C++ interface" in modes.cannot("replay", "native", {"replaybench"})
    assert modes.cannot("replay", "ours", {"replaybench"}, "host") is None
    assert "ours alone" in modes.cannot("replay", "native", both, "host")
    assert cli.wanted(["replay"], "host") == ["replaybench"] and cli.wanted(["host-handoff"], "host") == []
    assert set(cli.wanted(["replay", "allocation"], "cuda")) == {"replaybench", "bump", "allocbench"}


def test_a_section_may_need_few_rounds():
    assert cli.most("replay", argparse.Namespace(quick=False)) == 5 and cli.most("replay", argparse.Namespace(quick=True)) == 2
    assert cli.most("allocation", argparse.Namespace(quick=True)) is None


def test_traces_that_are_not_there_are_named(capsys, monkeypatch):
    with pytest.raises(SystemExit) as e:
        cli.main(["replay", "--traces", "/nonexistent/x.csv"])
    assert e.value.code == 2 and "--traces: /nonexistent/x.csv: no such file" in capsys.readouterr().err
    monkeypatch.setattr(traces, "default", lambda: [])
    assert cli.main(["replay", "--driver", "host"]) == 0
    assert "* replay: no traces here" in capsys.readouterr().out


@native
@compiler
@shipped
def test_ours_replays_on_the_host(capsys, tmp_path):
    path = tmp_path / "found.json"
    wanted = [os.path.join(TRACES, f"{name}.csv.gz") for name in ("exchanging_worker_1", "prefetch")]
    torn = tmp_path / "torn.csv"
    torn.write_text("a,b\n")
    arguments = ["replay", "--driver", "host", "--quick", "--json", str(path), "--traces", *wanted, str(torn)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    found = json.loads(path.read_text())
    section = found["sections"]["replay"]
    assert section["failed"] == {} and section["rounds"] == 2 and list(section["traces"]) == ["exchanging_worker_1", "prefetch"]
    ours = section["traces"]["prefetch"]["ours"]
    assert (ours["events"], ours["failed"], ours["replays"]) == (27005, 0, 3) and "reserved_before" not in ours
    assert ours["peak_live"] <= ours["peak_reserved"] and ours["growths"] > 0 and ours["largest_growth"] >= 1 << 20
    assert ours["ns"]["n"] == 2 * 27005 and ours["ns"]["n"] - ours["ns_without_growth"]["n"] == 2 * ours["growths"]
    assert ours["ns_without_growth"]["p50"] > 0 and "| prefetch (92 MiB live) | ours |" in text
    assert "line 1: a column is missing" in found["notes"]["replay ours: torn"]
    assert "ours alone" in found["cannot"]["replay native"]
    rows = [row["what"] for row in found["figures"]["targets"]]
    assert "replay prefetch: failed calls, ours" in rows and "replay prefetch: p99.9 of the calls' medians without growth, ours, ns" in rows


@native
@compiler
@shipped
def test_the_program_hands_its_traces_over():
    env = modes.environment("")
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env["PATH"]
    path = os.path.join(TRACES, "exchanging_worker_2.csv.gz")
    command = [PROGRAM, "bench", "compare", "--driver", "host", "--quick", "--json", "--trace", path, "--", "replay", "--rounds", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    section = json.loads(done.stdout)["sections"]["replay"]
    assert section["rounds"] == 1 and list(section["traces"]) == ["exchanging_worker_2"]


def test_a_process_that_ends_before_its_report_is_named(tmp_path):
    found = conductor.Measured()

    class Gone:
        mode, cases = "native", ["a"]

        def report(self):
            raise conductor.Failed("it ended")

        def alive(self):
            return False

    found.up.append(Gone())
    assert conductor.reports(found) == {} and found.failed == {"native": "it ended"}


# ---- torch's own interface, without a GPU: the pluggable allocator needs nothing of the driver but the current device


SHIM = "int cudaGetDevice(int* d) { *d = 0; return 0; } int cudaSetDevice(int d) { return 0; } int cudaGetDeviceCount(int* n) { *n = 1; return 0; }"
PLUGGED = """
#include <cstdlib>
#include <stdexcept>
static long live;
extern "C" void* plug(size_t n, int, void*) { if (n > 1000) throw std::runtime_error("out of memory, by 7 bytes"); live++; return malloc(16); }
extern "C" void unplug(void* p, size_t, int, void*) { live--; free(p); }
extern "C" long alive() { return live; }
"""
UNDER_TORCH = """
import ctypes, os, sys, types
import torch
from millpond.compare import allocators, build, replay, traces
work, notes = sys.argv[1], {}
assert build.build(work, notes, ("replaybench", "allocbench")) == {"replaybench", "allocbench"}, notes
plug = os.path.join(work, "plug.so")
torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(plug, "plug", "unplug"))
library, interface = ctypes.CDLL(os.path.join(work, "libreplaybench.so")), ctypes.CDLL(os.path.join(work, "liballocbench.so"))
interface.torch_thrown.restype = ctypes.c_char_p
allocator = object.__new__(allocators.Torch)
allocator._library, allocator.tells_growth = interface, False
allocator.malloc, allocator.free = allocators.address(interface.torch_malloc), allocators.address(interface.torch_free)
allocator.available, allocator.fresh, allocator.grown = (lambda: 1 << 40), (lambda peak: 0), (lambda: 0)
allocator.streams, allocator.peak = (lambda count: [0] * count), (lambda: None)
lines = [traces.HEADER, "0,0,allocate,0x1,512,0", "0,0,allocate,0x2,2000,0", "0,0,free,0x1,512,0", "0,0,allocate,0x3,7,0"]
one = replay.Replayed(traces.parse(lines), allocator, library, replay.Clock(library))
assert [one.slice(1)[0], one.slice(1)[0]] == [3, 3]
found = one.report()
assert found["failed"] == 1 and found["first_failure"] == "line 3: out of memory, by 7 bytes", found
assert ctypes.CDLL(plug).alive() == 0
print("ok")
"""


@compiler
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_torchs_interface_is_compiled_against_and_called(tmp_path):
    torch = pytest.importorskip("torch")
    include, _ = build._torch_folders()
    if torch.version.cuda is None or not any(os.path.exists(os.path.join(folder, "crt", "host_defines.h")) for folder in include):
        pytest.skip("torch without CUDA, or CUDA's headers are not here")
    (tmp_path / "shim.c").write_text(SHIM)
    (tmp_path / "plug.cpp").write_text(PLUGGED)
    for source, library in (("shim.c", "shim.so"), ("plug.cpp", "plug.so")):
        subprocess.run([shutil.which("c++") or "g++", "-shared", "-fPIC", "-x", "c++" if source == "plug.cpp" else "c", "-o", str(tmp_path / library), str(tmp_path / source)], check=True)
    env = dict(modes.environment(""), LD_PRELOAD=str(tmp_path / "shim.so"))
    done = subprocess.run([sys.executable, "-c", UNDER_TORCH, str(tmp_path)], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr[-3000:]
