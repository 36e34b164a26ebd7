"""Pool mode and captures against what torch does in them, played by a fake of the few calls that count: no GPU. Each case in a
process of its own."""

import pytest

from conftest import native
from test_torch_install import GPU, run

torch = pytest.importorskip("torch")

#: torch's allocator as far as it matters: which threads are in which pool, and that a pool which dies beside one aborts.
FAKE = (
    GPU
    + """
import contextlib, gc, threading, weakref
import millpond.torch
from millpond import _torch_captures, _torch_pools, _torch_share

said = []
def control(op, **fields):
    said.append((op, fields))
    return {"devices": [{"ordinal": 0}, {"ordinal": -1}]}
def words():
    return [(fields.get("device"), fields["allowed"]) for op, fields in said if op == "context_events"]
_native.control = control
_torch_share.install = lambda everything: None

underway, made, dead, emptied = [], [], [], []
class MemPool:
    def __init__(self, allocator):
        made.append(weakref.ref(self))
        self.number = len(made)
        weakref.finalize(self, lambda number: dead.append((number, list(underway))), self.number)

@contextlib.contextmanager
def use_mem_pool(pool, device=None):
    entry = (pool.number, device, threading.get_ident())
    assert entry[:2] not in [other[:2] for other in underway], "already recording to mempool_id"
    underway.append(entry)
    try:
        yield
    finally:
        underway.remove(entry)

device, streams = 0, threading.local()
torch.cuda.MemPool, torch.cuda.use_mem_pool = MemPool, use_mem_pool
torch.cuda.current_device = lambda: device
torch.cuda.current_stream = lambda: getattr(streams, "now", "side")
torch.cuda.get_allocator_backend = lambda: "native"
torch.cuda.memory.is_initialized = lambda: True
torch._C._cuda_emptyCache = lambda: emptied.append(list(underway))
millpond.torch._make_allocator = lambda malloc: malloc

# The methods that torch's own call by super().
class Base:
    def capture_begin(self, pool=None, capture_error_mode="global"):
        if self.fails == "begin":
            raise RuntimeError("no begin")
        calls.append("begin")
    def capture_end(self):
        if self.fails:
            raise RuntimeError("no end")
        calls.append("end")
calls = []
class CUDAGraph(Base):
    fails = None
    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        super().capture_begin(pool=pool, capture_error_mode=capture_error_mode)
    def capture_end(self) -> None:
        super().capture_end()
torch.cuda.CUDAGraph = CUDAGraph

def elsewhere(act):
    thread = threading.Thread(target=act); thread.start(); thread.join()

def block():
    with millpond.torch.pool() as pool:
        return pool.number
"""
)


def play(code, version="2.11.0+cu130"):
    assert run(f"{FAKE}torch.__version__ = {version!r}\n{code}\nprint('fine')") == "fine"


def test_a_pool_under_an_installed_one_is_that_one():
    play("""
millpond.torch.install(mode="pool")
with millpond.torch.pool() as outer, millpond.torch.pool() as inner:
    assert outer is inner and len(made) == len(underway) == 1
del outer, inner
gc.collect()
assert not dead and len(underway) == 1
# Another GPU's is another, and no pool may die while that one is installed.
device = 1
first = block()
gc.collect()
assert first == 2 and not dead
""")


def test_a_finished_pool_is_kept_while_any_thread_is_in_one_and_is_the_next_block_s():
    play("""
with millpond.torch.pool() as outer:
    numbers = []
    elsewhere(lambda: numbers.extend(block() for _ in range(3)))
    gc.collect()
    assert numbers == [2, 2, 2] and not dead, (numbers, dead)
    inner = block()
    assert inner == 2, "on this thread too"
del outer
gc.collect()
assert sorted(dead) == [(1, []), (2, [])] and not underway
assert block() == 3, "then a block has a pool of its own"
""")


def test_whoever_drops_a_pool_in_another_s_block_does_not_end_it():
    play("""
with millpond.torch.pool() as held:
    pass
with millpond.torch.pool() as other:
    del held
    gc.collect()
    assert not dead
    given_up = millpond.torch.pool(); given_up.__enter__()
    del given_up
    gc.collect()
    assert not dead and len(underway) == 1
del other
gc.collect()
assert sorted(number for number, _ in dead) == [1, 2, 3] and not any(others for _, others in dead)
""")


def test_no_pool_dies_while_a_graph_is_captured():
    play("""
def capture():
    graph.capture_begin(); begun.set(); finished.wait(20); graph.capture_end()
graph, begun, finished = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
block()
gc.collect()
assert len(dead) == 1
thread = threading.Thread(target=capture); thread.start(); begun.wait(20)
assert [block(), block()] == [2, 2]
gc.collect()
assert len(dead) == 1
finished.set(); thread.join()
assert block() == 2
gc.collect()
assert len(dead) == 2 and block() == 3
""")


def test_a_block_that_cannot_be_entered_leaves_nothing_behind():
    play("""
fine, torch.cuda.use_mem_pool = use_mem_pool, lambda pool, device: 1 / 0
for _ in range(2):
    try:
        block()
    except ZeroDivisionError:
        pass
gc.collect()
assert len(dead) == 2 and not _torch_pools._blocks and words()[-1] == (None, True)
torch.cuda.use_mem_pool = fine
assert block() == 3
""")


def test_from_torch_2_13_each_block_has_a_pool_of_its_own():
    play(
        """
millpond.torch.install(mode="pool")
assert block() == 2 and block() == 3
gc.collect()
assert [number for number, _ in dead] == [2, 3]
""",
        "2.13.0",
    )


def test_events_of_the_context_are_allowed_again_when_nobody_is_in_a_pool():
    play("""
with millpond.torch.pool():
    with millpond.torch.pool():
        elsewhere(block)
        assert words() == [(None, False)]
    assert words() == [(None, False)]
assert words() == [(None, False), (None, True)]
# Where the program itself allows none, none are.
said.clear()
millpond.context_events(False, device=0)
block()
assert words() == [(0, False), (None, False), (0, False), (-1, True)]
said.clear()
millpond.context_events(False)
block()
assert words() == [(None, False), (None, False), (0, False), (-1, False)]
millpond.context_events(True)
said.clear()
millpond.torch.install(mode="pool")
block()
assert words() == [(None, False)]
""")


def test_captures_in_pool_mode_need_torch_2_10():
    code = """
def capture():
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(); graph.capture_end()
def refused():
    try:
        capture()
    except millpond.Unsupported as e:
        assert "2.10" in str(e) and "install(mode='replace')" in str(e), e
        return True
with millpond.torch.pool():
    assert refused() is {refused} and len(calls) == {inside}
    elsewhere(capture)
assert not refused()
millpond.torch.install(mode="pool")
assert refused() is {refused}
assert len(calls) == {after}
"""
    play(code.format(refused=True, inside=0, after=4), "2.9.1+cu128")
    play(code.format(refused=None, inside=2, after=8), "2.10.0")


def test_empty_cache_steps_out_of_the_installed_pool_for_as_long_as_it_takes():
    play("""
torch.cuda.empty_cache()
millpond.torch.install(mode="pool")
inside = list(underway)
torch.cuda.empty_cache()
assert emptied == [[], []] and underway == inside and len(inside) == 1
# Not for another thread, nor in another block or in a capture, above which it would come to lie.
elsewhere(torch.cuda.empty_cache)
graph = torch.cuda.CUDAGraph()
graph.capture_begin()
torch.cuda.empty_cache()
graph.capture_end()
device = 1
with millpond.torch.pool() as held:
    torch.cuda.empty_cache()
device = 0
assert emptied[2:4] == [inside] * 2 and len(emptied[4]) == 2 and underway == inside
# What may not die inside may then, and what somebody has goes on being kept.
finished = []
def use():
    global device
    device = 2; finished.append(block()); device = 0
use()
assert not dead
torch.cuda.empty_cache()
assert [number for number, _ in dead] == finished, (dead, finished)
del held
gc.collect()
assert len(dead) == 1
def fails():
    raise RuntimeError("no memory")
_torch_pools._stepping_out(lambda: None)()
assert len(dead) == 2 and not any(others for _, others in dead)
try:
    _torch_pools._stepping_out(fails)()
except RuntimeError:
    assert underway == inside
""")


def test_a_capture_that_fails_is_told_of_by_its_thread():
    play("""
import inspect
told = []
library = type("Library", (), {"torch_capture_failed": lambda: told.append(threading.get_ident())})
_native.library = lambda: library
theirs = CUDAGraph.capture_begin, CUDAGraph.capture_end
_torch_captures.install(tell=True); _torch_captures.install(tell=True)
assert str(inspect.signature(CUDAGraph.capture_begin)) == str(inspect.signature(theirs[0]))

class Own(CUDAGraph):
    def capture_end(self):
        super().capture_end()

def run(graph, fails=None):
    graph.fails = fails
    try:
        graph.capture_begin(pool=(0, 1))
        graph.capture_end()
    except RuntimeError as e:
        assert str(e) == f"no {fails}", e
        return True

for kind in (CUDAGraph, Own):
    told.clear()
    assert not run(kind()) and not told
    assert run(kind(), "end") and told == [threading.get_ident()]
    assert run(kind(), "begin") and len(told) == 2
    assert not _torch_captures.is_capturing()
told.clear()
# On another stream than it was begun on a capture cannot be ended, and goes on; nor does one that is refused inside end it.
graph = CUDAGraph()
graph.capture_begin()
streams.now, graph.fails = "another", "end"
try:
    graph.capture_end()
except RuntimeError:
    pass
streams.now = "side"
assert run(CUDAGraph(), "begin")
assert not told and _torch_captures.is_capturing()
graph.fails = None
graph.capture_end()
assert not told and not _torch_captures.is_capturing()
_torch_captures.uninstall()
assert (CUDAGraph.capture_begin, CUDAGraph.capture_end) == theirs
assert run(CUDAGraph(), "end") and not told
""")


@native
def test_replacing_watches_torch_s_own_captures_and_tells_the_library():
    out = run(f"""{GPU}
theirs = torch.cuda.CUDAGraph.capture_end
millpond.torch.install()
from millpond import _torch_captures
assert torch.cuda.CUDAGraph.capture_end.__wrapped__ is theirs
assert _torch_captures._failed is _native.library().torch_capture_failed
told, tell = [], _torch_captures._failed
_torch_captures._failed = lambda: (tell(), told.append(1))
try:
    torch.cuda.CUDAGraph.capture_end(object())  # a graph cannot be made without a driver
except TypeError:
    print("raised", len(told))
""")
    assert out == "raised 1"
