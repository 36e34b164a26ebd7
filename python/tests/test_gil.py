"""Letting go needs no Python: a DLPack deleter on a thread of C's, while a thread of Python's holds the GIL and waits for it."""

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import time

import pytest

import millpond
from conftest import HERE, eventually, native
from millpond import _dtypes, _native

pytestmark = native
MIB = 1 << 20

held = ctypes.PyDLL(None)  # its functions are called with the GIL held
free = ctypes.CDLL(None)
TAKEN = b"used_dltensor"  # a capsule keeps no copy of its name


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def unended_under_the_gil(calls, seconds):
    """Runs (function, argument)s, each on a thread of C's, and keeps the GIL from before the first to after the last: the threads
    that had not ended in time."""
    threads, left, interval = [], [], sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for function, argument in calls:
            thread = ctypes.c_ulong()
            assert held.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(function), ctypes.c_void_p(argument)) == 0
            threads.append(thread)
        end = time.time() + seconds
        until = Timespec(int(end), int(end % 1 * 1e9))
        for thread in threads:
            code = held.pthread_timedjoin_np(thread, None, ctypes.byref(until))
            assert code in (0, errno.ETIMEDOUT), os.strerror(code)
            if code:
                left.append(thread)
    finally:
        sys.setswitchinterval(interval)
    return left


def deleter_of(memory):
    """(deleter, its argument) of a DLManagedTensor over the memory, which a consumer has taken."""
    memory.touch()
    capsule = _native.dlpack_capsule(
        memory.address, memory.device, *_dtypes.BY_NAME["uint8"].dlpack, (memory.nbytes,), (1,), memory.handle, memory.kind
    )
    memory.owned = False
    api = ctypes.pythonapi
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", api))
    tensor = get(capsule, b"dltensor")
    rename(capsule, TAKEN)
    return ctypes.c_void_p.from_address(tensor + 56).value, tensor  # behind 48 bytes of DLTensor and manager_ctx


@pytest.fixture
def arena():
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        yield arena


@contextlib.contextmanager
def worker(arena):
    process = subprocess.Popen([sys.executable, os.path.join(HERE, "worker_main.py")], env=arena.worker_env("w"))
    conn = arena.accept(timeout=60)
    try:
        yield conn
    finally:
        conn.close()
        process.kill()
        process.wait()


def row(arena, name):
    return arena.ledger().device().client(name)


def test_what_needs_the_gil_is_seen_to_hang():
    """The checker is checked."""
    ran = []
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(ran.append)
    (thread,) = unended_under_the_gil([(ctypes.cast(callback, ctypes.c_void_p).value, 7)], 0.1)
    assert free.pthread_join(thread, None) == 0 and ran == [7]


def test_an_imports_deleter_runs_on_a_thread_of_cs_while_python_holds_the_gil(arena):
    pytest.importorskip("numpy")
    with worker(arena) as conn:
        conn.call("post", (MIB,), "uint8", 3, timeout=30)
        ref = conn.recv(timeout=30, lazy=True)
        letting_go = deleter_of(ref._memory)
        eventually(lambda: row(arena, "parent").leased_in >= MIB and row(arena, "w").leased_out >= MIB)
        assert not unended_under_the_gil([letting_go], 20), "the deleter waits for Python"
        eventually(lambda: row(arena, "parent").leased_in == 0)
        eventually(lambda: row(arena, "w").leased_out == 0)
        assert conn.call("echo", 1, timeout=30) == 1


def test_a_blocks_deleter_runs_on_a_thread_of_cs_while_python_holds_the_gil(arena):
    block = millpond.empty((MIB,), "uint8", device="cpu", kind="r")
    assert row(arena, "parent").allocated >= MIB
    assert not unended_under_the_gil([deleter_of(block._memory)], 20), "the deleter waits for Python"
    eventually(lambda: row(arena, "parent").allocated == 0)


def test_many_deleters_at_once_while_python_holds_the_gil(arena):
    pytest.importorskip("numpy")
    with worker(arena) as conn:
        for _ in range(16):
            conn.call("post", (4096,), "uint8", 3, timeout=30)
        refs = [conn.recv(timeout=30, lazy=True) for _ in range(16)]
        assert not unended_under_the_gil([deleter_of(ref._memory) for ref in refs], 20), "a deleter waits for Python"
        eventually(lambda: row(arena, "parent").leased_in == 0 and row(arena, "w").leased_out == 0)
