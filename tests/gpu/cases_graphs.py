"""CUDA graphs, torch.compile, pool mode."""
import gc
import shutil
import threading

from harness import Parent, Skip, at_once, check, equal, raises, test, until, worker

MIB, GIB = 1 << 20, 1 << 30


@test()
def graph_capture_and_replay():
    """A captured graph keeps its memory while others allocate, fill and free; replays are right."""
    p = Parent(limit="8GiB")
    torch = p.torch
    x = torch.ones(MIB, device="cuda")
    w = torch.full((MIB,), 3.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a = x * w
        b = a + 1
        del a
        c = b * 2
    for turn in range(5):
        x.fill_(turn)
        noise = [torch.full((MIB,), 77.0, device="cuda") for _ in range(20)]
        graph.replay()
        torch.cuda.synchronize()
        equal(float(c[123]), (turn * 3 + 1) * 2.0, f"replay {turn}")
        equal(float(b[-1]), turn * 3 + 1.0, f"replay {turn}, inner value")
        check(all(bool((t == 77).all()) for t in noise), f"replay {turn} wrote into blocks of others")
        del noise
        torch.cuda.empty_cache()
    graph.reset()
    del graph, b, c
    torch.cuda.synchronize()


@worker
def two_values(conn):
    import torch

    torch.ones(8, device="cuda")
    for byte in (1, 2):
        t = torch.full((MIB,), byte, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        conn.send(t)
        del t
    while True:
        conn.send(float(conn.recv(timeout=60).sum()))


@test()
def nothing_crosses_during_a_capture():
    """Sending what a stream makes while it is captured, and opening what came, are refused by name; what is let go of goes back
    afterwards; the capture is none the worse."""
    p = Parent(limit="8GiB")
    torch = p.torch
    conn = p.worker(two_values)
    pid = conn.process.pid
    first, second = conn.recv(timeout=60), conn.recv(timeout=60, lazy=True)
    equal(int(first.sum(dtype=torch.int64)), MIB)
    t = torch.full((1000,), 3.0, device="cuda")
    conn.send(t)
    equal(conn.recv(timeout=60), 3000.0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = t * 2
        # As text: an exception's frames would hold the values.
        sends = str(raises(p.millpond.Unsupported, lambda: conn.send(made)))
        opens = str(raises(p.millpond.Unsupported, second.value))
        del first
        made += 1
    graph.replay()
    torch.cuda.synchronize()
    equal(float(made[999]), 7.0, "the replay")
    conn.send(made)
    equal(conn.recv(timeout=60), 7000.0, "and afterwards it goes")
    equal(int(second.value().sum(dtype=torch.int64)), 2 * MIB, "and the other is opened")
    second.release()
    torch.cuda.synchronize()
    until(lambda: p.of(pid, "leased_out") == 0, 10, lambda: f"still lent: {p.arena.ledger()}")
    del graph, made
    p.close()
    return {"send_says": sends[:150], "open_says": opens[:150]}


@test()
def several_graphs():
    """Several captures, one pool shared by two, replays in any order, after others were released."""
    p = Parent(limit="8GiB")
    torch = p.torch
    x = torch.ones(MIB, device="cuda")
    graphs = []
    for k in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x + k) * 2
        graphs.append((graph, y, k))
    shared = torch.cuda.graph_pool_handle()
    for k in (10, 11):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=shared):
            y = x * k
        graphs.append((graph, y, None))
    x.fill_(5)
    for graph, y, k in reversed(graphs[:4]):
        graph.replay()
        torch.cuda.synchronize()
        equal(float(y[7]), (5 + k) * 2.0, f"graph {k}")
    for number, k in ((4, 10), (5, 11)):
        graphs[number][0].replay()
        torch.cuda.synchronize()
        equal(float(graphs[number][1][7]), 5.0 * k)
    del graphs[:2], graph, y
    torch.cuda.empty_cache()
    noise = torch.full((64 * MIB,), 9.0, device="cuda")
    graphs[0][0].replay()
    torch.cuda.synchronize()
    equal(float(graphs[0][1][7]), (5 + 2) * 2.0)
    equal(float(noise.sum()), 9.0 * 64 * MIB)


@test()
def failed_capture():
    """A capture that fails leaves the allocator as it was: later work and captures are right."""
    p = Parent(limit="8GiB")
    torch = p.torch
    x = torch.ones(MIB, device="cuda")
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()

        def capture():
            with torch.cuda.graph(graph):
                y = x * 2
                torch.cuda.synchronize()
                return y

        raises(RuntimeError, capture)
        del graph
    torch.cuda.synchronize()
    equal(float((x * 4).sum()), 4.0 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x * 3
    graph.replay()
    torch.cuda.synchronize()
    equal(float(z[0]), 3.0)


@test()
def failed_capture_before_its_first_malloc():
    """A capture that fails before it allocates, then eager work: streams get each other's bytes, and empty_cache gives chunks back."""
    p = Parent(limit="8GiB")
    torch = p.torch
    torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph):
            torch.cuda.synchronize()

    raises(RuntimeError, capture)
    # torch.cuda.graph does not leave its stream where its end raises.
    torch.cuda.set_stream(torch.cuda.default_stream())
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        x = torch.full((GIB,), 1, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.synchronize()
    reserved = p.mine("reserved")
    check(reserved >= GIB, "the ledger says", reserved)
    with torch.cuda.stream(two):
        y = torch.full((GIB,), 2, dtype=torch.uint8, device="cuda")
    equal(p.mine("reserved"), reserved, "reserved when another stream asks for as much")
    equal(int(y[-1]), 2)
    del y
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    until(lambda: p.mine("reserved") < GIB, 5, lambda: f"empty_cache gave nothing back: {p.arena.ledger()}")
    del graph
    x = torch.ones(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x * 3
    graph.replay()
    torch.cuda.synchronize()
    equal(float(z[0]), 3.0, "a capture after it")


@test()
def growth_during_a_capture():
    """While one thread captures (global mode), another grows, frees and trims: the capture holds, both are right."""
    p = Parent(limit="16GiB")
    torch = p.torch
    x = torch.ones(MIB, device="cuda")
    torch.cuda.synchronize()
    inside, grown, failures = threading.Event(), threading.Event(), []
    side = torch.cuda.Stream()

    def grow():
        try:
            with torch.cuda.stream(side):
                inside.wait(20)
                for n in range(3):
                    big = torch.empty((n + 1) * GIB, dtype=torch.uint8, device="cuda")
                    del big
                p.arena.trim()
        except BaseException as e:
            failures.append(f"{type(e).__name__}: {e}")
        grown.set()

    thread = threading.Thread(target=grow)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        inside.set()
        check(grown.wait(30), "the other thread hung")
        z = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda").fill_(3)
        y = y + 1
    thread.join()
    equal(failures, [], "the growing thread")
    x.fill_(10)
    graph.replay()
    torch.cuda.synchronize()
    equal(float(y[9]), 21.0)
    equal(int(z[-1]), 3)


def _needs_a_compiler():
    try:
        import triton  # noqa: F401
    except ImportError:
        raise Skip("triton is not installed") from None
    if not (shutil.which("gcc") or shutil.which("cc")):
        raise Skip("no C compiler")


@test(timeout=110, quick=False)
def compile_default_mode():
    """torch.compile in its default mode under full replacement."""
    _needs_a_compiler()
    p = Parent()
    torch = p.torch
    torch.manual_seed(0)
    x = torch.randn(1000, 1000, device="cuda")
    f = lambda a: (torch.nn.functional.gelu(a) * 2 + a.sin()).sum(dim=1)
    check(torch.allclose(torch.compile(f)(x), f(x), atol=1e-3))


@test(timeout=110, quick=False)
def compile_reduce_overhead_is_refused():
    """mode="reduce-overhead" under full replacement: refused by name, not in torch's words; afterwards all works."""
    _needs_a_compiler()
    p = Parent()
    torch = p.torch
    x = torch.randn(1000, device="cuda")
    f = torch.compile(lambda a: (a * 2 + 1).sum(), mode="reduce-overhead")

    def run():
        for _ in range(3):
            f(x)
        torch.cuda.synchronize()

    e = raises(p.millpond.Unsupported, run)
    text = f"{type(e).__name__}: {e}"
    torch.cuda.synchronize()
    equal(float(torch.ones(10, device="cuda").sum()), 10.0)
    check('mode="reduce-overhead"' in text and 'install(mode="pool")' in text and "file an issue" not in text, text[:600])
    return {"says": text[:400]}


@test(timeout=110, quick=False)
def compile_reduce_overhead_in_pool_mode():
    """mode="reduce-overhead" in pool mode: works."""
    _needs_a_compiler()
    p = Parent(replace=False)
    torch = p.torch
    p.millpond.torch.install(mode="pool")
    x = torch.randn(1000, device="cuda")
    f = lambda a: (a * 2 + 1).sum()
    g = torch.compile(f, mode="reduce-overhead")
    for turn in range(4):
        x.fill_(turn)
        check(torch.allclose(g(x).clone(), f(x)), f"turn {turn}")


@test()
def pool_mode():
    """install(mode="pool"): torch's allocator in front, its memory from the arena, native statistics, graphs, OOM."""
    p = Parent(limit="2GiB", replace=False)
    torch = p.torch
    p.millpond.torch.install(mode="pool")
    equal(torch.cuda.get_allocator_backend(), "native")
    x = torch.ones(100 * MIB // 4, device="cuda")
    check(p.mine("reserved") >= 100 * MIB, "the ledger says", p.mine("reserved"))
    check(torch.cuda.memory_allocated() >= 100 * MIB and torch.cuda.memory_reserved() >= 100 * MIB)
    y = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    del y
    e = raises(torch.OutOfMemoryError, lambda: torch.empty(3 * GIB, dtype=torch.uint8, device="cuda"))
    equal(float(x.sum()), 100 * MIB / 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x * 3
    graph.replay()
    torch.cuda.synchronize()
    equal(float(z[5]), 3.0)
    return {"oom": str(e)[:300]}


@test()
def pool_as_a_block():
    """`with millpond.torch.pool()`: inside from the arena, outside not."""
    p = Parent(limit="4GiB", replace=False)
    torch = p.torch
    outside = torch.ones(50 * MIB, dtype=torch.uint8, device="cuda")
    equal(p.mine("allocated"), 0, "bytes of the arena before")
    with p.millpond.torch.pool():
        inside = torch.ones(60 * MIB, dtype=torch.uint8, device="cuda")
    check(p.mine("allocated") >= 60 * MIB, "bytes of the arena inside", p.mine("allocated"))
    again = torch.ones(50 * MIB, dtype=torch.uint8, device="cuda")
    equal(int(outside.sum(dtype=torch.int64) + inside.sum(dtype=torch.int64) + again.sum(dtype=torch.int64)), 160 * MIB)


@test(quick=False)
def native_ipc_of_pool_memory_is_refused_by_name():
    """Pool mode: torch shares its own memory as ever (or says why not), and of ours our error names what to call instead."""
    p = Parent(replace=False)
    torch, millpond = p.torch, p.millpond
    from torch.multiprocessing.reductions import reduce_tensor

    outside = torch.ones(1000, device="cuda")
    with millpond.torch.pool():
        inside = torch.ones(1000, device="cuda")
    e = raises(millpond.Unsupported, reduce_tensor, inside)
    check("conn.send" in str(e) and "millpond.torch.install_reducer()" in str(e), e)
    try:
        reduce_tensor(outside)
        outcome = "shared"
    except millpond.Error:
        raise
    except Exception as other:
        outcome = f"{type(other).__name__}: {str(other)[:200]}"
    equal((float(inside.sum()), float(outside.sum())), (1000.0, 1000.0))
    return {"says": str(e)[:300], "torch's own": outcome}


@test()
def pool_segments_return():
    """Segments go back to the arena when their pool dies, and those of tensors that outlive it when these are gone."""
    p = Parent(limit="4GiB", replace=False)
    torch = p.torch

    def reserved():
        p.arena.trim()
        return p.mine("reserved")

    with p.millpond.torch.pool() as made:
        gone = torch.ones(60 * MIB, dtype=torch.uint8, device="cuda")
        small = torch.ones(1000, dtype=torch.uint8, device="cuda")
        lasting = torch.full((80 * MIB,), 3, dtype=torch.uint8, device="cuda")
    del gone, small
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = p.mine("allocated")
    check(before >= 80 * MIB, "the ledger says", before)
    del made
    gc.collect()
    torch.cuda.empty_cache()
    until(lambda: p.mine("allocated") == 80 * MIB, 5, lambda: f"with its pool gone, and one tensor left: {p.mine('allocated')} of {before}")
    # The lasting one's chunk is its own; another may be the smallest that there is.
    until(lambda: reserved() <= (80 + 24) * MIB, 5, lambda: f"the arena has not got the others' chunks back: {p.mine('reserved')}")
    noise = torch.full((200 * MIB,), 9, dtype=torch.uint8, device="cuda")
    equal(int(lasting.sum(dtype=torch.int64)), 3 * 80 * MIB, "what outlives its pool")
    del lasting, noise
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    until(lambda: p.mine("allocated") == 0, 5, lambda: f"with its tensors gone too: {p.mine('allocated')}")
    until(lambda: reserved() == 0, 5, lambda: f"still reserved: {p.mine('reserved')}")
    # Each segment that torch got it has freed, once: of a pool that is gone, on whatever thread.
    count = lambda: {key: p.millpond._native.control("stats", device=0)[f"allocation.all.{key}"] for key in ("allocated", "freed")}  # noqa: E731
    equal(count()["allocated"], count()["freed"], "calls of malloc and of free")
    before_threads = count()["allocated"]
    with p.millpond.torch.pool() as made:
        theirs = [torch.ones(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    torch.cuda.synchronize()
    at_once(3, lambda number: [theirs.pop() for _ in range(2)])
    del made
    gc.collect()
    torch.cuda.empty_cache()
    until(lambda: p.mine("allocated") == 0, 5, lambda: f"freed by other threads: {p.mine('allocated')}")
    until(lambda: reserved() == 0, 5, lambda: f"still reserved after other threads' frees: {p.mine('reserved')}")
    check(count()["allocated"] > before_threads, "the pool got nothing")
    equal(count()["allocated"], count()["freed"], "calls of malloc and of free, with other threads")
    with p.millpond.torch.pool():
        again = torch.full((60 * MIB,), 5, dtype=torch.uint8, device="cuda")
    equal(int(again.sum(dtype=torch.int64)), 5 * 60 * MIB, "another pool")
    return {"before": before}


@test()
def pool_mode_retries():
    """Null where there is no room: torch gives its cached segments back and asks again. Inside a pool it does so for blocks over
    `max_split_size_mb` only."""
    import os

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    p = Parent(limit="2GiB", replace=False)
    torch = p.torch
    with p.millpond.torch.pool():
        cached = [torch.ones(800 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
        del cached
        torch.cuda.synchronize()
        check(p.mine("allocated") >= 1600 * MIB, "cached by torch", p.mine("allocated"))
        big = torch.full((1536 * MIB,), 7, dtype=torch.uint8, device="cuda")
        equal(int(big[:: 1 << 12].sum(dtype=torch.int64)), 7 * 1536 * (MIB >> 12))
        check(p.mine("allocated") < 2048 * MIB, "the ledger says", p.mine("allocated"))
        raises(torch.OutOfMemoryError, lambda: torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda"))
        del big
        torch.cuda.synchronize()
        equal(int(torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda")[-1]), 1, "after running out of memory")


@test()
def pool_out_of_memory_ends_with_its_pool():
    """By default torch gives nothing of a live pool's cache back, and says that it is out of memory: a pool that ends does."""
    p = Parent(limit="2GiB", replace=False)
    torch = p.torch
    retried = True
    with p.millpond.torch.pool() as made:
        cached = torch.ones(GIB, dtype=torch.uint8, device="cuda")
        del cached
        torch.cuda.synchronize()
        try:
            torch.empty(1536 * MIB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            retried = False
    del made
    gc.collect()
    torch.cuda.empty_cache()
    with p.millpond.torch.pool():
        big = torch.full((1536 * MIB,), 7, dtype=torch.uint8, device="cuda")
    equal(int(big.sum(dtype=torch.int64)), 7 * 1536 * MIB)
    return {"torch_gave_back_of_a_live_pool": retried}


@worker
def reads_when_told(conn):
    """Keeps what comes as a tensor, says what it holds when it is asked, and lets go when it is told."""
    import torch

    torch.ones(8, device="cuda")
    held = []
    while True:
        value = conn.recv(timeout=60)
        if isinstance(value, torch.Tensor):
            held.append(value)
        elif value == "drop":
            held.clear()
            torch.cuda.synchronize()
        else:
            conn.send([(int(x.sum(dtype=torch.int64)), bool((x == x[0]).all()), int(x[0])) for x in held])
        del value


def _proved(p, conn):
    """Sends the connection's first GPU value, and waits until nothing is kept for its canary: what survives then does not by that."""
    conn.send(p.torch.ones(100, dtype=p.torch.uint8, device="cuda"))
    until(lambda: conn._gpu.out is True and not conn._gpu._kept, 20, lambda: f"the canary: {conn._gpu.out}, kept {len(conn._gpu._kept)}")
    conn.send("drop")


def _large(kept):
    return [key for key in list(kept._kept) if key[1] > MIB]


def _watched(kept):
    """On which threads what is kept for others, over 1 MiB, was dropped."""
    threads, sweep = [], kept.sweep

    def watched():
        before = len(_large(kept))
        sweep()
        threads.extend([threading.current_thread().name] * (before - len(_large(kept))))

    kept.sweep = watched
    return threads


def _segment_is_kept(*worker_arguments):
    from millpond import _foreign

    p = Parent(limit="8GiB", replace=False)
    torch = p.torch
    p.millpond.torch.install(mode="pool")
    conn = p.worker(reads_when_told, *worker_arguments)
    _proved(p, conn)
    kept = _foreign._keeper.segments
    dropped = _watched(kept)
    full = lambda mib, value: torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    # Three in segments of their own, and two in one of 20 MiB.
    sizes = (40, 40, 40, 4, 4)
    for number, mib in enumerate(sizes):
        equal(conn.send(full(mib, number + 1)).copies, 0, "copies")
    equal(len(_large(kept)), len(sizes), "kept for others")
    check(torch.cuda.memory_allocated() - before >= (sum(sizes) - 1) * MIB, "allocated by torch", torch.cuda.memory_allocated() - before)
    others = [full(mib, 99) for mib in sizes * 3]
    torch.cuda.synchronize()
    conn.send("say")
    expected = [(mib * MIB * (number + 1), True, number + 1) for number, mib in enumerate(sizes)]
    equal(conn.recv(timeout=60), expected, "what the receiver reads after others were filled")
    del others
    equal(dropped, [], "dropped before its receiver was done")
    conn.send("drop")
    conn.send(full(1, 1))  # where no event over the context is allowed, DONE comes with the next value
    conn.send("drop")
    seconds = until(lambda: not _large(kept), 20, lambda: f"still kept: {_large(kept)}, {p.arena.ledger()}")
    equal(dropped, ["millpond-keeper"] * len(sizes), "dropped on")
    check(torch.cuda.memory_allocated() - before <= 2 * MIB, "torch has it back", torch.cuda.memory_allocated() - before)
    p.close()
    return {"dropped_after_ms": round(seconds * 1e3, 1)}


@test()
def pool_segment_is_kept():
    """In pool mode: send, del, allocate the same size, fill: the receiver still reads the old values, long after the canary's answer;
    when it lets go, torch has the memory back, by a Python thread of ours."""
    return _segment_is_kept()


@test()
def pool_segment_is_kept_for_a_pool():
    """The same where the receiver is in pool mode too."""
    return _segment_is_kept("--pool")


@test()
def pool_ticket_is_kept():
    """The same for tickets: kept until they are redeemed and their receiver is done, or cancelled."""
    from millpond import _foreign

    p = Parent(limit="8GiB", replace=False)
    torch, millpond = p.torch, p.millpond
    millpond.torch.install(mode="pool")
    full = lambda value: torch.full((40 * MIB,), value, dtype=torch.uint8, device="cuda")
    conn = p.worker(redeems)
    texts = [millpond.ticket(full(value)) for value in (5, 6)]
    others = [full(99) for _ in range(4)]
    torch.cuda.synchronize()
    equal(conn.call("redeem", texts[0], timeout=60), 5 * 40 * MIB, "what its redeemer read")
    millpond.cancel_ticket(texts[1])
    until(lambda: _foreign.kept_in_segments() == 0, 20, lambda: f"still kept: {_foreign.kept_in_segments()}, {p.arena.ledger()}")
    del others
    p.close()


@worker
def redeems(conn):
    import millpond
    import torch

    @conn.serve
    def redeem(text):
        return int(millpond.redeem(text).sum(dtype=torch.int64))

    conn.serve_forever()


@test()
def pool_mode_is_refused_under_async():
    """Pool mode and replacement under cudaMallocAsync are refused by name."""
    import os

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    p = Parent(limit="2GiB", replace=False)
    said = [str(raises(p.millpond.Error, lambda m=m: p.millpond.torch.install(mode=m))) for m in ("pool", "replace")]
    check(all("cudaMallocAsync" in text for text in said), said)
    return {"says": [text[:200] for text in said]}
