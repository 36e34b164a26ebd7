"""Copies between a GPU and host memory at the bus's rate: the library registers the host arena's memory once and reuses it."""

from . import _native, _streams, errors
from .tiers import log

#: Below this torch copies: registering a slab of the arena would cost more.
LEAST = 256 << 10
_told = False


def copy(device, to, source, nbytes):
    """Copies between GPU memory and host memory, behind the work of this thread's stream, and waits: the tier that it went by
    ("pinned", "host"). None: it did not, and the caller copies in another way."""
    global _told
    if nbytes < LEAST:
        return None
    try:
        what = {"device": device, "to": to, "from": source, "bytes": nbytes, "stream": _streams.current(device)}
        done = _native.control("copy_by_host", **what)
    except errors.Error as e:
        if not _told:
            _told = True
            log.warning("copies through host memory are slower here, torch makes them: %s: %s", e.code, e)
        return None
    return "pinned" if done.get("pinned", 0) >= done.get("pageable", 0) else "host"
