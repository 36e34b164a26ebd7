"""Allocation under torch's CUDA tensors, in one mode: the child's side."""

import ctypes
import os
import time

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
GIB = 1 << 30
#: Allocators of RMM that grow but give nothing back: a fresh one for each growth. Its arena is as large as it was made.
FRESH = ("rmm-pool", "rmm-async")


class Allocation:
    """The cases of one allocator."""

    def __init__(self, settings):
        self.mode, self.work = settings["mode"], settings["work"]
        self.notes = {}
        self._keep = prepare(self.mode, self.work)
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        self.cases = {f"torch.empty+del {name}": self._empty(nbytes) for name, nbytes in SIZES.items()}
        if self.mode in FRESH:
            self.cases["growth 1 GiB"] = self._first_growth
        elif self.mode in ("ours", "native", "expandable", "async"):
            self.cases["growth 1 GiB"] = self._growth
        self._native()

    def close(self):
        """Nothing: the process ends."""

    def _empty(self, nbytes):
        from .child import timed

        empty, dtype = self.torch.empty, self.torch.uint8

        def operation():
            for _ in range(20):
                x = empty(nbytes, dtype=dtype, device="cuda")
                del x

        def case(ms):
            n, ns = timed(operation, ms)
            return n * 20, ns

        return case

    def _growth(self, ms):
        """A tensor that needs memory from the driver: what is cached is given back first, outside of the time."""
        torch = self.torch
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        start = time.perf_counter_ns()
        x = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        took = time.perf_counter_ns() - start
        del x
        return 1, took

    def _first_growth(self, ms):
        """The same of an allocator that has nothing yet. It is asked directly: torch would keep the one that it has."""
        resource = _resource(self.mode, 0)
        start = time.perf_counter_ns()
        pointer = resource.allocate(GIB)
        took = time.perf_counter_ns() - start
        resource.deallocate(pointer, GIB)
        return 1, took

    def _native(self):
        path = os.path.join(self.work, "liballocbench.so")
        try:
            library = ctypes.CDLL(path)
        except OSError as e:
            self.notes["C++"] = f"calls through torch's C++ interface are not measured: {e}"
            return
        for name in ("pair", "mixed", "threads", "mixed_threads"):
            getattr(library, "bench_" + name).restype = ctypes.c_double
        for name, nbytes in SIZES.items():
            size = ctypes.c_size_t(nbytes)
            self.cases[f"C++ alloc+free {name}"] = counted(lambda count, size=size: library.bench_pair(size, count))
        self.cases["C++ 1,000 live blocks"] = counted(lambda count: library.bench_mixed(1000, count))
        self._streams = [self.torch.cuda.Stream() for _ in range(8)]
        handles = (ctypes.c_uint64 * 8)(*[s.cuda_stream for s in self._streams])
        for name in ("1 KiB", "1 MiB"):
            size = ctypes.c_size_t(SIZES[name])
            run = counted(lambda count, size=size: library.bench_threads(size, count, handles, 8), share=8)
            self.cases[f"C++ 8 threads, 8 streams {name}"] = self._spread(run)
        run = counted(lambda count: library.bench_mixed_threads(125, count, handles, 8), share=8)
        self.cases["C++ 8 threads, 8 streams, 1,000 live blocks"] = self._spread(run)

    @staticmethod
    def _spread(case):
        """Threads need CPUs: all of them for this case, then the one again."""

        def spread(ms):
            one = os.sched_getaffinity(0)
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            try:
                return case(ms)
            finally:
                os.sched_setaffinity(0, one)

        return spread


def counted(run, share=1):
    """A case of `run(count)`, which gives nanoseconds an operation: as many as fill the time, by what the last slice took."""
    state = {"each": 0.0}

    def case(ms):
        if not state["each"]:
            state["each"] = max(run(200), 1.0)
        count = max(100, min(1_000_000, int(ms * 1e6 / state["each"] / share)))
        state["each"] = max(run(count), 1.0)
        return count, state["each"] * count

    return case


def prepare(mode, work, limit="30%"):
    """Puts the mode's allocator under torch; what must stay alive."""
    if mode == "ours":
        import millpond

        arena = millpond.Arena(driver="cuda", limit=limit)
        millpond.torch.install()
        return arena
    if mode == "bump":
        import torch

        path = os.path.join(work, "libbump.so")
        torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(path, "bump_malloc", "bump_free"))
    elif mode.startswith("rmm"):
        return _rmm(mode)
    return None


def _resource(mode, nbytes):
    """RMM's allocator of a mode, with so much from the start."""
    import rmm

    if mode == "rmm-async":
        return rmm.mr.CudaAsyncMemoryResource(initial_pool_size=nbytes)
    make = rmm.mr.PoolMemoryResource if mode == "rmm-pool" else rmm.mr.ArenaMemoryResource
    return make(rmm.mr.CudaMemoryResource(), nbytes)


def _rmm(mode):
    import rmm
    import torch
    from rmm.allocators.torch import rmm_torch_allocator

    resource = _resource(mode, 8 * GIB)
    rmm.mr.set_current_device_resource(resource)
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    return resource
