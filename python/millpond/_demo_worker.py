"""A worker of `millpond demo`: `python -m millpond._demo_worker`."""

import gc
import hashlib
import sys
import time

import millpond
from millpond import _dtypes, _memory, _ref, _safetensors, _session, errors


def raw(value):
    """The bytes of a value as something that hashlib takes; from the GPU if need be."""
    if isinstance(value, _ref.Ref):
        value = _ref.Ref(value._memory, value._offset, _dtypes.BY_NAME["uint8"], (value.nbytes,), None).numpy()
    if hasattr(value, "data_ptr"):
        import torch

        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    import numpy as np

    return memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def hash_all(tensors):
    """sha256 of every tensor."""
    return {name: hashlib.sha256(raw(value)).hexdigest() for name, value in tensors.items()}


def checksum(value):
    """A result as text, rounded so that another order of addition may not matter."""
    import numpy as np

    value = np.asarray(value.cpu() if hasattr(value, "cpu") else value, "float64")
    return [f"{x:.6e}" for x in value.reshape(-1)]


def held_bytes(ledger):
    """Live and leased bytes of all clients."""
    return sum(
        client.get(key, 0)
        for device in ledger.get("devices", ())
        for client in device.get("clients", ())
        for key in ("allocated", "leased_out", "leased_in")
    )


def numbers(value):
    """A value as a flat float64 array, in the same way in every process, whatever is installed there."""
    import numpy as np

    if isinstance(value, _ref.Ref):
        name = value.dtype
    else:
        name = _dtypes.of_torch(value.dtype) if hasattr(value, "data_ptr") else _dtypes.of_numpy(value.dtype)
    row, data = _dtypes.lookup(name), raw(value)
    if name == "bfloat16":
        return (np.frombuffer(data, "uint16").astype("uint32") << 16).view("float32").astype("float64")
    if row.numpy is None or row.name.startswith(("np:", "complex")):
        return np.frombuffer(data, "uint8").astype("float64")
    return np.frombuffer(data, row.numpy).astype("float64")


def compute(tensors):
    """For each tensor its sum, norm and largest, and the cosine of its two halves: float64."""
    import numpy as np

    rows = []
    for name in sorted(tensors):
        flat = numbers(tensors[name])
        half = len(flat) // 2
        if half == 0:
            rows.append([flat.sum(), abs(flat).sum(), flat.max() if len(flat) else 0.0, 1.0])
            continue
        a, b = flat[:half], flat[half : 2 * half]
        norms = np.linalg.norm(a) * np.linalg.norm(b)
        rows.append([flat.sum(), np.linalg.norm(flat), flat.max(), a @ b / norms if norms else 0.0])
    return np.array(rows)


class Worker:
    """What the parent calls."""

    def __init__(self, conn, gpu):
        self.conn, self.gpu = conn, gpu
        self.tensors = {}

    def load(self, path):
        """Reads a file into arena memory."""
        start = time.perf_counter()
        entries = _safetensors.entries(path)
        self.tensors = {entry.name: self._read(path, entry) for entry in entries}
        seconds = time.perf_counter() - start
        return {
            "tensors": [e.name for e in entries],
            "bytes": sum(e.nbytes for e in entries),
            "hashes": hash_all(self.tensors),
            "seconds": seconds,
        }

    def _read(self, path, entry):
        shape = entry.shape[::-1] if entry.transposed else entry.shape
        if self.gpu:
            value = self._read_gpu(path, entry, shape)
        else:
            ref = _ref.empty(shape, entry.dtype, -1, "r")
            if entry.nbytes:
                _safetensors.read_into(path, entry, _memory.buffer(ref._memory, 0, entry.nbytes))
            value = ref.numpy() if ref._row.numpy else ref
        return value.T if entry.transposed else value

    def _read_gpu(self, path, entry, shape):
        import torch

        staging = torch.empty(entry.nbytes, dtype=torch.uint8)
        if entry.nbytes:
            _safetensors.read_into(path, entry, staging.numpy())
        value = torch.empty(shape, dtype=_dtypes.to_torch(entry.dtype), device="cuda")
        if entry.nbytes:
            value.view(-1).view(torch.uint8).copy_(staging)
        return value

    def hand_over(self):
        return self.tensors

    def compute(self, tensors):
        """Takes the tensors, hashes them, computes; the result is allocated by the caller."""
        self.tensors = tensors
        before = millpond.counters().get("copied_bytes", 0)
        hashes = hash_all(tensors)
        mine = compute(tensors)
        result = self.conn.result(mine.shape, "float64", "cpu" if not self.gpu else None)
        if self.gpu:
            import torch

            result.copy_(torch.from_numpy(mine))
        else:
            result[...] = mine
        return {"hashes": hashes, "result": result, "own_copied_bytes": millpond.counters().get("copied_bytes", 0) - before}

    def recompute(self):
        return compute(self.tensors)

    def write(self):
        """Changes the smallest tensor in place."""
        names = [n for n, v in self.tensors.items() if not isinstance(v, _ref.Ref) and 0 not in v.shape]
        if not names:
            return {"name": None, "hash": None}
        name = min(names, key=lambda n: (self.tensors[n].nbytes, n))
        value = self.tensors[name]
        if hasattr(value, "data_ptr"):
            import torch

            value.view(torch.uint8).bitwise_xor_(0x15) if value.dim() else value.reshape(1).view(torch.uint8).bitwise_xor_(0x15)
            if value.is_cuda:
                torch.cuda.synchronize()
        else:
            import numpy as np

            flat = value.reshape(-1) if value.flags.c_contiguous else value.T.reshape(-1)
            flat.view(np.uint8)[...] ^= 0x15
        return {"name": name, "hash": hash_all({name: value})[name]}

    def hash_one(self, name):
        return hash_all({name: self.tensors[name]})[name]

    def bounce(self, count):
        """Answers `count` messages, after importing what each carries."""
        for _ in range(count):
            value = self.conn.recv(timeout=60)
            del value
            self.conn.send(None)
        self.conn.send("done")

    def let_go(self):
        self.tensors = {}
        gc.collect()

    @staticmethod
    def counters():
        return millpond.counters()


def main():
    """Serves until the parent closes the channel."""
    info = millpond.attach()
    gpu = any(d["ordinal"] != -1 for d in info.get("devices", ()))
    if gpu:
        import torch  # noqa: F401  before the first CUDA use

        millpond.torch.install()
    conn = millpond.connection(timeout=60)
    worker = Worker(conn, gpu)
    for name in "load hand_over compute recompute write hash_one let_go counters".split():
        conn.serve(name)(getattr(worker, name))
    while True:
        try:
            message = conn.recv()  # serves calls meanwhile
        except (errors.Closed, errors.PeerDied, errors.OwnerDied):
            break
        getattr(worker, message["mode"])(*message["arguments"])
    worker.tensors = {}
    try:
        _session.detach()
    except errors.Error:
        pass  # the owner may be gone by now


if __name__ == "__main__":
    sys.exit(main())
