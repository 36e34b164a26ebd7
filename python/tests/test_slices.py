"""`_native.in_slices`: the main thread, whichever it is, comes back for signals; others wait in one piece; none past its time."""

import ctypes
import struct
import subprocess
import sys
import threading
import time

import pytest

from millpond import _native, errors

#: Says in how many pieces a wait of half a second is made, on the main thread of wherever it runs.
PIECES = """
import os, threading
from millpond import _native, errors
def pieces():
    asked = []
    def step(ms):
        asked.append(ms)
        threading.Event().wait(ms / 1000)
        raise errors.Timeout("")
    try:
        _native.in_slices(step, 0.5)
    except errors.Timeout:
        return len(asked)
"""
WHERE = {
    "here": "print(pieces())",
    "in a child": "pid = os.fork()\nprint(pieces(), flush=True) if not pid else os.waitpid(pid, 0)",
    "in a child of another thread": """
def fork():
    pid = os.fork()
    if not pid:
        print(pieces(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
thread = threading.Thread(target=fork)
thread.start()
thread.join()
""",
    "imported by another thread": None,
}


@pytest.mark.parametrize("where", WHERE)
def test_the_main_thread_waits_in_slices(where):
    code = PIECES + WHERE[where] if WHERE[where] else f"import threading\nt = threading.Thread(target=exec, args=({PIECES!r}, globals()))\nt.start()\nt.join()\nprint(pieces())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() and int(done.stdout) >= 3, done


def asked(timeout, give_up=None):
    """What `in_slices` asks for of a step that times out at once."""
    found = []

    def step(ms):
        found.append(ms)
        if len(found) == give_up:
            return "it came"
        time.sleep(0.0002)
        raise errors.Timeout("")

    try:
        return _native.in_slices(step, timeout), found
    except errors.Timeout:
        return None, found


@pytest.mark.parametrize("timeout", [0, -1, 0.0])
def test_no_time_is_one_look(timeout):
    assert asked(timeout) == (None, [0])


@pytest.mark.parametrize("timeout", [1e-9, 1e-4, 0.003])
def test_a_short_time_is_not_cut_shorter(timeout):
    start = time.monotonic()
    came, found = asked(timeout)
    assert came is None and time.monotonic() - start >= timeout and max(found) <= _native.milliseconds(timeout)


@pytest.mark.parametrize("timeout", [None, 1e6, 1e12])
def test_a_long_time_is_made_of_slices(timeout):
    assert asked(timeout, 5) == ("it came", [_native._SLICE_MS] * 5)


@pytest.mark.parametrize("timeout", [None, 0, 0.25, 1e6])
def test_another_thread_waits_in_one_piece(timeout):
    found = []
    thread = threading.Thread(target=lambda: found.append(asked(timeout)))
    thread.start()
    thread.join(10)
    assert found == [(None, [_native._FOR_EVER_MS if timeout is None else _native.milliseconds(timeout)])]


def test_the_callers_deadline_counts_where_it_has_one():
    """`end` is when the time is over; a wait that began before it was asked for is not given its time again."""
    found = []

    def step(ms):
        found.append(ms)
        raise errors.Timeout("")

    with pytest.raises(errors.Timeout):
        _native.in_slices(step, 1e6, time.monotonic())
    assert found == [_native._SLICE_MS]


@pytest.mark.parametrize("timeout, ms", [(None, -1), (0, 0), (-3, 0), (1e-4, 1), (0.2, 200), (1e300, int(_native.LONGEST * 1000))])
def test_seconds_as_the_library_has_them(timeout, ms):
    assert _native.milliseconds(timeout) == ms
    with pytest.raises(ValueError):
        _native.milliseconds(float("nan"))


def test_a_receive_in_the_middle_of_another_has_a_place_of_its_own(monkeypatch):
    """A signal handler runs between the native receive and the look at what came, and may itself receive."""
    texts, nested = [b"first", b"second"], []

    class Library:
        @staticmethod
        def receive(channel, timeout_ms, flags, streams, count, at, capacity, out):
            text = texts[channel]
            body = struct.pack("=QQ", 0, 7 + channel) + text
            ctypes.memmove(at, body, len(body))
            if channel == 0:
                nested.append(_native.receive(1, 0, 0, ()))
            return len(body)

    monkeypatch.setattr(_native, "_loaded", Library)
    assert _native.receive(0, 0, 0, ()) == ("first", (), 7)
    assert nested == [("second", (), 8)]
