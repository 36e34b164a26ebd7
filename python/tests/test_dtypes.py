"""The dtype table against numpy, ml_dtypes and torch, as far as they are installed."""

import pytest

import millpond
from millpond import _dtypes

ROWS = [d for d in _dtypes.BY_NAME.values() if not d.name.startswith("np:")]


@pytest.mark.parametrize("row", ROWS, ids=lambda d: d.name)
def test_numpy_agrees(row):
    pytest.importorskip("numpy")
    if row.ml_dtypes:
        pytest.importorskip("ml_dtypes")
    if not row.numpy and not row.ml_dtypes:
        with pytest.raises(millpond.Unsupported, match=r"\.torch\(\)"):
            _dtypes.to_numpy(row.name)
        return
    dtype = _dtypes.to_numpy(row.name)
    assert dtype.itemsize == row.itemsize
    assert _dtypes.of_numpy(dtype) == row.name
    assert _dtypes.parse(dtype).name == row.name and _dtypes.parse(dtype.type).name == row.name


@pytest.mark.parametrize("row", ROWS, ids=lambda d: d.name)
def test_torch_agrees(row):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, row.name, None)
    if dtype is None:
        with pytest.raises(millpond.Unsupported, match=row.name):
            _dtypes.to_torch(row.name)
        pytest.skip(f"torch {torch.__version__} has no {row.name}")
    assert torch.empty(0, dtype=dtype).element_size() == row.itemsize
    assert _dtypes.of_torch(dtype) == row.name and _dtypes.parse(dtype).name == row.name


def test_torch_has_no_dtype_that_is_neither_carried_nor_refused_by_name():
    torch = pytest.importorskip("torch")
    for name in dir(torch):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            continue
        try:
            assert _dtypes.BY_NAME[_dtypes.of_torch(dtype)].itemsize == dtype.itemsize
        except millpond.Unsupported as e:
            assert str(dtype) in str(e)


@pytest.mark.parametrize("row", ROWS, ids=lambda d: d.name)
def test_dlpack_bits_fit_the_size(row):
    assert row.dlpack[1] == row.itemsize * 8


@pytest.mark.parametrize("bad", ["float7", "", None, object(), "np:O", "torch.", 5])
def test_unknown_dtypes_are_named(bad):
    with pytest.raises(millpond.InvalidArgument, match="unknown dtype"):
        _dtypes.parse(bad)


@pytest.mark.parametrize("bad", ["float7", "np:O", "np:???", "np:"])
def test_unknown_names_from_the_wire_are_refused(bad):
    pytest.importorskip("numpy")
    with pytest.raises(millpond.Unsupported, match="unknown dtype"):
        _dtypes.lookup(bad)


def test_names_that_people_write():
    assert _dtypes.parse("torch.half").name == "float16"
    assert _dtypes.parse(float).name == "float64"
    assert _dtypes.parse("double").name == "float64"
