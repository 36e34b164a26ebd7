"""`millpond.compare`: the method on made-up figures, tables and plots of a stored run, a short real run on the host."""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

import pytest

from conftest import HERE, eventually, native
from millpond.compare import build, cli, conductor, modes, plot, report
from millpond.compare.child import timed
from millpond.compare.stats import Pairs, spread

SAMPLE = os.path.join(HERE, "compare_sample.json")


@pytest.fixture
def sample():
    with open(SAMPLE) as file:
        return json.load(file)


def test_the_ratio_is_the_median_of_neighbours_not_the_ratio_of_medians():
    pairs = Pairs()
    # A machine that gets three times slower in the middle: each neighbour sees the same of it.
    for n in range(10):
        clock = 1.0 if n < 5 else 3.0
        pairs.add("empty", "native", 100 * clock, 200 * clock)
    row = pairs.table()["empty"]
    assert row["native"]["ours_over"] == {"median": 0.5, "q1": 0.5, "q3": 0.5, "n": 10}
    assert row["ours"]["ns"]["q1"] == 100 and row["ours"]["ns"]["q3"] == 300 and "ours_over" not in row["ours"]


def test_spreads():
    assert spread([5]) == {"median": 5, "q1": 5, "q3": 5, "n": 1}
    assert spread([1, 2, 3, 4, 100]) == {"median": 3, "q1": 2, "q3": 4, "n": 5}


def test_a_slice_runs_for_its_time_and_at_least_once():
    calls = []
    n, ns = timed(lambda: calls.append(0), 2)
    assert n < len(calls) and ns >= 2_000_000
    n, ns = timed(lambda: time.sleep(0.02), 1)
    assert n == 1 and ns >= 20_000_000


class Turns:
    """A process that only notes when it is asked."""

    def __init__(self, mode, log, cases=("a", "b"), fails=None):
        self.mode, self.cases, self.log, self.fails, self.notes, self.pid = mode, list(cases), log, fails, {}, os.getpid()

    def ready(self, seconds):
        if self.fails == "start":
            raise conductor.Failed("no such library")

    def slice(self, case, ms):
        self.log.append((self.mode, case))
        if self.fails == case and len(self.log) > 20:
            raise conductor.Failed("out of memory")
        return {"ours": 1.0, "x": 2.0, "y": 4.0}[self.mode]

    def alive(self):
        return True


def options(**fields):
    return argparse.Namespace(**dict({"rounds": 4, "slice_ms": 1.0, "cpu": 0}, **fields))


def measured(processes, options, seconds, before=None):
    found = conductor.come_up(processes, options, time.monotonic() + 9, before)
    conductor.measure(found, options, time.monotonic() + seconds, lambda text: None)
    return found


@pytest.fixture
def unpinned(monkeypatch):
    monkeypatch.setattr(conductor, "pin", lambda *_: None)


def test_modes_take_turns_with_ours_and_sizes_go_round(unpinned):
    log = []
    found = measured([Turns("ours", log), Turns("x", log), Turns("y", log)], options(), 9)
    turns = log[6:]  # each case of each mode is run once before
    assert turns[:8] == [("ours", "a"), ("x", "a"), ("ours", "a"), ("y", "a"), ("ours", "b"), ("x", "b"), ("ours", "b"), ("y", "b")]
    assert turns[8:10] == [("x", "a"), ("ours", "a")], "B A in the next round"
    table = found.pairs.table()
    assert found.rounds == 4 and table["b"]["y"]["ours_over"] == {"median": 0.25, "q1": 0.25, "q3": 0.25, "n": 4}


def test_what_later_processes_find_is_added_to_what_the_first_found(unpinned):
    first = measured([Turns("ours", []), Turns("x", [])], options(), 9)
    both = measured([Turns("ours", []), Turns("x", [], fails="start")], options(), 9, first)
    both = measured([Turns("ours", []), Turns("x", [])], options(), 9, both)
    assert both.rounds == 12 and both.failed == {"x": "no such library"}
    assert both.pairs.table()["a"]["x"]["ours_over"] == {"median": 0.5, "q1": 0.5, "q3": 0.5, "n": 8}


def test_a_mode_that_fails_is_named_and_the_others_go_on(unpinned):
    log = []
    processes = [Turns("ours", log), Turns("x", log, fails="b"), Turns("y", log, fails="start")]
    found = measured(processes, options(rounds=9), 9)
    assert found.failed == {"y": "no such library"} and found.notes == {"x: b": "out of memory"}
    table = found.pairs.table()
    assert table["a"]["x"]["ours_over"]["n"] == 9 > table["b"]["x"]["ours_over"]["n"] and found.rounds == 9


def test_time_that_is_up_ends_it_with_whole_rounds(unpinned):
    found = measured([Turns("ours", [])], options(rounds=10**9), 0.05)
    rows = found.pairs.table()
    assert 0 < found.rounds < 10**9 and {row["ours"]["ns"]["n"] for row in rows.values()} == {found.rounds}


def test_every_thread_of_a_process_and_its_children_is_put_on_one_cpu_and_an_owner_elsewhere(tmp_path):
    (tmp_path / "serve").write_text("import time; time.sleep(60)")
    code = "import subprocess, sys, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
    code += "subprocess.Popen([sys.executable, 'serve']); subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    try:
        eventually(lambda: len(conductor.tree(process.pid)) == 3 and len(os.listdir(f"/proc/{process.pid}/task")) == 2)
        eventually(lambda: sum(map(conductor.is_owner, conductor.tree(process.pid))) == 1)
        cpus = os.sched_getaffinity(0)
        cpu = max(cpus)
        conductor.pin(process.pid, cpu)
        found = {pid: [os.sched_getaffinity(int(t)) for t in os.listdir(f"/proc/{pid}/task")] for pid in conductor.tree(process.pid)}
        owner = next(filter(conductor.is_owner, found))
        assert found.pop(owner) == [cpus - conductor.siblings(cpu) or {cpu}]
        assert sorted(map(len, found.values())) == [1, 2] and all(each == {cpu} for threads in found.values() for each in threads)
    finally:
        for pid in conductor.tree(process.pid):
            os.kill(pid, 9)
        process.wait()


def test_tables_and_plots_of_a_stored_run(sample, tmp_path, capsys):
    assert cli.main(["--report", SAMPLE, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "compare.md").read_text()
    assert text in capsys.readouterr().out + "\n"
    assert "| torch.empty+del 1 MiB |" in text and "×0.55 (0.53 to 0.58)" in text and "## Hand-off on the GPU" in text
    assert "* allocation rmm-pool: needs RMM" in text and "| torch.empty+del 1 MiB, ours / native | 0.55 | 0.9 | met |" in text
    for section in sample["sections"]:
        picture = xml.parse(tmp_path / f"{section}.svg").getroot()
        titles = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}title")]
        assert len(titles) == sum(len(row) for row in sample["sections"][section]["cases"].values())
        heights = {t: float(g.find("{*}rect").get("height")) for t, g in zip(titles, picture.iter("{http://www.w3.org/2000/svg}g"))}
        ours, native_ = (next(h for t, h in heights.items() if m in t and "1 MiB" in t) for m in (", ours:", ", mp-native:" if section == "handoff" else ", native:"))
        assert ours < native_, "the smaller figure has the lower bar"
    assert json.loads((tmp_path / "compare.json").read_text()) == sample


def test_names_are_escaped_in_a_plot():
    found = {"cases": {"a <b> & c": {"ours": {"ns": spread([1.0, 2.0])}}}}
    assert "a &lt;b&gt; &amp; c" in plot.svg("x", found) and xml.fromstring(plot.svg("x", found)) is not None
    assert plot.svg("x", {"cases": {}}) is None
    assert report.table("x", {"cases": {}, "rounds": 0}) == ["Nothing was measured."]


def test_figures_have_the_shape_of_the_gpu_run(sample):
    figures = report.figures(sample["sections"])
    assert figures["allocation"]["ours"]["torch.empty+del 1 MiB"] == 1.1
    assert figures["allocation_ours_over_native"]["torch.empty+del 1 MiB"] == 0.55
    rows = {row["what"]: row for row in figures["targets"]}
    assert rows["torch.empty+del 1 MiB, ours / bump"]["met"] is False
    assert rows["hand-off 1 GiB / 1 MiB, ours"] == {"what": "hand-off 1 GiB / 1 MiB, ours", "found": 1.02, "at_most": 1.3, "met": True}


def test_wrong_words_are_named(capsys):
    for arguments, words in (
        (["alocation"], "no section alocation: allocation"),
        (["--modes", "rmm"], "no mode rmm: async"),
        (["--cpu", "4096"], "we may run on"),
    ):
        with pytest.raises(SystemExit) as e:
            cli.main(arguments)
        assert e.value.code == 2 and words in capsys.readouterr().err
    assert cli.main(["--report", "/nonexistent.json"]) == 1
    assert "millpond: compare: FileNotFoundError" in capsys.readouterr().err


def test_help_names_every_mode(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(mode in text for of in modes.MODES.values() for mode in of)


def test_what_cannot_be_here_is_named_with_a_reason(monkeypatch):
    monkeypatch.setattr(modes, "no_gpu", lambda: None)
    monkeypatch.setattr(modes, "has", lambda module: module == "torch")
    assert modes.cannot("allocation", "native") is None and modes.cannot("handoff", "pool-pointer") is None
    assert "pip install rmm" in modes.cannot("allocation", "rmm-async")
    assert "C++ compiler" in modes.cannot("allocation", "bump") and modes.cannot("allocation", "bump", {"bump"}) is None
    monkeypatch.setattr(modes, "no_gpu", lambda: "no CUDA driver")
    assert modes.cannot("allocation", "native") == "no CUDA driver" and modes.cannot("host-handoff", "pipe-copy") is None
    assert set(modes.absent("host")) == {"allocation", "handoff", "replay"} and modes.absent("cuda") == {}


@native
def test_a_short_run_on_the_host(capsys, tmp_path):
    path = tmp_path / "found.json"
    arguments = ["--driver", "host", "--quick", "--rounds", "2", "--slice-ms", "1", "--modes", "pipe-copy,shared-copy"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    assert "Not measured here" in capsys.readouterr().out
    found = json.loads(path.read_text())
    section = found["sections"]["host-handoff"]
    assert section["rounds"] == 2 and section["failed"] == {} and found["failed"] == 0 and found["passed"] == 3
    assert list(section["cases"]) == ["hand-off 4 KiB", "hand-off 1 MiB", "hand-off 16 MiB"]
    for row in section["cases"].values():
        assert row["pipe-copy"]["ours_over"]["n"] == 2 and row["ours"]["ns"]["n"] == 4 and row["shared-copy"]["ns"]["median"] > 0
    large = section["cases"]["hand-off 16 MiB"]
    assert large["pipe-copy"]["ours_over"]["median"] < 1, "an offset is faster than 16 MiB through a pipe"


@native
def test_the_program_hands_over_to_python(tmp_path):
    from millpond._owner import program_path

    env = modes.environment("")
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env["PATH"]
    command = [program_path(), "bench", "compare", "--driver", "host", "--quick", "--json", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--", "--rounds", "1", "--slice-ms", "1", "--modes", "pipe-copy"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sections"]["host-handoff"]["rounds"] == 1 and (tmp_path / "host-handoff.svg").exists()
    alone = subprocess.run([program_path(), "bench", "compare", "ledger", "--quick"], env=env, capture_output=True, text=True, timeout=60)
    assert alone.returncode == 1 and "measured alone" in alone.stderr


def test_a_mode_that_cannot_start_says_why(tmp_path):
    if modes.no_gpu() is None:
        pytest.skip("there is a GPU here")
    process = conductor.Process("handoff", "pool-pointer", argparse.Namespace(driver="cuda", quick=True), str(tmp_path))
    with pytest.raises(conductor.Failed, match="libcuda"):
        process.ready(60)
    conductor.stop([process])
    assert not process.alive()


def test_the_driver_structures_have_the_drivers_sizes():
    from millpond.compare import pool

    assert ctypes.sizeof(pool._Properties) == 88 and ctypes.sizeof(pool._Access) == 12


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_bump_allocator_never_gives_an_address_twice_in_a_lap(tmp_path):
    notes = {}
    path = os.path.join(tmp_path, "libbump.so")
    assert build.build(str(tmp_path), notes, ("bump",)) == {"bump"}, notes
    source = tmp_path / "runtime.cpp"
    source.write_text('#include <sys/mman.h>\nextern "C" int cudaMalloc(void** p, unsigned long n) { *p = mmap(0, n, 0, 34, -1, 0); return *p == (void*)-1; }')
    runtime = os.path.join(tmp_path, "libcudart.so.12")
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12", "-o", runtime, str(source)], check=True)
    code = f"""
import ctypes
ctypes.CDLL({runtime!r}, ctypes.RTLD_GLOBAL)
bump = ctypes.CDLL({path!r}).bump_malloc
bump.restype, bump.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
first = bump(1000, 0, None)
assert bump(1, 0, None) == first + 1024, "the first GiB is real memory"
seen, at = [], None
for n in range(70):
    seen.append(bump(1 << 39, 0, None))
lap = sorted(seen[:60])
assert all(b - a >= 1 << 39 for a, b in zip(lap, lap[1:])), "no two blocks of a lap overlap"
assert all(not first <= a < first + (1 << 30) for a in seen), "and none lies in real memory"
assert all(a % 512 == 0 for a in seen) and min(seen[60:]) >= lap[0]
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr
