"""RMM (cuDF, cuML) takes its GPU memory from the arena.

    millpond.integrations.rmm.install()

The tests hold it against the real RMM (26.10) as far as that goes without a GPU: its resource calls ours.
"""

from .. import _native, _streams


def install(rmm=None, device=None):
    """Makes the arena the current device's memory resource; gives the resource."""
    if rmm is None:
        import rmm
    made = resource(rmm, device)
    rmm.mr.set_current_device_resource(made)
    return made


def resource(rmm, device=None):
    """An `rmm.mr.CallbackMemoryResource` over the arena. RMM calls Python for each allocation: put an
    `rmm.mr.PoolMemoryResource` on top where that is too slow. `device`: an ordinal, default 0."""
    ordinal = 0 if device is None else int(device)

    def allocate(size, stream=None):
        return _native.allocate(ordinal, size or 1, _streams.handle(_raw(stream)))

    def deallocate(address, size, stream=None):
        if address:
            raw = _streams.handle(_raw(stream))
            if raw:
                _native.record_stream(address, raw)  # it may be freed on another stream than it was made on
            _native.deallocate(address)

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)


def _raw(stream):
    """RMM's Stream says its handle by `__cuda_stream__` (version, handle)."""
    protocol = getattr(stream, "__cuda_stream__", None)
    return protocol()[1] if protocol is not None else stream
