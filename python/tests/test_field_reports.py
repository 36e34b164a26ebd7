"""Kinds of fault that others met in the field and that no other test here is about: see tests/README.md."""

import os
import platform
import re
import signal
import subprocess
import sys

import pytest

from conftest import native

pytestmark = native
pytest.importorskip("numpy")

#: Kills a process that fetches a descriptor out of another one, or looks into it. Inherited by what it starts.
LOCK = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
def lock(numbers):
    code = [(0x20, 0, 0, 0)]  # the system call's number
    for n, number in enumerate(numbers):
        code.append((0x15, len(numbers) - n, 0, number))  # is it this one: to the end
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x80000000)]  # allow; kill the process
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(filters))
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.c_char_p(program), 0, 0), (4, 0, 0, 0, 0)):
        if libc.prctl(*arguments):
            raise SystemExit(77)
"""

WORKER = """
import millpond
libc.prctl(4, 0, 0, 0, 0)  # not dumpable: nobody may attach to it
millpond.attach()
conn = millpond.connection(timeout=20)
value = conn.recv(timeout=20)
value[...] = 5
conn.send(float(value.sum()))
mine = millpond.empty((1000,), "float32")
mine[...] = 3
conn.send(mine)
conn.recv(timeout=20)
"""

PARENT = """
import os, subprocess, sys
import millpond
with millpond.Arena(limit="64MiB", driver="host") as arena:
    worker = subprocess.Popen([sys.executable, "-c", os.environ["WORKER"]], env=arena.worker_env("locked"))
    with arena.accept(timeout=30) as conn:
        value = arena.empty((1000,), "float32")
        value[...] = 1
        conn.send(value)
        assert conn.recv(timeout=20) == 5000 and value[3] == 5
        theirs = conn.recv(timeout=20)
        assert theirs[999] == 3
        del theirs
        conn.send("end")
        assert worker.wait(20) == 0
"""


def test_transfers_where_no_process_may_take_a_descriptor_out_of_another():
    """pidfd_getfd is refused in many containers (pytorch#165685, #130890, #179220): ours travel beside frames."""
    ptrace, vm_read = {"x86_64": (101, 310), "aarch64": (117, 270)}.get(platform.machine(), (None, None))
    if ptrace is None:
        pytest.skip(f"the numbers of system calls on {platform.machine()} are not known here")
    locked = LOCK + f"lock([438, {ptrace}, {vm_read}])\n"
    control = subprocess.run([sys.executable, "-c", locked + "libc.syscall(438, 0, 0, 0)"])
    if control.returncode == 77:
        pytest.skip("no system call filter may be set here")
    assert control.returncode == -signal.SIGSYS, "the lock locks"
    env = dict(os.environ, WORKER="import ctypes\nlibc = ctypes.CDLL(None)\n" + WORKER)
    done = subprocess.run([sys.executable, "-c", locked + PARENT], env=env, timeout=60, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


GLOBALS = """
import os, subprocess, sys
import millpond
arena = millpond.Arena(limit="64MiB", driver="host")
kept = arena.empty((1000,), "float32")
kept[...] = 1
part = kept[10:20]
worker = subprocess.Popen([sys.executable, "-c", os.environ["WORKER"]], env=arena.worker_env("ends"))
conn = arena.accept(timeout=30)
theirs = conn.recv(timeout=20)
conn.send(part)
assert worker.wait(20) == 0
ring = {"theirs": theirs}
ring["ring"] = ring
assert theirs[999] == 3
"""

ENDS = """
import millpond
millpond.attach()
conn = millpond.connection(timeout=20)
mine = millpond.empty((1000,), "float32")
mine[...] = 3
conn.send(mine)
theirs = conn.recv(timeout=20)
assert theirs.sum() == 10
"""


def test_values_in_globals_at_the_interpreters_end():
    """Own, received and half-forgotten values, an arena and channels that nobody closes (vllm#16993, #46050): no crash, not a word."""
    done = subprocess.run([sys.executable, "-c", GLOBALS], env=dict(os.environ, WORKER=ENDS), timeout=60, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_test_that_the_tables_name_is_there():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    page = os.path.join(root, "tests", "README.md")
    if not os.path.exists(page):
        pytest.skip("not a checkout")
    with open(page) as f:
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in f if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == [*range(1, 24), *range(1, 17)], "both tables, row by row"
    there = {}
    for folder in ("allocator", "ipc", "tests", "torch-plugin", "python/tests"):
        for path, _, files in os.walk(os.path.join(root, folder)):
            for stem, kind in map(os.path.splitext, files):
                if kind in (".rs", ".py"):
                    with open(os.path.join(path, stem + kind)) as f:
                        there.setdefault(stem, set()).update(re.findall(r"^\s*(?:fn|def) (\w+)", f.read(), re.M))
    for number, report, _, *columns in rows:
        named = re.findall(r"`([\w:]+)`", " ".join(columns))
        assert named, f"row {number}, {report}: no test"
        for name in named:
            stem, _, test = name.partition("::")
            assert test and test in there.get(stem, ()), f"row {number}, {report}: {name} is not there"
