"""The worker of the end-to-end tests: serves small things until its channel ends. Python 3.9, numpy optional."""

import gc
import hashlib
import os
import signal
import sys
import time

import millpond


class Worker:
    def __init__(self, conn):
        self.conn = conn
        self.kept = {}

    def echo(self, value):
        return value

    def hash(self, value):
        import numpy as np

        value = value.value() if isinstance(value, millpond.Ref) else value
        if hasattr(value, "data_ptr"):
            import torch

            return hashlib.sha256(bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())).hexdigest()
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()

    def keep(self, name, value):
        self.kept[name] = value

    def drop(self, name=None):
        self.kept.clear() if name is None else self.kept.pop(name)
        gc.collect()

    def get(self, name):
        return self.kept[name]

    def ticket(self, name):
        return millpond.ticket(self.kept[name])

    def redeem(self, name, text):
        self.kept[name] = millpond.redeem(text)

    def fill(self, name, value):
        self.kept[name][...] = value

    def total(self, name):
        return float(self.kept[name].sum())

    def make(self, shape, dtype, value):
        out = millpond.empty(shape, dtype)
        out[...] = value
        return out

    def post(self, shape, dtype, value, readonly=False):
        self.conn.send(self.make(shape, dtype, value), readonly=readonly)

    def into_result(self, shape, dtype, value):
        out = self.conn.result(shape, dtype)
        out[...] = value
        return out

    def type_of(self, value):
        return type(value).__module__ + "." + type(value).__name__

    def is_lazy(self):
        value = self.conn.recv(timeout=30, lazy=True)
        return isinstance(value["t"], millpond.Ref) and value["t"].shape

    def next(self):
        self.conn.recv(timeout=30)

    def next_total(self):
        return float(self.conn.recv(timeout=30)["t"].sum())

    def next_writable(self):
        return bool(self.conn.recv(timeout=30).flags.writeable)

    def send_back(self):
        self.conn.send(self.conn.recv(timeout=30))

    def numpy_file(self):
        try:
            import numpy
        except ImportError:
            return ""
        return numpy.__file__

    def attach_again(self):
        try:
            millpond.attach()
        except millpond.AlreadyAttached as e:
            return str(e)

    def bad(self):
        return {"meta": {"fn": print}}

    def pid(self):
        return os.getpid()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def spin(self, seconds):
        """Does not look whether it was cancelled."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)

    def obey(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            millpond.check_cancelled()
            time.sleep(0.01)

    def call_back(self):
        return self.conn.call("echo", 1, timeout=1, on_timeout="kill")

    def counters(self):
        return millpond.counters()

    def watch_refusals(self):
        self.refused = []
        millpond.on_refusal(self.refused.append)

    def refusals(self, timeout):
        end = time.monotonic() + timeout
        while not self.refused and time.monotonic() < end:
            time.sleep(0.002)
        return [dict(event) for event in self.refused]

    def grow(self, nbytes):
        try:
            self.kept["grown"] = millpond.empty(nbytes, "uint8")
            return True
        except millpond.OutOfMemory:
            return False

    def total_of(self, values):
        return len(values)

    def version(self):
        return list(sys.version_info[:2])


def main():
    millpond.attach()
    conn = millpond.connection(timeout=30)
    worker = Worker(conn)
    for name in dir(worker):
        if not name.startswith("_") and callable(getattr(worker, name)):
            conn.serve(name)(getattr(worker, name))
    conn.serve_forever()


if __name__ == "__main__":
    main()
