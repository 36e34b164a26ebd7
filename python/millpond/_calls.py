"""Calls over a channel: `call`, `start`, `serve`, replies in any order, callbacks in mid-call, cancel, forwarded log records.

Headers on the wire, each before the value it belongs to:

    ["m"]                          a plain message
    ["c", id, name, parent|null]   a call; parent: the caller's own call that it is made in
    ["r", id]  ["e", id]           its reply; its error ({type, code, message, traceback})
    ["x", id]                      cancel
    ["l"]                          a log record
"""

import collections
import itertools
import logging
import threading
import time
import traceback

from . import _native, _session, errors
from ._call import Call

_here = threading.local()
_RESULT = "$result"


class _Running:
    """A call of theirs that runs here."""

    __slots__ = ("channel", "id", "cancelled")

    def __init__(self, channel, id):
        self.channel, self.id, self.cancelled = channel, id, False


def cancelled():
    """Inside a served function: whether its caller cancelled it or stopped waiting for it."""
    running = getattr(_here, "running", None)
    if running is None:
        return False
    if not running.cancelled:
        running.channel._poll()
    return running.cancelled or running.channel.closed


def check_cancelled():
    """Raises `Cancelled` where `cancelled()` would be true."""
    if cancelled():
        raise errors.Cancelled("the caller cancelled this call")


class Calls:
    """The half of `Channel` that makes and serves calls."""

    def _begin_calls(self):
        self._ids = itertools.count(1)
        self._pending = {}  # calls of ours that no reply came for
        self._incoming = collections.deque()
        self._running = {}
        self._handlers = {}
        self._serving = 0
        self._stop = False
        #: Replies that nobody waited for any more, cancels of calls that are gone.
        self.dropped = 0

    def call(self, name, *args, timeout=None, on_timeout="cancel", grace=5.0, **kwargs):
        """Calls what the other side serves under `name` and gives its result. Its exception comes as `RemoteError`. After
        `timeout` seconds: `Timeout`, and the other side is told to stop (`millpond.cancelled()` there).

        `on_timeout="kill"`: if the call has not ended `grace` seconds after it was told, the owner kills the process at the other
        end, and the call raises `PeerDied`, which says so. Only a parent can do that to its workers. `timeout`, `on_timeout` and
        `grace` are the call's own: they are not passed on."""
        self._check_policy(on_timeout, timeout, grace)
        return self._call(name, args, kwargs, timeout, grace if on_timeout == "kill" else None)

    def start(self, name, /, *args, **kwargs):
        """Calls what the other side serves under `name`, and returns when the call is sent: a `Call`, with `result(timeout)`,
        `done()` and `cancel()`. Every argument is passed on."""
        self._poll()  # replies that nobody waits for do not fill the socket
        call = self._new_call(name, 0)
        try:
            self._send_call(call, args, kwargs, None)
        except BaseException:
            self._pending.pop(call._id, None)
            raise
        return call

    def _new_call(self, name, waiters):
        id = next(self._ids)
        call = self._pending[id] = Call(self, id, name, waiters)
        return call

    def _send_call(self, call, args, kwargs, timeout):
        running = getattr(_here, "running", None)
        parent = running.id if running is not None and running.channel is self else None
        self._transmit(["c", call._id, call.name, parent], {"args": list(args), "kwargs": kwargs}, timeout, root="call")

    def _call(self, name, args, kwargs, timeout, grace=None):
        end = _native.deadline(timeout)
        call = self._new_call(name, 1)
        try:
            self._send_call(call, args, kwargs, timeout)
            self._await(call, end)
            return call._take()
        except (errors.Timeout, KeyboardInterrupt) as e:
            self._quietly(["x", call._id])
            if not isinstance(e, errors.Timeout):
                raise
            if grace is not None:
                self._end_or_kill(call, grace)
            raise errors.Timeout(f"the call of {name!r} had no answer within {timeout} s") from None
        finally:
            self._pending.pop(call._id, None)
            self._leave_call(call)

    def _await(self, call, end):
        """Returns when the reply of a call is here; what the other side calls meanwhile is run."""
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            message = self._wait(lambda: self._for_call(call), left)
            if message is True:
                return
            self._run(message)

    def _leave_call(self, call):
        """One thread less waits for a call. What it has not run of the call's callbacks, others may."""
        with self._state:
            call._waiters -= 1
            if call._callbacks and not call._waiters:
                self._incoming.extend(call._callbacks)
                call._callbacks.clear()
                self._state.notify_all()

    def _end_or_kill(self, call, grace):
        """Returns when a call that was cancelled has ended. Where it does not in time, its process is killed: `PeerDied`."""
        start = time.monotonic()
        try:
            self._await(call, start + grace)
        except errors.Timeout:
            _native.control("kill", channel=self._handle, waited_ms=int((time.monotonic() - start) * 1000))
            try:
                self._wait(lambda: None, 5.0)  # its end comes by the channel, and says why
            except errors.Timeout:
                # A forked child of its may hold the channel.
                who = f"{self.peer.name} (pid {self.peer.pid})"
                raise errors.PeerDied(f"{who} was killed by policy: {call.name!r} did not obey its cancel") from None

    def set_policy(self, on_stopped="report", stopped_after=10.0):
        """What the owner does with the process at the other end when it stops (SIGSTOP, a debugger): `"report"` it in the ledger,
        or `"kill"` it once it has been stopped for `stopped_after` seconds, by its pidfd. It dies as any other does; `PeerDied`,
        the ledger and `Arena.on_death` say why. Time in which this process is stopped too (Ctrl-Z) does not count. Only a parent
        can say that of its workers; replaces what was said before."""
        self._check_policy(on_stopped, None, stopped_after, "on_stopped", "report")
        after = None if on_stopped == "report" else int(stopped_after * 1000)
        _native.control("policy", channel=self._handle, kill_stopped_after_ms=after)

    def _check_policy(self, policy, timeout, seconds, what="on_timeout", mild="cancel"):
        if policy == mild:
            return
        if policy != "kill":
            raise errors.InvalidArgument(f'{what}={policy!r}: "{mild}" or "kill"')
        if what == "on_timeout" and timeout is None:
            raise errors.InvalidArgument('on_timeout="kill" needs timeout=')
        if not 0 <= seconds <= 1e9:
            raise errors.InvalidArgument(f"{seconds} seconds are no time to wait before a process is killed")
        if _session.info().get("role") != "parent":
            raise errors.Refused(f'{what}="kill": only a parent says who is killed, and only of its workers')

    def _for_call(self, call):
        """For one that waits for a call: True if its reply is here, else what there is to run."""
        if call._reply is not None:
            return True
        if call._callbacks:
            return call._callbacks.popleft()
        if self._incoming and not self._serving:
            return self._incoming.popleft()
        return None

    def serve(self, what):
        """Serves a function to the other side: `@conn.serve`, or `@conn.serve("name")`. It runs when this side waits: in
        `serve_forever`, or in a `recv` or `call` of its own."""
        if callable(what):
            self._handlers[what.__name__] = what
            return what

        def decorate(function):
            self._handlers[what] = function
            return function

        return decorate

    def serve_forever(self, threads=1):
        """Answers calls until the channel ends or `stop()` is called. With several threads, that many at a time."""
        helpers = [threading.Thread(target=self._serve_loop, daemon=True, name=f"millpond-serve-{i}") for i in range(1, threads)]
        for helper in helpers:
            helper.start()
        self._serve_loop()
        for helper in helpers:
            helper.join()

    def stop(self):
        """Ends `serve_forever`, after the calls that run."""
        with self._state:
            self._stop = True
            self._state.notify_all()

    def _serve_loop(self):
        with self._state:
            self._serving += 1
        try:
            while True:
                message = self._wait(self._for_server, None)
                if message is True:
                    return
                self._run(message)
        except (errors.Closed, errors.PeerDied, errors.OwnerDied):
            pass
        finally:
            with self._state:
                self._serving -= 1

    def _for_server(self):
        if self._stop:
            return True
        return self._incoming.popleft() if self._incoming else None

    def _serve_one_locked(self):
        """Called by a waiting `recv` with the state locked: runs a call that has come, if no other thread serves."""
        if self._incoming and self._handlers and not self._serving:
            message = self._incoming.popleft()
            try:
                self._state.release()
                self._run(message)
            finally:
                self._state.acquire()

    def result(self, shape, dtype, device=None):
        """Inside a served function: a value that the caller allocated in its own memory, for this side to fill in place and
        return."""
        from . import _dtypes, _ref

        running = getattr(_here, "running", None)
        if running is None or running.channel is not self:
            raise errors.InvalidArgument("conn.result() is for a function that serves a call of this connection")
        row = _dtypes.parse(dtype)
        shape = [shape] if isinstance(shape, int) else [int(n) for n in shape]
        kind = _ref.default_kind(row, _session.device_ordinal(device), dtype)
        return self._call(_RESULT, (shape, row.name, None if device is None else str(device), kind), {}, None)

    def forward_logs(self, logger=None, level=logging.INFO):
        """Sends the log records of this process to the other side, where the logger of the same name handles them. Gives the
        handler."""
        handler = _Forward(self, level)
        (logger or logging.getLogger()).addHandler(handler)
        return handler

    # Messages that are not plain values. The state is locked.

    def _dispatch_call(self, message):
        kind = message.header[0]
        if kind == "c":
            _, id, _, parent = message.header
            self._running[id] = _Running(self, id)
            call = self._pending.get(parent)
            (call._callbacks if call is not None and call._waiters else self._incoming).append(message)
        elif kind in "re":
            call = self._pending.pop(message.header[1], None)
            if call is None:
                self.dropped += 1
            else:
                if call._cancelled and kind == "r":
                    message.memories = ()  # nobody will have it
                call._reply = message
        elif kind == "x":
            running = self._running.get(message.header[1])
            if running is None:
                self.dropped += 1
            else:
                running.cancelled = True
        else:
            raise errors.Protocol(f"received a message of unknown kind {kind!r}")

    def _run(self, message):
        """Runs one call and answers it. If the channel ends meanwhile, whoever waits next learns it."""
        _, id, name, parent = message.header
        running = self._running.get(id)
        outer, _here.running = getattr(_here, "running", None), running
        try:
            if running is not None and running.cancelled:
                raise errors.Cancelled("the caller cancelled this call before it began")
            content = message.decode()
            if name == _RESULT:
                value = self._make_result(parent, *content["args"])
            else:
                handler = self._handlers.get(name)
                if handler is None:
                    raise errors.InvalidArgument(f"nothing is served as {name!r}; served are {sorted(self._handlers)}")
                value = handler(*content["args"], **content["kwargs"])
            content = message = None
            self._transmit(["r", id], value)
        except BaseException as e:
            self._quietly(["e", id], _describe(e))
            if not isinstance(e, Exception):
                raise
        finally:
            _here.running = outer
            with self._state:
                self._running.pop(id, None)

    def _make_result(self, parent, shape, dtype, device, kind):
        from . import _ref

        ordinal = _session.device_ordinal(device)
        value = _ref.empty(shape, dtype, ordinal, "r")
        value._kind = kind  # what the other side makes of it, and sends back
        with self._state:
            call = self._pending.get(parent)
            if call is not None:
                call._kept.append(value)
        return value

    def _quietly(self, header, value=None):
        try:
            self._transmit(header, value, timeout=5.0)
        except errors.Error:
            pass  # the other side is gone; whoever waits learns it by itself


def _describe(e):
    cls = type(e)
    name = cls.__qualname__ if cls.__module__ in ("builtins", None) else f"{cls.__module__}.{cls.__qualname__}"
    code = e.code if isinstance(e, errors.Error) else None
    text = "".join(traceback.format_exception(cls, e, e.__traceback__))
    return {"type": name, "code": code, "message": str(e), "traceback": text}


class _Forward(logging.Handler):
    """Sends records over a channel."""

    def __init__(self, channel, level):
        super().__init__(level)
        self._channel = channel

    def emit(self, record):
        if self._channel.closed:
            return
        fields = {
            "name": record.name,
            "levelno": record.levelno,
            "levelname": record.levelname,
            "msg": record.getMessage(),
            "created": record.created,
            "pathname": record.pathname,
            "lineno": record.lineno,
            "funcName": record.funcName,
            "process": record.process,
            "threadName": record.threadName,
        }
        if record.exc_info:
            fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
        self._channel._quietly(["l"], fields)


def emit_log(fields):
    """Handles a forwarded record as if it had been made here."""
    try:
        record = logging.makeLogRecord(fields)
        logger = logging.getLogger(record.name)
        enabled = logger.isEnabledFor(record.levelno)
    except (TypeError, ValueError) as e:
        raise errors.Protocol(f"received a malformed log record: {e}") from None
    if enabled:
        logger.handle(record)
