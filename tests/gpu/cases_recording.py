"""Recording under full replacement: torch's memory history and its viewer, replays of recorded runs, traces across processes."""
import json
import os
import subprocess
import tempfile
import threading
import time

from harness import GPU, Parent, check, equal, test, until, worker

MIB = 1 << 20
#: The most that a recorded allocation with frames may cost, in nanoseconds.
FRAMES_NS = 3000


def program(*arguments):
    from millpond._owner import program_path

    done = subprocess.run([program_path(), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=50)
    equal(done.returncode, 0, done.stderr.decode())
    return json.loads(done.stdout)


def innermost(torch, n):
    return torch.empty(n, dtype=torch.uint8, device="cuda")


@test()
def memory_history_has_frames():
    """_record_memory_history: allocations of Python, of operators and of autograd's threads, each with its frames or none; torch's viewer reads the snapshot."""
    p = Parent()
    torch = p.torch
    memory = torch.cuda.memory
    torch.ones(1, device="cuda")
    memory._record_memory_history(max_entries=10_000, stacks="python")
    kept = innermost(torch, 3 * MIB)
    gone = innermost(torch, 5 * MIB)
    where = gone.data_ptr()
    del gone
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    (torch.nn.functional.gelu(x @ x).sum()).backward()
    torch.cuda.synchronize()
    snapshot = memory._snapshot()
    trace = snapshot["device_traces"][0]
    of = lambda action, addr: [e for e in trace if e["action"] == action and e.get("addr") == addr]
    allocated = of("alloc", kept.data_ptr())
    equal([f["name"] for f in allocated[0]["frames"][:2]], ["innermost", "memory_history_has_frames"], "the frames of an allocation")
    equal(allocated[0]["size"], 3 * MIB)
    check(of("free_requested", where) and of("free_completed", where), "the free is not there", trace[:6])
    # A free has frames where torch holds the GIL while it frees.
    of_free = [f["name"] for f in of("free_requested", where)[0]["frames"][:1]]
    without = [e for e in trace if e["action"] == "alloc" and not e["frames"]]
    check(without, "autograd's thread is Python's for our recording, or allocates nothing")
    block = [b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == kept.data_ptr()]
    equal(block[0]["frames"], allocated[0]["frames"], "the frames of a live block")
    import torch.cuda._memory_viz as viz

    check("cudaMalloc" in viz.trace(snapshot) or "entries" in viz.trace(snapshot), viz.trace(snapshot)[:300])
    check("innermost" in viz.memory(snapshot, format_flamegraph=lambda text: text), "the viewer's flames have no frames")
    for page in (viz.trace_plot(snapshot), viz.segment_plot(snapshot)):
        check("snapshot.pickle" in page)
    memory._record_memory_history(None)
    check(not any(memory._snapshot()["device_traces"]), "after the end", memory._snapshot()["device_traces"])
    return {"entries": len(trace), "without_frames": len(without), "frames_of_a_free": of_free}


@test(alone=True)
def recording_costs_little():
    """torch.empty + del: off, recorded, recorded with the frames of a deep stack. Frames cost at most 3 µs an allocation."""
    p = Parent()
    torch = p.torch

    def pairs(count=20_000):
        start = time.perf_counter_ns()
        for _ in range(count):
            torch.empty(4096, dtype=torch.uint8, device="cuda")
        return (time.perf_counter_ns() - start) / count

    def deep(levels):
        return deep(levels - 1) if levels else min(pairs() for _ in range(3))

    from millpond import _trace

    deep(30)
    off = deep(30)
    _trace.record(events=1 << 20)
    recorded = deep(30)
    _trace.record(events=1 << 20, frames=64)
    frames = deep(30)
    p.millpond._native.control("record_stop")
    again = deep(30)
    check(frames - min(off, again) <= FRAMES_NS, f"frames cost {frames - min(off, again):.0f} ns an allocation")
    return {"off_ns": round(off), "recorded_ns": round(recorded), "frames_ns": round(frames), "off_again_ns": round(again)}


@test()
def frames_from_many_threads():
    """Threads that allocate, free and fight for the GIL while frames are taken, and one that turns them on and off."""
    p = Parent()
    torch = p.torch
    from millpond import _trace

    torch.ones(1, device="cuda")
    stop = threading.Event()
    failed = []

    def work(n):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    a = torch.randn(64, 64, device="cuda", requires_grad=True)
                    (a @ a).sum().backward()
        except BaseException as e:
            failed.append(repr(e))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for turn in range(20):
        _trace.record(frames=32 if turn % 2 else 0, free_frames=True, events=1 << 16, fresh=turn % 5 == 0)
        time.sleep(0.02)
    stop.set()
    for t in threads:
        t.join(30)
        check(not t.is_alive(), "a thread hangs")
    equal(failed, [])
    recording = p.millpond._native.control("recording", device=0)
    check(len(recording["events"]) > 100 and recording["stacks"], len(recording["events"]))
    return {"events": len(recording["events"]), "stacks": len(recording["stacks"])}


@test()
def a_recorded_run_replays():
    """A training loop on two streams, recorded into a file: its replay fails nowhere and has the same peak."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MILLPOND_TRACE"], os.environ["MILLPOND_TRACE_EVENTS"] = folder, str(1 << 20)
        p = Parent()
        torch = p.torch
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        side = torch.cuda.Stream()
        for step in range(10):
            with torch.cuda.stream(side):
                batch = torch.randn(256 + 16 * step, 1024, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            batch.record_stream(torch.cuda.current_stream())
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        traces = program("replay", folder, "--record", os.path.join(folder, "csv"), "--json")["traces"]
        (trace,) = [t for t in traces if "gpu0" in t["file"]]
        equal(trace["failed"], [])
        equal(trace["peak_live"], peak, "peak of the replay")
        check(any(name.endswith("-gpu0.csv") for name in os.listdir(os.path.join(folder, "csv"))))
        return {"events": trace["events"], "ratio": round(trace["ratio"], 3), "p999_ns": trace["ns"]["p999"]}


@worker
def adder(conn):
    while True:
        value = conn.recv(timeout=60)
        conn.send(value + 1)


@test(host=True)
def a_trace_of_hand_offs_and_a_death():
    """Two processes on one clock: sends joined to receipts both ways, counters, growth; the worker is killed and its part is there."""
    p = Parent()
    torch, millpond = p.torch, p.millpond
    place = "cuda" if GPU else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "trace.json")
        with millpond.trace(out, frames=16) as written:
            conn = p.worker(adder)
            for n in range(3):
                t = p.arena.empty((MIB,), "float32", kind="t", device=place)
                t.fill_(n)
                conn.send(t)
                equal(float(conn.recv(timeout=60)[0]), n + 1)
            conn.process.kill()
            conn.process.wait()
            seen = lambda: program("trace", os.environ["MILLPOND_TRACE"], "-o", os.path.join(folder, "live.json"), "--json")["written"]["deaths"]
            until(lambda: seen() == 1, 20, "the worker's death is not in the trace")
        with open(out) as file:
            events = json.load(file)["traceEvents"]
    equal((written["processes"], written["deaths"]), (2, 1))
    check(written["arrows"] >= 6, written)
    flows = {}
    for e in events:
        if e["ph"] in "sf":
            flows.setdefault(e["id"], {})[e["ph"]] = e
    check(all(f["s"]["ts"] <= f["f"]["ts"] for f in flows.values()), "a receipt before its send")
    device = "GPU 0" if GPU else "host"
    for pid in (os.getpid(), conn.process.pid):
        check(any(e["ph"] == "C" and e["pid"] == pid and e["name"] == f"reserved, {device}" for e in events), f"no counter of {pid}")
    return {"events": written["events"], "arrows": written["arrows"], "waits": sum(e["name"].startswith("wait") for e in events), "torch": torch.__version__}
