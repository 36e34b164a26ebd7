"""dma-buf on request, and LMCache's hook for descriptors, against a stand-in of its signature (0.5.6)."""

import os
import subprocess
import sys
import types
import uuid

import pytest

import millpond
from conftest import native
from millpond import _native
from millpond.integrations import lmcache


class Array:
    """GPU memory by its interface."""

    def __init__(self, strides=None, shape=(4, 6)):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (0x7000_0200, False), "strides": strides, "version": 3}


def test_a_dma_buf_is_a_descriptor_with_an_offset(monkeypatch):
    read, write = os.pipe()
    asked = []

    def control(op, **fields):
        asked.append((op, fields))
        return {"fd": os.dup(write), "offset": 0x200, "bytes": 4096}

    monkeypatch.setattr(_native, "control", control)
    with millpond.dmabuf(Array()) as made:
        assert asked == [("dma_buf", {"device": 0, "address": 0x7000_0200, "bytes": 96})]
        assert (made.offset, made.nbytes, made.page_bytes, made.fileno()) == (0x200, 96, 4096, made.fd)
        os.write(made.fd, b"x")
        fd = made.fd
    assert made.fd == -1 and os.read(read, 1) == b"x"
    with pytest.raises(OSError):
        os.fstat(fd)
    made.close()


def test_what_has_no_dma_buf_is_refused_by_name(monkeypatch):
    def control(op, **fields):
        raise millpond.Unsupported("cuMemGetHandleForAddressRange failed: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(_native, "control", control)
    with pytest.raises(millpond.Unsupported, match="cuMemGetHandleForAddressRange"):
        millpond.dmabuf(Array())
    with pytest.raises(millpond.Unsupported, match="in host memory"):
        millpond.dmabuf(type("Host", (), {"__array_interface__": {"data": (4096, False), "shape": (1,), "typestr": "|u1"}})())
    with pytest.raises(millpond.InvalidArgument, match="contiguous"):
        millpond.dmabuf(Array(strides=(48, 8)))
    with pytest.raises(millpond.InvalidArgument, match="without bytes"):
        millpond.dmabuf(Array(shape=(0, 3)))


class Wrapper:
    """What LMCache's wrapper shows of itself."""

    def __init__(self, fd):
        self.handle = uuid.uuid4().bytes
        self._fd = fd

    def fd_payload(self):
        return None if self._fd is None else (self.handle, self._fd)


_IMPORTER = """
import os, sys, types
sys.modules.update({name: types.ModuleType(name) for name in ("lmcache", "lmcache.v1", "lmcache.v1.platform",
    "lmcache.v1.platform.devices", "lmcache.v1.platform.devices.cuda")})
module = sys.modules["lmcache.v1.platform.devices.cuda.ipc_wrapper"] = types.ModuleType("ipc_wrapper")
module.set_vmm_fd_resolver = lambda resolver: setattr(module, "resolver", resolver)
import millpond
from millpond.integrations import lmcache
millpond.attach()
lmcache.install()
fd = module.resolver(bytes.fromhex(sys.argv[1]))
assert not os.get_inheritable(fd)
os.write(fd, b"came")
try:
    module.resolver(bytes(16))
except millpond.Stale as e:
    assert "has published" in str(e) and "(1 asked)" in str(e), e
else:
    sys.exit("an unknown id was resolved")
lmcache.uninstall()
assert module.resolver is None
"""


@native
def test_lmcaches_descriptors_go_between_processes(tmp_path):
    read, write = os.pipe()
    with millpond.Arena(limit="64MiB", driver="host") as arena:
        wrapper = Wrapper(write)
        assert lmcache.publish(wrapper) and lmcache.publish(wrapper)
        assert not lmcache.publish(Wrapper(None)), "a fabric handle travels by itself"
        command, env = [sys.executable, "-c", _IMPORTER, wrapper.handle.hex()], arena.worker_env("importer")
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        assert os.read(read, 4) == b"came"
        lmcache.withdraw(wrapper)
        with pytest.raises(millpond.Stale):
            lmcache.resolve(wrapper.handle)
        lmcache.withdraw(wrapper)
        lmcache._door.close()
        lmcache._door = None


def test_an_lmcache_without_the_hook_is_named(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "lmcache":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lmcache", types.ModuleType("lmcache"))
    with pytest.raises(millpond.Unsupported, match="no set_vmm_fd_resolver"):
        lmcache.install()
