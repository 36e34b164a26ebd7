"""The receivers of the hand-offs: `python -m millpond.compare.receiver SETTINGS`, and what torch.multiprocessing spawns."""

import json
import mmap
import multiprocessing
import os
import socket
import sys
import threading


def main():
    settings = json.loads(sys.argv[1])
    try:
        _RECEIVERS[settings["way"]](settings)
    except (EOFError, BrokenPipeError, ConnectionError):
        pass  # the sender has ended
    os._exit(0)


def ours(settings):
    """A worker of the arena."""
    import millpond

    millpond.attach()
    sync = None
    if not settings["host"]:
        import torch

        millpond.torch.install()
        torch.zeros(1, device="cuda")
        sync = torch.cuda.current_stream().synchronize
    conn = millpond.connection(timeout=100)
    conn.send(0)
    try:
        while True:
            value = conn.recv()
            if sync is not None:
                sync()
            del value
            conn.send(0)
    except (millpond.Closed, millpond.PeerDied, millpond.OwnerDied):
        pass


def queue(there, back, host):
    """torch.multiprocessing's."""
    import torch

    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    if not host:
        torch.zeros(1, device="cuda")
    back.put(0)
    while True:
        value = there.get()
        if value is None:
            return
        if not host:
            torch.cuda.current_stream().synchronize()
        del value
        back.put(0)


def _end_with(parent):
    parent.join()
    os._exit(0)


def _beside(settings):
    connection = socket.socket(fileno=settings["fds"][0])
    shared = settings["shared"]
    return connection, mmap.mmap(settings["fds"][1], shared) if shared else None


def shared_copy(settings):
    """Its bytes are where both look: there is nothing to be done."""
    from .handoff import receive

    connection, _memory = _beside(settings)
    connection.sendall(b"u")
    while True:
        receive(connection, 8)
        connection.sendall(b"a")


def pipe_copy(settings):
    """All bytes, into memory of its own."""
    from multiprocessing.connection import Connection

    connection, _ = _beside(settings)
    connection.sendall(b"u")
    pipe = Connection(connection.detach())
    while True:
        pipe.recv_bytes()
        pipe.send_bytes(b"a")


def pinned(settings):
    """A copy out of pinned memory."""
    import struct

    import torch

    from .handoff import pinned as register
    from .handoff import receive

    connection, memory = _beside(settings)
    source = register(torch, memory, settings["shared"])
    into = torch.empty(settings["shared"], dtype=torch.uint8, device="cuda")
    connection.sendall(b"u")
    while True:
        (nbytes,) = struct.unpack("=Q", receive(connection, 8))
        into[:nbytes].copy_(source[:nbytes], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        connection.sendall(b"a")


def pool_pointer(settings):
    """The importer of a pool."""
    from .handoff import receive
    from .pool import POINTER_BYTES, Pool

    connection, _ = _beside(settings)
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    pool = Pool.imported(fds[0])
    connection.sendall(b"u")
    while True:
        pool.free(pool.import_pointer(receive(connection, POINTER_BYTES)))
        connection.sendall(b"a")


_RECEIVERS = {"ours": ours, "shared-copy": shared_copy, "pipe-copy": pipe_copy, "pinned": pinned, "pool-pointer": pool_pointer}

if __name__ == "__main__":
    main()
