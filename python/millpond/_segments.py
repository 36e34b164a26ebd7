"""Tensors that were sent out of segments of torch's caching allocator (pool mode).

A lease pins a block of the arena, and there a block is a whole segment: dropped, a tensor's part of it would be torch's next
tensor's while a receiver reads it. So the tensor's storage is kept until no receiver uses its bytes: the one it was sent to, or
whoever got it from there. Looked at and dropped on the keeper's thread (`_foreign`), with one call for all.
"""

import threading

from . import _native, errors


class Kept:
    """What is kept, by range: who sends the same tensor often keeps it once."""

    def __init__(self):
        self._kept = {}  # (first byte, bytes) -> what keeps them alive
        self._lock = threading.Lock()

    def __len__(self):
        return len(self._kept)

    def add(self, encoded):
        """What was just sent, where it lies in a segment. The encoder still keeps it alive."""
        ranges = [(tensor[0], tensor[1]) for tensor in encoded.tensors if tensor[0] and not tensor[3]]
        try:
            inside = _native.control("lent", ranges=ranges)["segment"]
        except errors.Error:
            inside = [True] * len(ranges)
        values = [(_address(value), value) for value in encoded.keep]
        for (start, nbytes), is_inside in zip(ranges, inside):
            if is_inside:
                mine = [_lasting(value) for at, value in values if at is None or start <= at < start + nbytes]
                with self._lock:
                    self._kept[start, nbytes] = mine

    def sweep(self):
        """One look: what nobody uses any more is dropped."""
        with self._lock:
            entries = list(self._kept.items())
        if not entries:
            return
        try:
            lent = _native.control("lent", ranges=[key for key, _ in entries])["lent"]
        except (errors.NotAttached, errors.Forked):
            lent = [False] * len(entries)  # the process is going down, or is not the one that sent it
        except errors.Error:
            return
        for (key, mine), used in zip(entries, lent):
            if not used:
                with self._lock:
                    # Sent again since the look, it is another list, and is kept.
                    if self._kept.get(key) is mine:
                        del self._kept[key]


def _address(value):
    """Where a value's memory starts; None where it does not say."""
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    interface = getattr(value, "__cuda_array_interface__", None) or getattr(value, "__array_interface__", None)
    return interface["data"][0] if interface else None


def _lasting(value):
    """What keeps a value's memory alive: its storage, since the tensor may be given another."""
    return value.untyped_storage() if hasattr(value, "untyped_storage") else value
