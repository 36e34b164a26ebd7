"""The program: `millpond bench compare`, `python -m millpond.compare`."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

from . import conductor, modes, plot, report, traces
from .build import build

EPILOG = """\
modes:
{modes}

Examples: what this machine can; the hand-offs alone, longer; traces of one's own; tables and plots of an earlier run.
  $ millpond bench compare --out compared
  $ millpond bench compare --driver cuda -- handoff --rounds 100
  $ millpond bench compare -- replay --traces traces/ training.csv.gz
  $ python3 -m millpond.compare --report compared/compare.json --out compared

With --out DIR: compare.json, compare.md, an SVG for each section, a PNG where matplotlib is. What cannot run here is named."""


def parse(arguments):
    """The options."""
    listed = "\n".join(f"  {section}:\n" + "\n".join(f"    {m:14} {what}" for m, what in of.items()) for section, of in modes.MODES.items())
    parser = argparse.ArgumentParser(
        prog="millpond bench compare",
        description="Sets millpond beside torch's allocators, RMM and the other ways of handing memory over, in turn, on this machine.",
        epilog=EPILOG.format(modes=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(modes.MODES)} (default: all of the driver's)")
    parser.add_argument("--driver", choices=("auto", "cuda", "host"), default="auto", help="whose memory (default: a GPU's where there is one)")
    parser.add_argument("--modes", metavar="A,B", help="only these, with ours always among them")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of slices (default 40; --quick 12; replay: at most 5; 2)")
    parser.add_argument("--pairs", type=int, default=1, metavar="N", help="each section with so many sets of processes, one after another (default 1)")
    parser.add_argument("--slice-ms", type=float, default=10.0, metavar="MS", help="length of a slice (default 10)")
    parser.add_argument("--seconds", type=float, metavar="S", help="end by then, with the rounds that are done (default 180; --quick 40)")
    parser.add_argument("--cpu", type=int, metavar="N", help="the CPU that all run on (default: the last that we may use)")
    parser.add_argument(
        "--traces", nargs="+", action="extend", metavar="PATH", help="replay: files and folders of traces, as millpond replay reads (default: the project's own)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and cases, and less to be trusted")
    parser.add_argument("--out", metavar="DIR", help="write compare.json, compare.md and the plots there")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON instead of the tables (to a FILE: beside them)")
    parser.add_argument("--report", metavar="FILE", help="measure nothing: read this compare.json")
    options = parser.parse_args(arguments)
    wrong = [s for s in options.sections if s not in modes.MODES]
    if wrong:
        parser.error(f"no section {', '.join(wrong)}: {', '.join(modes.MODES)}")
    known = {mode for of in modes.MODES.values() for mode in of}
    options.modes = options.modes.split(",") if options.modes else None
    if options.modes and not set(options.modes) <= known:
        parser.error(f"no mode {', '.join(sorted(set(options.modes) - known))}: {', '.join(sorted(known))}")
    allowed = os.sched_getaffinity(0)
    options.cpu = max(allowed) if options.cpu is None else options.cpu
    if options.cpu not in allowed:
        parser.error(f"--cpu {options.cpu}: we may run on {sorted(allowed)}")
    try:
        options.traces = traces.find(options.traces) if options.traces else traces.default()
    except traces.TraceError as e:
        parser.error(f"--traces: {e}")
    options.rounds = options.rounds or (12 if options.quick else 40)
    options.seconds = options.seconds or (40.0 if options.quick else 180.0)
    return options


def main(arguments=None):
    """Measures and writes; gives the exit code."""
    options = parse(arguments)
    quiet = options.json == "-"
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if quiet else (lambda text: print(text, flush=True))
    try:
        if options.report:
            with open(options.report) as file:
                found = json.load(file)
        else:
            found = compare(options, say)
        write(options, found, say)
    except (OSError, ValueError, KeyError) as e:
        print(f"millpond: compare: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 1 if found["failed"] else 0


def compare(options, say):
    """Everything that this machine can; the report."""
    end = time.monotonic() + options.seconds
    options.driver = modes.choose_driver(options.driver)
    sections = options.sections or modes.sections(options.driver)
    found = {
        "machine": machine(options.driver),
        "driver": options.driver,
        "method": {"cpu": options.cpu, "slice_ms": options.slice_ms, "rounds": options.rounds, "pairs": options.pairs, "quick": options.quick},
        "sections": {},
        "cannot": {} if options.sections else modes.absent(options.driver),
        "notes": {},
        "figures": {},
    }
    with tempfile.TemporaryDirectory(prefix="millpond-compare-") as work:
        if "replay" in sections and not options.traces:
            sections = [section for section in sections if section != "replay"]
            found["cannot"]["replay"] = "no traces here: name some with --traces (they lie in benches/traces of the repository)"
        built = build(work, found["notes"], wanted(sections, options.driver))
        started = {}
        try:
            for section in sections:
                started[section] = start(section, options, work, built, found["cannot"])
            # All are up before any is measured: what comes up disturbs.
            soon = time.monotonic() + 0.6 * (end - time.monotonic())
            measured = {section: conductor.come_up(started[section], options, soon) for section in sections}
            for number, section in enumerate(sections):
                say(f"{section}: {', '.join(p.mode for p in measured[section].up) or 'nothing can run here'}")
                until = time.monotonic() + (end - time.monotonic()) / (len(sections) - number)
                conductor.measure(measured[section], options, until, say, most(section, options))
                for pair in range(1, options.pairs):
                    conductor.stop(started.pop(section))
                    started[section] = start(section, options, work, built, found["cannot"])
                    anew = conductor.come_up(started[section], options, until, measured[section])
                    say(f"  pair {pair + 1} of {options.pairs}")
                    conductor.measure(anew, options, until, say, most(section, options))
                    measured[section] = anew
                summary(section, measured[section], found)
                conductor.stop(started.pop(section))
                conclude(found)
                if options.json and options.json != "-":
                    replace(options.json, json.dumps(found, indent=1))  # what there is, should we be ended
        finally:
            conductor.stop([process for processes in started.values() for process in processes])
    conclude(found)
    return found


def wanted(sections, driver):
    """The libraries that the sections need here."""
    names = ["replaybench"] if "replay" in sections else []
    if driver == "cuda" and modes.no_gpu() is None:
        names += ["allocbench", "bump"] if {"allocation", "replay"} & set(sections) else []
    return names


def most(section, options):
    """The rounds that a section takes at most; None: as many as asked for."""
    return modes.ENOUGH[section][0 if options.quick else 1] if section in modes.ENOUGH else None


def start(section, options, work, built, cannot):
    """The section's processes; those that cannot be are named."""
    processes = []
    for mode in modes.MODES[section]:
        if options.modes and mode not in options.modes and mode != "ours":
            continue
        why = modes.cannot(section, mode, built, options.driver)
        if why is None:
            processes.append(conductor.Process(section, mode, options, work))
        else:
            cannot[f"{section} {mode}"] = why
    return processes


def summary(section, measured, found):
    """Enters what a section came to."""
    found["sections"][section] = {"cases": measured.pairs.table(), "rounds": measured.rounds, "failed": measured.failed}
    if section == "replay":
        found["sections"][section]["traces"] = conductor.reports(measured)
    found["notes"].update({f"{section} {key}": value for key, value in measured.notes.items()})


def conclude(found):
    """The figures, the targets, and what passed, in the shape of the other stages of a GPU run."""
    found["figures"] = report.figures(found["sections"])
    cases = []
    for section, of in found["sections"].items():
        seen = {mode for row in of["cases"].values() for mode in row}
        for mode in sorted(seen | set(of["failed"])):
            case = {"case": f"{section} {mode}", "ok": mode not in of["failed"]}
            if not case["ok"]:
                case["message"] = of["failed"][mode]
            cases.append(case)
    found["cases"] = cases
    found["failed"] = sum(not case["ok"] for case in cases)
    found["passed"] = len(cases) - found["failed"]
    found["skipped"] = len(found["cannot"])


def write(options, found, say):
    """Tables, files, plots."""
    text = report.markdown(found)
    if options.json == "-":
        print(json.dumps(found))
    else:
        say("\n" + text)
        if options.json:
            replace(options.json, json.dumps(found, indent=1))
    if options.out:
        os.makedirs(options.out, exist_ok=True)
        replace(os.path.join(options.out, "compare.json"), json.dumps(found, indent=1) + "\n")
        replace(os.path.join(options.out, "compare.md"), text)
        for section, of in found["sections"].items():
            picture = plot.svg(section, of)
            if picture:
                replace(os.path.join(options.out, f"{section}.svg"), picture)
                why = plot.png(section, of, os.path.join(options.out, f"{section}.png"))
                if why:
                    say(f"{section}.png: {why}")
        say(f"written: {options.out}")


def replace(path, text):
    """A file whole, or the old one."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def machine(driver):
    """Where the figures come from."""
    found = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "driver": driver, "python": platform.python_version()}
    found.update(kernel=platform.release(), cpus=os.cpu_count(), load=round(os.getloadavg()[0], 2), cpu=_field("/proc/cpuinfo", "model name"))
    if modes.has("torch"):
        found["torch"] = _said([sys.executable, "-c", "import torch; print(torch.__version__)"], 120)
    if driver == "cuda":
        found["gpu"] = _said(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], 30)
    from .. import __version__

    found["millpond"] = __version__
    return found


def _field(path, name):
    try:
        with open(path) as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(name)), None)
    except OSError:
        return None


def _said(command, seconds):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=modes.environment("")).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
