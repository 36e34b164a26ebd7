"""Processes that are killed, and what the others get."""
import os
import select
import signal
import threading
import time

from harness import GPU, Parent, check, equal, raises, test, until, worker

MIB, GIB = 1 << 20, 1 << 30
LONG = 600_000_000


@worker
def never_ready(conn):
    import torch

    t = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    t.fill_(1)
    torch.cuda._sleep(1000)  # loading a kernel waits for what runs: load them all first
    torch.cuda.synchronize()
    conn.send(torch.zeros(4, device="cuda"))  # and the connection's GPU canary goes first, while nothing runs
    torch.cuda.synchronize()
    for _ in range(40):
        torch.cuda._sleep(LONG)
    t.fill_(9)
    conn.send(t)
    conn.recv(timeout=60)


@test()
def producer_killed_before_ready():
    """SIGKILL of a producer whose long kernel still runs: recv(wait=True) raises PeerDied, and soon."""
    p = Parent()
    p.torch.ones(1, device="cuda")
    conn = p.worker(never_ready)
    conn.recv(timeout=60)
    killed = []

    def kill():
        time.sleep(4)  # the value is on its way by then, and its kernels run for twelve seconds
        killed.append(time.perf_counter())
        conn.process.kill()

    threading.Thread(target=kill).start()
    e = raises(p.millpond.PeerDied, lambda: conn.recv(timeout=30, wait=True))
    took = time.perf_counter() - killed[0]
    check(took < 2, f"PeerDied came {took:.2f} s after the kill")
    equal(float(p.torch.ones(10, device="cuda").sum()), 10.0)
    p.torch.cuda.synchronize()
    p.close()
    return {"ms_from_kill_to_PeerDied": round(took * 1e3, 2), "says": str(e)[:200]}


@test()
def waiting_stream_is_released():
    """A plain recv orders a stream behind READY; the producer is killed: the stream goes on, nothing hangs."""
    p = Parent()
    torch = p.torch
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda").sum(dtype=torch.int64)
    torch.cuda.synchronize()
    conn = p.worker(never_ready)
    conn.recv(timeout=60)
    t = conn.recv(timeout=30)
    total = t.sum(dtype=torch.int64)
    check(not torch.cuda.current_stream().query(), "nothing was waited for")
    time.sleep(0.2)
    conn.process.kill()
    start = time.perf_counter()
    until(torch.cuda.current_stream().query, 10, "the stream never went on")
    took = time.perf_counter() - start
    del t, total
    e = raises((p.millpond.PeerDied, p.millpond.Closed), lambda: conn.recv(timeout=10))
    p.close()
    return {"ms_from_kill_to_release": round(took * 1e3, 2), "then": type(e).__name__}


def seen_after(died, conn, stream, ref):
    """Kills a worker; `died` is what says so: the µs from the moment at which its process is gone (its pidfd is readable) until the stream goes on (and
    from when its socket has ended too), until PeerDied can be had, and until the socket has ended; and what its end took."""
    pidfd = os.pidfd_open(conn.process.pid)
    poll, ends = select.poll(), select.poll()
    poll.register(pidfd, select.POLLIN)
    ends.register(conn.fileno(), 0)  # says only that nobody holds the other end any more
    start = time.monotonic_ns()
    conn.process.kill()
    gone = closed = released = told = None
    while None in (gone, closed, released, told):
        if gone is None and poll.poll(0):
            gone = time.monotonic_ns()
        if closed is None and ends.poll(0):
            closed = time.monotonic_ns()
        if released is None and stream.query():
            released = time.monotonic_ns()
        if told is None:
            try:
                check(not ref.ready(), "what the dead one never made counts as ready")
            except died:
                told = time.monotonic_ns()
        check(time.monotonic_ns() - start < 10e9, f"10 s after the kill: gone {gone}, released {released}, PeerDied {told}")
    os.close(pidfd)
    conn.process.wait()
    both = max(gone, closed)
    us = lambda at, since: max(0, at - since) / 1e3  # noqa: E731
    return us(released, gone), us(released, both), us(told, gone), us(closed, gone), us(gone, start)


@test(alone=True, timeout=120)
def released_after_gone():
    """SIGKILL of producers in mid-kernel, each with a stream here that waits for it: how long after its process is gone the stream
    goes on, and PeerDied can be had. One loop looks at all three, every few microseconds. The other producers' kernels have their
    slices of the GPU's time before the stream has its own (`millpond-micro`, part death: two processes, no slices)."""
    p = Parent()
    torch = p.torch
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda").sum(dtype=torch.int64)
    torch.cuda.synchronize()
    conns = p.workers(never_ready, 6)
    for conn in conns:
        conn.recv(timeout=60)
    waiting = []
    for conn in conns:
        ref = conn.recv(timeout=30, lazy=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            total = ref.value().sum(dtype=torch.int64)
        waiting.append((conn, stream, ref, total))
    # In the order in which they were queued: streams that share a hardware queue hold up only later ones.
    found = []
    for conn, stream, ref, _ in waiting:
        check(not stream.query(), "nothing was waited for")
        found.append(seen_after(p.millpond.PeerDied, conn, stream, ref))
    columns = [sorted(column) for column in zip(*found)]
    figure = lambda column: {"p50": round(column[len(column) // 2], 1), "max": round(column[-1], 1), "n": len(column)}  # noqa: E731
    del waiting, ref, total
    torch.cuda.synchronize()
    p.close()
    names = "released_after_gone released_after_both peer_died_after_gone socket_end_after_gone gone_after_kill".split()
    return {f"{name}_us": figure(column) for name, column in zip(names, columns)}


@worker
def hog(conn):
    import torch

    conn.recv(timeout=120)  # it has no context before that
    t = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for n in range(2000):
        t.fill_(n % 256)
    conn.send("busy")
    time.sleep(60)
    del t


@test(alone=True)
def killed_in_mid_kernel():
    """SIGKILL of a process that holds 8 GiB in mid-kernel: back in the ledger, and usable here. How long the driver takes to
    take the work down depends on the process's hardware queues: 8 as worker_env() sets them, and the most, 32."""
    p = Parent(limit="12GiB")
    torch = p.torch
    torch.ones(1, device="cuda")
    figures = {}
    starts = ["8", "8", "8", "32"]
    # To start torch takes most of the time: all at once. Each waits for its turn.
    conns = sorted(p.workers(hog, len(starts), CUDA_DEVICE_MAX_CONNECTIONS=starts), key=lambda conn: conn.number)
    for queues in ("8", "32"):
        ledger, usable = [], []
        for conn in [conn for conn in conns if starts[conn.number] == queues]:
            conn.send("go")
            equal(conn.recv(timeout=60), "busy")
            pid = conn.process.pid
            check(p.of(pid, "reserved") >= 8 * GIB, "reserved", p.of(pid, "reserved"))
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            until(lambda: p.of(pid, "reserved") == 0, 10, lambda: f"the ledger says {p.arena.ledger()}")
            ledger.append(round((time.perf_counter() - start) * 1e3, 2))
            t = torch.full((8 * GIB,), 5, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            usable.append(round((time.perf_counter() - start) * 1e3, 2))
            check(bool((t[:: 1 << 20] == 5).all()), "late writes of the dead process")
            del t
            conn.process.wait()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            until(lambda: p.mine("reserved") < GIB, 5, "empty_cache gave nothing back")
        figures[f"{queues}_queues"] = {"ledger_ms": ledger, "usable_ms": usable}
    p.close()
    check(max(figures["8_queues"]["ledger_ms"] + figures["32_queues"]["ledger_ms"]) <= 1500, "slower than 1.5 s:", figures)
    return figures


@worker
def holder(conn):
    kept = conn.recv(timeout=60)
    conn.send("holding")
    time.sleep(60)
    del kept


@test(host=True)
def consumer_killed():
    """SIGKILL of a consumer: its holds end, the producer's memory comes back, in and out of its reach."""
    p = Parent()
    torch = p.torch
    for turn, conn in enumerate(p.workers(holder, 3)):
        t = torch.ones(16 * MIB, dtype=torch.uint8, device="cuda") if GPU else p.arena.zeros((16 * MIB,), "uint8", kind="t")
        conn.send(t)
        equal(conn.recv(timeout=60), "holding")
        check(p.mine("leased_out") >= 16 * MIB, "leased out", p.mine("leased_out"))
        conn.process.kill()
        del t
        until(lambda: p.mine("leased_out") == 0, 10, lambda: f"turn {turn}: still leased out: {p.arena.ledger()}")
        until(lambda: p.mine("allocated") < 16 * MIB, 10, lambda: f"turn {turn}: still allocated: {p.arena.ledger()}")
    p.close()


@worker
def slow_writer(conn):
    """Writes what it gets, again and again, for about a second longer than it says anything; `drop`: lets go of it before."""
    import torch

    t, drop = conn.recv(timeout=60)
    t.fill_(1)  # loading a kernel waits for what runs: load it first
    torch.cuda.synchronize()
    conn.send("warm")
    conn.recv(timeout=60)
    if drop:
        for n in range(1000):
            t.fill_(100 + n % 50)
        del t
        conn.send("let go")
    else:
        for n in range(6000):
            t.fill_(100 + n % 50)
            if n == 300:
                conn.send("writing")
    conn.recv(timeout=60)


@test(timeout=80)
def consumer_killed_while_its_kernel_writes():
    """SIGKILL of a consumer whose own kernels are writing the tensor that it was given, held or just let go of: the producer, who has
    freed it, does not get the bytes back before they are over. It fills them as soon as it does: nothing is written late."""
    n = 2 * GIB
    p = Parent(limit="3GiB")
    torch = p.torch
    figures = {}
    for way, conn in zip(("held", "let_go"), p.workers(slow_writer, 2)):
        t = torch.full((n,), 5, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        where = t.data_ptr()
        conn.send((t, way == "let_go"))
        equal(conn.recv(timeout=60), "warm")
        del t
        conn.send("go")
        equal(conn.recv(timeout=60), "writing" if way == "held" else "let go")
        # There is room for one of its size alone.
        if way == "held":
            raises(torch.OutOfMemoryError, lambda: torch.empty(n, dtype=torch.uint8, device="cuda"))
        gone = os.pidfd_open(conn.process.pid)
        start = time.perf_counter()
        conn.process.kill()

        def again():
            try:
                return torch.full((n,), 7, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return None

        found = [None]
        until(lambda: found.__setitem__(0, again()) or found[0] is not None, 20, lambda: f"{way}: it never came back: {p.arena.ledger()}")
        took = time.perf_counter() - start
        if way == "held":
            check(select.select([gone], [], [], 0)[0], "its block was given out before its process was gone")
        t = found.pop()
        for look in range(3):
            equal((int(t.min()), int(t.max())), (7, 7), f"{way}, look {look}: what the dead one's kernel wrote late")
            time.sleep(0.05)
        os.close(gone)
        conn.process.wait()
        figures[f"{way}_ms_until_reused"], figures[f"{way}_same_address"] = round(took * 1e3, 2), t.data_ptr() == where
        del t
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        until(lambda: p.mine("reserved") < GIB, 5, "empty_cache gave nothing back")
    p.close()
    return figures


@worker
def refiller(conn):
    import millpond
    import torch

    make = lambda byte: torch.full((16 * MIB,), byte, dtype=torch.uint8, device="cuda") if GPU else millpond.empty((16 * MIB,), "uint8", kind="t").fill_(byte)  # noqa: E731
    t = make(33)
    conn.send(t)
    del t
    equal(conn.recv(timeout=60), "refill")
    kept = [make(n) for n in range(4)]
    if GPU:
        torch.cuda.synchronize()
    conn.send("refilled")
    conn.recv(timeout=60)
    del kept


@worker
def sender_of_one(conn):
    import millpond
    import torch

    t = torch.full((16 * MIB,), 33, dtype=torch.uint8, device="cuda") if GPU else millpond.empty((16 * MIB,), "uint8", kind="t").fill_(33)
    if GPU:
        torch.cuda.synchronize()
    conn.send(t)
    conn.recv(timeout=60)


@test(host=True)
def producer_killed_after_ready():
    """A producer dies after its data was ready: the receiver's tensor stays as it is, for as long as it is held."""
    p = Parent(limit="4GiB")
    torch = p.torch
    conn = p.worker(sender_of_one)
    pid = conn.process.pid
    t = conn.recv(timeout=60, wait=True)
    conn.process.kill()
    conn.process.wait()
    until(lambda: all(c["pid"] != pid or c["state"] != "live" for d in p.arena.ledger()["devices"] for c in d["clients"]), 5, "the death was not noticed")
    noise = [torch.full((16 * MIB,), 1, dtype=torch.uint8, device="cuda") for _ in range(10)] if GPU else []
    equal(int(t.sum(dtype=torch.int64)), 33 * 16 * MIB, "the tensor after its producer's death")
    del t, noise
    if GPU:
        torch.cuda.synchronize()
    until(lambda: sum(d["orphaned"] for d in p.arena.ledger()["devices"]) == 0, 5, lambda: f"orphaned: {p.arena.ledger()}")
    p.close()


@test(host=True)
def adopted_outlives_its_maker():
    """adopt(): the maker refills the size and is killed; the bytes stay, the ledger shows exactly their chunks as the adopter's,
    and dropping the tensor gives them back."""
    p = Parent(limit="4GiB")
    torch = p.torch
    figures = {}
    for way, conn in zip(("leaves", "killed"), p.workers(refiller, 2)):
        t = conn.recv(timeout=60)
        check(p.arena.adopt(t) is t, "adopt gives the value back")
        e = raises(p.millpond.InvalidArgument, lambda: p.arena.adopt(torch.zeros(4)))
        conn.send("refill")
        equal(conn.recv(timeout=60), "refilled")
        pid = conn.process.pid
        if way == "killed":
            conn.process.kill()
        else:
            conn.send("go")
        conn.process.wait()
        start = time.perf_counter()
        until(lambda: p.mine("adopted") >= 16 * MIB, 10, lambda: f"never inherited: {p.arena.ledger()}")
        figures[f"{way}_inherited_ms"] = round((time.perf_counter() - start) * 1e3, 2)
        check(p.of(pid, "reserved") == 0, "the maker has still", p.of(pid, "reserved"))
        equal(sum(d["orphaned"] for d in p.arena.ledger()["devices"]), 0, "orphaned")
        noise = [torch.full((16 * MIB,), 1, dtype=torch.uint8, device="cuda") for _ in range(10)] if GPU else []
        equal(int(t.sum(dtype=torch.int64)), 33 * 16 * MIB, "the tensor after its maker's death")
        t += 1
        equal(int(t.sum(dtype=torch.int64)), 34 * 16 * MIB, "and it may be written")
        del t, noise
        if GPU:
            torch.cuda.synchronize()
        until(lambda: p.mine("adopted") == 0 and p.of(pid, "reserved") == 0, 10, lambda: f"not given back: {p.arena.ledger()}")
        conn.close()
    figures["says"] = str(e)[:120]
    p.close()
    return figures


@worker
def sleeper_with_fork(conn):
    import torch

    t = torch.full((256 * MIB,), 1, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    conn.send(torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    for _ in range(40):
        torch.cuda._sleep(LONG)
    t.fill_(9)
    conn.send({"child": pid, "t": t})
    time.sleep(60)


@test(alone=True, quick=False)
def killed_with_a_forked_child():
    """SIGKILL of a process in mid-kernel whose forked child lives on, so that its kernels do too: nothing is reused and nobody who waits
    is released before the child is gone too."""
    p = Parent()
    torch = p.torch
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda").sum(dtype=torch.int64)
    torch.cuda.synchronize()
    conn = p.worker(sleeper_with_fork)
    conn.recv(timeout=60)
    found = conn.recv(timeout=60, lazy=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        total = found["t"].value().sum(dtype=torch.int64)
    pid, child = conn.process.pid, found["child"]
    held = p.of(pid, "reserved")
    check(held >= 256 * MIB, held)
    os.kill(pid, signal.SIGKILL)
    conn.process.wait()
    for _ in range(50):
        check(not stream.query() and not found["t"].ready(), "released while its kernels may run")
        time.sleep(0.01)
    equal(p.of(pid, "reserved"), held, "reserved while the child still has the driver's files")
    start = time.perf_counter()
    os.kill(child, signal.SIGKILL)
    until(stream.query, 10, "the stream never went on")
    released = time.perf_counter() - start
    raises(p.millpond.PeerDied, found["t"].ready)
    del found, total
    torch.cuda.synchronize()
    until(lambda: p.of(pid, "reserved") == 0, 10, lambda: f"never given back: {p.arena.ledger()}")
    took = time.perf_counter() - start
    p.close()
    return {"released_ms_after_the_child": round(released * 1e3, 2), "ms_after_the_child": round(took * 1e3, 2)}


@worker
def in_a_long_kernel(conn):
    import torch

    conn.send(torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()
    for _ in range(12):
        torch.cuda._sleep(LONG)
    conn.send("queued")
    torch.cuda.synchronize()
    conn.send("over")
    conn.recv(timeout=60)


@test(quick=False)
def a_worker_in_a_long_kernel_lives():
    """A worker that waits seconds for its kernel beats all the while, and is never taken for a stopped one."""
    p = Parent()
    p.torch.ones(1, device="cuda")
    conn = p.worker(in_a_long_kernel)
    conn.recv(timeout=60)
    equal(conn.recv(timeout=60), "queued")
    states, start = set(), time.perf_counter()
    while not p.millpond.wait_any([conn], timeout=0.05):
        clients = [c for d in p.arena.ledger()["devices"] for c in d["clients"] if c["pid"] == conn.process.pid]
        states |= {c["state"] for c in clients}
    took = time.perf_counter() - start
    equal(conn.recv(timeout=60), "over")
    check(took > 1.5, f"the kernels took {took:.2f} s: too short to show anything")
    equal(states, {"alive"})
    p.close()
    return {"seconds": round(took, 2)}


@worker
def never_ready_then(conn):
    import ctypes
    import resource

    import torch

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    t = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    t.fill_(1)
    torch.cuda._sleep(1000)
    conn.send(torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()
    conn.recv(timeout=60)  # when all are there: the first would have done before the last came
    for _ in range(150):
        torch.cuda._sleep(LONG)
    t.fill_(9)
    conn.send(t)
    if conn.recv(timeout=60) == "exit":
        os._exit(3)
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(8)


@test(timeout=120)
def however_it_ends():
    """_exit, a crash, SIGSTOP and then SIGKILL, each with GPU work queued and running: streams that wait go on, what never got ready
    says so, the memory comes back, and nothing here is disturbed."""
    p = Parent()
    torch = p.torch
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda").sum(dtype=torch.int64)
    torch.ones(10, device="cuda").sum()  # loading a kernel later would wait for what waits
    torch.cuda.synchronize()
    ways = ("exit", "segv", "stop")
    conns = p.workers(never_ready_then, len(ways))
    for conn in conns:
        conn.recv(timeout=60)
    for conn in conns:
        conn.send("go")
    waiting, begun = [], time.perf_counter()
    for conn in conns:
        ref, stream = conn.recv(timeout=30, lazy=True), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            ref.value().sum(dtype=torch.int64)
        waiting.append((conn, ref, stream))
    figures = {}
    for way, (conn, ref, stream) in zip(ways, waiting):
        check(not stream.query(), f"{way}: nothing was waited for, {time.perf_counter() - begun:.1f} s on: {figures}")
        start = time.perf_counter()
        if way == "stop":
            conn.process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            check(not stream.query() and not ref.ready(), "a stopped process is not a dead one")
            conn.process.kill()
        else:
            conn.send(way)
        raises(p.millpond.PeerDied, lambda ref=ref: ref.wait(timeout=30))
        until(stream.query, 10, "the stream never went on")
        figures[f"{way}_ms"] = round((time.perf_counter() - start) * 1e3, 2)
        code = conn.process.wait()
        equal(code, {"exit": 3, "segv": -signal.SIGSEGV, "stop": -signal.SIGKILL}[way], way)
        ref.release()
        pid = conn.process.pid
        until(lambda: p.of(pid, "reserved") == 0, 10, lambda: f"never given back: {p.arena.ledger()}")
        equal(float(torch.ones(10, device="cuda").sum()), 10.0)
    p.close()
    return figures


@worker
def broken_context(conn):
    import torch

    t = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    short = torch.zeros(8, device="cuda")
    at = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(1000)
    short[at].sum()
    conn.send(torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()
    for _ in range(6):
        torch.cuda._sleep(LONG)
    short[at + (1 << 30)]  # an assertion on the device: from then on every call of this context fails
    t.fill_(9)
    conn.send(t)
    try:
        torch.cuda.synchronize()
        conn.send("the context is well")
    except RuntimeError as e:
        conn.send(f"{type(e).__name__}: {e}"[:200])
    conn.recv(timeout=60)


@test()
def dead_context_in_a_live_process():
    """A worker's context dies behind what it sent, its process lives: what never got ready says so, streams go on, the ledger says
    faulted; its memory is in quarantine until it ends; words still pass."""
    p = Parent(limit="8GiB")
    torch = p.torch
    stream = torch.cuda.Stream()  # before the GPU is busy: the first one makes torch's whole pool of them
    with torch.cuda.stream(stream):
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda").sum(dtype=torch.int64)
    torch.cuda.synchronize()
    conn = p.worker(broken_context)
    pid = conn.process.pid
    conn.recv(timeout=60)
    ref = conn.recv(timeout=60, lazy=True)
    with torch.cuda.stream(stream):
        total = ref.value().sum(dtype=torch.int64)
    check(not stream.query(), "nothing was waited for")
    e = raises(p.millpond.PeerDied, lambda: ref.wait(timeout=30))
    until(stream.query, 10, "the stream never went on")
    row = lambda: next(c for d in p.arena.ledger()["devices"] for c in d["clients"] if c["pid"] == pid and d["id"].startswith("GPU"))  # noqa: E731
    until(lambda: row()["state"] == "faulted", 10, lambda: f"the ledger says {row()['state']}")
    says = conn.recv(timeout=30)
    check(says != "the context is well" and conn.process.poll() is None, says)
    check(row()["reserved"] >= 64 * MIB, "its memory was taken back while it lives")
    del total
    ref.release()
    equal(float(torch.ones(10, device="cuda").sum()), 10.0, "here all is well")
    conn.process.kill()
    conn.process.wait()
    until(lambda: p.of(pid, "reserved") == 0, 10, lambda: f"never given back: {p.arena.ledger()}")
    p.close()
    return {"PeerDied": str(e)[:150], "worker_says": says}


@test()
def owner_killed():
    """SIGKILL of the owner: memory that is held stays usable, new growth fails by name, nobody hangs."""
    p = Parent(limit="8GiB", on_owner_death="continue")
    torch = p.torch
    t = torch.full((MIB,), 2.0, device="cuda")
    torch.cuda.synchronize()
    p.arena._owner.process.kill()
    p.arena._owner.process.wait()
    time.sleep(0.2)
    equal(float(t.sum()), 2.0 * MIB)
    e = raises(Exception, lambda: torch.empty(6 * GIB, dtype=torch.uint8, device="cuda"))
    check("the owner of the arena has ended" in str(e), e)
    equal(float((t + 1).sum()), 3.0 * MIB)
    return {"growth_says": f"{type(e).__name__}: {str(e)[:250]}"}
