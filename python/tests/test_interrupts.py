"""Ctrl-C at every call that a wait makes: nothing stays locked, and somebody else can read."""

import sys
import threading

import pytest

import millpond
from conftest import eventually
from millpond import _native, channel

OURS = {channel.__file__, _native.__file__}


def interrupted(at, act):
    """Runs `act` with a KeyboardInterrupt after the `at`th call of a C function that our code makes. Whether it came so far."""
    left = at

    def profile(frame, event, argument):
        nonlocal left
        if event == "c_return" and frame.f_code.co_filename in OURS:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        act()
    except KeyboardInterrupt:
        pass
    except millpond.Timeout:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


@pytest.mark.parametrize("what", ["a message", "nothing", "another reads"])
def test_an_interrupt_leaves_nothing_locked(pair, fake, what):
    a, b = pair
    at, came = 0, True
    while came:
        at += 1
        reader = threading.Thread(target=b.recv, args=(10,))
        if what == "another reads":
            reader.start()
            eventually(lambda: b._reading)
        elif what == "a message":
            a.send(at)
        came = interrupted(at, lambda: b.recv(timeout=0.001))
        if what == "another reads":
            assert b._reading
            a.send("for the other")
            reader.join(10)
            assert not reader.is_alive()
        assert not b._lock.locked() and not b._reading and not b._waiting, f"after call {at}"
        a.send("next")
        while b.recv(timeout=10) != "next":
            pass
    assert at > 3


def test_an_interrupt_of_a_poll_leaves_nothing_locked(pair):
    a, b = pair
    at = 1
    while interrupted(at, b._poll):
        assert not b._lock.locked() and not b._reading, f"after call {at}"
        a.send("next")
        assert b.recv(timeout=10) == "next"
        at += 1
    assert at > 2
