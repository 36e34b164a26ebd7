"""Types that a user registers, so that they cross by their fields. No class names from the other side, and no pickle but for a type
that both sides have registered for it by name."""

import dataclasses
import pickle as _pickle

from . import errors

_by_type = {}
_by_name = {}


class Registered:
    """How one type crosses."""

    __slots__ = ("type", "name", "version", "to_fields", "from_fields", "pickle")

    def __init__(self, type, name, version, to_fields, from_fields, pickle=False):
        self.type, self.name, self.version = type, name, version
        self.to_fields, self.from_fields, self.pickle = to_fields, from_fields, pickle


def register(type, to_fields=None, from_fields=None, name=None, version=1, pickle=False):
    """Lets values of `type` cross: `to_fields(value)` gives a dict, `from_fields(dict)` makes the value again. A dataclass
    needs neither. Both sides register it under the same `name` (default: the class's) and `version`. Returns the type, so
    that it can be a decorator.

    `pickle=True`: they cross as a pickle, in host memory of the arena, marked as such; arrays in them are copied twice. Whoever receives
    a pickle runs what it says: both sides must have registered the type for it."""
    if pickle and (to_fields or from_fields):
        raise errors.InvalidArgument(f"{type.__name__} crosses by its fields or by pickle, not both")
    if not pickle and (to_fields is None or from_fields is None):
        to_fields, from_fields = _by_dataclass(type, to_fields, from_fields)
    entry = Registered(type, name or type.__name__, int(version), to_fields, from_fields, bool(pickle))
    other = _by_name.get(entry.name)
    if other is not None and other.type is not type:
        raise errors.InvalidArgument(f"the name {entry.name!r} is registered for {other.type.__qualname__}")
    _by_type[type] = entry
    _by_name[entry.name] = entry
    from . import _tree

    _tree.forget(type)
    return type


def _by_dataclass(type, to_fields, from_fields):
    if not dataclasses.is_dataclass(type):
        raise errors.InvalidArgument(f"{type.__name__} is no dataclass: say to_fields and from_fields")
    names = [f.name for f in dataclasses.fields(type)]
    to_fields = to_fields or (lambda value: {n: getattr(value, n) for n in names})
    return to_fields, from_fields or (lambda fields: _make_dataclass(type, fields))


def _make_dataclass(type, fields):
    value = object.__new__(type)
    known = {f.name for f in dataclasses.fields(type)}
    if set(fields) != known:
        raise errors.Protocol(f"{type.__name__} has fields {sorted(known)}, received {sorted(fields)}")
    for key, item in fields.items():
        object.__setattr__(value, key, item)
    return value


def of_type(type):
    """The registration of a type or of one of its bases."""
    for base in type.__mro__:
        entry = _by_type.get(base)
        if entry is not None:
            return entry
    return None


def pickled(entry, value):
    """The bytes of a value of a type that is registered for pickle."""
    return _pickle.dumps(value, protocol=5)


def _known(name, version, pickle):
    entry = _by_name.get(name)
    if entry is None:
        raise errors.Unsupported(f"received a {name!r} (version {version}), which is not registered here: millpond.register")
    if entry.version != version:
        raise errors.Unsupported(f"received a {name!r} of version {version}; version {entry.version} is registered here")
    if entry.pickle != pickle:
        ways = ("by its fields", "as a pickle")
        raise errors.Unsupported(f"received a {name!r} {ways[pickle]}; it is registered here to come {ways[entry.pickle]}")
    return entry


def restore(name, version, fields):
    """The value of a received record."""
    return _known(name, version, False).from_fields(fields)


def unpickle(name, version, data):
    """The value of a received pickle, of a type that is registered here for it."""
    entry = _known(name, version, True)
    try:
        value = _pickle.loads(data)
    except errors.Error:
        raise
    except Exception as e:  # whatever the type's own code raises
        raise errors.Protocol(f"the pickle of a {name!r} could not be read: {type(e).__name__}: {e}") from e
    if not isinstance(value, entry.type):
        raise errors.Protocol(f"the pickle of a {name!r} holds a {type(value).__qualname__}")
    return value
