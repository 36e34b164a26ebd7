"""One exception per cause. `Error.code` is the name that the C API gives it."""


class Error(Exception):
    """Base of everything that millpond raises."""

    code = "Internal"
    #: Further fields of the library's report (sizes, limits, who holds what), when there are any.
    details = {}


class InvalidArgument(Error, ValueError):
    code = "InvalidArgument"


class NotAttached(Error):
    code = "NotAttached"


class AlreadyAttached(Error):
    code = "AlreadyAttached"


class DriverUnavailable(Error):
    code = "DriverUnavailable"


class OwnerUnavailable(Error):
    code = "OwnerUnavailable"


class Refused(Error):
    code = "Refused"


class OutOfMemory(Error, MemoryError):
    code = "OutOfMemory"


class PeerDied(Error):
    code = "PeerDied"


class OwnerDied(Error):
    code = "OwnerDied"


class Stale(Error):
    code = "Stale"


class Timeout(Error, TimeoutError):
    code = "Timeout"


class Closed(Error):
    code = "Closed"


class Protocol(Error):
    code = "Protocol"


class Forked(Error):
    code = "Forked"


class Unsupported(Error):
    code = "Unsupported"


class CannotCross(Error, TypeError):
    """A value that no tier can carry. The message names its path in the tree, `path` is that path."""

    code = "CannotCross"
    path = ""


class Cancelled(Error):
    """A call was cancelled by its caller."""

    code = "Cancelled"


class RemoteError(Error):
    """A call failed on the other side. `type`, `remote_code` and `traceback` are what it said there."""

    code = "RemoteError"
    type = ""
    remote_code = None
    traceback = ""

    def __str__(self):
        text = super().__str__()
        return f"{text}\n\non the other side:\n{self.traceback}" if self.traceback else text


def _subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


BY_CODE = {cls.code: cls for cls in _subclasses(Error)}


def make(code, message, details=None):
    """The exception for a code of the C API."""
    cls = BY_CODE.get(code, Error)
    error = cls(message)
    if cls is Error:
        error.code = code
    if details:
        error.details = details
    return error


def cannot_cross(path, reason):
    """A `CannotCross` whose message starts with the path of the value."""
    error = CannotCross(f"{path or 'the value'} cannot cross: {reason}")
    error.path = path
    return error
