"""Runs the stages one after another, each with its own time limit, and puts what they say into one file. See README.md."""
import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import targets

HERE = os.path.dirname(os.path.abspath(__file__))
STAGES = "conformance micro contract bench demo stress torch pairs".split()
#: Those that have no room beside the others on every machine, and the seconds that each needs: a whole run has them last, as far as that
#: many are left over, and a quick one not at all.
APART = {"pairs": 85, "stress": 75}
#: Seconds for each stage: (quick, full). What a stage leaves over goes to the later ones.
LIMITS = {"conformance": (45, 75), "micro": (35, 110), "contract": (25, 45), "stress": (40, 130), "torch": (90, 290), "bench": (30, 150), "demo": (25, 45), "pairs": (40, 110)}
USUAL = [stage for stage in STAGES if stage not in APART]
TOTAL = (172, 565)
FIRST_LINES = 30
#: Of a line of figures on the screen; the log has all of it.
WIDTH = 260


def main():
    options = parse()
    os.makedirs(options.out, exist_ok=True)
    # Not in OUTDIR: few files come back from a GPU machine.
    with tempfile.TemporaryDirectory(prefix="millpond-gpu-", ignore_cleanup_errors=True) as work:
        return run(options, work)


def run(options, work):
    runner = Runner(options, work)
    signal.signal(signal.SIGTERM, runner.stopped)
    runner.note_machine()
    for stage in STAGES:
        if stage in options.only:
            runner.stage(stage)
    for stage, needs in APART.items():
        if options.only == USUAL and not options.quick and runner.left() >= needs:
            runner.stage(stage)
    runner.results["seconds"] = round(time.monotonic() - runner.start, 1)
    runner.write()
    return runner.summary()


def parse():
    parser = argparse.ArgumentParser(prog="run.sh", description="All GPU checks in one command; see README.md.")
    parser.add_argument("out", metavar="OUTDIR")
    parser.add_argument("--quick", action="store_true", help="the short form: at most 3 minutes")
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    usual, apart = ",".join(USUAL), ", ".join(APART)
    parser.add_argument("--only", default=usual, help=f"stages, with commas between them (default {usual}, then, but for --quick, {apart} as far as there is time)")
    parser.add_argument("--carry", help="what pack.sh laid out (default .carry of this checkout)")
    parser.add_argument("--input", help="demo: a safetensors file (default: random tensors of a small model's shapes)")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a target was missed, too")
    parser.add_argument("--fault", help="stress: break this on purpose (programs packed with CARGO_FLAGS='--features millpond-ipc/faults'); it must fail")
    parser.add_argument("--skip", help="torch: none of the tests whose names hold one of these")
    parser.add_argument("--match", help="torch: only the tests whose names hold one of these, with commas between them")
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = [s for s in options.only if s not in STAGES]
    if unknown:
        parser.error(f"unknown stages {unknown}: {STAGES}")
    if options.carry is None:
        beside = os.path.dirname(HERE)
        options.carry = beside if os.path.isdir(os.path.join(beside, "bin")) else os.path.join(HERE, "..", "..", ".carry")
    options.carry = os.path.abspath(options.carry)
    if not os.path.exists(os.path.join(options.carry, "bin", "millpond")):
        parser.error(f"{options.carry} has no bin/millpond: run tests/gpu/pack.sh, and name the folder in carry")
    options.out = os.path.abspath(options.out)
    return options


class Runner:
    def __init__(self, options, work):
        self.options, self.work = options, work
        self.start = time.monotonic()
        self.total = TOTAL[0 if options.quick else 1]
        self.bin = os.path.join(options.carry, "bin")
        self.log = open(os.path.join(options.out, "log.txt"), "a")
        self.log.truncate(0)
        self.child = None
        self.env = dict(os.environ)
        python = os.path.join(options.carry, "python")
        self.env["PYTHONPATH"] = python + os.pathsep + self.env["PYTHONPATH"] if self.env.get("PYTHONPATH") else python
        self.env["MILLPOND_PROGRAM"] = os.path.join(self.bin, "millpond")
        self.env["MILLPOND_LIBRARY"] = os.path.join(python, "millpond", "libmillpond_torch.so")
        self.env.setdefault("MILLPOND_LOG", "warn")
        self.env["PYTHONUNBUFFERED"] = "1"
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"
        self.results = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": shlex.join(["tests/gpu/run.sh", *sys.argv[1:]]),
            "commit": self.commit(),
            "driver_kind": options.driver,
        }
        self.notes = []
        # Carried files may have lost their mode on the way.
        for name in os.listdir(self.bin):
            try:
                os.chmod(os.path.join(self.bin, name), 0o755)
            except OSError:
                pass

    def commit(self):
        try:
            with open(os.path.join(self.options.carry, "COMMIT")) as file:
                return file.read().strip()
        except OSError:
            return None

    def say(self, text):
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def ask(self, *command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.env).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    def note_machine(self):
        lines = self.ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version,uuid,compute_mode", "--format=csv,noheader").splitlines()
        self.results["gpu"] = [line.strip() for line in lines]
        self.results["driver"] = lines[0].split(",")[2].strip() if lines and lines[0].count(",") >= 2 else None
        self.results["kernel"], self.results["cpus"] = os.uname().release, os.cpu_count()
        ask_torch = "import torch, json; print(json.dumps({'torch_version': torch.__version__, 'cuda_version': torch.version.cuda}))"
        # The first import reads a few GiB from a cold disk.
        known = self.ask(sys.executable, "-c", ask_torch)
        self.results.update(json.loads(known) if known.startswith("{") else {"torch_version": None, "cuda_version": None})
        self.results["python"] = sys.version.split()[0]
        doctor = self.ask(os.path.join(self.bin, "millpond"), "doctor", "--json")
        try:
            self.results["doctor"] = json.loads(doctor)
        except ValueError:
            self.results["doctor"] = doctor[-2000:] or None
        facts = {key: self.results[key] for key in ("gpu", "driver", "torch_version", "cuda_version", "kernel", "cpus", "commit")}
        self.say(f"machine ({time.monotonic() - self.start:.1f} s): {json.dumps(facts)}")
        self.log.write(f"doctor: {doctor}\n")

    def stage(self, stage):
        getattr(self, stage)()
        self.write()

    def left(self):
        """Seconds that are left of all."""
        return self.total - (time.monotonic() - self.start)

    def run(self, stage, command):
        """Runs a stage's program: its exit code (None: out of time) and seconds. Its output goes to the log."""
        left = self.left()
        later = [s for s in STAGES[STAGES.index(stage) + 1 :] if s in self.options.only]
        limit = min(left, LIMITS[stage][0 if self.options.quick else 1] if later else left)
        if limit < 5:
            self.say(f"== {stage}: not run, no time left")
            self.results[stage] = {"error": "not run: no time left"}
            return None, 0.0
        self.stage_log = self.log.tell()
        self.say(f"== {stage} (at {time.monotonic() - self.start:.0f} s, limit {limit:.0f} s): {shlex.join(command)}")
        begun = time.monotonic()
        environment = dict(self.env, MILLPOND_STAGE_SECONDS=str(int(limit) - 3))
        try:
            # A session of its own, so that all of it can be ended.
            self.child = subprocess.Popen(
                command, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        except OSError as e:
            self.results[stage] = {"error": str(e)}
            self.say(f"   {stage}: {e}")
            return -1, 0.0
        try:
            code = self.child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        self.end_child()
        seconds = time.monotonic() - begun
        self.say(f"   {stage}: {'out of time' if code is None else f'exit code {code}'}, {seconds:.1f} s")
        return code, seconds

    def said(self):
        """The end of what the stage has written into the log."""
        self.log.flush()
        with open(self.log.name, "rb") as file:
            file.seek(self.stage_log)
            return file.read()[-1500:].decode("utf-8", "replace")

    def end_child(self):
        if self.child is None:
            return
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except OSError:
            pass
        self.child.wait()
        self.child = None

    def json_of(self, stage, command):
        """Runs a program that leaves its results in a JSON file, whole or in part."""
        path = os.path.join(self.work, stage + ".json")
        code, seconds = self.run(stage, [*command, "--json", path])
        if stage in self.results:
            return self.results[stage]
        try:
            with open(path) as file:
                found = json.load(file)
        except (OSError, ValueError) as e:
            found = {"error": f"no results: {e}; it said: {self.said()}"}
        found["exit_code"], found["stage_seconds"] = code, round(seconds, 1)
        if code is None:
            found["out_of_time"] = True
        self.results[stage] = found
        return found

    def quick(self):
        return ["--quick"] if self.options.quick else []

    def conformance(self):
        self.json_of("conformance", [os.path.join(self.bin, "millpond-conformance"), "--platform", self.options.driver])

    def micro(self):
        owner = ["--owner", os.path.join(self.bin, "millpond")]
        self.json_of("micro", [os.path.join(self.bin, "millpond-micro"), "--driver", self.options.driver, *owner, *self.quick()])

    def contract(self):
        command = [sys.executable, os.path.join(HERE, "contract.py"), "--driver", self.options.driver, "--bin", self.bin, *self.quick()]
        self.json_of("contract", command)

    def stress(self):
        kills, seconds = (25, 30) if self.options.quick else (100, 100)
        command = [os.path.join(self.bin, "millpond"), "stress", "--driver", self.options.driver, "--workers", "4"]
        command += ["--kills", str(kills), "--seconds", str(seconds), "--json"]
        if self.options.fault:
            command += ["--fault", self.options.fault]
        found = self.last_line_of("stress", command)
        if found is None:
            return
        found["figures"] = {key: found[key] for key in ("kills", "timed_kills", "killed_inside", "ops", "transfers", "seconds", "reclaim_ms", "release_us", "outside_bytes", "outside_not_checked") if key in found}
        if found.get("findings"):
            found["error"] = "; ".join(found["findings"])

    def torch(self):
        command = [sys.executable, os.path.join(HERE, "torch_suite.py"), "--driver", self.options.driver, *self.quick()]
        if self.options.match:
            command += ["--match", self.options.match]
        if self.options.skip:
            command += ["--skip", self.options.skip]
        self.json_of("torch", command)

    def bench(self):
        command = [sys.executable, os.path.join(HERE, "bench.py"), "--driver", self.options.driver]
        self.json_of("bench", [*command, *self.quick()])

    def pairs(self):
        """Ten pairs of processes, ours and torch's own, one pair after the other."""
        command = [sys.executable, os.path.join(HERE, "bench.py"), "--driver", self.options.driver, "--modes", "native", "--pairs", "10"]
        self.json_of("pairs", [*command, "--rounds", "3", "allocation"])

    def demo(self):
        path = self.options.input
        if path is None:
            path = os.path.join(self.work, "weights.safetensors")
            try:
                make_weights(path, 24 if self.options.quick else 90)
            except Exception as e:
                self.results["demo"] = {"error": f"no weights: {type(e).__name__}: {e}"}
                return
        command = [sys.executable, "-m", "millpond", "demo", "--driver", self.options.driver, "--input", path, "--json"]
        self.last_line_of("demo", command)

    def last_line_of(self, stage, command):
        """Runs a program whose last line on stdout is its results in JSON; None where it was not run."""
        out = os.path.join(self.work, stage + ".json")
        code, seconds = self.run(stage, ["sh", "-c", f"{shlex.join(command)} > {shlex.quote(out)}"])
        if stage in self.results:
            return None
        try:
            with open(out) as file:
                found = json.loads(file.read().strip().splitlines()[-1])
        except (OSError, ValueError, IndexError) as e:
            found = {"error": f"no report: {e}; it said: {self.said()}"}
        found["exit_code"], found["stage_seconds"] = code, round(seconds, 1)
        self.results[stage] = found
        return found

    def write(self):
        self.results["missed"] = targets.judge(self.results)[0]
        path = os.path.join(self.options.out, "results.json")
        with open(path + ".new", "w") as file:
            json.dump(self.results, file, indent=1)
        os.replace(path + ".new", path)

    def stopped(self, *_):
        self.end_child()
        self.results["stopped"] = "by the overall time limit"
        self.write()
        self.summary()
        os._exit(124)

    def summary(self):
        """Prints the summary; the exit code."""
        bad = []
        lines = [f"==== summary after {time.monotonic() - self.start:.0f} s"]
        for stage in STAGES:
            found = self.results.get(stage)
            if found is None:
                continue
            failures = failures_of(stage, found)
            lines.append(f"{stage:12} {headline(stage, found)}{f'  ({len(failures)} failed)' if failures else ''}")
            bad += [f"{stage}: {failure}" for failure in failures]
        self.log.write("\n".join(figures(self.results)) + "\n")
        lines += ["", *(line if len(line) <= WIDTH else line[:WIDTH] + "…" for line in figures(self.results))]
        # The end of the output comes back by itself, some 12,000 characters of it: each failure gets its share.
        share = max(170, 7000 // max(1, len(bad)))
        for failure in bad:
            self.log.write(f"FAIL  {failure}\n")
            head, *rest = failure.splitlines()
            lines += ["", "FAIL  " + head[:share]]
            left = share - len(head)
            for line in rest[:FIRST_LINES]:
                left -= len(line)
                if left < 0:
                    break
                lines.append("      " + line)
        missed, lacking = targets.judge(self.results)
        if lacking:
            unjudged = f"targets without a figure: {', '.join(lacking)}"
            self.log.write(unjudged + "\n")
            lines += ["", unjudged if len(unjudged) <= WIDTH else unjudged[:WIDTH] + "…"]
        lines += ["", *(f"MISSED  {sentence}" for sentence in missed)] if missed else []
        self.say("\n".join(lines))
        self.say(f"==== {verdict(bad, missed)}; results: {os.path.join(self.options.out, 'results.json')}")
        return 1 if bad or (missed and self.options.strict) else 0


def verdict(bad, missed):
    """The summary's last words."""
    if not missed:
        return f"{len(bad)} FAILED" if bad else "all well"
    targets_missed = f"{len(missed)} target{'s' if len(missed) > 1 else ''} missed: {'; '.join(missed)}"
    return f"{len(bad)} FAILED; {targets_missed}" if bad else f"ran; {targets_missed}"


def headline(stage, found):
    if "error" in found and len(found) <= 3:
        return f"error: {str(found['error'])[:300]}"
    counts = ", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "skipped") if key in found)
    late = ", OUT OF TIME" if found.get("out_of_time") else ""
    if stage == "stress":
        counts = ", ".join(f"{found.get(key)} {key}" for key in ("kills", "transfers", "corruptions", "hung", "leaked_bytes", "leaked_fds"))
    return f"{counts or ('verified' if found.get('verified') else '')} in {found.get('stage_seconds')} s{late}"


def failures_of(stage, found):
    failures = []
    for case in found.get("cases", ()):
        if not case.get("ok", True):
            failures.append(f"{case.get('device', '')} {case['case']}: {case.get('message')}".strip())
    if found.get("error"):
        failures.append(str(found["error"])[:3000])
    if found.get("out_of_time"):
        failures.append("out of time: what is here is what was done before")
    elif found.get("exit_code") not in (0, None) and not failures:
        failures.append(f"exit code {found['exit_code']}: see log.txt")
    if stage == "demo" and not found.get("verified") and not failures:
        failures.append(f"not verified: {json.dumps(found)[:1000]}")
    return failures


def short(value):
    """Figures for the eye: of a distribution only the median and the tail."""
    if isinstance(value, dict) and "p50" in value and "p99" in value:
        return f"p50 {value['p50']} p99 {value['p99']}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict) and "met" in value[0]:
        missed = [f"{row['what']}: {row['found']} (at most {row['at_most']})" for row in value if not row["met"]]
        return f"{len(value) - len(missed)} of {len(value)} met" + ("; missed: " + "; ".join(missed) if missed else "")
    return json.dumps(value)


def figures(results):
    """The figures that matter, one line each."""
    lines = []
    for stage in ("micro", "contract", "stress", "torch", "bench", "pairs"):
        for name, value in (results.get(stage, {}).get("figures") or {}).items():
            lines.append(f"{stage}  {name}: {short(value)}")
    demo = results.get("demo", {})
    if "handoff_us" in demo:
        keys = ("tensors", "bytes", "bytes_copied", "socket_bytes", "verified", "handoff_us")
        lines.append(f"demo   {json.dumps({key: demo.get(key) for key in keys})}")
    return lines


def make_weights(path, mebibytes):
    """A safetensors file of random float32 and float16 tensors of many shapes."""
    import numpy as np

    rng = np.random.default_rng(7)
    tensors, left = {}, mebibytes << 20
    shapes = [(384,), (1536, 384), (384, 1536), (384, 384), (30522 // 8, 384), (3, 5, 7), (1,), (0, 4)]
    n = 0
    while left > 0:
        shape = shapes[n % len(shapes)]
        value = rng.standard_normal(shape, dtype=np.float32)
        if n % 3 == 2:
            value = value.astype(np.float16)
        tensors[f"layer.{n}.weight"] = value
        left -= max(value.nbytes, 1)
        n += 1
    header, at = {}, 0
    for name, value in tensors.items():
        dtype = "F16" if value.dtype == np.float16 else "F32"
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.tobytes())


if __name__ == "__main__":
    sys.exit(main())
