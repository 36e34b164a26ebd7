"""torch CPU tensors: every dtype, views, sharing, lifetime; over the stand-in for the native library."""

import gc

import pytest

import millpond
from millpond import _dtypes

torch = pytest.importorskip("torch")


def cross(pair, value, **how):
    a, b = pair
    sent = a.send(value)
    return b.recv(timeout=5, **how), sent


def same(a, b):
    assert type(b) is torch.Tensor and a.dtype == b.dtype and a.shape == b.shape
    assert raw(a) == raw(b)


def raw(t):
    """The bytes of every element, whatever the type."""
    size = t.element_size()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]
    return t.detach().view(carrier).tolist()


def patterned(shape, dtype):
    count = 1
    for n in shape:
        count *= n
    raw = torch.arange(count * torch.empty(0, dtype=dtype).element_size(), dtype=torch.int64) % (2 if dtype == torch.bool else 60)
    return raw.to(torch.uint8).view(dtype).view(shape)


DTYPES = [d.name for d in _dtypes.BY_NAME.values() if hasattr(torch, d.name)]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_alone_and_as_views(pair, fake, name):
    t = patterned((4, 6), getattr(torch, name))
    got, sent = cross(pair, [t])
    same(t, got[0])
    got, sent = cross(pair, {"t": t, "row": t[1], "tt": t.t(), "some": t[1:3, ::2]})
    assert sent.tensors == 1
    for key, mine in (("t", t), ("row", t[1]), ("tt", t.t()), ("some", t[1:3, ::2])):
        its = got[key]
        assert its.dtype == mine.dtype and its.shape == mine.shape and its.stride() == mine.stride()
        assert raw(its) == raw(mine)
    got["t"].view(torch.uint8)[1, 0] = 1
    assert got["row"].view(torch.uint8)[0] == 1, "still one storage"
    del got, its
    gc.collect()
    assert fake.live == 0 and not fake.managed


VIEWS = {
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(3, 0, 2),
    "offset": lambda: torch.arange(50)[13:],
    "steps": lambda: torch.arange(60.0).view(3, 20)[:, 1::3],
    "permuted": lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": lambda: torch.nn.Parameter(torch.rand(3, 3)),
    "needs grad": lambda: torch.rand(3, requires_grad=True) * 2,
    "conjugate": lambda: torch.rand(4, dtype=torch.complex64).conj(),
    "negative bit": lambda: torch.rand(4, dtype=torch.complex64).conj().imag,
    "ones": lambda: torch.rand(1, 1, 5)[:, :, 2:3],
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_kind_of_view(pair, fake, name):
    t = VIEWS[name]()
    (got,), sent = cross(pair, [t])
    assert type(got) is torch.Tensor and not got.requires_grad and got.dtype == t.dtype
    assert got.shape == t.shape and torch.equal(got, t.detach())
    assert sent.copies >= (1 if "bit" in name or name == "conjugate" else 0)
    del got
    gc.collect()
    assert fake.live == 0


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.empty(3, device="meta"), "device meta"),
        (lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), "nested"),
        (lambda: torch.float32, "torch.dtype"),
    ],
)
def test_tensors_that_cannot_cross_are_named_by_path(pair, make, words):
    with pytest.raises(millpond.CannotCross, match=words) as e:
        pair[0].send({"meta": [1, make()]})
    assert e.value.path == 'out["meta"][1]'


def test_the_storage_lives_as_long_as_any_view(pair, fake):
    (got,), _ = cross(pair, [torch.arange(100.0)])
    view = got[50:60]
    del got
    gc.collect()
    assert fake.live == 1 and view.sum() == 545
    del view
    gc.collect()
    assert fake.live == 0 and len(fake.released) == 1


def test_a_ref_gives_torch_numpy_and_dlpack_and_is_released_once(pair, fake):
    np = pytest.importorskip("numpy")
    ref, _ = cross(pair, torch.arange(12.0).view(3, 4)[1:], lazy=True)
    assert isinstance(ref, millpond.Ref) and ref.dtype == "float32" and ref.shape == (2, 4)
    t, n, d = ref.torch(), ref.numpy(), torch.utils.dlpack.from_dlpack(ref)
    t[0, 0] = 99
    assert n[0, 0] == 99 and d[0, 0] == 99
    assert isinstance(ref.value(), torch.Tensor)
    del ref, t, d
    gc.collect()
    assert fake.live == 1 and np.array_equal(n[1], [8, 9, 10, 11])
    del n
    gc.collect()
    assert fake.live == 0 and len(fake.released) == 1


def test_forwarding_an_opened_ref_still_names_the_import(pair, fake):
    a, b = pair
    a.send(torch.arange(4))
    ref = b.recv(timeout=5, lazy=True)
    t = ref.torch()
    b.send([ref, ref])
    assert [x[3] for x in fake.sent[-1][1]] == [ref._memory.handle]
    assert a.recv(timeout=5)[1].tolist() == [0, 1, 2, 3] and t.sum() == 6


def test_numpy_goes_as_numpy_and_torch_as_torch(pair):
    np = pytest.importorskip("numpy")
    got, _ = cross(pair, {"n": np.arange(3), "t": torch.arange(3), "shape": torch.rand(2, 3).shape})
    assert type(got["n"]) is np.ndarray and type(got["t"]) is torch.Tensor and got["shape"] == (2, 3)


def test_views_shared_between_numpy_and_torch_stay_shared(pair):
    np = pytest.importorskip("numpy")
    n = np.arange(10.0)
    got, sent = cross(pair, {"n": n, "t": torch.from_numpy(n)[5:]})
    assert sent.tensors == 1
    got["t"][0] = -1
    assert got["n"][5] == -1


def test_a_misaligned_tensor_still_arrives(pair, fake):
    import ctypes

    buffer = (ctypes.c_char * 64).from_buffer_copy(bytes(range(64)))
    fake.queues[2].put((b'[["m"],{"$":["t","t",0,1,"int32",[2],0]}]', [(buffer, 64, -1, 0)]))
    got = pair[1].recv(timeout=5)
    assert got.tolist() == [int.from_bytes(bytes(range(1, 5)), "little"), int.from_bytes(bytes(range(5, 9)), "little")]


def test_hostile_bounds_never_reach_dlpack(pair, fake):
    import ctypes

    for text in (b'["t","t",0,0,"float32",[17],0]', b'["t","t",0,60,"float32",[2],0]', b'["v","t",0,0,"float32",[2,2],[100,1]]'):
        buffer = (ctypes.c_char * 64)()
        fake.queues[2].put((b'[["m"],{"$":' + text + b"}]", [(buffer, 64, -1, 0)]))
        with pytest.raises(millpond.Protocol, match="of 64"):
            pair[1].recv(timeout=5)
    gc.collect()
    assert fake.live == 0 and not fake.managed
