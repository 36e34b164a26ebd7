"""The LMCache door with the real LMCache: its own wrapper, wire and resolver, between two processes. Its GPU calls alone are stubbed.

Without a GPU, `lmcache` needs torch and msgspec to be imported that far: `make test-doors` sets it up."""

import os
import subprocess
import sys

import pytest

import millpond
from conftest import native
from millpond.integrations import lmcache

pytestmark = native
pytest.importorskip("msgspec", reason="LMCache is not installed: make test-doors")
ipc = pytest.importorskip(lmcache._MODULES[0], reason="LMCache is not installed: make test-doors")
wire = pytest.importorskip("lmcache.v1.platform.base.ipc_wire")
BYTES = 4096

_IMPORTER = """
import mmap, os, sys, types
import msgspec
import millpond
from lmcache.v1.platform.base import ipc_wire
from lmcache.v1.platform.devices.cuda import ipc_wrapper, utils
from millpond.integrations import lmcache

ok, mapped = 0, {}

class Driver:  # the calls that LMCache makes of a driver, on ordinary memory
    class CUresult:
        CUDA_SUCCESS = ok
    class CUmemAllocationHandleType:
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    class CUmemAccessDesc:
        def __init__(self):
            self.location = types.SimpleNamespace()
    class CUmemLocationType:
        CU_MEM_LOCATION_TYPE_DEVICE = 1
    class CUmemAccess_flags:
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
    def cuMemImportFromShareableHandle(fd, kind):
        mapped["memory"] = mmap.mmap(fd, os.fstat(fd).st_size)
        mapped["fd"] = fd
        return ok, "handle"
    def cuMemAddressReserve(size, *_):
        return ok, 4096
    def cuMemMap(*_):
        return (ok,)
    def cuMemSetAccess(*_):
        return (ok,)

utils._import_cuda_bindings = lambda: (Driver, None)
data = msgspec.json.decode(bytes.fromhex(sys.argv[1]), type=ipc_wire.VmmCudaIPCData)
wrapper = ipc_wrapper.VmmCudaIPCWrapper.from_wire(data)
assert wrapper.fd_payload() is None, "a decoded wrapper has no descriptor"
try:
    wrapper._import_and_map(0)
except RuntimeError as e:
    assert "No VMM fd resolver installed" in str(e), e
else:
    sys.exit("it resolved without a resolver")
millpond.attach()
lmcache.install()
assert ipc_wrapper._VMM_FD_RESOLVER is lmcache.resolve
mapping = wrapper._import_and_map(0)
assert mapping.base_ptr == 4096 and mapping.alloc_handle == "handle"
assert mapped["memory"][:5] == b"bytes", mapped["memory"][:5]
try:
    os.fstat(mapped["fd"])
except OSError:
    pass
else:
    sys.exit("LMCache closes what it resolved")
mapped["memory"][:4] = b"came"
lmcache.uninstall()
assert ipc_wrapper._VMM_FD_RESOLVER is None
"""


def wrapper_of(fd):
    """What `VmmCudaIPCWrapper.wrap` gives for memory with a descriptor."""
    metadata = {"dtype": next(name for name, kind in wire.DTYPES.items() if kind.itemsize == 1), "shape": (BYTES,), "stride": (1,)}
    metadata = wire.TensorMetadata(**metadata, storage_offset=0, device_uuid="GPU-0")
    made = {"export_id": os.urandom(16), "kind": "posix_fd", "fabric_blob": None, "alloc_size": BYTES, "alloc_offset": 0, "nbytes": BYTES}
    wrapper = ipc.VmmCudaIPCWrapper.from_wire(wire.VmmCudaIPCData(version=1, metadata=metadata, **made))
    wrapper._fd = fd
    return wrapper


def test_the_hook_is_the_one_that_the_door_was_written_for():
    import inspect
    import typing

    assert lmcache._wrapper_module() is ipc
    parameters = list(inspect.signature(ipc.set_vmm_fd_resolver).parameters)
    assert parameters == ["resolver"]
    hint = typing.get_type_hints(ipc.set_vmm_fd_resolver)["resolver"]
    assert hint == (typing.Callable[[bytes], int] | None) or "Callable" in str(hint)


def test_a_wrapper_crosses_by_lmcaches_own_wire_and_is_mapped():
    import msgspec

    fd = os.memfd_create("kv-cache")
    os.ftruncate(fd, BYTES)
    os.pwrite(fd, b"bytes", 0)
    wrapper = wrapper_of(fd)
    assert wrapper.fd_payload() == (wrapper.handle, fd)
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        assert lmcache.publish(wrapper)
        command = [sys.executable, "-c", _IMPORTER, msgspec.json.encode(wrapper.to_wire()).hex()]
        done = subprocess.run(command, env=arena.worker_env("importer"), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-3000:]
        assert os.pread(fd, 4, 0) == b"came"
        lmcache.withdraw(wrapper)
        wrapper.close()
        assert wrapper.fd_payload() is None
        lmcache._door.close()
        lmcache._door = None
