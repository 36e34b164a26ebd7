"""Two processes that wait for each other in both directions on streams that share a hardware queue, at the driver's own calls.

usage: python3 two_way.py [--queues 1,8,32] [--gaps 1,8,32] [--bound 3]

In each of two processes stream 0 waits for the other's word, and only then stream `gap` is told to write its own: neither has a
cycle among its streams. Where the two streams share a hardware queue the write stands behind the wait in both processes, and
nothing goes on until somebody stores into the words: the bound is over, this program does, and the streams go on. One line of
JSON for each pair: {"queues","gap","stuck","went_on_ms","after_the_store_ms"}. No torch, no toolkit, no millpond.
"""
import argparse
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time

NOT_READY, STREAMS, POISON = 600, 40, 1 << 62
COMING_UP = 40


def side(options):
    """One of the two processes: its word is its number's, the other's is the next one."""
    page = mmap.mmap(options.page, mmap.PAGESIZE)
    signal.alarm(COMING_UP + 4 * options.bound)
    lib = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        result = getattr(lib, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: CUDA error {result}")

    device, context, base = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", ctypes.c_uint(0))
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    host = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    call("cuMemHostRegister_v2", host, ctypes.c_size_t(len(page)), ctypes.c_uint(3))
    call("cuMemHostGetDevicePointer_v2", ctypes.byref(base), host, ctypes.c_uint(0))
    streams = [ctypes.c_void_p() for _ in range(STREAMS)]
    for stream in streams:
        call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        # Its first use gives it its hardware queue.
        call("cuStreamWriteValue64_v2", stream, ctypes.c_uint64(base.value + 512), ctypes.c_uint64(1), ctypes.c_uint(0))
    call("cuCtxSynchronize")
    mine, its = 8 * options.side, 8 * (1 - options.side)
    word = ctypes.c_uint64(base.value + mine), ctypes.c_uint64(base.value + its)

    def meet(number, seconds):
        """Both sides are here."""
        ctypes.c_uint64.from_buffer(page, 64 + mine).value = number
        end = time.monotonic() + seconds
        while ctypes.c_uint64.from_buffer(page, 64 + its).value < number:
            if time.monotonic() > end:
                raise RuntimeError("the other side did not come")

    meet(1, COMING_UP)
    # GEQ: 0.
    call("cuStreamWaitValue64_v2", streams[0], word[1], ctypes.c_uint64(1), ctypes.c_uint(0))
    # Both wait before either writes: this is what cannot happen where a value is named only after its write was queued.
    meet(2, 10)
    call("cuStreamWriteValue64_v2", streams[options.gap], word[0], ctypes.c_uint64(1), ctypes.c_uint(0))

    def is_over():
        result = lib.cuStreamQuery(streams[0])
        if result not in (0, NOT_READY):
            raise RuntimeError(f"cuStreamQuery: CUDA error {result}")
        return result == 0

    def over(start, seconds):
        while not is_over():
            if time.monotonic() > start + seconds:
                return None
        return round((time.monotonic() - start) * 1e3, 3)

    went_on = over(time.monotonic(), options.bound)
    found = {"went_on_ms": went_on, "after_the_store_ms": None}
    if went_on is None:
        print("stuck", flush=True)
        sys.stdin.readline()  # the store is done
        found["after_the_store_ms"] = over(time.monotonic(), options.bound)
    print(json.dumps(found), flush=True)
    os._exit(0)


def pair(queues, gap, bound):
    page_fd = os.memfd_create("words")
    os.ftruncate(page_fd, mmap.PAGESIZE)
    page = mmap.mmap(page_fd, mmap.PAGESIZE)
    env = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS=str(queues))
    sides = []
    for number in (0, 1):
        command = [sys.executable, os.path.abspath(__file__), "--side", str(number), "--page", str(page_fd), "--gap", str(gap), "--bound", str(bound)]
        sides.append(
            subprocess.Popen(command, env=env, pass_fds=(page_fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        # Each has its own alarm: these end.
        first = [one.stdout.readline().strip() for one in sides]
        stuck = "stuck" in first
        if stuck:
            for number in (0, 1):
                ctypes.c_uint64.from_buffer(page, 8 * number).value = POISON
        said = [one.communicate("stored\n" if stuck else None, timeout=2 * bound + 10) for one in sides]
        texts = [(line + "\n" + out).strip().splitlines()[-1:] for line, (out, _) in zip(first, said)]
        found = [json.loads(text[0]) if text and text[0].startswith("{") else {"error": err[-500:]} for text, (_, err) in zip(texts, said)]
    except subprocess.TimeoutExpired:
        found = [{"error": "no end, though the words were stored"}]
    finally:
        for one in sides:
            one.kill()
            one.wait()
    errors = [one["error"] for one in found if "error" in one]
    if errors:
        return {"queues": queues, "gap": gap, "error": errors[0]}
    worst = lambda key: max((one[key] for one in found if one[key] is not None), default=None)  # noqa: E731
    recovered = stuck and all(one["went_on_ms"] is not None or one["after_the_store_ms"] is not None for one in found)
    figures = {"went_on_ms": worst("went_on_ms"), "after_the_store_ms": worst("after_the_store_ms")}
    return {"queues": queues, "gap": gap, "stuck": stuck, "recovered": recovered, **figures}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queues", default="1,8,32", help="hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) of both processes")
    parser.add_argument("--gaps", default="1,8,32", help=f"which stream writes, of {STREAMS}: stream 0 waits")
    parser.add_argument("--bound", type=float, default=3, help="seconds before the words are stored by hand (3)")
    for hidden in ("--side", "--page", "--gap"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        options.bound = int(options.bound) or 1
        return side(options)
    failed = False
    for queues in map(int, options.queues.split(",")):
        for gap in map(int, options.gaps.split(",")):
            found = pair(queues, gap, options.bound)
            failed |= "error" in found
            print(json.dumps(found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
