"""Calls over a channel, both ends in this process, over the stand-in for the native library."""

import gc
import logging
import threading
import time
import weakref

import pytest

import millpond


@pytest.fixture
def served(pair):
    """(caller, server): the server answers in a thread of its own."""
    caller, server = pair
    threads = []

    def start(n=1):
        thread = threading.Thread(target=server.serve_forever, args=(n,), daemon=True)
        thread.start()
        threads.append(thread)
        return caller, server

    yield start
    caller.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "serve_forever ends with the channel"


def wait_for(condition, what):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def test_a_call_gives_the_result(served):
    caller, server = served()

    @server.serve
    def add(a, b=1):
        return a + b

    server.serve("other name")(lambda: {"x": [1, (2,)]})
    assert caller.call("add", 2, b=5, timeout=5) == 7
    assert caller.call("add", b"1" * 5000, b"2", timeout=5) == b"1" * 5000 + b"2"
    assert caller.call("other name", timeout=5) == {"x": [1, (2,)]}


def test_an_exception_comes_with_its_traceback(served):
    caller, server = served()

    @server.serve
    def breaks():
        raise KeyError("no such layer")

    with pytest.raises(millpond.RemoteError, match="'breaks' failed with KeyError: 'no such layer'") as e:
        caller.call("breaks", timeout=5)
    assert e.value.type == "KeyError" and "in breaks" in e.value.traceback and "in breaks" in str(e.value)
    with pytest.raises(millpond.RemoteError, match="nothing is served as 'nope'.*breaks") as e:
        caller.call("nope", timeout=5)
    assert e.value.remote_code == "InvalidArgument"


def test_a_result_that_cannot_cross_is_the_callers_error(served):
    caller, server = served()
    server.serve("bad")(lambda: {"meta": {"fn": print}})
    with pytest.raises(millpond.RemoteError, match=r'out\["meta"\]\["fn"\] cannot cross') as e:
        caller.call("bad", timeout=5)
    assert e.value.remote_code == "CannotCross"
    with pytest.raises(millpond.CannotCross, match=r'call\["args"\]\[0\]'):
        caller.call("bad", print, timeout=5)
    assert not caller._pending


def test_replies_in_any_order_to_many_threads(served):
    caller, server = served(4)
    gates = [threading.Event() for _ in range(4)]

    @server.serve
    def wait(i):
        assert gates[i].wait(10)
        return i

    results = {}
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, caller.call("wait", i, timeout=20))) for i in range(4)]
    for t in threads:
        t.start()
    for i in (3, 1, 0, 2):
        gates[i].set()
        wait_for(lambda: i in results, f"reply {i}")
    assert results == {i: i for i in range(4)}
    for t in threads:
        t.join(5)


def test_callbacks_into_the_caller_in_mid_call(served):
    caller, server = served()
    seen = []
    caller.serve("progress")(lambda step: seen.append(step) or step * 10)

    @server.serve
    def work(n):
        return [server.call("progress", i, timeout=5) for i in range(n)]

    assert caller.call("work", 3, timeout=10) == [0, 10, 20] and seen == [0, 1, 2]


def test_callbacks_nest(served):
    caller, server = served()

    @caller.serve
    def down(n):
        return n if n == 0 else caller.call("up", n - 1, timeout=5)

    @server.serve
    def up(n):
        return n if n == 0 else server.call("down", n - 1, timeout=5)

    assert caller.call("up", 9, timeout=10) == 0


def test_plain_messages_and_calls_do_not_mix_up(served):
    caller, server = served()
    server.serve("echo")(lambda x: x)
    got = []
    thread = threading.Thread(target=lambda: got.append(caller.recv(timeout=10)))
    thread.start()
    for i in range(50):
        assert caller.call("echo", i, timeout=5) == i
    server.send("plain")
    thread.join(10)
    assert got == ["plain"]


def test_a_recv_serves_calls_meanwhile(pair):
    a, b = pair
    b.serve("echo")(lambda x: x)
    got = []
    thread = threading.Thread(target=lambda: got.append(b.recv(timeout=10)))
    thread.start()
    assert a.call("echo", 5, timeout=5) == 5
    a.send("then this")
    thread.join(10)
    assert got == ["then this"]


def test_a_call_times_out_and_the_other_side_is_told(served):
    caller, server = served()
    told = threading.Event()

    @server.serve
    def slow():
        end = time.monotonic() + 10
        while not millpond.cancelled() and time.monotonic() < end:
            time.sleep(0.002)
        told.set()
        return "late"

    start = time.monotonic()
    with pytest.raises(millpond.Timeout, match="'slow' had no answer within 0.05 s"):
        caller.call("slow", timeout=0.05)
    assert time.monotonic() - start < 5 and told.wait(10)
    server.serve("echo")(lambda x: x)
    assert caller.call("echo", 1, timeout=5) == 1
    assert caller.dropped == 1, "the late reply was dropped and counted"
    assert not millpond.cancelled()


def test_a_cancelled_call_raises_cancelled(served):
    caller, server = served()

    @server.serve
    def stops():
        while True:
            millpond.check_cancelled()
            time.sleep(0.002)

    call = caller.start("stops")
    assert not call.done() and call.cancel() and call.cancel()
    for _ in range(2):
        with pytest.raises(millpond.Cancelled, match="the call of 'stops' was cancelled") as e:
            call.result(timeout=10)
    assert e.value.__cause__.remote_code == "Cancelled" and call.done() and not caller._pending


def test_what_was_cancelled_before_it_began_ends_at_its_first_look(served):
    caller, server = served()
    gate, looked = threading.Event(), []
    server.serve("first")(lambda: gate.wait(10))
    server.serve("second")(lambda: looked.append(millpond.check_cancelled()))
    first, second = caller.start("first"), caller.start("second")
    assert second.cancel()
    gate.set()
    assert first.result(timeout=10) is True
    with pytest.raises(millpond.Cancelled):
        second.result(timeout=10)
    assert not looked


def test_started_calls_pass_every_argument_on(served):
    caller, server = served()
    server.serve("all")(lambda *args, **kwargs: [list(args), kwargs])
    call = caller.start("all", 1, name="n", timeout=3, self=4, grace=5)
    assert call.result(timeout=10) == [[1], {"name": "n", "timeout": 3, "self": 4, "grace": 5}] and call.name == "all"
    with pytest.raises(millpond.CannotCross, match=r'call\["args"\]\[0\]'):
        caller.start("all", print)
    assert not caller._pending and "done" in repr(call)


def test_an_error_is_the_same_at_every_asking_and_keeps_nothing(served, fake):
    caller, server = served()

    @server.serve
    def breaks(data):
        raise KeyError("no such layer")

    call = caller.start("breaks", b"x" * 5000)
    for _ in range(2):
        with pytest.raises(millpond.RemoteError, match="no such layer"):
            call.result(timeout=10)
    call = caller.start("nope", b"x" * 5000)
    with pytest.raises(millpond.RemoteError, match="nothing is served"):
        call.result(timeout=10)
    wait_for(lambda: fake.live == 0, "the arguments are let go of")


def test_the_end_of_another_channel_is_an_answer_too(served):
    caller, server = served()

    @server.serve
    def ask_another():
        raise millpond.PeerDied("the other worker has died")

    server.serve("echo")(lambda x: x)
    with pytest.raises(millpond.RemoteError) as e:
        caller.call("ask_another", timeout=5)
    assert e.value.remote_code == "PeerDied" and caller.call("echo", 1, timeout=5) == 1, "and it goes on serving"


def test_log_records_come_to_the_logger_of_the_same_name(served, caplog):
    caller, server = served()
    logger = logging.getLogger("a.worker.module")
    logger.propagate = False  # in one process: else the record would be seen at its source already
    logger.setLevel(logging.INFO)
    handler = server.forward_logs(logger)
    seen = []

    class Sink(logging.Handler):
        def emit(self, record):
            if record.process == -1:
                seen.append(record.getMessage())

    @server.serve
    def talk():
        record = logger.makeRecord(logger.name, logging.INFO, "f", 1, "step %d", (7,), None)
        record.process = -1
        handler.emit(record)
        return 1

    logger.addHandler(Sink())
    logger.removeHandler(handler)
    assert caller.call("talk", timeout=5) == 1
    assert seen == ["step 7"]
    for h in list(logger.handlers):
        logger.removeHandler(h)


def test_the_end_of_the_channel_wakes_every_waiter(pair):
    a, b = pair
    outcomes = []

    def wait(what):
        try:
            what()
        except millpond.Closed:
            outcomes.append("closed")

    threads = [threading.Thread(target=wait, args=(w,)) for w in (a.recv, a.recv, lambda: a.call("x"), lambda: a.call("y"))]
    for t in threads:
        t.start()
    wait_for(lambda: len(a._pending) == 2 and a._reading, "all wait")
    b.close()
    for t in threads:
        t.join(10)
    assert outcomes == ["closed"] * 4
    assert a.closed
    with pytest.raises(millpond.Closed):
        a.send(1)


def test_a_recv_that_times_out_hands_the_reading_over(pair):
    a, b = pair
    got = []
    first = threading.Thread(target=lambda: pytest.raises(millpond.Timeout, a.recv, timeout=0.05))
    first.start()
    wait_for(lambda: a._reading, "the first reads")
    second = threading.Thread(target=lambda: got.append(a.recv(timeout=10)))
    second.start()
    first.join(10)
    b.send("hello")
    second.join(10)
    assert got == ["hello"]


def test_several_senders_and_receivers(pair):
    a, b = pair
    got = []
    receivers = [threading.Thread(target=lambda: [got.append(b.recv(timeout=10)) for _ in range(50)]) for _ in range(4)]
    senders = [threading.Thread(target=lambda s=s: [a.send((s, i)) for i in range(50)]) for s in range(4)]
    for t in receivers + senders:
        t.start()
    for t in receivers + senders:
        t.join(20)
    assert sorted(got) == [(s, i) for s in range(4) for i in range(50)]


def test_result_is_allocated_by_the_caller(served, monkeypatch):
    np = pytest.importorskip("numpy")
    from millpond import _session

    monkeypatch.setattr(_session, "_info", {"devices": [{"ordinal": -1}]})
    caller, server = served()

    @server.serve
    def make(n):
        out = server.result((n, 2), "float32")
        assert isinstance(out, millpond.Ref) or out.shape == (n, 2)
        out[...] = 3
        return out

    got = caller.call("make", 4, timeout=10)
    assert got.shape == (4, 2) and np.asarray(got).sum() == 24 and not caller._pending
    with pytest.raises(millpond.InvalidArgument, match="for a function that serves"):
        server.result((1,), "float32")


def test_refs_in_calls_are_released(served, fake):
    caller, server = served()
    server.serve("size")(len)
    for _ in range(20):
        assert caller.call("size", b"x" * 5000, timeout=5) == 5000
    assert fake.live == 0


@pytest.mark.parametrize("what", ["nothing", "nonsense", "malformed", "the end", "a call"])
def test_a_failure_keeps_nothing_of_its_callers(pair, fake, what):
    sent = {"nonsense": (b"nonsense", []), "malformed": (b'[["m"],{"$":[]}]', []), "the end": None}
    if what in sent:
        fake.queues[2].put(sent[what])

    class Value:
        pass

    def fail():
        value = Value()
        try:
            pair[1].call("f", value=1, timeout=0.01) if what == "a call" else pair[1].recv(timeout=0.01)
        except millpond.Error:
            return weakref.ref(value)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("text", ['[["e",1],5]', '[["l"],5]', '[["l"],{"name":5}]', '[["l"],{"levelno":"high"}]', '[["k","gpu-x-pool"],[5,"x",[1,2,3,4]]]'])
def test_what_is_no_error_record_or_pool_is_a_named_error_at_most(pair, fake, text):
    fake.queues[2].put((text.encode(), []))
    with pytest.raises((millpond.Protocol, millpond.RemoteError, millpond.Timeout)):
        pair[1].call("f", timeout=0.05)
    pair[0].send("after")
    assert pair[1].recv(timeout=5) == "after"
