"""Descriptors from process to process: a socket beside the owner's that gives them out, to the same user, who shows a key."""

import hmac
import os
import secrets
import socket
import struct
import threading

from .tiers import log

_SECONDS = 5.0
_LINE = 400


class Door:
    """Gives descriptors out by name. `give(name)`: a descriptor, closed here after it has gone, or None."""

    def __init__(self, kind, key, give):
        from . import _session

        self.key = key
        self._give = give
        folder = os.path.dirname(_session.info()["socket"])
        self.path = os.path.join(folder, f"{kind}-{os.getpid()}-{secrets.token_hex(4)}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(8)
        threading.Thread(target=self._serve, name=f"millpond-{kind}", daemon=True).start()

    def close(self):
        """Nobody gets anything any more."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
            os.unlink(self.path)
        except OSError:
            pass
        self._listener.close()

    def _serve(self):
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                try:
                    self._answer(peer)
                except Exception as e:  # whoever asked learns it by the end of the connection
                    log.debug("a descriptor was not given out: %s: %s", type(e).__name__, e)

    def _answer(self, peer):
        peer.settimeout(_SECONDS)
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        key, _, name = _read_line(peer).partition(" ")
        if uid != os.getuid() or not hmac.compare_digest(key.encode(), self.key.encode()):
            return
        fd = self._give(name)
        if fd is None:
            return
        try:
            socket.send_fds(peer, [b"+"], [fd])
        finally:
            os.close(fd)


def fetch(path, key, name):
    """A descriptor of another process's door: the caller's to close. `OSError` where it gives none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(_SECONDS)
        door.connect(path)
        door.sendall(f"{key} {name}\n".encode())
        _, fds, _, _ = socket.recv_fds(door, 1, 1)
    if not fds:
        raise OSError(f"no descriptor {name} came from {path}")
    os.set_inheritable(fds[0], False)
    return fds[0]


def doors(kind):
    """The paths of all doors of a kind, of whatever process of this arena."""
    from . import _session

    folder = os.path.dirname(_session.info()["socket"])
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.startswith(f"{kind}-")]


def arena_key(kind):
    """A key that whoever is attached to this arena can make."""
    from . import _session

    return hmac.new(_session.info()["key"].encode(), f"millpond {kind}".encode(), "sha256").hexdigest()


def _read_line(peer):
    data = b""
    while not data.endswith(b"\n") and len(data) < _LINE:
        part = peer.recv(_LINE - len(data))
        if not part:
            break
        data += part
    return data.decode("ascii", "replace").strip()
