"""Recording what this process and its workers do, and one trace out of it for Perfetto."""

import atexit
import contextlib
import os
import shutil
import tempfile

from . import _native, errors

_at_exit = False


def record(frames=0, **settings):
    """Begins a recording. With frames it is ended before Python is: no thread may wait for the GIL then."""
    global _at_exit
    if frames and not _at_exit:
        _at_exit = True
        atexit.register(_end)
    return _native.control("record", frames=frames, **settings)


def _end():
    with contextlib.suppress(errors.Error):
        _native.control("record_stop")


def from_environment():
    """After attaching: the frames that `trace(frames=)` in another process, or the user, asks for."""
    frames, folder = os.environ.get("MILLPOND_TRACE_FRAMES", ""), os.environ.get("MILLPOND_TRACE")
    if folder and frames.isdigit() and int(frames):
        record(frames=int(frames), folder=folder)


@contextlib.contextmanager
def trace(out, frames=0, events=None, blocks=None):
    """Records this process, and the workers that are started and attach inside the block, and writes one trace to `out` at its
    end: open it in https://ui.perfetto.dev. It shows allocated and reserved bytes, growth, trims, refusals, waits, deaths, and an arrow
    from each send to its receipt. A worker that is killed is in it up to its last event.

    `frames`: Python frames that each allocation is recorded with, at most; the call that allocates takes the GIL for that.
    `events`: how many each process keeps, the newest (262144). `blocks`: each allocation and free as a mark of its own (where
    frames are recorded). Gives a dictionary that has, after the block, what was written: processes, events, arrows, deaths."""
    if os.environ.get("MILLPOND_TRACE"):
        raise errors.Refused(
            f"this process is recorded into {os.environ['MILLPOND_TRACE']} already (MILLPOND_TRACE): millpond trace makes a trace of that"
        )
    out = os.path.abspath(os.fspath(out))
    open(out, "ab").close()  # now, not after the work, it is said where that cannot be written
    folder = tempfile.mkdtemp(prefix="millpond-trace-")
    variables = {"MILLPOND_TRACE": folder}
    if frames:
        variables["MILLPOND_TRACE_FRAMES"] = str(frames)
    if events:
        variables["MILLPOND_TRACE_EVENTS"] = str(events)
    before = {name: os.environ.get(name) for name in variables}
    written = {}
    try:
        record(frames=frames, events=events, folder=folder, fresh=True)
        os.environ.update(variables)
        yield written
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        try:
            _native.control("record_stop", file=True)
            blocks = bool(frames) if blocks is None else bool(blocks)
            written.update(_native.control("merge_traces", folder=folder, out=out, blocks=blocks))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
