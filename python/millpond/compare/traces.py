"""Allocation traces: CSV in RMM's columns into flat arrays, as `millpond replay` reads it.

Columns are found by their names in the first line; `Action`, `Pointer`, `Size` and `Stream` are needed. Actions are `allocate`,
`allocate failure` and `free` (or `deallocate`), any other is refused with its line. The order is the file's, whatever the threads.
A failure of the program that was traced is counted and not replayed; calls of no bytes are not replayed.
"""

import array
import glob
import gzip
import os

HEADER = "Thread,Time,Action,Pointer,Size,Stream"
_ENDS = (".csv.gz", ".csv")
_GRANULE = 512
_U64 = 2**64


class TraceError(ValueError):
    """A file that is no trace; the line is named."""


class Trace:
    """One trace: `events` has four words for each call, `lines` where in the file it stands."""

    def __init__(self, name):
        self.name = name
        #: bytes, stream (its place in `streams`), block (a number for each address that is live), frees (0 or 1).
        self.events = array.array("Q")
        self.lines = array.array("Q")
        #: The trace's handles; the first is the legacy default stream.
        self.streams = [0]
        self.blocks = 0
        #: Lines after the header.
        self.count = 0
        #: Failures that the trace itself has.
        self.recorded_failures = 0
        #: What the trace itself has wrong: (line, reason).
        self.wrong = []
        #: The most bytes that were live, each block rounded up to 512.
        self.peak_live = 0

    def __len__(self):
        return len(self.lines)


def default():
    """The traces that lie beside this package in a checkout, or in what was packed for a GPU machine."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return find([os.path.join(root, "benches", "traces")], missing=True)


def find(paths, missing=False):
    """The files that are meant: a folder's traces in the order of their names, or the file itself."""
    found = []
    for path in paths:
        if os.path.isdir(path):
            files = sorted(file for end in _ENDS for file in glob.glob(os.path.join(glob.escape(path), "*" + end)))
            if not files and not missing:
                raise TraceError(f"{path}: no {' or '.join('*' + end for end in _ENDS)} there")
            found += files
        elif os.path.exists(path):
            found.append(path)
        elif not missing:
            raise TraceError(f"{path}: no such file or folder")
    return [os.path.abspath(path) for path in found]


def names(paths):
    """A name for each file: without its end, and with its folder where two would be the same."""
    short = [_stem(os.path.basename(path)) for path in paths]
    return [name if short.count(name) == 1 else _stem(os.path.join(os.path.basename(os.path.dirname(path)), os.path.basename(path))) for name, path in zip(short, paths)]


def _stem(name):
    return next((name[: -len(end)] for end in _ENDS if name.endswith(end)), name)


def read(path, name=None):
    """Reads a file, gzipped if its name ends in `.gz`."""
    name = name or _stem(os.path.basename(path))
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", errors="replace", newline=None) as file:
            return parse(file, name)
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from None
    except (OSError, EOFError) as e:
        raise TraceError(f"{path}: {e}") from None


def parse(lines, name=""):
    """Reads the lines of a trace."""
    lines = iter(lines)
    header = [column.strip().lower() for column in next(lines, "").split(",")]
    try:
        columns = [header.index(column) for column in ("action", "pointer", "size", "stream")]
    except ValueError:
        raise TraceError(f"line 1: a column is missing: expected {HEADER}") from None
    trace = Trace(name)
    live, places, vacant, bytes_live = {}, {0: 0}, [], 0
    for line, text in enumerate(lines, 2):
        if not text.strip():
            continue
        fields = [field.strip() for field in text.split(",")]
        action, pointer, size, stream = (fields[at] if at < len(fields) else "" for at in columns)
        trace.count += 1
        if action not in ("allocate", "allocate failure", "free", "deallocate"):
            raise TraceError(f"line {line}: {action!r} is no action")
        pointer = _number(pointer, 16, "pointer", line)
        size = _number(size, 10, "size", line)
        stream = _number(stream, 16, "stream", line)
        if action == "allocate failure":
            trace.recorded_failures += 1
        elif size == 0 or (action != "allocate" and pointer == 0):
            pass
        elif action == "allocate":
            if pointer in live:
                trace.wrong.append((line, f"the trace allocates {pointer:#x}, which is live"))
                continue
            if stream not in places:
                places[stream] = len(trace.streams)
                trace.streams.append(stream)
            if vacant:
                block = vacant.pop()
            else:
                block, trace.blocks = trace.blocks, trace.blocks + 1
            live[pointer] = (size, places[stream], block)
            trace.events.extend((size, places[stream], block, 0))
            trace.lines.append(line)
            bytes_live += _rounded(size)
            trace.peak_live = max(trace.peak_live, bytes_live)
        elif pointer not in live:
            trace.wrong.append((line, f"the trace frees {pointer:#x}, which is not live"))
        else:
            size, place, block = live.pop(pointer)
            vacant.append(block)
            trace.events.extend((size, place, block, 1))
            trace.lines.append(line)
            bytes_live -= _rounded(size)
    return trace


def _rounded(size):
    return -(-size // _GRANULE) * _GRANULE


def _number(text, radix, what, line):
    if text in ("", "(nil)", "nullptr"):
        return 0
    try:
        # Not what Python's int takes beside digits: signs, underscores, spaces.
        value = int(text, 16 if text[:2] in ("0x", "0X") else radix) if text.isalnum() else _U64
    except ValueError:
        value = _U64
    if value >= _U64:
        raise TraceError(f"line {line}: {text!r} is no {what}")
    return value
