"""Handing a value to another process and having its answer, in one mode: the sender's side, which starts the receiver.

One operation: a fresh value, its way there, the receiver has it with its bytes in order, a small answer comes back, both let go.
"""

import json
import mmap
import os
import queue
import socket
import struct
import subprocess
import sys
import time

from . import modes


class Handoff:
    """The cases of one way: a size each."""

    def __init__(self, settings):
        self.notes = {}
        quick = settings["quick"]
        host = settings["section"] == "host-handoff"
        sizes = (modes.HOST_BYTES if host else modes.HANDOFF_BYTES)[0 if quick else 1]
        self._way = _WAYS[settings["mode"]](settings, max(sizes), host)
        self.cases = {}
        for nbytes in sizes:
            self.cases[f"hand-off {label(nbytes)}"] = self._case(nbytes)

    def _case(self, nbytes):
        from .child import timed

        return lambda ms: timed(lambda: self._way.exchange(nbytes), ms)

    def close(self):
        self._way.close()


def label(nbytes):
    """A size as a case's name has it."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


class Ours:
    """A tensor or array in arena memory, by a channel."""

    def __init__(self, settings, largest, host):
        import millpond

        self._arena = millpond.Arena(driver="host" if host else "cuda", limit=4 * largest if host else "30%")
        if host:
            self._make = lambda nbytes: self._arena.empty((nbytes,), "uint8")
        else:
            import torch

            if settings["mode"] == "ours":
                millpond.torch.install()
            self._make = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        command = [sys.executable, "-m", "millpond.compare.receiver", json.dumps({"way": "ours", "host": host})]
        self._receiver = subprocess.Popen(command, env=self._arena.worker_env("receiver"))
        self._conn = self._arena.accept(timeout=100)
        self._conn.recv(timeout=100)  # it is up

    def exchange(self, nbytes):
        value = self._make(nbytes)
        self._conn.send(value)
        self._conn.recv(timeout=30)

    def close(self):
        self._conn.close()
        self._receiver.wait(5)
        self._arena.close()


class OneCopy:
    """A copy on the GPU, and nobody to give it to."""

    def __init__(self, settings, largest, host):
        import torch

        self._source, self._into = (torch.zeros(largest, dtype=torch.uint8, device="cuda") for _ in range(2))
        self._wait = torch.cuda.current_stream().synchronize

    def exchange(self, nbytes):
        self._into[:nbytes].copy_(self._source[:nbytes])
        self._wait()

    def close(self):
        pass


class Queue:
    """torch.multiprocessing's queues."""

    def __init__(self, settings, largest, host):
        import torch
        import torch.multiprocessing as mp

        from . import receiver

        context = mp.get_context("spawn")
        self._there, self._back = context.Queue(), context.Queue()
        device = "cpu" if host else "cuda"
        self._make = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
        if not host:
            torch.zeros(1, device="cuda")
        self._process = context.Process(target=receiver.queue, args=(self._there, self._back, host), daemon=True)
        self._process.start()
        self._answer(100)

    def exchange(self, nbytes):
        value = self._make(nbytes)
        self._there.put(value)
        self._answer(30)

    def _answer(self, seconds):
        """Waits for the receiver, which may have ended over what it was sent."""
        end = time.monotonic() + seconds
        while True:
            try:
                return self._back.get(timeout=1)
            except queue.Empty:
                if not self._process.is_alive():
                    raise EOFError(f"its receiver has ended, with code {self._process.exitcode}") from None
                if time.monotonic() > end:
                    raise

    def close(self):
        self._there.put(None)
        self._process.join(5)


class _Beside:
    """A receiver that has a socket and, with `shared`, memory in common with the sender."""

    def __init__(self, way, shared=0):
        self._socket, other = socket.socketpair()
        fds = [other.fileno()]
        self._memory = None
        if shared:
            fd = os.memfd_create("millpond-compare")
            os.ftruncate(fd, shared)
            self._memory = mmap.mmap(fd, shared)
            fds.append(fd)
        settings = {"way": way, "fds": fds, "shared": shared}
        command = [sys.executable, "-m", "millpond.compare.receiver", json.dumps(settings)]
        self._receiver = subprocess.Popen(command, pass_fds=fds)
        other.close()
        if shared:
            os.close(fd)

    def _up(self):
        self._socket.settimeout(100)
        receive(self._socket, 1)

    def _said(self, nbytes):
        self._socket.sendall(struct.pack("=Q", nbytes))
        receive(self._socket, 1)

    def close(self):
        self._socket.close()
        self._receiver.wait(5)


def receive(connection, nbytes):
    """Exactly so many bytes."""
    parts = bytearray()
    while len(parts) < nbytes:
        part = connection.recv(nbytes - len(parts))
        if not part:
            raise EOFError("the other side has ended")
        parts += part
    return bytes(parts)


class SharedCopy(_Beside):
    """A copy into memory that both map."""

    def __init__(self, settings, largest, host):
        super().__init__("shared-copy", largest)
        self._source = memoryview(bytearray(largest))
        self._up()

    def exchange(self, nbytes):
        self._memory[:nbytes] = self._source[:nbytes]
        self._said(nbytes)


class PipeCopy(_Beside):
    """All bytes through a socket, as multiprocessing's connections send them."""

    def __init__(self, settings, largest, host):
        super().__init__("pipe-copy")
        from multiprocessing.connection import Connection

        self._source = memoryview(bytearray(largest))
        self._up()
        self._socket.setblocking(True)
        self._pipe = Connection(os.dup(self._socket.fileno()))

    def exchange(self, nbytes):
        self._pipe.send_bytes(self._source[:nbytes])
        self._pipe.recv_bytes()

    def close(self):
        self._pipe.close()
        super().close()


class Pinned(_Beside):
    """A copy into pinned memory that both map, and a copy out of it."""

    def __init__(self, settings, largest, host):
        import torch

        super().__init__("pinned", largest)
        self._torch = torch
        self._pinned = pinned(torch, self._memory, largest)
        self._source = torch.empty(largest, dtype=torch.uint8, device="cuda")
        self._up()

    def exchange(self, nbytes):
        self._pinned[:nbytes].copy_(self._source[:nbytes], non_blocking=True)
        self._torch.cuda.current_stream().synchronize()
        self._said(nbytes)


def pinned(torch, memory, nbytes):
    """Shared memory as a tensor that the GPU copies from and to by itself."""
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    torch.zeros(1, device="cuda")
    code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)
    if int(code):
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes: error {int(code)}")
    return tensor


class PoolPointer(_Beside):
    """Pointers of a shareable pool."""

    def __init__(self, settings, largest, host):
        from .pool import Pool

        super().__init__("pool-pointer")
        self._pool = Pool.create()
        fd = self._pool.export()
        socket.send_fds(self._socket, [b"p"], [fd])
        os.close(fd)
        self._up()

    def exchange(self, nbytes):
        pool = self._pool
        address = pool.allocate(nbytes)
        try:
            self._socket.sendall(pool.export_pointer(address))
            receive(self._socket, 1)
        finally:
            pool.free(address)


_WAYS = {
    "ours": Ours,
    "ours-copied": Ours,
    "one-copy": OneCopy,
    "mp-native": Queue,
    "mp-expandable": Queue,
    "mp-queue": Queue,
    "pool-pointer": PoolPointer,
    "pinned": Pinned,
    "shared-copy": SharedCopy,
    "pipe-copy": PipeCopy,
}
