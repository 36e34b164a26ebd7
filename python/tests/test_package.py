"""The package itself: old syntax, no imports of others, names."""

import glob
import os
import py_compile
import re
import subprocess
import sys

import pytest

import millpond
from conftest import PACKAGE

FILES = sorted(glob.glob(os.path.join(PACKAGE, "**", "*.py"), recursive=True))


def python39():
    for pattern in ("~/.pyenv/versions/3.9.*/bin/python", "/usr/bin/python3.9"):
        for path in glob.glob(os.path.expanduser(pattern)):
            return path
    return None


@pytest.mark.parametrize("path", FILES, ids=[os.path.relpath(f, PACKAGE) for f in FILES])
def test_every_file_compiles_as_python_39(path, tmp_path):
    import ast

    with open(path) as f:
        ast.parse(f.read(), path, feature_version=(3, 9))
    py_compile.compile(path, str(tmp_path / "x.pyc"), doraise=True)


def test_a_real_python_39_imports_the_package():
    python = python39()
    if python is None:
        pytest.skip("no Python 3.9 here")
    code = "import millpond, millpond.channel, millpond.arena, millpond._tree, millpond._decode; print(millpond.__version__)"
    done = subprocess.run([python, "-c", code], env={**os.environ, "PYTHONPATH": PACKAGE}, capture_output=True, text=True)
    assert done.stdout.strip() == millpond.__version__, done.stderr


def test_importing_imports_neither_numpy_nor_torch_nor_the_library():
    code = "import sys, millpond; from millpond import _native; print([m for m in ('numpy','torch') if m in sys.modules], _native._loaded)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[] None", done.stderr


def test_only_the_standard_library_is_imported_at_the_top():
    import ast

    allowed = set(getattr(sys, "stdlib_module_names", ())) | {"millpond"}
    if len(allowed) == 1:
        pytest.skip("needs Python 3.10")
    for path in FILES:
        if os.sep + "millpond" + os.sep not in path or os.path.basename(path).startswith(("torch", "_torch")) or path.endswith("integrations" + os.sep + "ray.py"):
            continue
        if os.sep + "integrations" + os.sep in path:
            continue  # a door imports what it is the door of
        with open(path) as f:
            for node in ast.parse(f.read()).body:
                names = []
                if isinstance(node, ast.Import):
                    names = [a.name for a in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module]
                for name in names:
                    assert name.split(".")[0] in allowed, f"{path} imports {name}"


def header():
    path = os.path.join(os.path.dirname(PACKAGE), "torch-plugin", "include", "millpond.h")
    if not os.path.exists(path):
        pytest.skip("not in the source tree")
    with open(path) as f:
        return f.read()


def test_the_functions_are_those_of_the_header():
    from millpond import _native

    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header(), flags=re.S)
    declared = dict(re.findall(r"\b(millpond_\w+)\(([^)]*)\)\s*;", text))
    for name, (_, arguments) in {**_native._BLOCKING, **_native._QUICK}.items():
        words = declared[name].strip()
        count = 0 if words in ("", "void") else words.count(",") + 1
        assert count == len(arguments), name
    version = re.search(r"#define MILLPOND_ABI_VERSION (\d+)", text)
    assert int(version.group(1)) == _native.ABI_VERSION


def test_every_code_has_its_exception():
    from millpond import errors

    words = re.search(r"[Cc]odes(?: by name)?:(.*?Internal)", header(), re.S).group(1).replace("*", " ").split()
    assert len(words) > 10
    for code in words:
        if code != "Internal":
            assert errors.BY_CODE[code].__name__ == code
    assert isinstance(errors.make("Timeout", "x"), TimeoutError) and isinstance(errors.make("CannotCross", "x"), TypeError)
    error = errors.make("OutOfMemory", "asked 5", {"limit": 3})
    assert error.details == {"limit": 3} and str(error) == "asked 5" and isinstance(error, MemoryError)
    assert errors.make("SomethingNew", "x").code == "SomethingNew"


def test_a_missing_library_says_what_to_do(monkeypatch):
    from millpond import _native

    monkeypatch.setattr(_native, "_loaded", None)
    monkeypatch.setenv("MILLPOND_LIBRARY", "/nonexistent/lib.so")
    with pytest.raises(millpond.Unsupported, match="MILLPOND_LIBRARY"):
        _native.control("status")


def test_another_library_is_refused_by_name(monkeypatch):
    from millpond import _native

    import ctypes.util

    monkeypatch.setattr(_native, "_loaded", None)
    monkeypatch.setenv("MILLPOND_LIBRARY", ctypes.util.find_library("c") or "libc.so.6")
    with pytest.raises(millpond.Unsupported, match="no function millpond_"):
        _native.control("status")


def test_limits_that_people_write():
    from millpond.arena import parse_bytes

    assert parse_bytes("80%") == "80%" and parse_bytes("12.5 %") == "12.5%"
    assert parse_bytes("6GiB") == 6 << 30 and parse_bytes("1.5 KiB") == 1536 and parse_bytes("2GB") == 2 * 10**9
    assert parse_bytes("6G") == parse_bytes("6 gib") == 6 << 30 and parse_bytes("1.5KB") == 1500 and parse_bytes("7b") == 7
    assert parse_bytes(4096) == 4096 and parse_bytes("4096") == 4096 and parse_bytes(None) is None
    for bad in ("", "80 percent", "0", "-5", "0%", "101%", "GiB", 0, -1, "1e9", True):
        with pytest.raises(millpond.InvalidArgument):
            parse_bytes(bad)


def test_the_workers_path_has_this_package_and_nothing_else(tmp_path):
    folder = os.path.join(os.path.dirname(millpond.__file__), "_worker_path")
    assert [n for n in os.listdir(folder) if n != "__pycache__"] == ["millpond"]
    code = (
        "import millpond, millpond.arena, millpond._decode; from millpond import _native, Ref\n"
        "print(millpond.__version__, millpond.__file__, _native.__file__, millpond.Arena is millpond.arena.Arena)"
    )
    for python in filter(None, (sys.executable, python39())):
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run([python, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
        real = os.path.dirname(millpond.__file__)
        expected = [millpond.__version__, os.path.join(real, "__init__.py"), os.path.join(real, "_native.py"), "True"]
        assert done.stdout.split() == expected, done.stderr


def test_attach_without_an_environment_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("MILLPOND_SOCKET", raising=False)
    monkeypatch.delenv("MILLPOND_KEY", raising=False)
    with pytest.raises(millpond.InvalidArgument, match="MILLPOND_SOCKET is not set"):
        millpond.attach()


def test_worker_env(monkeypatch):
    from millpond.arena import Arena

    arena = Arena.__new__(Arena)
    arena.socket, arena._key, arena._open, arena._owner = "/tmp/x/s", "secret", False, None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync,max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    env = arena.worker_env("denoiser", EXTRA=5)
    assert env["MILLPOND_SOCKET"] == "/tmp/x/s" and env["MILLPOND_KEY"] == "secret" and env["MILLPOND_NAME"] == "denoiser"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64" and "PYTORCH_ALLOC_CONF" not in env
    assert env["PYTHONPATH"].split(os.pathsep)[0] == "/somewhere" and env["EXTRA"] == "5"
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert arena.worker_env("d", CUDA_DEVICE_MAX_CONNECTIONS=32)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    assert arena.worker_env("d")["CUDA_DEVICE_MAX_CONNECTIONS"] == "4"
    assert [os.path.basename(p) for p in env["PYTHONPATH"].split(os.pathsep)] == ["somewhere", "_worker_path"]
    assert "secret" not in repr(arena) and "secret" not in str(arena)
