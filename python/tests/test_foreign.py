"""Values by a token of the driver's (CUDA IPC, a shared pool): proved first, kept by their sender, closed before they are let go;
over stand-ins for GPU memory and for the driver's calls."""

import ctypes
import gc
import os
import threading

import pytest

import millpond
from conftest import eventually
from millpond import _fds, _foreign, _gpu_canary, _memory, _native, _ref, _streams, errors, pool, tiers

DATA = bytes(range(200)) + bytes(56)


class Plain:
    """GPU memory that is not the arena's."""

    def __init__(self, data=DATA):
        self.buffer = ctypes.create_string_buffer(data, len(data))
        self.freed = False
        address = ctypes.addressof(self.buffer)
        self.__dict__["face"] = {"shape": (len(data),), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}

    @property
    def __cuda_array_interface__(self):
        return self.face


class View:
    """What stands for a received tensor: it holds its import, as a tensor's storage does."""

    def __init__(self, memory, address, nbytes):
        self.memory, self.address, self.nbytes = memory, address, nbytes

    def bytes(self):
        return ctypes.string_at(self.address, self.nbytes)


class Backend(_gpu_canary._Backend):
    spoil = False

    def probes(self, device):
        memory = _memory.block(64, 0)
        return {"all": _ref.Ref(memory, 0, _memory._dtypes.lookup("uint8"), (64,), None, "r")}

    def plain_probes(self):
        return {"plain": Plain()}

    def check(self, values):
        if "plain" not in values:
            return {}
        return {"plain": "its bytes differ"} if self.spoil or values["plain"].bytes() != DATA else {}


class Driver:
    """The calls of the driver's that the tier makes."""

    def __init__(self, fake):
        self.fake, self.log, self.open, self.refuse, self.kind = fake, [], {}, None, "ipc"

    def control(self, op, **f):
        if op == "locate":
            return {"kind": "block" if f["address"] in self.fake.memory else "foreign"}
        if op == "foreign_export":
            if self.refuse:
                raise errors.Unsupported(self.refuse)
            return {"kind": self.kind, "token": f"{f['address']:0128x}", "offset": 0, "bytes": len(DATA)}
        if op == "foreign_open":
            key = (f["peer"], f["kind"], f["token"])
            self.open[key] = self.open.get(key, 0) + 1
            return {"address": int(f["token"], 16), "bytes": len(DATA)}
        if op == "foreign_close":
            self.log.append("close")
            key = (f["peer"], f["kind"], f["token"])
            self.open[key] -= 1
            return {"closed": not self.open[key]}
        if op == "import_parted":
            return {"parted": f["import"] not in self.fake.memory}
        return {}


@pytest.fixture
def rig(monkeypatch, pair, fake):
    driver, backend = Driver(fake), Backend()
    monkeypatch.setattr(_native, "control", driver.control)
    monkeypatch.setattr(_gpu_canary, "gpu_backend", lambda: backend)
    monkeypatch.setattr(_gpu_canary.Prover, "_await_answer", lambda self: None)
    monkeypatch.setattr(_streams, "gpus", lambda: 1)
    monkeypatch.setattr(_foreign, "_keeper", _foreign._Keeper())
    monkeypatch.setattr(_foreign._Keeper, "add", add_without_a_thread)
    pending = set()

    def wait_done(address, stream, flags, ms):
        if address in pending:
            raise errors.Timeout("held")

    monkeypatch.setattr(_native, "wait_done", wait_done)
    release = _native.import_release

    def released(handle):
        driver.log.append("release")
        release(handle)

    monkeypatch.setattr(_native, "import_release", released)

    def over(memory, address, device, row, shape, strides):
        view = View(_memory.Memory(memory.handle, 0, memory.address, memory.nbytes, device), address, shape[0] * row.itemsize)
        memory.owned = False
        return view

    monkeypatch.setattr(_memory, "torch_over", over)
    near, far = pair
    near.prefer = "ipc"
    return near, far, driver, backend, pending


def add_without_a_thread(self, sent=(), opened=None):
    self.sent.extend(sent)
    if opened is not None:
        self.opened.append(opened)


def proved(near, far):
    """Both tiers of this direction are proved."""
    near.send(Plain())  # the arena's
    far.recv(timeout=2, lazy=True)
    near._poll()
    assert near._gpu.out is True and near._foreign.out is None
    near.send(Plain())  # asks
    assert near._foreign.out == "asked" and near.tiers["copy"] == 2
    far.recv(timeout=2, lazy=True)
    near._poll()
    gc.collect()
    _foreign._keeper.sweep()


def test_a_value_goes_by_token_once_that_is_proved_and_is_kept_until_it_is_closed(rig):
    near, far, driver, _, pending = rig
    proved(near, far)
    assert near._foreign.out is True and not _foreign._keeper.opened and not _foreign._keeper.sent
    driver.log.clear()
    source = Plain()
    near.send({"x": source})
    assert near.tiers["ipc"] == 1 and near.tiers["copy"] == 2
    (kept,) = _foreign._keeper.sent
    pending.update({kept.first._memory.address, kept.last._memory.address})
    got = far.recv(timeout=2)["x"]
    assert got.bytes() == DATA and got.address == source.face["data"][0], "no copy"
    assert _foreign.companion(got.address + 5) == got.memory.address and _foreign.companion(1) is None
    _foreign._keeper.sweep()
    assert driver.log == [] and _foreign.kept() == {"sent": 1, "open": 1} and kept.tensor is source
    del got
    gc.collect()
    assert driver.log == ["release"], "its tensor let go"
    _foreign._keeper.sweep()
    assert driver.log == ["release", "close", "release"], "closed before its owner may free it"
    assert _foreign.kept() == {"sent": 1, "open": 0}
    pending.clear()
    _foreign._keeper.sweep()
    assert _foreign.kept() == {"sent": 0, "open": 0} and kept.tensor is None


def test_one_allocation_twice_is_opened_twice_and_closed_twice(rig):
    near, far, driver, _, _ = rig
    proved(near, far)
    source = Plain()
    near.send([source, source])
    first, second = far.recv(timeout=2)
    assert first.address == second.address and max(driver.open.values()) == 2
    del first
    gc.collect()
    _foreign._keeper.sweep()
    assert max(driver.open.values()) == 1 and second.bytes() == DATA
    del second
    gc.collect()
    _foreign._keeper.sweep()
    assert not any(driver.open.values())


def test_what_fails_its_proof_is_off_and_values_are_copied(rig, caplog):
    near, far, driver, backend, _ = rig
    backend.spoil = True
    proved(near, far)
    assert near._foreign.out is False and "its bytes differ" in near._foreign.reason
    near.send(Plain())
    assert near.tiers["copy"] == 3 and near.tiers["ipc"] == 0
    assert len([r for r in caplog.records if "are off, they are copied" in r.getMessage()]) == 1
    assert any("failed its proof" in reason for reason in tiers.falls())


def test_a_proof_that_would_be_copied_is_none(rig):
    near, far, driver, _, _ = rig
    driver.refuse = "the memory is no plain cudaMalloc allocation"
    near.send(Plain())
    far.recv(timeout=2, lazy=True)
    near._poll()
    near.send(Plain())
    assert near._foreign.out is False and "no plain cudaMalloc" in near._foreign.reason


def test_memory_that_cannot_be_shared_is_copied_with_its_reason(rig):
    near, far, driver, _, _ = rig
    proved(near, far)
    driver.refuse = "the memory is no plain cudaMalloc allocation"
    near.send(Plain())
    assert (near.tiers["copy"], near.tiers["ipc"]) == (3, 0)
    assert any("no plain cudaMalloc" in reason for reason in tiers.falls()) and tiers.steps()["ipc to copy"] >= 1


def test_memory_of_the_arena_goes_by_the_arena_whatever_is_preferred(rig):
    near, far, driver, _, _ = rig
    proved(near, far)
    memory = _memory.block(100, 0)
    near.send(_ref.Ref(memory, 0, _memory._dtypes.lookup("uint8"), (100,), None, "r"))
    assert near.tiers["ipc"] == 0


def test_an_arena_without_room_makes_way_for_tokens_and_says_so(rig, monkeypatch):
    near, far, driver, _, _ = rig
    proved(near, far)
    near.prefer = None
    send = _native.send

    def full(channel, tree, tensors, timeout_ms):
        if any(t[1] == len(DATA) for t in tensors):
            raise errors.OutOfMemory("512 MiB of 512 MiB are in use")
        return send(channel, tree, tensors, timeout_ms)

    monkeypatch.setattr(_native, "send", full)
    near.send(Plain())
    assert near.tiers["ipc"] == 1 and far.recv(timeout=2).bytes() == DATA
    assert any("no room for a copy" in reason for reason in tiers.falls())


@pytest.mark.parametrize("spoil", ["kind", "companions", "bounds", "channel"])
def test_a_token_of_a_peer_is_checked(rig, spoil):
    near, far, driver, _, _ = rig
    proved(near, far)
    near.send(Plain())
    message = far._wait(far._next_value, 2)
    if spoil == "kind":
        message.body = message.body.replace('"ipc"', '"any"')
    elif spoil == "companions":
        message.body = message.body.replace('"r",1,', '"r",0,').replace('"r",2,', '"r",0,')
    elif spoil == "bounds":
        message.body = message.body.replace("[256]", "[257]")
    else:
        message.peer = None
    with pytest.raises(millpond.Protocol):
        message.decode()
    gc.collect()
    _foreign._keeper.sweep()
    assert not any(driver.open.values()), "what was opened is closed"


def test_an_unknown_preference_is_refused(pair):
    with pytest.raises(millpond.InvalidArgument, match='"ipc" or "host"'):
        pair[0].send(1, prefer="gpu")


# Pools.


def test_a_swap_comes_before_torch_and_needs_its_backend(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(millpond.Refused, match="before import torch"):
        pool.swap()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with pytest.raises(millpond.Refused, match="backend:cudaMallocAsync"):
        pool.swap()
    assert not pool.swapped() and pool.offer() == []


def test_a_swap_is_said_in_the_log(monkeypatch, caplog):
    import sys

    monkeypatch.setattr(pool, "_swapped", {})
    monkeypatch.setattr(_foreign, "pool_swapped", False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setattr(_native, "control", lambda op, **f: {"id": "GPU-0", "device": f["device"]})
    pool.swap(0)
    assert pool.swapped() and _foreign.pool_swapped and any("millpond's in this process (experimental)" in r.getMessage() for r in caplog.records)


def test_a_pools_descriptor_goes_to_who_has_the_key(monkeypatch, tmp_path):
    from millpond import _session

    read, write = os.pipe()
    monkeypatch.setattr(pool, "_swapped", {3: "GPU-3"})
    monkeypatch.setattr(pool, "_door", None)
    monkeypatch.setattr(_session, "_info", {"socket": str(tmp_path / "owner"), "devices": []})
    imported = threading.Event()

    def control(op, **f):
        if op == "pool_fd":
            assert f["device"] == 3
            return {"fd": os.dup(write)}
        if op == "pool_import":
            assert (f["peer"], f["theirs"]) == (77, 3) and not os.get_inheritable(f["fd"])
            os.write(f["fd"], b"here")
            imported.set()
        return {"devices": []}

    monkeypatch.setattr(_native, "control", control)
    offers = pool.offer()
    (_, _, path, key) = offers[0]
    assert os.path.dirname(path) == str(tmp_path) and len(key) == 64
    with pytest.raises(OSError):
        _fds.fetch(path, "0" * 64, 3)
    assert not imported.is_set()
    pool.take(77, offers)
    assert imported.is_set() and os.read(read, 4) == b"here"
    pool.take(77, [[3, "GPU-3", str(tmp_path / "nothing"), key]])  # said in the log, raised where a value needs it


def test_the_keepers_thread_ends_when_nothing_is_kept(monkeypatch):
    keeper = _foreign._Keeper()

    class Entry:
        calls = 0

        def over(self):
            self.calls += 1
            return self.calls > 2

    entry = Entry()
    keeper.add(sent=[entry])
    eventually(lambda: not keeper.sent and keeper._thread is None)
    assert entry.calls == 3




def test_memory_of_a_swapped_pool_goes_by_it_without_being_asked_for(rig, monkeypatch):
    near, far, driver, _, _ = rig
    driver.kind = "pool"
    near.prefer = None
    monkeypatch.setattr(_foreign, "pool_swapped", True)
    proved(near, far)
    near.send(Plain())
    assert near.tiers["pool"] == 1 and far.recv(timeout=2).bytes() == DATA
    driver.kind = "ipc"  # memory of torch's that is not the pool's is copied, since nobody asked for more
    near.send(Plain())
    assert (near.tiers["pool"], near.tiers["ipc"], near.tiers["copy"]) == (1, 0, 3)
    assert any("asked for" in reason for reason in tiers.falls())
