import os
import sys
import time

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)
ROOT = os.path.dirname(PACKAGE)
INSTALLED = os.environ.get("MILLPOND_TEST_INSTALLED") == "1"
if not INSTALLED:
    sys.path.insert(0, PACKAGE)
    os.environ["PYTHONPATH"] = PACKAGE  # for the processes that tests start
sys.path.insert(0, HERE)


def eventually(what, seconds=10):
    """Waits until `what()` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def _find(name, packaged):
    import millpond

    here = os.path.join(os.path.dirname(millpond.__file__), packaged)
    built = [os.path.join(ROOT, "target", profile, name) for profile in ("release", "debug")]
    for path in [here, *sorted((p for p in built if os.path.exists(p)), key=os.path.getmtime, reverse=True)]:
        if os.path.exists(path):
            return path
    return None


LIBRARY = os.environ.get("MILLPOND_LIBRARY") or _find("libmillpond_torch.so", "libmillpond_torch.so")
PROGRAM = os.environ.get("MILLPOND_PROGRAM") or _find("millpond", "bin/millpond")
if LIBRARY:
    os.environ["MILLPOND_LIBRARY"] = LIBRARY
if PROGRAM:
    os.environ["MILLPOND_PROGRAM"] = PROGRAM

#: For tests that need the native library and the program. CI sets MILLPOND_TEST_NATIVE=1: then they may not be skipped.
native = pytest.mark.skipif(
    not (LIBRARY and PROGRAM) and os.environ.get("MILLPOND_TEST_NATIVE") != "1",
    reason="the native library is not built: cargo build -p millpond-torch && cargo build -p millpond-ipc --features cli",
)


@pytest.fixture
def fake(monkeypatch):
    """The stand-in for the native library."""
    import gc

    from fake_native import Fake

    gc.collect()  # and what earlier tests left in cycles goes to the library that it came from
    yield Fake().install(monkeypatch)
    gc.collect()  # what hangs in cycles is released here, not in the next test's stand-in


@pytest.fixture
def pair(fake):
    """Two ends of one channel, over the stand-in."""
    from millpond.channel import Channel

    return Channel(1, {"name": "b"}), Channel(2, {"name": "a"})


@pytest.fixture
def registry():
    """Registrations that end with the test."""
    from millpond import _tree, _types

    yield
    for cls in list(_types._by_type):
        del _types._by_type[cls]
        _tree.forget(cls)
    _types._by_name.clear()
