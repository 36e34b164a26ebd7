"""What is gathered while a value is encoded: its memory ranges, and what is to be counted and kept. `_tree` writes the text."""

import types

from . import _leaves, _native, _pinned, _streams

#: What most messages have none of is made when it is needed.
_NONE = types.MappingProxyType({})


class Encoder:
    """What `_native.send` needs, what must live until it has returned, and how to encode."""

    __slots__ = (
        *("text", "tensors", "keep", "copies", "copied_bytes", "hosted", "ways", "inline", "gpus", "falls", "tokens", "by_host", "leaving"),
        *("packed", "leaves", "imports", "off", "streams", "kinds", "why_copied", "by_choice", "overlap", "sparse"),
    )

    def __init__(self, off=(), kinds=(), why_copied=None, by_choice=False, overlap=False):
        #: The GPUs whose values may not go by their arena.
        self.off = off
        #: Which kinds of token GPU values that are not the arena's may go by; or what is counted of each: (best, to, why).
        self.kinds = kinds
        self.why_copied = why_copied
        #: Going by host memory was asked for, and is no fall.
        self.by_choice = by_choice
        #: The message may leave before the copies to host memory are over; the caller calls `finish`.
        self.overlap = overlap
        self.streams = {}  # device -> the stream that READY follows
        self.leaves = []  # (device, first byte, end, position, node)
        self.sparse = _NONE  # position -> a view with large gaps
        self.imports = _NONE  # handle -> index
        self.text = b""
        self.tensors = []
        self.keep = []
        self.copies = self.copied_bytes = 0
        self.hosted = 0  # GPU values that go by host memory
        self.ways = {}  # address of a range that stands for another value -> what the library is to count it as
        self.inline = 0
        self.gpus = ()  # the GPUs in whose memory there are values
        self.falls = []  # (best tier, the tier taken, reason or None for the connection's, bytes)
        self.tokens = ()  # values by token: (kind, bytes, first companion, last companion, what to keep)
        self.by_host = _NONE  # tier -> (values, bytes), of those in `hosted`
        self.packed = ()  # (device, bytes) of views that were copied without their gaps
        self.leaving = ()  # copies to host memory that are under way

    def went_by_host(self, tier, nbytes, address):
        """A GPU value goes by host memory, where its copy is."""
        self.ways[address] = _native.WAYS[tier]
        self.hosted += 1
        self.copied_bytes += nbytes
        values, before = self.by_host.get(tier, (0, 0))
        self.by_host = {**self.by_host, tier: (values + 1, before + nbytes)}

    def finish(self):
        """Returns when nothing that was encoded is read any more: the message has left, or will not."""
        while self.leaving:
            last, self.leaving = self.leaving[-1], self.leaving[:-1]
            _pinned.over(last)

    def has_gaps(self, value):
        """The value whose range comes next is a view with large gaps."""
        if not self.sparse:
            self.sparse = {}
        self.sparse[len(self.leaves)] = value

    def range(self, device, address, nbytes, node):
        leaves = self.leaves
        leaves.append((device, address, address + nbytes, len(leaves), node))

    def place(self, flags):
        """One range for each group of overlapping leaves; the nodes learn theirs."""
        leaves, tensors, streams = self.leaves, self.tensors, self.streams
        if len(leaves) > 1:
            leaves.sort(key=_by_place)
        if self.sparse:
            self.pack()
        if len(leaves) == 1:
            device, low, high, _, node = leaves[0]
            stream = streams.get(device)
            node[2], node[3] = len(tensors), 0
            tensors.append((low, high - low, _streams.current(device) if stream is None else stream, 0, device, flags))
            return
        device = low = high = None
        group = []
        for leaf in leaves:
            if leaf[0] == device and leaf[1] < high:
                if leaf[2] > high:
                    high = leaf[2]
                group.append(leaf)
                continue
            if group:
                _close(group, low, high, tensors, streams, flags)
            device, low, high = leaf[0], leaf[1], leaf[2]
            group = [leaf]
        if group:
            _close(group, low, high, tensors, streams, flags)

    def pack(self):
        """Views with large gaps that share memory with nothing else here, and would be copied as they are, go without the gaps."""
        leaves = self.leaves
        starts = [*leaves[1:], (None, 0)]
        device = high = None
        for number, (leaf, after) in enumerate(zip(list(leaves), starts)):
            shared = leaf[0] == device and leaf[1] < high or after[0] == leaf[0] and after[1] < leaf[2]
            high = max(high, leaf[2]) if leaf[0] == device else leaf[2]
            device = leaf[0]
            if leaf[3] in self.sparse and not shared:
                packed = _leaves.without_gaps(self, self.sparse[leaf[3]], leaf[1])
                if packed is not None:
                    leaf[4][6] = 0
                    leaves[number] = (device, packed[0], packed[0] + packed[1], *leaf[3:])
        leaves.sort(key=_by_place)

    def mark_ways(self):
        """What stands for another value is counted as that."""
        self.tensors = [t[:5] + (t[5] | self.ways.get(t[0], 0),) for t in self.tensors]


def _by_place(leaf):
    return leaf[:3]


def _close(group, low, high, tensors, streams, flags):
    device = group[0][0]
    stream = streams.get(device)
    if stream is None:
        stream = streams[device] = _streams.current(device)
    index = len(tensors)
    tensors.append((low, high - low, stream, 0, device, flags))
    shared = len(group) > 1
    for leaf in group:
        node = leaf[4]
        node[2], node[3] = index, leaf[1] - low
        if shared:
            node[0] = "v"
