"""Dictionaries whose keys are attributes too."""


class Record(dict):
    """A dictionary whose keys are attributes too. Fields that this version does not know are in it as well."""

    __slots__ = ()

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a {type(self).__name__.lower()} has no {name!r}: {', '.join(self)}") from None

    def __dir__(self):
        return [*super().__dir__(), *self]
