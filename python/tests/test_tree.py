"""Values that cross: encoding and decoding over the stand-in for the native library."""

import dataclasses
import gc
import json
import math

import pytest

import millpond
from millpond import _decode, _tree


def cross(pair, value, **how):
    a, b = pair
    a.send(value)
    return b.recv(timeout=5, **how)


PLAIN = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**64) - 5,
    10**5000,
    0.1,
    -0.0,
    1e308,
    float("inf"),
    float("-inf"),
    "",
    'äß漢🙂\x00"\\',
    "\ud800 alone",
    b"",
    b"\x00\xff" * 10,
    1 + 2j,
    [],
    {},
    (),
    [[]],
    [1, [2, (3, {"k": (4,)})]],
    {"a": {"b": {"c": None}}},
    {1: "int", "1": "str", None: 0, True: "bool also 1", 2.5: 1, (1, "x"): [2], b"k": 3},
    {"$": 1},
    {"$": ["t", 1, 2]},
    {"$": ["t"], "other": {"$": {"$": None}}},
    {"x": [1, 2], 5: {"y": 1}},
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_back_equal_and_of_the_same_type(pair, value):
    got = cross(pair, value)
    assert got == value and type(got) is type(value)
    if isinstance(value, float):
        assert math.copysign(1, got) == math.copysign(1, value)


def test_nan_is_valid_json(pair, fake):
    got = cross(pair, [float("nan"), 1.0])
    assert math.isnan(got[0]) and got[1] == 1.0
    json.loads(fake.sent[0][0], parse_constant=lambda c: pytest.fail(c))


def test_order_of_keys_is_kept(pair):
    assert list(cross(pair, {"z": 1, "a": 2, 3: 4, "b": 5})) == ["z", "a", 3, "b"]


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 100_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_every_size(pair, fake, size, kind):
    data = bytes(i * 7 % 256 for i in range(size))
    got = cross(pair, {"b": kind(data)})["b"]
    assert type(got) is kind and bytes(got) == data
    assert len(fake.sent[0][1]) == (1 if size > 1024 else 0), "large ones go through memory, small ones through the tree"
    del got
    gc.collect()
    assert fake.live == 0


def test_memoryview_keeps_its_memory(pair, fake):
    got = cross(pair, memoryview(bytearray(b"abc" * 1000)))
    part = got[3:6]
    del got
    gc.collect()
    assert fake.live == 1 and bytes(part) == b"abc"
    part.release()
    del part
    gc.collect()
    assert fake.live == 0


def test_subclasses_of_plain_types_cross_as_the_plain_type(pair):
    import collections
    import enum

    class Colour(enum.IntEnum):
        RED = 3

    Point = collections.namedtuple("Point", "x y")
    assert cross(pair, [Colour.RED, Point(1, 2), collections.OrderedDict(a=1)]) == [3, (1, 2), {"a": 1}]


def test_the_same_list_twice_is_sent_by_value(pair):
    inner = [1]
    assert cross(pair, [inner, inner]) == [[1], [1]]


class Opaque:
    pass


@pytest.mark.parametrize(
    "value, path",
    [
        ({"meta": {"fn": print}}, 'out["meta"]["fn"]'),
        ([1, (2, {3})], "out[1][1]"),
        (Opaque(), "out"),
        ({(1, Opaque()): 1}, "out[(1, "),
        ({"a": [Opaque]}, 'out["a"][0]'),
        ({5: {"x": iter([])}}, 'out[5]["x"]'),
        ({"it": (i for i in ())}, 'out["it"]'),
    ],
)
def test_what_cannot_cross_is_named_by_its_path(pair, fake, value, path):
    with pytest.raises(millpond.CannotCross) as e:
        pair[0].send(value)
    assert str(e.value).startswith(path) and e.value.path.startswith(path)
    assert isinstance(e.value, TypeError) and not fake.sent


def test_a_cycle_is_refused_with_its_path(pair):
    a = {"list": []}
    a["list"].append(a)
    with pytest.raises(millpond.CannotCross, match=r'out\["list"\]\[0\] cannot cross: it contains itself: it is out'):
        pair[0].send(a)


def test_too_deep_is_refused_not_a_crash(pair):
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(millpond.CannotCross, match="deeper than 100"):
        pair[0].send(value)
    while value:  # taken apart here: CPython's own deallocation of deep lists is another matter
        value = value[0]
    ok = []
    for _ in range(95):
        ok = [ok]
    assert cross(pair, ok) == ok


@dataclasses.dataclass
class Mesh:
    vertices: object
    faces: object
    name: str = "m"


def test_a_dataclass_crosses_once_registered(pair, registry):
    with pytest.raises(millpond.CannotCross, match=r"not registered: millpond.register\(Mesh\)"):
        pair[0].send({"m": Mesh([1.0], [2])})
    millpond.register(Mesh)
    got = cross(pair, {"m": Mesh([1.0], (2,))})["m"]
    assert got == Mesh([1.0], (2,))


def test_registered_type_by_functions_and_its_versions(pair, registry):
    class Celsius:
        def __init__(self, degrees):
            self.degrees = degrees

    millpond.register(Celsius, lambda c: {"d": c.degrees}, lambda f: Celsius(f["d"]), name="temp", version=2)
    assert cross(pair, [Celsius(20)])[0].degrees == 20
    pair[0].send(Celsius(3))
    millpond.register(Celsius, lambda c: {"d": c.degrees}, lambda f: Celsius(f["d"]), name="temp", version=3)
    with pytest.raises(millpond.Unsupported, match="of version 2; version 3 is registered"):
        pair[1].recv(timeout=5)


class Odd:
    """Has no fields that anybody knows of."""

    def __init__(self, secret):
        self.secret = secret

    def __eq__(self, other):
        return type(other) is Odd and other.secret == self.secret


def test_pickle_is_for_types_that_both_sides_registered_for_it(pair, registry, fake):
    with pytest.raises(millpond.CannotCross, match=r"out\[0\] cannot cross: a value of type .*Odd"):
        pair[0].send([Odd(1)])
    millpond.register(Odd, pickle=True, version=3)
    before = millpond.tiers.falls()
    assert cross(pair, {"x": [Odd({"deep": (1, 2.5)}), 4]}) == {"x": [Odd({"deep": (1, 2.5)}), 4]}
    text, ranges = fake.sent[-1]
    assert b'["p","Odd",3,["t","b",0,0,"uint8",' in text and b"deep" not in text, "marked, and not in the message"
    assert len(ranges) == 1, "in a memfd, however small"
    why = "a Odd crosses as a pickle: it is registered for that"
    assert millpond.tiers.falls()[why] == before.get(why, 0) + 1
    pair[0].send(Odd(2))
    message = pair[1]._wait(pair[1]._next_value, 5)
    millpond.register(Odd, lambda value: {}, lambda fields: Odd(0), version=3)
    with pytest.raises(millpond.Unsupported, match="received a 'Odd' as a pickle; it is registered here to come by its fields"):
        message.decode()
    with pytest.raises(millpond.InvalidArgument, match="not both"):
        millpond.register(Odd, lambda value: {}, lambda fields: None, pickle=True)


def test_a_pickle_that_cannot_be_or_is_another_type_is_named(pair, registry):
    millpond.register(Odd, pickle=True)
    with pytest.raises(millpond.CannotCross, match=r'out\["bad"\] cannot cross: a Odd that cannot be pickled: .*lambda'):
        pair[0].send({"good": 1, "bad": Odd(lambda: 0)})
    import pickle

    from millpond import _types

    for data, words in ((pickle.dumps(7), "holds a int"), (b"no pickle", "could not be read")):
        with pytest.raises(millpond.Protocol, match=words):
            _types.unpickle("Odd", 1, data)
    with pytest.raises(millpond.Unsupported, match="not registered"):
        _types.unpickle("Even", 1, pickle.dumps(7))


def test_a_mesh_crosses_by_its_fields_and_keeps_what_it_shares(pair, registry):
    np = pytest.importorskip("numpy")

    class Mesh3:  # as trimesh's: no dataclass, arrays that may be missing
        def __init__(self, vertices, faces, normals=None, extras=None):
            self.vertices, self.faces, self.normals, self.extras = vertices, faces, normals, extras or {}

    keys = ("vertices", "faces", "normals", "extras")
    millpond.register(Mesh3, lambda mesh: {key: getattr(mesh, key) for key in keys}, lambda fields: Mesh3(**fields), name="mesh", version=2)
    vertices = np.arange(12, dtype=np.float32).reshape(4, 3)
    mesh = Mesh3(vertices, np.array([[0, 1, 2], [1, 2, 3]], np.int32), None, {"first": vertices[:1], "uv": np.zeros((0, 2))})
    got = cross(pair, {"meshes": [mesh, mesh]})["meshes"]
    assert all(type(one) is Mesh3 and np.array_equal(one.vertices, vertices) and one.normals is None for one in got)
    assert got[0].faces.dtype == np.int32 and got[0].extras["uv"].shape == (0, 2)
    got[0].vertices[0, 0] = 99
    assert got[0].extras["first"][0, 0] == 99 and got[1].vertices[0, 0] == 99, "one memory, as at the sender"


def test_an_unregistered_record_is_named_at_the_receiver(pair, registry):
    millpond.register(Mesh, name="mesh")
    pair[0].send(Mesh(1, 2))
    from millpond import _types

    _types._by_name.clear()
    with pytest.raises(millpond.Unsupported, match="'mesh' \\(version 1\\), which is not registered"):
        pair[1].recv(timeout=5)


def test_a_field_that_cannot_cross_is_named(pair, registry):
    millpond.register(Mesh)
    with pytest.raises(millpond.CannotCross) as e:
        pair[0].send([Mesh(1, {"x": print})])
    assert e.value.path == 'out[0].faces["x"]'


HOSTILE = [
    '[["m"],{"$":["t","n",0,0,"float32",[1000],0]}]',
    '[["m"],{"$":["t","n",0,1000,"float32",[1],0]}]',
    '[["m"],{"$":["t","n",0,-4,"float32",[1],0]}]',
    '[["m"],{"$":["t","n",0,0,"float32",[-1],0]}]',
    '[["m"],{"$":["t","n",0,0,"float32",[2,2],[1]]}]',
    '[["m"],{"$":["t","n",0,0,"float32",[2],[-1]]}]',
    '[["m"],{"$":["t","n",0,0,"float32",[4],[99999999999999999999]]}]',
    '[["m"],{"$":["t","n",9,0,"float32",[1],0]}]',
    '[["m"],{"$":["t","n",-1,0,"float32",[1],0]}]',
    '[["m"],{"$":["t","t",0,0,"float32",[1000],0]}]',
    '[["m"],{"$":["t","b",0,0,"uint8",[1000],0]}]',
    '[["m"],{"$":["t","b",0,0,"uint8",["x"],0]}]',
    '[["m"],{"$":["t","b",0,0,"uint8",[1000,0],0]}]',
    '[["m"],{"$":["t","a",0,0,"uint8",[1000],[0]]}]',
    '[["m"],{"$":["t","m",0,0,"uint8",[1000,0],0]}]',
    '[["m"],{"$":["t","m",0,0,"uint8",[],0]}]',
    '[["m"],{"$":["t","b",0,0.5,"uint8",[1],0]}]',
    '[["m"],{"$":["t","b",0,0,"uint8",[1.5],0]}]',
    '[["m"],{"$":["t","n",0,0,"float32",[99999999999999999999,0],0]}]',
    '[["m"],{"$":["t","n",-1,0,"float32",[99999999999999999999,0],0]}]',
    '[["m"],{"$":["f",' + "9" * 400 + "]}]",
    '[["m"],' + "9" * 5000 + "]",
    '[["m"],]',
    '[["m"],1 ]',
    '[["m"],1],2]',
    '[["m"],{"$":["t","n",0.5,0,"float32",[1],0]}]',
    '[["m"],{"$":["t","n",0,0.5,"float32",[1],0]}]',
    '[["m"],{"$":["t"]}]',
    '[["m"],{"$":["zz",1]}]',
    '[["m"],{"$":["h",["t","t",0,0,"float32",[1000],0],1,[]]}]',
    '[["m"],{"$":["h",["t","t",9,0,"float32",[1],0],1,[[4,1,1]]]}]',
    '[["m"],{"$":["h",{"t":1},1,[]]}]',
    '[["m"],{"$":["h",["t"],1,[]]}]',
    '[["m"],{"$":["p","Odd",1,["t","b",0,0,"uint8",[1],0]]}]',
    '[["m"],{"$":["p",[],1,["t","b",9,0,"uint8",[1],0]]}]',
    '[["m"],{"$":{}}]',
    '[["m"],{"$":[]}]',
    '[["m"],{"$":["b","*"]}]',
    '[["m"],{"$":["i","99x"]}]',
    '[["m"],{"$":["d",[[[],1]]]}]',
    '[["m"],{"$":["d",[1]]}]',
    '[["m"],' + '{"$":["u",[' * 5000 + "]]}" * 5000 + "]",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_malformed_value_is_a_named_error_and_lets_go(fake, pair, text):
    pytest.importorskip("numpy")
    buffer = (__import__("ctypes").c_char * 64)()
    fake.queues[2].put((text.encode(), [(buffer, 64, -1, 0)]))
    with pytest.raises((millpond.Protocol, millpond.Unsupported)):
        pair[1].recv(timeout=5)
    gc.collect()
    assert fake.live == 0


NOT_OURS = ["", "{}", "[1]", "[[]]", "[{},1]", "nonsense", '[["m"]', '[["m"] ,1]', '["m",1]', "[" * 100_000]
NOT_OURS += [f"[{header},1]" for header in ('[]', '[""]', '["re",1]', '["zz",1]', "[5]", "[null]", "[[]]", "[{}]", '["k"]', '["k",1]')]
NOT_OURS += [f"[{header},1]" for header in ('["c"]', '["c",1]', '["c",[],"f",null]', '["c",1,2,null]', '["c",1,"f",[]]', '["c",1,"f",null,1]')]
NOT_OURS += [f"[{header},1]" for header in ('["r"]', '["r",[]]', '["e",{}]', '["x"]', '["x","1"]')]


@pytest.mark.parametrize("text", NOT_OURS, ids=range(len(NOT_OURS)))
def test_a_message_that_is_not_ours_is_refused_and_lets_go(fake, pair, text):
    fake.queues[2].put((text.encode(), [((__import__("ctypes").c_char * 64)(), 64, -1, 0)]))
    pair[0].send("after")
    with pytest.raises(millpond.Protocol, match="not ours") as e:
        pair[1].recv(timeout=5)
    del e
    assert fake.live == 0 and pair[1].recv(timeout=5) == "after"


def test_unknown_dtype_is_named(fake, pair):
    fake.queues[2].put((b'[["m"],{"$":["t","n",0,0,"float7",[1],0]}]', [((__import__("ctypes").c_char * 64)(), 64, -1, 0)]))
    with pytest.raises(millpond.Unsupported, match="float7"):
        pair[1].recv(timeout=5)


def test_a_message_that_is_dropped_undecoded_lets_its_imports_go(fake, pair):
    pair[0].send(b"x" * 5000)
    message = pair[1]._receive(100)
    assert fake.live == 1
    del message
    gc.collect()
    assert fake.live == 0


def test_a_refusal_deep_in_a_big_tree_names_the_right_one(pair):
    value = {"rows": [{"v": [i, (i, str(i))]} for i in range(50)]}
    value["rows"][33]["v"][1] = (1, {"deep": object()})
    with pytest.raises(millpond.CannotCross) as e:
        pair[0].send(value)
    assert e.value.path == 'out["rows"][33]["v"][1][1]["deep"]'


def test_encode_keeps_pairs_and_plain_dicts_apart():
    assert _tree.encode({"a": 1}).text == b'{"a":1}'
    assert _tree.encode({"$": 1}).text == b'{"$":["d",[["$",1]]]}'


@pytest.mark.parametrize("text", [b"\xff", b'[["m"],"\xc3"]'])
def test_what_is_no_text_is_refused_as_not_ours(monkeypatch, text):
    from types import SimpleNamespace

    from millpond import _native

    def receive(channel, timeout, flags, streams, count, at, size, out):
        data = _native._HEAD.__self__.pack(1, 7) + _native.TENSOR.pack(0, 64, 0, 5, -1, 0) + text
        __import__("ctypes").memmove(at, data, len(data))
        return len(data)

    released = []
    monkeypatch.setattr(_native, "_loaded", SimpleNamespace(receive=receive))
    monkeypatch.setattr(_native, "import_release", released.append)
    with pytest.raises(millpond.Protocol, match="not ours"):
        _decode.Received(*_native.receive(1, 0, 0, ()))
    gc.collect()
    assert released == [5]
