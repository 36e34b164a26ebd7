"""The ledger as objects: fields by attribute or by key, and plain JSON. And scopes: peaks and counts of a `with` block."""

import threading

from . import _native, _session
from ._record import Record


def size(nbytes):
    """Bytes as a person reads them."""
    for unit, factor, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if nbytes >= factor:
            return f"{nbytes / factor:.{digits}f} {unit}"
    return str(nbytes)


class Client(Record):
    """One client's use of one device, in bytes. What the owner granted is exact; what the client says is as of its last write."""

    __slots__ = ()
    client: int  # its slot
    serial: int  # which client of that slot it is
    pid: int
    start_time: int  # of the process, in clock ticks since boot: tells it from a later one of the same pid
    name: str
    state: str  # alive, stopped, dying, faulted, orphaned
    role: str  # parent, worker
    reserved: int  # chunks
    peak_reserved: int
    chunks: int
    limit: int  # 0: only the arena's
    retired: int  # given back, still mapped by others
    adopted: int  # of reserved: what it adopted of clients that are dead
    allocated: int  # live blocks
    peak_allocated: int
    blocks: int
    requested: int
    largest_free: int
    leased_out: int  # of its blocks, what others hold
    leased_in: int  # of others' blocks, what it holds
    out_of_memory: int
    killed: "str | None"  # why the owner killed it, if it did: seen while something of it is left
    beat_age_ms: int
    # So far, since it attached:
    growths: int  # granted
    refusals: int
    trims: int  # how often it gave chunks back
    trimmed_bytes: int
    copies: int  # that its sending made
    copied_bytes: int
    sent: "dict[str, int]"  # values, by tier: arena, copy, pool, cuda_ipc, pinned, host, inline
    received: "dict[str, int]"
    falls: "dict[str, int]"  # values that went by a lower tier than their best, by reason

    @property
    def slack(self):
        """What it has but does not use: at most this much a trim could give back."""
        return max(self.reserved - self.get("adopted", 0) - self.allocated, 0)

    @property
    def fragmentation(self):
        """How scattered its free memory is: 0.0 where it is one block, near 1.0 where it is many small ones."""
        return 1.0 - min(self.largest_free, self.slack) / self.slack if self.slack else 0.0


class Device(Record):
    """One device."""

    __slots__ = ()
    id: str
    name: str
    total: int
    limit: int  # what the arena may take
    reserved: int  # what it has taken: the clients' reserved, retired and orphaned
    peak: int
    retired: int
    orphaned: int
    growths: int
    refusals: int
    deaths: int
    kills_stopped: int  # of the deaths: by policy, since they were stopped
    kills_call: int  # by policy, since a call of theirs did not end
    clients: "list[Client]"

    @property
    def kills(self):
        """How many were killed by policy."""
        return self.get("kills_stopped", 0) + self.get("kills_call", 0)

    @property
    def free(self):
        """What the arena may still take."""
        return max(self.limit - self.reserved, 0)

    def client(self, name):
        """The client of this name or pid; KeyError."""
        for client in self.clients:
            if name in (client.name, client.pid):
                return client
        raise KeyError(f"no client {name!r}: {', '.join(client.name for client in self.clients)}")


class Lend(Record):
    """What one client lends to another: slots, window, bytes, holds. `to` is None while nobody has taken it."""

    __slots__ = ()


class Ledger(Record):
    """Who holds how much, by device and client."""

    __slots__ = ()
    token: str
    devices: "list[Device]"
    lends: "list[Lend]"

    def device(self, id=None):
        """The device of this id or name; without, the one of which most is reserved. KeyError."""
        found = self.devices if id is None else [d for d in self.devices if id in (d.id, d.name)]
        if not found:
            raise KeyError(f"no device {id!r}: {', '.join(d.id for d in self.devices)}")
        return max(found, key=lambda d: d.reserved)

    def __str__(self):
        lines = []
        for d in self.devices:
            lines.append(f"{d.id}  {d.name}: {size(d.reserved)} of {size(d.limit)} reserved")
            for c in d.clients:
                lines.append(f"  {c.name} (pid {c.pid}, {c.state}): {size(c.allocated)} allocated of {size(c.reserved)} reserved")
        return "\n".join(lines)


def typed(answer):
    """The library's answer as a `Ledger`."""
    devices = [Device(d, clients=[Client(c) for c in d.get("clients", ())]) for d in answer.get("devices", ())]
    return Ledger(answer, devices=devices, lends=[Lend(x) for x in answer.get("lends", ())])


def ledger():
    """Who holds how much, by device and client; for an attached process."""
    return typed(_native.control("ledger"))


def read_ledger(socket, key=None):
    """The ledger of an owner, from any process, without attaching to it. `key`: default MILLPOND_KEY."""
    import os

    return typed(_native.control("read_ledger", socket=str(socket), key=key or os.environ.get("MILLPOND_KEY")))


def draw(segments, width=100, page=None, lines=4):
    """A heap as text, a character a page: `#` live blocks, `+` partly live, `~` freed but still in use by streams or
    receivers, `.` free. `page`: default 2 MiB, or as much as makes a chunk `lines` lines."""
    if not segments:
        return "no chunks\n"
    page = page or 2 << 20
    while max(s["total_size"] for s in segments) > page * width * lines:
        page *= 2
    free = [b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive"]
    total, used = sum(s["total_size"] for s in segments), sum(s["allocated_size"] for s in segments)
    scattered = 1 - max(free) / sum(free) if free else 0.0
    text = f"{size(used)} allocated of {size(total)} in {len(segments)} chunks, {size(page)} a character, "
    text += f"free: {len(free)} pieces, the largest {size(max(free, default=0))}, {scattered:.0%} scattered\n"
    for segment in segments:
        pages = -(-segment["total_size"] // page)
        live, parting = [0] * pages, [0] * pages
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                counts = live if block["state"] == "active_allocated" else parting
                start = block["address"] - segment["address"]
                for n in range(start // page, -(-(start + block["size"]) // page)):
                    counts[n] += min(start + block["size"], (n + 1) * page) - max(start, n * page)
        row = ""
        for n in range(pages):
            whole = min(page, segment["total_size"] - n * page)
            row += "#" if live[n] == whole else "+" if live[n] else "~" if parting[n] else "."
        text += "".join(f"  {row[n : n + width]}\n" for n in range(0, len(row), width))
    return text


_nesting = threading.local()


class Scope:
    """Peaks and counts of a `with` block, of this process on one device:

    with arena.scope("vae") as scope:
        decode()
    print(scope)  # vae: peak 1.20 GiB in 40 blocks, 96 allocations of 3.10 GiB, 0 left

    Scopes nest ("vae/decoder"); what an inner one sees, the outer ones see too. One after the other or one within the other:
    the peaks of scopes that overlap in other ways (from several threads) are those of the device since the later began."""

    def __init__(self, name, device=None):
        self.name = name
        self.device = device
        self.stats = {}
        self._number = None

    def __enter__(self):
        if self._number is not None:
            raise RuntimeError(f"scope {self.name!r} has begun already")
        path = getattr(_nesting, "path", ())
        self.name = "/".join([*path, self.name])
        self._ordinal = _session.device_ordinal(self.device)
        self._number = _native.control("begin_scope", device=self._ordinal)["scope"]
        self._path, _nesting.path = path, (*path, self.name.rpartition("/")[2])
        return self

    def __exit__(self, *_):
        _nesting.path = self._path
        self.stats = _native.control("end_scope", device=self._ordinal, scope=self._number)
        self._number = None

    def _get(self, counter):
        return self.stats.get(counter, 0)

    @property
    def peak_bytes(self):
        """The most bytes of live blocks while it ran, those from before it among them."""
        return self._get("allocated_bytes.all.peak")

    @property
    def peak_blocks(self):
        """The most live blocks."""
        return self._get("allocation.all.peak")

    @property
    def peak_reserved(self):
        """The most bytes of chunks."""
        return self._get("reserved_bytes.all.peak")

    @property
    def allocations(self):
        """How many blocks were allocated in it."""
        return self._get("allocation.all.allocated")

    @property
    def frees(self):
        """How many blocks were freed in it."""
        return self._get("allocation.all.freed")

    @property
    def allocated_bytes(self):
        """Bytes of all blocks that were allocated in it."""
        return self._get("allocated_bytes.all.allocated")

    @property
    def left_bytes(self):
        """Bytes that it allocated and did not free; negative where it freed more."""
        return self.allocated_bytes - self._get("allocated_bytes.all.freed")

    @property
    def growths(self):
        """How often more memory was asked of the owner."""
        return self._get("growths")

    def __repr__(self):
        return (
            f"{self.name}: peak {size(self.peak_bytes)} in {self.peak_blocks} blocks, "
            f"{self.allocations} allocations of {size(self.allocated_bytes)}, {size(self.left_bytes) if self.left_bytes > 0 else 0} left"
        )


def scope(name, device=None):
    """Peaks and counts of a `with` block: see `Scope`."""
    return Scope(name, device)
