"""The canary at each connection, through the production path: what it finds, and what happens then."""

import logging
import os
import subprocess
import sys

import pytest

import millpond
from conftest import HERE, native
from millpond import _gpu_canary, _memory, _native, canary

CORRUPT = os.path.join(HERE, "corrupt_worker.py")


@pytest.fixture(scope="module")
def arena():
    with millpond.Arena(limit="256MiB", driver="host", name="canary-parent") as arena:
        yield arena


def start(arena, name, *args):
    return subprocess.Popen([sys.executable, *args], env=arena.worker_env(name), stdout=subprocess.PIPE, text=True)


GOOD = "import millpond; millpond.attach(); c = millpond.connection(timeout=30); c.send('here'); c.recv(timeout=30)"


@native
@pytest.mark.parametrize(
    "how, what",
    [
        ("received", "over 2 MiB, parent to worker: byte 1060921 of 2101249"),
        ("sent", "bfloat16, worker to parent: byte 3 of 70"),
        ("offset", "a view, parent to worker: element (0, 0)"),
        ("dies", "did not come to an end"),
    ],
)
def test_a_worker_whose_memory_does_not_carry_bytes_is_refused_by_name(arena, caplog, how, what):
    bad = start(arena, f"bad-{how}", CORRUPT, how)
    with pytest.raises(millpond.Refused) as e:
        arena.accept(timeout=30)
    assert f"bad-{how}" in str(e.value) and str(bad.pid) in str(e.value) and what in str(e.value)
    out, _ = bad.communicate(timeout=20)
    if how == "dies":
        assert bad.returncode == 3
    else:
        assert bad.returncode == 7 and what in out
        assert any(r.levelno == logging.ERROR and what in r.getMessage() for r in caplog.records)
    # The arena works on, for others.
    good = start(arena, "good", "-c", GOOD)
    with arena.accept(timeout=30) as conn:
        assert conn.recv(timeout=30) == "here"
        conn.send(None)
        assert good.wait(20) == 0


@native
def test_the_canary_costs_no_message_and_no_tier_of_the_users(arena):
    good = start(arena, "counts", "-c", GOOD)
    with arena.accept(timeout=30) as conn:
        assert conn.recv(timeout=30) == "here"
        assert set(conn.tiers.values()) == {0}
        conn.send(None)
        assert good.wait(20) == 0


@native
def test_it_cannot_be_switched_off():
    here = os.path.dirname(millpond.__file__)
    for name in ("canary.py", "_gpu_canary.py", "arena.py", "_session.py"):
        with open(os.path.join(here, name), encoding="utf-8") as source:
            text = source.read()
        assert "CANARY" not in text and "probe=" not in text
    for module in (canary, _gpu_canary):
        with open(module.__file__, encoding="utf-8") as source:
            assert "environ" not in source.read()


def test_every_probe_is_looked_at(fake, monkeypatch):
    monkeypatch.setattr(_native, "control", lambda op, **f: {})
    for name in canary._SPECS:
        sent = canary.probes("parent")
        assert canary.check("parent", sent) == {}
        value = sent["values"][name]
        at = value._address() + (value._strides[0] * value._row.itemsize if value._strides else value.nbytes // 2)
        before = _memory.ctypes.string_at(at, 1)
        _memory.ctypes.memset(at, before[0] ^ 1, 1)
        assert name in canary.check("parent", sent)
    assert set(canary.check("worker", canary.probes("parent"))) >= {"8x8 float32", "over 2 MiB", "from outside", "inline"}
    short = canary.probes("worker")
    del short["values"]["no elements"]
    assert list(canary.check("worker", short)) == ["no elements"]


def test_what_there_is_no_memory_for_is_skipped(fake, monkeypatch):
    def full(nbytes, device):
        if nbytes > 1 << 20:
            raise millpond.OutOfMemory("full")
        return block(nbytes, device)

    block = _memory.block
    monkeypatch.setattr(_memory, "block", full)
    sent = canary.probes("worker")
    assert sent["skipped"] == ["over 2 MiB"] and canary.check("worker", sent) == {}
