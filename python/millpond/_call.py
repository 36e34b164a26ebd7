"""`Call`: one call of ours, from its frame to its end. `Channel.start` gives it, `Channel.call` is made of it."""

import collections
import threading

from . import _native, errors


class Call:
    """A call that was started and is not waited for yet. Any thread may ask, several at a time.

    Nothing is read behind one's back: the reply is taken up, and what the other side calls back is run, while some thread is in
    `result` or `done`, or waits on the same connection. Dropped, the call goes on: its reply is let go of when it comes. Kept, it
    keeps its result."""

    __slots__ = ("name", "_channel", "_id", "_reply", "_callbacks", "_kept", "_waiters", "_cancelled", "_outcome", "_taking")

    def __init__(self, channel, id, name, waiters=0):
        #: What is called.
        self.name = name
        self._channel, self._id = channel, id
        self._reply = None  # the message; True once it is taken up
        self._callbacks = collections.deque()  # for those who wait for this call
        self._kept = []  # results made here for the other side, until the call ends
        self._waiters = waiters
        self._cancelled = False
        self._outcome = None  # (value, error)
        self._taking = threading.Lock()

    def __repr__(self):
        how = "cancelled" if self._cancelled else "under way" if self._reply is None else "done"
        return f"<millpond.Call of {self.name!r}, {how}>"

    def result(self, timeout=None):
        """What the function returned; the same at every call. What it raised comes as `RemoteError`. `Timeout` after `timeout`
        seconds: the call goes on, ask again or `cancel()`. `Cancelled`, once it has ended there, if it was cancelled. `Closed`,
        `PeerDied`: no reply comes any more. GPU values are ordered on the current stream of the thread that asks first."""
        channel = self._channel
        if self._outcome is None:
            with channel._state:
                self._waiters += 1
            try:
                channel._await(self, _native.deadline(timeout))
            except errors.Timeout:
                raise errors.Timeout(f"the call of {self.name!r} had no answer within {timeout} s; it goes on") from None
            finally:
                channel._leave_call(self)
            with self._taking:
                if self._outcome is None:
                    try:
                        self._outcome = self._take(), None
                    except BaseException as e:
                        self._outcome = None, e
        value, error = self._outcome
        if error is None:
            return value
        try:
            raise error
        finally:
            self = error = None  # the error knows this frame: no cycle

    def done(self):
        """Whether `result` would return or raise at once. Reads what has come, and runs what the other side has called back."""
        channel = self._channel
        channel._poll()
        while True:
            with channel._state:
                what = True if channel._ended is not None else channel._for_call(self)
            if what is None or what is True:
                return bool(what)
            channel._run(what)

    def cancel(self):
        """Tells the other side to stop: `millpond.cancelled()` is true there. `result` then waits until the call has ended there and
        raises `Cancelled`, whatever the function returned. False: too late, the reply is here, or the channel has ended."""
        channel = self._channel
        channel._poll()
        with channel._state:
            if self._cancelled or self._reply is not None or channel._ended is not None:
                return self._cancelled
            self._cancelled = True
        try:
            channel._transmit(["x", self._id], None, timeout=5.0)
        except errors.Timeout:
            self._cancelled = False
            raise
        except errors.Error:
            pass  # the other side is gone; `result` says so
        return True

    def _take(self):
        """The value of the reply, or its error raised. Once, by one thread."""
        message, self._reply = self._reply, True
        try:
            failed = message.header[0] == "e"
            if self._cancelled:
                said = remote_error(self.name, message.decode()) if failed else None
                if isinstance(said, errors.Cancelled):
                    raise said
                raise errors.Cancelled(f"the call of {self.name!r} was cancelled") from said
            value = message.decode()
            if failed:
                raise remote_error(self.name, value)
            return value
        finally:
            message = None  # an error keeps this frame
            del self._kept[:]


def remote_error(name, report):
    """The error that a report of the other side's stands for."""
    if not isinstance(report, dict):
        report = {}
    error = errors.RemoteError(f"{name!r} failed with {report.get('type')}: {report.get('message')}")
    error.type = report.get("type", "")
    error.remote_code = report.get("code")
    error.traceback = report.get("traceback", "")
    if error.remote_code == "Cancelled":
        cancel = errors.Cancelled(f"the call of {name!r} was cancelled")
        cancel.__cause__ = error
        return cancel
    return error
