"""The processes of a comparison: started together, put on one CPU, measured in slices that take turns."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

from . import modes
from .stats import Pairs


class Failed(Exception):
    """A mode's process did not do what it was told."""


class Process:
    """One mode. It comes up at once, measures when told, and ends with us."""

    def __init__(self, section, mode, options, work):
        self.section, self.mode = section, mode
        self.cases, self.notes = [], {}
        settings = {"section": section, "mode": mode, "driver": options.driver, "quick": options.quick, "work": work}
        settings["traces"] = getattr(options, "traces", None) or []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millpond.compare.child", json.dumps(settings)],
            env=modes.environment(mode),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines, self._errors = [], []
        self._came = threading.Condition()
        for stream, into in ((self._process.stdout, self._lines), (self._process.stderr, self._errors)):
            threading.Thread(target=self._feed, args=(stream, into), daemon=True).start()

    @property
    def pid(self):
        return self._process.pid

    def _feed(self, stream, into):
        for line in stream:
            with self._came:
                into.append(line.rstrip())
                del into[:-200]
                self._came.notify_all()
        with self._came:
            into.append(None)
            self._came.notify_all()

    def _answer(self, seconds):
        end = time.monotonic() + seconds
        with self._came:
            while True:
                if self._lines:
                    line = self._lines.pop(0)
                    if line is None:
                        self._lines.append(None)
                        raise Failed(f"it ended (code {self._process.wait()}): {self._said()}")
                    if line.startswith("{"):
                        answer = json.loads(line)
                        if "error" in answer:
                            raise Failed(answer["error"])
                        return answer
                    continue
                left = end - time.monotonic()
                if left <= 0:
                    raise Failed(f"no answer within {seconds:.0f} s: {self._said()}")
                self._came.wait(left)

    def _said(self):
        return " | ".join(line for line in self._errors[-8:] if line)[-1500:] or "it said nothing"

    def ready(self, seconds):
        """Waits until it is up; learns its cases."""
        answer = self._answer(seconds)
        self.cases, self.notes = answer["cases"], answer.get("notes", {})

    def slice(self, case, ms, seconds=30.0):
        """One slice: nanoseconds an operation."""
        answer = self._ask({"case": case, "ms": ms}, seconds)
        return answer["ns"] / answer["n"]

    def report(self, seconds=30.0):
        """What it found beside times: {case: figures}."""
        return self._ask({"report": True}, seconds)["report"]

    def _ask(self, what, seconds):
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the answer says that it ended
        return self._answer(seconds)

    def hang_up(self):
        """Tells it to end."""
        try:
            self._process.stdin.close()
        except OSError:
            pass

    def alive(self):
        """Whether it runs."""
        return self._process.poll() is None


def stop(processes, seconds=3.0):
    """Ends processes and all that they started: by themselves, if they do so in time."""
    families = [(process, tree(process.pid)) for process in processes]
    for process in processes:
        process.hang_up()
    end = time.monotonic() + seconds
    for process, family in families:
        try:
            process._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        # Those that it left behind, while their parents still say so: a pid may be another's by now.
        for pid in set(family) & set(tree(process.pid)) if process.alive() else orphans(family):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        process._process.wait()


def orphans(family):
    """Of some processes, those that still run a part of this package."""
    found = []
    for pid in family:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"millpond" in file.read():
                    found.append(pid)
        except OSError:
            pass
    return found


def tree(root):
    """A process and all that it started, as /proc has them."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                pass
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def pin(root, cpu):
    """Puts every thread of a process and of all that it started on one CPU; an owner's on any that shares no core with it, where there
    is one: it is another program, and its work is not its clients'."""
    elsewhere = os.sched_getaffinity(0) - siblings(cpu) or {cpu}
    for pid in tree(root):
        try:
            cpus = elsewhere if is_owner(pid) else {cpu}
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(int(thread), cpus)
            except OSError:
                pass


def is_owner(pid):
    """Whether a process is `millpond serve`."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().split(b"\0")[1:2] == [b"serve"]


def siblings(cpu):
    """The CPUs of one CPU's core."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            parts = [part.split("-") for part in file.read().strip().split(",")]
    except OSError:
        return {cpu}
    return {n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)} | {cpu}


class Measured:
    """What a section came to."""

    def __init__(self, before=None):
        self.pairs = before.pairs if before else Pairs()
        self.up = []  # processes
        self.failed = before.failed if before else {}  # mode -> why
        self.notes = before.notes if before else {}
        self.rounds = before.rounds if before else 0


def come_up(processes, options, end, before=None):
    """Waits until the processes of a section are up, and puts them on their CPU: what is known of it so far. `before`: what other
    processes of it came to."""
    found = Measured(before)
    for process in processes:
        try:
            process.ready(max(1.0, min(120.0, end - time.monotonic())))
            found.notes.update({f"{process.mode}: {key}": value for key, value in process.notes.items()})
            found.up.append(process)
        except Failed as e:
            found.failed[process.mode] = str(e)
    for process in found.up:
        pin(process.pid, options.cpu)
    return found


def measure(found, options, end, say, most=None):
    """Slices of all processes that are up, ours first among them, until the rounds (at most `most`) are done or the time is up."""
    rounds = found.rounds + min(options.rounds, most or options.rounds)
    up = found.up
    ours = next((p for p in up if p.mode == "ours"), None)
    cases = list(dict.fromkeys(case for p in up for case in p.cases))
    for process in up:  # each case once, unmeasured: caches fill, what cannot be is found
        for case in list(process.cases):
            _warm(process, case, options, found, end)
    while found.rounds < rounds and time.monotonic() < end:
        for case in cases:
            _round(case, ours, up, options, found, found.rounds)
        found.rounds += 1
        if found.rounds % 10 == 0:
            say(f"  round {found.rounds} of {rounds}")


def reports(found):
    """What the processes that are up have to tell beside times: {case: {mode: figures}}."""
    told = {}
    for process in found.up:
        try:
            for case, figures in process.report().items():
                told.setdefault(case, {})[process.mode] = figures
        except Failed as e:
            _note(process, "report", e, found)
    return told


def _warm(process, case, options, found, end):
    try:
        if time.monotonic() < end:
            process.slice(case, options.slice_ms)
    except Failed as e:
        process.cases.remove(case)
        _note(process, case, e, found)


def _note(process, case, error, found):
    found.notes[f"{process.mode}: {case}"] = str(error)
    if not process.alive():
        process.cases.clear()
        found.failed[process.mode] = str(error)


def _round(case, ours, up, options, found, number):
    others = [p for p in up if p is not ours and case in p.cases]
    ms = options.slice_ms
    if ours is None or case not in ours.cases:
        for process in others:
            _try(process, case, ms, found, lambda value, p=process: found.pairs.alone(case, p.mode, value))
        return
    if not others:
        _try(ours, case, ms, found, lambda value: found.pairs.alone(case, "ours", value))
    for process in others:
        # A B, then B A: neither always comes first.
        first, second = (ours, process) if number % 2 == 0 else (process, ours)
        values = []
        for one in (first, second):
            if not _try(one, case, ms, found, values.append):
                break
        if len(values) == 2:
            mine, theirs = values if first is ours else reversed(values)
            found.pairs.add(case, process.mode, mine, theirs)


def _try(process, case, ms, found, keep):
    try:
        keep(process.slice(case, ms))
        return True
    except Failed as e:
        if case in process.cases:
            process.cases.remove(case)
        _note(process, case, e, found)
        return False
