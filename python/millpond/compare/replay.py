"""Traces replayed in one mode: the child's side. A slice is one trace, from an allocator that has nothing cached.

The first replay of a trace asks after each slow call whether memory was reserved, and so finds the calls that grow; its times are
not kept. The later ones ask nobody, and the calls found are left out of the figures "without growth".
"""

import array
import bisect
import ctypes
import os

from . import allocators, traces

DONE, FAILED, NOT_TRIED = 0, 1, 2
#: So many of the slowest calls are named.
SLOWEST = 20
#: No growth is faster than this, in nanoseconds.
SLOW_NS = 1000
_Reserved = ctypes.CFUNCTYPE(ctypes.c_uint64)


class Job(ctypes.Structure):
    """As in replaybench.cpp."""

    _fields_ = [
        ("events", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("streams", ctypes.c_void_p),
        ("blocks", ctypes.c_size_t),
        ("allocate", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("reserved", _Reserved),
        ("slow", ctypes.c_uint64),
        ("ticks", ctypes.c_void_p),
        ("grew", ctypes.c_void_p),
        ("outcome", ctypes.c_void_p),
        ("device", ctypes.c_int32),
    ]


class Replay:
    """The traces of one allocator: a case each."""

    def __init__(self, settings):
        self.notes = {}
        library = ctypes.CDLL(os.path.join(settings["work"], "libreplaybench.so"))
        self.clock = Clock(library)
        allocator = allocators.of(settings, library)
        paths = settings["traces"]
        self._replayed = {}
        for path, name in zip(paths, traces.names(paths)):
            try:
                self._replayed[name] = Replayed(traces.read(path, name), allocator, library, self.clock)
            except traces.TraceError as e:
                self.notes[name] = str(e)
        self.cases = {name: one.slice for name, one in self._replayed.items()}

    def report(self):
        """What each trace came to: {name: figures}."""
        return {name: one.report() for name, one in self._replayed.items() if one.tried}

    def close(self):
        """Nothing: the process ends."""


class Clock:
    """The clock that the calls are timed with."""

    def __init__(self, library):
        tick, cost = ctypes.c_double(), ctypes.c_double()
        library.replay_clock(ctypes.byref(tick), ctypes.byref(cost))
        self.tick_ns, self.cost_ns = tick.value, cost.value


class Replayed:
    """One trace and all its replays."""

    def __init__(self, trace, allocator, library, clock):
        self._trace, self._allocator, self._run, self._clock = trace, allocator, library.replay_run, clock
        self._run.restype = None
        count = len(trace)
        self._ticks, self._grew = array.array("I", bytes(4 * count)), array.array("Q", bytes(8 * count))
        self._outcome = array.array("B", bytes(count))
        self._growths = None  # event -> bytes, once they are known
        self._all, self._steady = array.array("I"), array.array("I")
        self._rounds = []  # the steady calls' times of each replay, in the trace's order
        self.tried = 0
        self._peak, self._left, self._apart = None, 0, 0
        self._failed, self._first = 0, None

    def slice(self, ms):
        """One replay, after one that is not timed, as another allocator had this processor till now: (calls, nanoseconds). The length
        is the trace's, whatever is asked."""
        need, free = int(self._trace.peak_live * self._allocator.room) + (64 << 20), self._allocator.available()
        if need > free:
            raise MemoryError(f"it needs {need / 2**30:.2f} GiB of the device, {free / 2**30:.2f} GiB are free")
        finding = self._growths is None
        self._fresh()
        self._replay(False)
        self._fresh()
        before = self._allocator.grown()
        self._replay(finding and self._allocator.tells_growth)
        self.tried += 1
        self._note_peak()
        if finding:
            self._growths = {n: grew for n, grew in enumerate(self._grew) if grew}
        elif self._allocator.tells_growth and self._allocator.grown() - before != sum(self._growths.values()):
            self._apart += 1
        took = [ticks for ticks, outcome in zip(self._ticks, self._outcome) if outcome == DONE]
        if not finding:
            self._all.extend(took)
            if self._allocator.tells_growth:
                steady = [self._ticks[n] for n in self._steady_calls()]
                self._steady.extend(steady)
                self._rounds.append(steady)
        self._note_failures()
        return max(len(took), 1), sum(took) * self._clock.tick_ns

    def _fresh(self):
        self._left = max(self._left, self._allocator.fresh(self._trace.peak_live))

    def _replay(self, ask):
        trace, allocator = self._trace, self._allocator
        streams = array.array("Q", allocator.streams(len(trace.streams)))
        asked = _Reserved(allocator.grown) if ask else _Reserved()
        at = lambda flat: flat.buffer_info()[0]  # noqa: E731
        job = Job(at(trace.events), len(trace), at(streams), trace.blocks, allocator.malloc, allocator.free, asked)
        job.slow, job.device = max(1, int(SLOW_NS / self._clock.tick_ns)), allocator.device
        job.ticks, job.grew, job.outcome = at(self._ticks), at(self._grew), at(self._outcome)
        self._run(ctypes.byref(job))

    def _note_peak(self):
        peak = self._allocator.peak()
        if peak is not None:
            self._peak = max(self._peak or 0, peak)

    def _note_failures(self):
        failed = [n for n, outcome in enumerate(self._outcome) if outcome == FAILED]
        self._failed = max(self._failed, len(failed))
        if failed and self._first is None:
            self._first = f"line {self._trace.lines[failed[0]]}: {' '.join(self._allocator.said().split())[:300]}"

    def report(self):
        """The figures, times in nanoseconds with the clock's own in them."""
        trace, tells = self._trace, self._allocator.tells_growth
        own = medians(self._rounds)
        found = {
            "events": trace.count,
            "recorded_failures": trace.recorded_failures,
            "peak_live": trace.peak_live,
            "peak_reserved": self._peak,
            "ratio": round(self._peak / trace.peak_live, 4) if self._peak is not None and trace.peak_live else None,
            "replays": self.tried,
            "failed": self._failed + len(trace.wrong),
            "ns": percentiles(self._all, self._clock.tick_ns),
            "ns_without_growth": percentiles(self._steady, self._clock.tick_ns) if tells else None,
            "ns_without_growth_medians": percentiles(own, self._clock.tick_ns) if tells else None,
            "slowest": self._slowest(own),
            "growths": len(self._growths or {}) if tells else None,
            "largest_growth": max((self._growths or {}).values(), default=0) if tells else None,
            "clock_ns": round(self._clock.cost_ns, 1),
        }
        if found["failed"]:
            found["first_failure"] = self._first or "line {}: {}".format(*trace.wrong[0])
        if self._left:
            found["reserved_before"] = self._left
        if self._apart:
            found["replays_that_grew_otherwise"] = self._apart
        return found

    def _steady_calls(self):
        """The places of the calls that did what they should and are not known to grow."""
        return [n for n, outcome in enumerate(self._outcome) if outcome == DONE and n not in (self._growths or {})]

    def _slowest(self, own):
        """The calls whose median is the highest: [line, nanoseconds, calls since the last growth], the slowest first."""
        steady = self._steady_calls()
        ordered = sorted(zip(own, steady), reverse=True)[:SLOWEST] if len(own) == len(steady) else []
        growths = sorted(self._growths or {})
        since = lambda n: n - growths[bisect.bisect(growths, n) - 1] if growths and growths[0] <= n else None  # noqa: E731
        return [[self._trace.lines[n], round(ticks * self._clock.tick_ns), since(n)] for ticks, n in ordered]


def medians(rounds):
    """The median of each call over its replays: what the call takes, without what else the machine did in one of them. Replays in
    which other calls failed cannot be laid over each other: nothing then."""
    if not rounds or any(len(steady) != len(rounds[0]) for steady in rounds):
        return []
    return [sorted(times)[len(times) // 2] for times in zip(*rounds)]


def percentiles(ticks, tick_ns):
    """{"p50", "p99", "p999", "max", "n"} of some times, in nanoseconds; None of none."""
    if not ticks:
        return None
    ordered = sorted(ticks)
    at = lambda part: round(ordered[min(int(len(ordered) * part), len(ordered) - 1)] * tick_ns, 1)  # noqa: E731
    return {"p50": at(0.5), "p99": at(0.99), "p999": at(0.999), "max": at(1.0), "n": len(ordered)}
