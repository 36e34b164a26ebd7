"""Types that a user registers, so that they cross by their fields. No pickle, no class names from the other side."""

import dataclasses

from . import errors

_by_type = {}
_by_name = {}


class Registered:
    """How one type crosses."""

    __slots__ = ("type", "name", "version", "to_fields", "from_fields")

    def __init__(self, type, name, version, to_fields, from_fields):
        self.type, self.name, self.version = type, name, version
        self.to_fields, self.from_fields = to_fields, from_fields


def register(type, to_fields=None, from_fields=None, name=None, version=1):
    """Lets values of `type` cross: `to_fields(value)` gives a dict, `from_fields(dict)` makes the value again. A dataclass
    needs neither. Both sides register it under the same `name` (default: the class's) and `version`. Returns the type, so
    that it can be a decorator."""
    if to_fields is None or from_fields is None:
        if not dataclasses.is_dataclass(type):
            raise errors.InvalidArgument(f"{type.__name__} is no dataclass: say to_fields and from_fields")
        names = [f.name for f in dataclasses.fields(type)]
        to_fields = to_fields or (lambda value: {n: getattr(value, n) for n in names})
        from_fields = from_fields or (lambda fields: _make_dataclass(type, fields))
    entry = Registered(type, name or type.__name__, int(version), to_fields, from_fields)
    other = _by_name.get(entry.name)
    if other is not None and other.type is not type:
        raise errors.InvalidArgument(f"the name {entry.name!r} is registered for {other.type.__qualname__}")
    _by_type[type] = entry
    _by_name[entry.name] = entry
    from . import _tree

    _tree.forget(type)
    return type


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


def restore(name, version, fields):
    """The value of a received record."""
    entry = _by_name.get(name)
    if entry is None:
        raise errors.Unsupported(f"received a {name!r} (version {version}), which is not registered here: millpond.register")
    if entry.version != version:
        raise errors.Unsupported(f"received a {name!r} of version {version}; version {entry.version} is registered here")
    return entry.from_fields(fields)
