"""CuPy takes its GPU memory from the arena: its arrays then cross as offsets.

    millpond.attach()                      # or millpond.Arena(...)
    millpond.integrations.cupy.install()

The tests hold it against the real CuPy (14.2) as far as that goes without a GPU: its allocator calls ours.
"""

from .. import _memory, _native


def install(cupy=None):
    """`cupy.cuda.set_allocator` with `allocator`; gives the one that it set."""
    if cupy is None:
        import cupy
    allocate = allocator(cupy)
    cupy.cuda.set_allocator(allocate)
    return allocate


def allocator(cupy):
    """A function of bytes that gives a `cupy.cuda.MemoryPointer`. A block is freed when its last array dies, in the order of
    the stream that was current when it was made; for others say `millpond.record_stream(array, stream)`."""

    def allocate(size):
        device = cupy.cuda.Device().id
        stream = cupy.cuda.get_current_stream().ptr
        nbytes = size or 1
        address = _native.allocate(device, nbytes, stream)
        memory = _memory.Memory(address, _native.KIND_BLOCK, address, nbytes, device, stream=stream, is_ready=True)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, nbytes, memory, device), 0)

    return allocate
