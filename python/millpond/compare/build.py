"""Compiles the small C++ libraries that allocation and replays use, as far as this machine can."""

import glob
import importlib.util
import os
import shutil
import subprocess
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def build(work, notes, wanted=("bump", "allocbench", "replaybench"), seconds=100):
    """Puts libNAME.so of those wanted into `work`; what did not go is in `notes`. The names of those that are there."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        if wanted:
            notes["build"] = "no C++ compiler: the bump allocator, calls through C++ and replays are not measured"
        return set()
    return {name for name in wanted if any(_attempt(name, command, notes, seconds) for command in _commands(name, compiler, work))}


def _commands(name, compiler, work):
    """What may compile a library, the first that does."""
    common = ["-O2", "-shared", "-fPIC", "-o", os.path.join(work, f"lib{name}.so"), os.path.join(HERE, name + ".cpp")]
    if name != "allocbench":
        return [[compiler, "-std=c++17", *common, "-ldl"]]
    if importlib.util.find_spec("torch") is None:
        return []
    include, lib = _torch_folders()
    torch = ["-w", *(f"-I{folder}" for folder in include), *common, f"-L{lib}", "-lc10_cuda", "-lc10"]
    return [[compiler, f"-std={standard}", *torch] for standard in ("c++17", "c++20")]


def _torch_folders():
    root = os.path.dirname(importlib.util.find_spec("torch").origin)
    include = [os.path.join(root, "include"), os.path.join(root, "include", "torch", "csrc", "api", "include")]
    include += glob.glob(os.path.join(os.path.dirname(root), "nvidia", "*", "include"))
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or (os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else "/usr/local/cuda")
    # The compiler's own first: torch's wheels may lack some of CUDA's headers.
    include.insert(0, os.path.join(home, "include"))
    # What the wheels lack, triton brings.
    include.append(os.path.join(os.path.dirname(root), "triton", "backends", "nvidia", "include"))
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
