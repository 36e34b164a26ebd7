"""Compiles the two small C++ libraries that the allocation part uses, as far as this machine can."""

import glob
import importlib.util
import os
import shutil
import subprocess
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def build(work, notes, seconds=100):
    """Puts libbump.so and liballocbench.so into `work`; what did not go is in `notes`. The path of libbump.so, or None."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        notes["build"] = "no C++ compiler: the bump allocator and the calls through C++ are not measured"
        return None
    bump = os.path.join(work, "libbump.so")
    source = os.path.join(HERE, "bump.cpp")
    made = _attempt("bump", [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-o", bump, source, "-ldl"], notes, seconds)
    if importlib.util.find_spec("torch") is None:
        return bump if made else None
    include, lib = _torch_folders()
    for standard in ("c++17", "c++20"):
        command = [compiler, "-O2", f"-std={standard}", "-shared", "-fPIC", "-w", *(f"-I{folder}" for folder in include)]
        command += ["-o", os.path.join(work, "liballocbench.so"), os.path.join(HERE, "allocbench.cpp"), f"-L{lib}", "-lc10_cuda", "-lc10"]
        if _attempt("allocbench", command, notes, seconds):
            break
    return bump if made else None


def _torch_folders():
    root = os.path.dirname(importlib.util.find_spec("torch").origin)
    include = [os.path.join(root, "include"), os.path.join(root, "include", "torch", "csrc", "api", "include")]
    include += glob.glob(os.path.join(os.path.dirname(root), "nvidia", "*", "include"))
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or (os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else "/usr/local/cuda")
    # The compiler's own first: torch's wheels may lack some of CUDA's headers.
    include.insert(0, os.path.join(home, "include"))
    return [folder for folder in include if os.path.isdir(folder)], os.path.join(root, "lib")


def _attempt(what, command, notes, seconds):
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as e:
        notes["build_" + what] = str(e)[:500]
        return False
    notes["build_" + what] = f"{time.monotonic() - start:.1f} s" if done.returncode == 0 else done.stderr[-1500:]
    return done.returncode == 0
