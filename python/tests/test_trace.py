"""Recording, with real processes on the host driver: what is in the files, also of one that was killed; and Python's frames."""

import contextlib
import csv
import ctypes
import glob
import json
import os
import subprocess
import sys
import threading

import millpond
import pytest
from conftest import HERE, PROGRAM, eventually, native
from millpond import _native, _trace

pytestmark = native
MIB = 1 << 20


@pytest.fixture
def arena():
    with millpond.Arena(limit="256M", driver="host", chunk_bytes="32MiB") as arena:
        yield arena
        _native.control("record_stop", file=True)


@contextlib.contextmanager
def worker(arena, name, **env):
    process = subprocess.Popen([sys.executable, os.path.join(HERE, "worker_main.py")], env=arena.worker_env(name, **env))
    conn = arena.accept(timeout=60)
    try:
        yield process, conn
    finally:
        conn.close()
        try:
            process.wait(30)
        finally:
            process.kill()


def program(*args):
    done = subprocess.run([PROGRAM, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def recorded():
    return _native.control("recording", device=-1)


def names(answer, event):
    return [answer["frames"][str(n)][2] for n in answer["stacks"].get(str(event[5]), ())]


def test_two_processes_on_one_clock_one_of_them_killed(arena, tmp_path):
    np = pytest.importorskip("numpy")
    out = tmp_path / "out.json"
    with millpond.trace(out, frames=8) as written:
        folder = os.environ["MILLPOND_TRACE"]
        with worker(arena, "victim") as (process, conn):
            made = conn.call("make", (4 * MIB,), "uint8", 3, timeout=60)
            value = arena.empty((MIB,), "uint8")
            value[...] = 7
            assert conn.call("hash", value, timeout=60)
            assert int(made[-1]) == 3
            process.kill()
            process.wait()

            def noticed():
                code, text, _ = program("trace", folder, "-o", tmp_path / "live.json", "--json")
                return code == 0 and json.loads(text)["written"]["deaths"] == 1

            eventually(noticed, 30)
        listed = {p["pid"]: p for p in json.loads(program("trace", folder, "--json")[1])["processes"]}
    assert np and "MILLPOND_TRACE" not in os.environ and not os.path.exists(folder)
    assert listed[process.pid]["name"] == "victim" and listed[process.pid]["ended_ns"] is None and listed[process.pid]["dropped"] == 0
    assert (written["processes"], written["deaths"], written["failed"]) == (2, 1, [])
    assert written["arrows"] >= 2

    events = json.loads(out.read_text())["traceEvents"]
    ours, theirs = ([e for e in events if e["pid"] == pid] for pid in (os.getpid(), process.pid))
    flows = {}
    for e in events:
        if e["ph"] in "sf":
            flows.setdefault(e["id"], {})[e["ph"]] = e
    assert any(f["s"]["pid"] == os.getpid() and f["f"]["pid"] == process.pid for f in flows.values())
    assert any(f["s"]["pid"] == process.pid and f["f"]["pid"] == os.getpid() for f in flows.values())
    assert all(f["s"]["ts"] <= f["f"]["ts"] for f in flows.values()), "one clock"
    for side in (ours, theirs):
        assert any(e["name"] == "growth" and e["ph"] == "X" for e in side)
        assert max(e["args"]["bytes"] for e in side if e["ph"] == "C" and e["name"] == "reserved, host") >= 24 * MIB
    died = [e for e in theirs if e["name"] == "died"]
    assert len(died) == 1 and died[0]["ts"] >= max(e["ts"] for e in theirs if e["name"] != "died")
    allocated = [e for e in theirs if e["name"] == "allocate" and e["args"]["bytes"] == 4 * MIB]
    assert any(" make" in frame for frame in allocated[0]["args"]["frames"]), "the worker's frames"


def test_a_recording_is_replayed_with_the_same_numbers(arena, tmp_path):
    pytest.importorskip("numpy")
    folder, kept = tmp_path / "run", tmp_path / "csv"
    with worker(arena, "w: 1", MILLPOND_TRACE=folder) as (process, conn):
        for turn, size in enumerate([1, 3 * MIB, 511, 9 * MIB, 513, 40 * MIB, 2 * MIB]):
            conn.call("make", (size,), "uint8", turn, timeout=60)
        code, text, _ = program("replay", folder, "--record", kept, "--json")
        live = json.loads(text)["traces"]
        (client,) = [c for d in arena.ledger()["devices"] for c in d["clients"] if c["name"] == "w: 1"]
    assert code == 0 and len(live) == 1 and live[0]["failed"] == [] and live[0]["events"] >= 7, "while it runs"
    code, text, _ = program("replay", folder, "--record", kept, "--json")
    (trace,) = json.loads(text)["traces"]
    (file,) = glob.glob(str(kept / "*.csv"))
    with open(file) as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == "Thread Time Action Pointer Size Stream".split() and os.path.basename(file).startswith(f"w--1-{process.pid}-")
    assert len(rows) == trace["events"] and {r["Action"] for r in rows} == {"allocate", "free"}
    assert {int(r["Size"]) for r in rows} >= {1, 3 * MIB, 9 * MIB, 40 * MIB}
    now = peak = 0
    for row in rows:
        now += (1 if row["Action"] == "allocate" else -1) * -(-int(row["Size"]) // 512) * 512
        peak = max(peak, now)
    assert trace["peak_live"] == peak == client["peak_allocated"] >= 40 * MIB and trace["failed"] == []
    code, text, _ = program("replay", file, "--json")
    (again,) = json.loads(text)["traces"]
    assert code == 0
    assert all(again[key] == trace[key] for key in ("events", "peak_live", "peak_reserved", "growths", "ratio"))


def test_a_replay_checks_order_and_names_what_failed(tmp_path):
    path = tmp_path / "run.csv"
    lines = [
        "Thread,Time,Action,Pointer,Size,Stream",
        "11,0,allocate,0x1000,8388608,0x10",
        "12,0,free,0x1000,8388608,0x10",
        "12,0,allocate,0x2000,8388608,0x20",
    ]
    path.write_text("\n".join(lines))
    code, text, err = program("replay", path, "--json", "--repeat", "1")
    (trace,) = json.loads(text)["traces"]
    assert (code, err, trace["threads"], trace["streams"], trace["failed"]) == (0, "", 2, 2, [])
    assert trace["checks"]["allocations"] == 6 and trace["checks"]["crossed"] >= 2 and trace["checks"]["waits"] >= 1
    code, text, _ = program("replay", path, "--repeat", "1")
    assert code == 0 and "3 events, 2 threads, 2 streams" in text and "6 allocations checked" in text and "0 events failed" in text

    lines += ["12,0,free,0x1000,8388608,0x10", "11,0,allocate,0x2000,512,0x20", f"11,0,allocate,0x3000,{1 << 43},0x20"]
    path.write_text("\n".join(lines))
    code, text, err = program("replay", path, "--json", "--repeat", "1")
    failed = json.loads(text)["traces"][0]["failed"]
    assert code == 1
    assert [(f["line"], f["rule"]) for f in failed] == [(5, "unknown free"), (6, "allocated twice"), (7, "failed allocation")]
    assert err.splitlines()[0] == f"millpond: {path}: line 5: unknown free: the trace frees 0x1000, which is not live"
    code, text, err = program("replay", path, "--repeat", "1")
    assert code == 1 and "3 events failed" in text and "line 7: failed allocation: " in err


def test_frames_are_taken_of_the_calling_thread_only_while_they_are_on(arena):
    library = _native.library()

    def innermost():
        library.deallocate(library.allocate(-1, 4096, 0))

    def thread():
        innermost()

    assert recorded()["on"] is False
    _trace.record(frames=3)
    innermost()
    other = threading.Thread(target=thread)
    other.start()
    other.join()
    _trace.record(frames=0)
    innermost()
    answer = recorded()
    allocated = [e for e in answer["events"] if e[0] == "alloc"]
    assert [names(answer, e) for e in allocated] == [
        ["innermost", "test_frames_are_taken_of_the_calling_thread_only_while_they_are_on", "pytest_pyfunc_call"],
        ["innermost", "thread", "run"],
        [],
    ]
    file, line, _ = answer["frames"][str(answer["stacks"][str(allocated[0][5])][0])]
    assert os.path.samefile(file, __file__) and line == innermost.__code__.co_firstlineno + 1
    # The same stack is the same number, and a new recording knows it too.
    _trace.record(frames=3, fresh=True)
    for _ in range(3):
        innermost()
    answer = recorded()
    assert len({e[5] for e in answer["events"] if e[0] == "alloc"}) == 1 and len(answer["stacks"]) == 1
    assert names(answer, answer["events"][0])[0] == "innermost"
    _native.control("record_stop")
    assert recorded()["events"] == []


def test_many_threads_that_fight_for_the_gil(arena):
    library = _native.library()
    _trace.record(frames=16, events=100_000)

    def work(depth):
        if depth:
            return work(depth - 1)
        for _ in range(200):
            library.deallocate(library.allocate(-1, 4096, 0))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    answer = recorded()
    assert len([e for e in answer["events"] if e[0] == "alloc"]) == 1200 and len(answer["stacks"]) == 6
    assert all(len(names(answer, e)) >= 1 for e in answer["events"] if e[0] == "alloc")
    times = [e[4] for e in answer["events"]]
    assert times == sorted(times)


def test_threads_that_python_does_not_know_have_no_frames_and_do_not_wait(arena):
    library, libc = _native.library(), ctypes.CDLL(None)
    _trace.record(frames=8)
    # A thread of C's that allocates, while this one holds the GIL and waits for it: pthread_join by PyDLL.
    handle = ctypes.c_ulong()
    held = ctypes.PyDLL(None)
    libc.pthread_create(ctypes.byref(handle), None, ctypes.c_void_p(library.address_of("millpond_allocate")), ctypes.c_void_p(0xFFFFFFFF))
    assert held.pthread_join(handle, None) == 0
    assert all(names(recorded(), e) == [] for e in recorded()["events"])


AFTER = """
import ctypes, sys, millpond
from millpond import _native
arena = millpond.Arena(limit="64M", driver="host")
library = _native.library()
library.allocate(-1, 512, 0)
print(_native.control("record", frames=8))   # not by _trace.record: nothing ends it before Python
sys.stdout.flush()
# Called by C's exit, when there is no Python any more: (status, argument) are (device, bytes).
ctypes.CDLL(None).on_exit(ctypes.c_void_p(library.address_of("millpond_allocate")), ctypes.c_void_p(4096))
sys.exit(-1)
"""


def test_after_the_interpreter_has_ended_nothing_is_asked_of_it():
    done = subprocess.run([sys.executable, "-c", AFTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 255 and b"True" in done.stdout, done.stderr.decode()


DAEMONS = """
import threading, time, millpond
from millpond import _native, _trace
arena = millpond.Arena(limit="64M", driver="host")
library = _native.library()
def work():
    while True:
        library.deallocate(library.allocate(-1, 4096, 0))
_trace.record(frames=8)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
while len(_native.control("recording", device=-1)["events"]) < 100:
    pass
print("fine", flush=True)
"""


def test_a_program_ends_although_its_daemon_threads_take_frames():
    done = subprocess.run([sys.executable, "-c", DAEMONS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0 and b"fine" in done.stdout, done.stderr.decode()


def test_a_recording_in_a_file_is_not_ended_for_one_in_memory(arena, tmp_path):
    library = _native.library()
    first = _native.control("record", folder=str(tmp_path), events=1000)
    assert os.path.dirname(first["path"]) == str(tmp_path) and os.stat(first["path"]).st_mode & 0o777 == 0o600
    assert _trace.record(events=5000, frames=4, fresh=True) == {"path": first["path"], "events": 1000, "frames": True}
    library.deallocate(library.allocate(-1, 4096, 0))
    _native.control("record_stop")
    library.deallocate(library.allocate(-1, 4096, 0))
    events = [e for e in recorded()["events"] if e[0] == "alloc"]
    assert len(events) == 2 and events[0][5] != 0 and events[1][5] == 0, "frames end, the file goes on"


def test_what_cannot_be_traced_is_said(arena, tmp_path, monkeypatch):
    code, _, err = program("trace", tmp_path)
    assert code == 1 and "no recordings" in err
    (tmp_path / "bad.millpond").write_text("hello")
    code, _, err = program("trace", tmp_path)
    assert code == 1 and "bad.millpond" in err and "not a recording" in err
    code, _, err = program("replay", tmp_path)
    assert code == 1 and "not a recording" in err
    with pytest.raises(OSError):
        with millpond.trace(tmp_path / "no" / "out.json"):
            raise AssertionError("not reached")
    monkeypatch.setenv("MILLPOND_TRACE", str(tmp_path))
    with pytest.raises(millpond.Refused, match="MILLPOND_TRACE"):
        with millpond.trace(tmp_path / "out.json"):
            raise AssertionError("not reached")


FORKED = """
import os, millpond
from millpond import _native, _trace
arena = millpond.Arena(limit="64M", driver="host")
library = _native.library()
library.allocate(-1, 512, 0)
_trace.record(frames=8)
child = os.fork()
if child == 0:
    try:
        _native.control("recording", device=-1)
    except millpond.Forked:
        raise SystemExit(7)   # and at its exit it does not wait for the parent's locks
    raise SystemExit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 if hasattr(os, "waitstatus_to_exitcode") else True
library.allocate(-1, 512, 0)
assert len(_native.control("recording", device=-1)["events"]) == 1, "the child wrote nothing"
"""


def test_a_forked_child_records_nothing():
    done = subprocess.run([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
