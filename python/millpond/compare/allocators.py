"""What a trace is replayed against: an allocator by two functions, and what its own statistics say."""

import ctypes
import os
import time

from . import allocation

MIB = 1 << 20


def of(settings, library):
    """The allocator of a mode. `library`: libreplaybench.so."""
    if settings["driver"] == "host":
        return Host(library)
    if settings["mode"] == "bump":
        return Bump("bump", settings["work"])
    if settings["mode"].startswith("rmm"):
        return Rmm(settings["mode"], settings["work"])
    return Torch(settings["mode"], settings["work"])


def address(function):
    """A C function as a number."""
    return ctypes.cast(function, ctypes.c_void_p).value


class Emptied:
    """Waits until nothing is reserved; what never goes away is waited for once."""

    def __init__(self, seconds=0.3):
        self._seconds, self._stays = seconds, 0

    def until(self, empty):
        """Calls `empty`, which gives the bytes that are left, until there are none. What is left."""
        end = time.monotonic() + self._seconds
        while True:
            left = empty()
            if left <= self._stays:
                return left
            if time.monotonic() > end:
                self._stays = left
                return left
            time.sleep(0.002)


class Counted:
    """What is said of itself by an allocator that counts as torch does."""

    def grown(self):
        """All bytes that were ever reserved."""
        return self._stat("allocated")

    def peak(self):
        """The most bytes that were reserved since `fresh`; None where nobody can tell."""
        return self._stat("peak")


class Torch(Counted):
    """torch's C++ interface, whatever is under it: ours, native, expandable, cudaMallocAsync."""

    device = 0
    #: How much more than the trace's peak must be free.
    room = 1.3

    def __init__(self, mode, work):
        self.mode = mode
        self._keep = self._install(work)
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        self._library = ctypes.CDLL(os.path.join(work, "liballocbench.so"))
        self._library.torch_thrown.restype = ctypes.c_char_p
        self.malloc, self.free = address(self._library.torch_malloc), address(self._library.torch_free)
        #: Whether `grown` tells how much was ever reserved.
        self.tells_growth = mode != "async"
        self._streams, self._emptied = [], Emptied()

    def _install(self, work):
        # Some traces need more than the other sections; a limit is not taken up.
        return allocation.prepare(self.mode, work, limit="90%")

    def streams(self, count):
        """So many streams, of torch's pool: the first is the legacy default stream."""
        while len(self._streams) < count - 1:
            self._streams.append(self.torch.cuda.Stream())
        return [0] + [stream.cuda_stream for stream in self._streams[: count - 1]]

    def available(self):
        """Bytes that the device has."""
        return self.torch.cuda.mem_get_info()[0]

    def fresh(self, peak_live):
        """As at the start: nothing cached, peaks begin anew. The bytes that are reserved still."""
        left = self._emptied.until(self._empty)
        self.torch.cuda.reset_peak_memory_stats()
        return left

    def _empty(self):
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        return self._stat("current")

    def _stat(self, what):
        return self.torch.cuda.memory_stats(0).get(f"reserved_bytes.all.{what}", 0)

    def said(self):
        """Why the last call failed."""
        return self._library.torch_thrown().decode(errors="replace") or "it gave a null pointer"


class Bump(Torch):
    """The floor: what a call costs under torch whose allocator does next to nothing. Nothing comes back, nothing grows."""

    room = 0

    def fresh(self, peak_live):
        return 0

    def peak(self):
        return None

    def grown(self):
        return 0


class Rmm(Torch):
    """RMM under torch, a fresh resource for each replay. Its pool tells its size; the arena takes all of its size at once."""

    tells_growth = False

    def __init__(self, mode, work):
        super().__init__(mode, work)
        self.tells_growth = False
        self.room = 2.5 if mode == "rmm-arena" else 2.0

    def _install(self, work):
        import rmm
        import torch
        from rmm.allocators.torch import rmm_torch_allocator

        self._rmm = rmm
        self._plain = rmm.mr.CudaMemoryResource()
        self._resource = None
        rmm.mr.set_current_device_resource(self._plain)
        torch.cuda.memory.change_current_allocator(rmm_torch_allocator)

    def fresh(self, peak_live):
        mr = self._rmm.mr
        self.torch.cuda.synchronize()
        mr.set_current_device_resource(self._plain)
        self._resource = None  # what it had goes back
        if self.mode == "rmm-pool":
            self._resource = mr.PoolMemoryResource(self._plain, initial_pool_size=0)
        elif self.mode == "rmm-arena":
            self._resource = mr.ArenaMemoryResource(self._plain, arena_size(peak_live))
        else:
            self._resource = mr.CudaAsyncMemoryResource(initial_pool_size=2 * MIB)
        mr.set_current_device_resource(self._resource)
        return 0

    def peak(self):
        return self._resource.pool_size() if self.mode == "rmm-pool" else None

    def grown(self):
        return 0


def arena_size(peak_live):
    """The size of RMM's arena for a trace: twice what is live, at least a GiB."""
    return max(1 << 30, -(-2 * peak_live // MIB) * MIB)


class Host(Counted):
    """Ours over the host driver, by the C interface. It has one stream there."""

    device = -1
    room = 1.3
    mode = "ours"
    tells_growth = True

    def __init__(self, library):
        import millpond
        from millpond import _native

        self._arena = millpond.Arena(driver="host")
        self._control = _native.control
        self._own = _native.library()
        library.replay_own(ctypes.c_void_p(self._own.address_of("millpond_allocate")), ctypes.c_void_p(self._own.address_of("millpond_deallocate")))
        self.malloc, self.free = address(library.replay_own_malloc), address(library.replay_own_free)
        self._own.deallocate(self._own.allocate(-1, 512, 0))
        self._emptied = Emptied()

    def streams(self, count):
        return [0] * count

    def available(self):
        return int(0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))  # the arena's limit; nothing is touched

    def fresh(self, peak_live):
        left = self._emptied.until(self._empty)
        self._control("reset_peak_stats", device=-1)
        return left

    def _empty(self):
        self._control("trim", device=-1)
        return self._stat("current")

    def _stat(self, what):
        return self._control("stats", device=-1)[f"reserved_bytes.all.{what}"]

    def said(self):
        error = self._own.last_error()
        return error.decode(errors="replace") if error else "it gave 0"

