"""CuPy's and RMM's doors with the real packages: both can be imported without a GPU, and their own classes call ours. Nothing that they
allocate here is touched: the addresses are the stand-in's."""

import gc

import pytest

from millpond import _native
from millpond.integrations import cupy as cupy_door
from millpond.integrations import rmm as rmm_door


def test_the_real_cupy(fake, monkeypatch):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: make test-doors")
    asked = []
    allocate = fake.allocate
    monkeypatch.setattr(_native, "allocate", lambda device, n, stream: (asked.append((device, n, stream)), allocate(device, n, stream))[1])
    # What asks the driver.
    monkeypatch.setattr(cupy.cuda, "Device", lambda: type("Device", (), {"id": 0}))
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: type("Stream", (), {"ptr": 77}))
    try:
        assert cupy_door.install() is not None
        pointer = cupy.cuda.alloc(1000)
        assert type(pointer) is cupy.cuda.MemoryPointer and type(pointer.mem) is cupy.cuda.UnownedMemory
        assert asked == [(0, 1000, 77)] and (pointer.mem.size, pointer.device_id) == (1000, 0) and fake.live == 1
        view = pointer + 512
        del pointer
        gc.collect()
        assert fake.live == 1, "a view keeps the block"
        del view
        gc.collect()
        assert fake.live == 0
    finally:
        cupy.cuda.set_allocator(None)


def test_the_real_rmm(fake, monkeypatch):
    rmm = pytest.importorskip("rmm", reason="RMM is not installed: make test-doors")
    asked, recorded = [], []
    allocate = fake.allocate
    monkeypatch.setattr(_native, "allocate", lambda device, n, stream: (asked.append((device, n, stream)), allocate(device, n, stream))[1])
    monkeypatch.setattr(_native, "record_stream", lambda address, stream: recorded.append(stream))
    made = rmm_door.resource(rmm, 0)
    assert type(made) is rmm.mr.CallbackMemoryResource
    address = made.allocate(1000)
    assert fake.live == 1 and [n for _, n, _ in asked] == [1000] and isinstance(asked[0][2], int)
    made.deallocate(address, 1000)
    assert fake.live == 0

    def full(device, n, stream):
        raise MemoryError("the arena is full")

    monkeypatch.setattr(_native, "allocate", full)
    with pytest.raises(MemoryError):
        made.allocate(1 << 40)
