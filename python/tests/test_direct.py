"""Two workers with a channel of their own: values go from one to the other, and the parent sees none of it."""

import subprocess
import sys

import pytest

import millpond
from conftest import native

pytestmark = native
np = pytest.importorskip("numpy")

WORKER = """
import os, sys
import millpond
millpond.attach()
parent = millpond.connection(timeout=30)
me, other, first = sys.argv[1:]
direct = millpond.connect(other, timeout=30)
assert direct.peer.name == other, direct.peer
if first == "first":
    t = millpond.empty((1000,), "float32")
    t[...] = 4
    direct.send({"t": t})
    del t
    back = direct.recv(timeout=30)
    parent.send({"total": float(back.sum()), "served": direct.call("double", 21, timeout=30)})
else:
    @direct.serve("double")
    def double(n):
        return 2 * n
    t = direct.recv(timeout=30)["t"]
    t[...] += 1  # in place: it is the same memory
    direct.send(t)
    del t
    direct.serve_forever()
    parent.send("ended")
parent.recv(timeout=30)
"""


def test_two_workers_talk_without_the_parent():
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        named = {"a": ["a", "b", "first"], "b": ["b", "a", "second"]}
        processes = [subprocess.Popen([sys.executable, "-c", WORKER, *words], env=arena.worker_env(name)) for name, words in named.items()]
        conns = {conn.peer.name: conn for conn in (arena.accept(timeout=60), arena.accept(timeout=60))}
        before = millpond.counters()
        assert conns["a"].recv(timeout=60) == {"total": 5000.0, "served": 42}
        conns["a"].send("end")
        assert conns["b"].recv(timeout=60) == "ended"
        conns["b"].send("end")
        assert [process.wait(20) for process in processes] == [0, 0]
        assert millpond.counters()["received_tensors"] == before["received_tensors"], "no tensor came by the parent"


def test_nobody_there_is_a_time_out():
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        code = "import millpond\nmillpond.attach()\nmillpond.connection(timeout=20)\ntry:\n    millpond.connect('nobody', timeout=0.1)\nexcept millpond.Timeout:\n    raise SystemExit(7)"
        worker = subprocess.Popen([sys.executable, "-c", code], env=arena.worker_env("w"))
        with arena.accept(timeout=30):
            assert worker.wait(20) == 7
