#!/usr/bin/env python3
"""A CUDA interprocess event whose maker is killed is never over: whoever waits for it hangs. See README.md beside this file.

usage: python3 interprocess_event_hang.py [--watch 20] [--gib 4] [--cases event-killed,word-killed,...]

Needs Linux, Python 3.9 and an NVIDIA driver; no torch, no toolkit. Prints JSON: one line a case as it is done, then all of it.
Every case runs in processes of its own that are killed when its time is over, so this program cannot hang. Exit code 0: every
case could be run, whatever it saw; 1: one could not; 2: no driver.
"""
import argparse
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time

#: What is queued in front of the signal, who signals, and what becomes of the maker.
CASES = {
    "event-lives": "an interprocess event; its maker lives and its work ends: the control, a waiter is released",
    "event-killed": "an interprocess event, recorded behind fills; its maker is killed",
    "event-killed-kernel": "the same behind one long kernel",
    "word-lives": "a 64-bit word in shared memory that the maker's stream writes; the maker lives: the control",
    "word-killed": "the same, the maker is killed; then another process stores into the word, as a supervisor would",
    "word-killed-kernel": "the same behind one long kernel",
}
#: Far above any value that is waited for: GEQ is cyclic, and this is less than half of the way round.
POISON = 1 << 62
#: Beyond what is watched: context creation, fills, the driver's teardown.
MARGIN = 60
NOT_READY = 600

SPIN = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .u64 %t<4>;
    .reg .pred %p;
    ld.param.u64 %t0, [cycles];
    mov.u64 %t1, %clock64;
again:
    mov.u64 %t2, %clock64;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, %t0;
    @%p bra again;
    ret;
}
"""


class EventHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class Driver:
    """libcuda, a context on its first device, and a stream."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", ctypes.c_uint(0))
        self("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self.stream = self.new_stream()

    def __call__(self, name, *arguments):
        result = getattr(self.lib, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: CUDA error {result}")

    def new_stream(self):
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        return stream

    def is_over(self, stream):
        result = self.lib.cuStreamQuery(stream)
        if result not in (0, NOT_READY):
            raise RuntimeError(f"cuStreamQuery: CUDA error {result}")
        return result == 0

    def register(self, page):
        """The GPU's address of a page of shared memory."""
        host = ctypes.addressof(ctypes.c_char.from_buffer(page))
        address = ctypes.c_uint64()
        self("cuMemHostRegister_v2", ctypes.c_void_p(host), ctypes.c_size_t(len(page)), ctypes.c_uint(3))
        self("cuMemHostGetDevicePointer_v2", ctypes.byref(address), ctypes.c_void_p(host), ctypes.c_uint(0))
        return address


def maker(options):
    """Queues work and, behind it, the signal; then waits to be killed."""
    line, page = socket.socket(fileno=options.socket), mmap.mmap(options.page, mmap.PAGESIZE)
    cuda = Driver()
    event = ctypes.c_void_p()
    if options.case.startswith("event"):
        handle = EventHandle()
        cuda("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2 | 4))  # no timing, interprocess
        cuda("cuIpcGetEventHandle", ctypes.byref(handle), event)
        line.sendall(ctypes.string_at(ctypes.byref(handle), 64))
    else:
        word = cuda.register(page)
    if options.case.endswith("kernel"):
        module, kernel, cycles = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(150_000_000_000)
        cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(SPIN))
        cuda("cuModuleGetFunction", ctypes.byref(kernel), module, ctypes.c_char_p(b"spin"))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(cycles))
        one = ctypes.c_uint(1)
        cuda("cuLaunchKernel", kernel, one, one, one, one, one, one, ctypes.c_uint(0), cuda.stream, parameters, ctypes.c_void_p())
    else:
        memory, size = ctypes.c_uint64(), ctypes.c_size_t(options.gib << 30)
        cuda("cuMemAlloc_v2", ctypes.byref(memory), size)
        for n in range(200 if options.case.endswith("lives") else 2000):
            cuda("cuMemsetD8Async", memory, ctypes.c_ubyte(n % 256), size, cuda.stream)
    if options.case.startswith("event"):
        cuda("cuEventRecord", event, cuda.stream)
    else:
        cuda("cuStreamWriteValue64_v2", cuda.stream, word, ctypes.c_uint64(1), ctypes.c_uint(0))
    line.sendall(b"queued")
    signal.alarm(options.watch + MARGIN)
    signal.pause()


def waiter(options):
    """Makes a stream wait for the maker's signal, kills the maker, and looks when the stream goes on."""
    # The maker comes before the context: it shall inherit nothing of the driver's.
    ours, its = socket.socketpair()
    page_fd = os.memfd_create("word")
    os.ftruncate(page_fd, mmap.PAGESIZE)
    page = mmap.mmap(page_fd, mmap.PAGESIZE)
    command = [*again(options, options.case), "--role", "maker", "--socket", str(its.fileno()), "--page", str(page_fd)]
    process = subprocess.Popen(command, pass_fds=(its.fileno(), page_fd), stdout=sys.stderr)
    its.close()
    cuda = Driver()
    ours.settimeout(MARGIN)
    by_event = options.case.startswith("event")
    if by_event:
        handle, event = EventHandle(), ctypes.c_void_p()
        ctypes.memmove(ctypes.byref(handle), received(ours, 64), 64)
        cuda("cuIpcOpenEventHandle", ctypes.byref(event), handle)
    else:
        word = cuda.register(page)
    received(ours, 6)
    if by_event:
        cuda("cuStreamWaitEvent", cuda.stream, event, ctypes.c_uint(0))
    else:
        cuda("cuStreamWaitValue64_v2", cuda.stream, word, ctypes.c_uint64(1), ctypes.c_uint(0))  # 0: at least
    time.sleep(0.1)
    found = {"case": options.case, "waited_before": not cuda.is_over(cuda.stream)}
    start = time.monotonic()
    if options.case.endswith("lives"):
        found["released_ms"] = released(cuda, start, options.watch)
    else:
        end = os.pidfd_open(process.pid)
        process.kill()
        # Ready when the driver has taken its work down too.
        gone = select.select([end], [], [], options.watch)[0]
        found["maker_gone_ms"] = round((time.monotonic() - start) * 1e3, 2) if gone else None
        # A word is watched for a moment only: nobody claims that it changes by itself.
        found["released_by_the_death_ms"] = released(cuda, start, options.watch if by_event else 1)
        found["watched_s"] = options.watch if by_event else 1
        if not by_event:
            stored = time.monotonic()
            ctypes.c_uint64.from_buffer(page).value = POISON
            found["released_by_a_store_ms"] = released(cuda, stored, options.watch)
        elif found["released_by_the_death_ms"] is None:
            other = cuda.new_stream()
            found["another_stream_works"] = cuda.is_over(other)
            # What a program would do next, and never come back from: asked without blocking.
            found["hangs"] = not cuda.is_over(cuda.stream)
    print(json.dumps(found), flush=True)
    # Not by way of the driver's own end: that would wait too.
    process.kill()
    os._exit(0)


def received(line, count):
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise RuntimeError("the maker ended early: what it said is above")
        data += part
    return data


def released(cuda, start, seconds):
    """Milliseconds until the stream has nothing left to do; None where it still has then."""
    end = time.monotonic() + seconds
    while not cuda.is_over(cuda.stream):
        if time.monotonic() > end:
            return None
        time.sleep(0.00002)
    return round((time.monotonic() - start) * 1e3, 3)


def again(options, case):
    return [sys.executable, os.path.abspath(__file__), "--cases", case, "--watch", str(options.watch), "--gib", str(options.gib)]


def run(options, case):
    """One case in a session of its own, which ends with it."""
    process = subprocess.Popen(
        [*again(options, case), "--role", "waiter"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, said = process.communicate(timeout=options.watch + 2 * MARGIN)
    except subprocess.TimeoutExpired:
        out, said = "", f"not done within {options.watch + 2 * MARGIN} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"case": case, "error": said.strip()[-800:] or f"exit code {process.returncode}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watch", type=int, default=20, metavar="SECONDS", help="how long a waiter is watched (20)")
    parser.add_argument("--gib", type=int, default=4, help="GiB that the fills fill (4)")
    parser.add_argument("--cases", default=",".join(CASES), help="; ".join(f"{name}: {what}" for name, what in CASES.items()))
    for hidden in ("--role", "--socket", "--page"):
        parser.add_argument(hidden, type=str if hidden == "--role" else int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = options.cases.split(",")
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        parser.error(f"no case {unknown}: {', '.join(CASES)}")
    if options.role:
        options.case = cases[0]
        return {"maker": maker, "waiter": waiter}[options.role](options)
    try:
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError as e:
        print(json.dumps({"error": f"no NVIDIA driver here: {e}"}))
        return 2
    found = []
    for case in cases:
        found.append(run(options, case))
        print(json.dumps(found[-1]), flush=True)
    failed = [case["case"] for case in found if "error" in case]
    hung = [case["case"] for case in found if case.get("hangs")]
    print(json.dumps({"cuda": version.value, "watched_s": options.watch, "hung": hung, "failed": failed, "cases": found}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
