"""CuPy's and RMM's doors, against stand-ins of their documented interfaces; `test_door_real_allocators.py` has the real ones."""

import gc
import types

from millpond import _native
from millpond.integrations import cupy as cupy_door
from millpond.integrations import rmm as rmm_door


def test_cupy(fake, monkeypatch):
    asked = []
    monkeypatch.setattr(_native, "allocate", lambda device, n, stream: (asked.append((device, n, stream)), fake.allocate(device, n, stream))[1])

    class UnownedMemory:
        def __init__(self, ptr, size, owner, device_id=-1):
            self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id

    class MemoryPointer:
        def __init__(self, mem, offset):
            self.mem, self.ptr = mem, mem.ptr + offset

    cuda = types.SimpleNamespace(
        Device=lambda: types.SimpleNamespace(id=1),
        get_current_stream=lambda: types.SimpleNamespace(ptr=77),
        UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer,
        set_allocator=lambda f: setattr(cuda, "current", f),
    )
    cupy_door.install(types.SimpleNamespace(cuda=cuda))
    pointer, none = cuda.current(1000), cuda.current(0)
    assert asked == [(1, 1000, 77), (1, 1, 77)] and pointer.mem.size == 1000 and fake.live == 2
    del pointer, none
    gc.collect()
    assert fake.live == 0


def test_rmm(fake, monkeypatch):
    recorded = []
    monkeypatch.setattr(_native, "record_stream", lambda address, stream: recorded.append(stream))

    class CallbackMemoryResource:
        def __init__(self, allocate, deallocate):
            self.allocate, self.deallocate = allocate, deallocate

    mr = types.SimpleNamespace(CallbackMemoryResource=CallbackMemoryResource, set_current_device_resource=lambda r: setattr(mr, "now", r))
    rmm_door.install(types.SimpleNamespace(mr=mr))

    class Stream:
        def __cuda_stream__(self):
            return (0, 99)

    address = mr.now.allocate(4096, Stream())
    assert fake.live == 1
    mr.now.deallocate(address, 4096, Stream())
    mr.now.deallocate(0, 0)
    assert fake.live == 0 and recorded == [99]
    bare = mr.now.allocate(10)
    mr.now.deallocate(bare, 10)
    assert fake.live == 0
