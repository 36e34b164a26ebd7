"""Allocation under torch, side by side: ours, native, expandable segments, cudaMallocAsync, a bump allocator, RMM if it is there.

`python3 bench.py [--quick] [--json FILE]`. All processes start at once and wait; then one after another measures, the modes
taking turns, so that a pair of neighbours has the same conditions.
"""
import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = {"1KiB": 1 << 10, "1MiB": 1 << 20, "64MiB": 64 << 20}
CONF = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--driver", default="cuda")
    parser.add_argument("--work", default="/tmp/millpond-bench")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    return parent(options)


def parent(options):
    report = {"cases": [], "figures": {}, "notes": {}, "passed": 0, "failed": 0, "skipped": 0}
    if options.driver != "cuda" or not has_torch():
        report["notes"]["skipped"] = "needs a GPU and torch"
        report["skipped"] = 1
        print(report["notes"]["skipped"])
        save(options, report)
        return 0
    end = time.monotonic() + float(os.environ.get("MILLPOND_STAGE_SECONDS", "600"))
    os.makedirs(options.work, exist_ok=True)
    build(options.work, report)
    try:
        import rmm  # noqa: F401

        rmm_modes = ["rmm-pool", "rmm-arena", "rmm-async"]
    except ImportError as e:
        rmm_modes = []
        report["notes"]["rmm"] = f"not installed: {e}"
    pairs, others = (3, 1) if options.quick else (10, 3)
    order = []
    for n in range(pairs):
        # A B, then B A: neither always comes first.
        order += [("native", n), ("ours", n)] if n % 2 == 0 else [("ours", n), ("native", n)]
        if n < others:
            order += [(mode, n) for mode in ["bump", "expandable", "async", *rmm_modes]]
    save(options, report)
    found = {}
    # So many at a time that all have come up soon and their contexts fit.
    for at in range(0, len(order), 18):
        batch = [Child(mode, number, options) for mode, number in order[at : at + 18]]
        for one in batch:
            if time.monotonic() > end - 3:
                one.result = {"error": "not run: no time left"}
            else:
                one.measure(min(30.0, end - time.monotonic()))
            found.setdefault(one.mode, {})[one.number] = one.result
        for one in batch:
            one.stop()
        evaluate(report, found)
        save(options, report)
    for mode, results in found.items():
        errors = [r["error"] for r in results.values() if "error" in r]
        case = {"case": mode, "ok": not errors, "runs": len(results)}
        if errors:
            case["message"] = f"{len(errors)} of {len(results)} runs failed: {errors[0]}"
        report["cases"].append(case)
    report["failed"] = sum(not c["ok"] for c in report["cases"])
    report["passed"] = len(report["cases"]) - report["failed"]
    save(options, report)
    print(json.dumps(report["figures"], indent=1))
    return 1 if report["failed"] else 0


def has_torch():
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def save(options, report):
    if options.json:
        with open(options.json + ".new", "w") as file:
            json.dump(report, file, indent=1)
        os.replace(options.json + ".new", options.json)


def build(work, report):
    """Compiles the two libraries, each as far as it goes."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        report["notes"]["build"] = "no C++ compiler: the bump allocator and the calls through C++ are not measured"
        return
    source = os.path.join(HERE, "bump.cpp")
    attempt(report, "bump", [compiler, "-O2", "-shared", "-fPIC", "-o", os.path.join(work, "libbump.so"), source, "-ldl"])
    include, lib = torch_folders()
    for standard in ("c++17", "c++20"):
        command = [compiler, "-O2", f"-std={standard}", "-shared", "-fPIC", "-w", *(f"-I{folder}" for folder in include)]
        command += ["-o", os.path.join(work, "liballocbench.so"), os.path.join(HERE, "allocbench.cpp"), f"-L{lib}", "-lc10_cuda", "-lc10"]
        if attempt(report, "allocbench", command):
            break


def torch_folders():
    import glob
    import importlib.util

    root = os.path.dirname(importlib.util.find_spec("torch").origin)
    site = os.path.dirname(root)
    include = [os.path.join(root, "include"), os.path.join(root, "include", "torch", "csrc", "api", "include")]
    include += glob.glob(os.path.join(site, "nvidia", "*", "include"))
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or (os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else "/usr/local/cuda")
    # The compiler's own first: torch's wheels may lack some of CUDA's headers.
    include.insert(0, os.path.join(home, "include"))
    return [folder for folder in include if os.path.isdir(folder)], os.path.join(root, "lib")


def attempt(report, what, command):
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    except (OSError, subprocess.TimeoutExpired) as e:
        report["notes"]["build_" + what] = str(e)[:500]
        return False
    ok = done.returncode == 0
    report["notes"]["build_" + what] = f"{time.monotonic() - start:.1f} s" if ok else done.stderr[-1500:]
    print(f"build {what}: {report['notes']['build_' + what]}", flush=True)
    return ok


class Child:
    """A process of one mode. It comes up at once and measures when told."""

    def __init__(self, mode, number, options):
        self.mode, self.number, self.result = mode, number, None
        command = [sys.executable, os.path.abspath(__file__), "--child", mode, "--work", options.work]
        if options.quick:
            command.append("--quick")
        env = dict(os.environ)
        env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        if mode in CONF:
            env["PYTORCH_CUDA_ALLOC_CONF"] = CONF[mode]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines, self.errors = [], []
        self.event = threading.Condition()
        for stream, into in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            threading.Thread(target=self._feed, args=(stream, into), daemon=True).start()

    def _feed(self, stream, into):
        for line in stream:
            with self.event:
                into.append(line.rstrip())
                self.event.notify_all()
        with self.event:
            self.event.notify_all()

    def _line(self, start, seconds):
        end = time.monotonic() + seconds
        with self.event:
            while True:
                for line in self.lines:
                    if line.startswith(start):
                        return line
                if self.process.poll() is not None and not self.event.wait(0.3):
                    return None
                if time.monotonic() > end:
                    return None
                self.event.wait(0.2)

    def measure(self, seconds):
        if self._line("ready", seconds) is None:
            self.result = {"error": f"did not come up within {seconds:.0f} s (code {self.process.poll()}): {' | '.join(self.errors[-8:])[-1500:]}"}
        else:
            try:
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            except OSError:
                pass
            line = self._line("{", seconds)
            if line:
                self.result = json.loads(line)
            else:
                self.result = {"error": f"no figures (code {self.process.poll()}): {' | '.join(self.errors[-8:])[-1500:]}"}
        self.stop()

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def child(options):
    mode = options.child
    keep = None
    import torch

    if mode == "ours":
        import millpond

        keep = millpond.Arena(driver="cuda", limit="30%")
        millpond.torch.install()
    elif mode == "bump":
        path = os.path.join(options.work, "libbump.so")
        torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(path, "bump_malloc", "bump_free"))
    elif mode.startswith("rmm"):
        keep = rmm_resource(mode)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(measure(torch, options, mode)), flush=True)
    del keep
    os._exit(0)


def rmm_resource(mode):
    import rmm
    import torch
    from rmm.allocators.torch import rmm_torch_allocator

    cuda = rmm.mr.CudaMemoryResource()
    if mode == "rmm-pool":
        resource = rmm.mr.PoolMemoryResource(cuda, initial_pool_size=8 << 30)
    elif mode == "rmm-arena":
        resource = rmm.mr.ArenaMemoryResource(cuda, 8 << 30)
    else:
        resource = rmm.mr.CudaAsyncMemoryResource(initial_pool_size=8 << 30)
    rmm.mr.set_current_device_resource(resource)
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    return resource


def measure(torch, options, mode):
    figures = {}
    clock = time.perf_counter
    if mode != "bump":
        times = []
        blocks = []
        for _ in range(4):
            start = clock()
            blocks.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
            times.append((clock() - start) * 1e6)
        del blocks
        figures["growth_1GiB_us"] = min(times[1:])
    count, batches = (2000, 5) if options.quick else (4000, 9)
    for name, nbytes in SIZES.items():
        for _ in range(300):
            x = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            del x
        found = []
        for _ in range(batches):
            start = clock()
            for _ in range(count):
                x = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                del x
            found.append((clock() - start) / count * 1e6)
        figures[f"empty_del_{name}_us"] = statistics.median(found)
    try:
        library = ctypes.CDLL(os.path.join(options.work, "liballocbench.so"))
    except OSError as e:
        figures["cpp"] = f"not measured: {e}"
        return figures
    for name in ("pair", "mixed", "threads"):
        getattr(library, "bench_" + name).restype = ctypes.c_double
    for name, nbytes in SIZES.items():
        figures[f"cpp_pair_{name}_ns"] = library.bench_pair(ctypes.c_size_t(nbytes), 20000 if options.quick else 60000)
    figures["cpp_mixed_1000_live_ns"] = library.bench_mixed(1000, 20000 if options.quick else 60000)
    streams = [torch.cuda.Stream() for _ in range(8)]
    handles = (ctypes.c_uint64 * 8)(*[s.cuda_stream for s in streams])
    for name in ("1KiB", "1MiB"):
        figures[f"cpp_8_threads_{name}_ns"] = library.bench_threads(ctypes.c_size_t(SIZES[name]), 10000, handles, 8)
    return figures


def evaluate(report, found):
    """Medians by mode, ratios by pair."""
    figures = {}
    good = {mode: {n: r for n, r in results.items() if "error" not in r} for mode, results in found.items()}
    for mode, results in good.items():
        keys = {key for r in results.values() for key, v in r.items() if isinstance(v, (int, float))}
        figures[mode] = {key: round(statistics.median(r[key] for r in results.values() if key in r), 3) for key in sorted(keys)}
        figures[mode]["runs"] = len(results)
    ours, native = good.get("ours", {}), good.get("native", {})
    pairs = [n for n in ours if n in native]
    if pairs:
        keys = [k for k in figures["ours"] if k != "runs" and all(k in native[n] and k in ours[n] for n in pairs)]
        ratios = {k: [ours[n][k] / native[n][k] for n in pairs] for k in keys}
        figures["ours_over_native_median_of_pairs"] = {k: round(statistics.median(v), 3) for k, v in ratios.items()}
        figures["ours_over_native_pairs"] = {k: [round(x, 2) for x in v] for k, v in ratios.items() if k.startswith("empty")}
    if "bump" in figures and "ours" in figures:
        figures["ours_over_bump"] = {k: round(figures["ours"][k] / v, 3) for k, v in figures["bump"].items() if k in figures["ours"] and k != "runs"}
    figures["targets"] = targets(figures)
    report["figures"] = figures


def targets(figures):
    """The targets of the issue on the allocator, each with what was found."""
    rows = []

    def row(what, value, most):
        if value is not None:
            rows.append({"what": what, "found": value, "at_most": most, "met": value <= most})

    native, bump, ours = (figures.get(k, {}) for k in ("ours_over_native_median_of_pairs", "ours_over_bump", "ours"))
    for size in SIZES:
        row(f"torch.empty+del {size}, ours / bump", bump.get(f"empty_del_{size}_us"), 1.1)
        row(f"torch.empty+del {size}, ours / native, median of pairs", native.get(f"empty_del_{size}_us"), 0.9)
        row(f"alloc+free alone {size}, ours / native", native.get(f"cpp_pair_{size}_ns"), 0.6)
    row("1,000 live blocks, ours / native", native.get("cpp_mixed_1000_live_ns"), 0.6)
    for size in ("1KiB", "1MiB"):
        key = f"cpp_8_threads_{size}_ns"
        best = min((f[key] for m, f in figures.items() if isinstance(f, dict) and m in ("native", "expandable", "async", "rmm-pool", "rmm-arena", "rmm-async") and key in f), default=None)
        row(f"8 threads on 8 streams {size}, ours / the best other", round(ours[key] / best, 3) if best and key in ours else None, 1.0)
    row("growth of 1 GiB, µs", ours.get("growth_1GiB_us"), 500)
    return rows


if __name__ == "__main__":
    sys.exit(main())
