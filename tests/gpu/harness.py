"""What the torch tests stand on: a registry, tests and workers in processes of their own, results one by one.

A test is a function with `@test`; it runs in a fresh process (`torch_suite.py --one NAME`), gives a dict of figures or None,
and fails by raising. A worker is a function with `@worker` that gets its channel; `Parent.worker(function)` starts it.
"""
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

TESTS, WORKERS = {}, {}
DRIVER = os.environ.get("MILLPOND_TEST_DRIVER", "cuda")
GPU = DRIVER == "cuda"
SUITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_suite.py")
#: The end of a failed test's output that is kept.
TAIL = 3500


class Skip(Exception):
    """The test says why it cannot run here."""


def test(timeout=60, quick=True, alone=False, host=False):
    """`alone`: it measures time, or needs much memory. `host`: runs on the host driver too."""

    def register(function):
        TESTS[function.__name__] = {"function": function, "timeout": timeout, "quick": quick, "alone": alone, "host": host}
        return function

    return register


def worker(function):
    WORKERS[function.__name__] = function
    return function


def check(condition, *what):
    if not condition:
        raise AssertionError(" ".join(str(w) for w in what) or "check failed")


def equal(found, expected, what=""):
    if found != expected:
        raise AssertionError(f"{what}: {found!r}, expected {expected!r}")


def raises(kinds, function, *arguments):
    """The exception that a call raises; fails if it does not."""
    try:
        value = function(*arguments)
    except kinds as e:
        return e
    raise AssertionError(f"no {kinds} was raised; the call gave {value!r}")


def until(condition, seconds, what):
    """Waits for a condition: the seconds that took."""
    start = time.monotonic()
    while True:
        found = condition()
        if found:
            return time.monotonic() - start
        if time.monotonic() - start > seconds:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.0005)


def timed(torch, function):
    """Seconds of a call, GPU work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def at_once(count, run, seconds=60):
    """`run(0)` to `run(count - 1)`, each on a thread of its own: all end, and none raises."""
    failed = []

    def guarded(number):
        try:
            run(number)
        except BaseException as e:
            failed.append(f"thread {number}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    equal((failed, [n for n, thread in enumerate(threads) if thread.is_alive()]), ([], []), "threads that failed, threads that hang")


class Parent:
    """This process as a parent, with its arena. `replace`: torch's allocator is ours here too."""

    def __init__(self, limit="60%", replace=True, torch=True, **arena):
        import millpond

        self.millpond = millpond
        self.arena = millpond.Arena(limit=limit, driver=DRIVER, **arena)
        self.torch = None
        if torch:
            import torch as module

            self.torch = module
            if replace and GPU:
                millpond.torch.install()
        self.processes = []

    def worker(self, function, *arguments, **env):
        """Starts a worker: its channel, which knows its process as `.process`."""
        command = [sys.executable, SUITE, "--worker", function.__name__, *map(str, arguments)]
        environment = self.arena.worker_env(function.__name__, MILLPOND_TEST_DRIVER=DRIVER, **env)
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        end = time.monotonic() + 50
        while True:
            try:
                conn = self.arena.accept(timeout=0.5)
                break
            except self.millpond.Timeout:
                check(process.poll() is None, f"the worker ended with code {process.returncode} before it came")
                check(time.monotonic() < end, "the worker did not come within 50 s")
        conn.process = process
        return conn

    def workers(self, function, n, **env):
        """Starts n workers at once: their channels, in the order in which they came. Of a variable that is a list each has its own."""
        command = [sys.executable, SUITE, "--worker", function.__name__]
        started = {}
        for number in range(n):
            own = {name: value[number] if isinstance(value, list) else value for name, value in env.items()}
            environment = self.arena.worker_env(function.__name__, MILLPOND_TEST_DRIVER=DRIVER, **own)
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            self.processes.append(process)
            started[process.pid] = process
        conns = []
        for _ in range(n):
            conn = self.arena.accept(timeout=60)
            conn.process = started[conn.peer.pid]
            conn.number = list(started).index(conn.peer.pid)
            conns.append(conn)
        return conns

    def mine(self, key):
        """A figure of this process's row in the ledger, summed over the devices."""
        return self.of(os.getpid(), key)

    def of(self, pid, key):
        ledger = self.arena.ledger()
        return sum(c.get(key, 0) for d in ledger["devices"] for c in d["clients"] if c["pid"] == pid)

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.arena.close()


def be_worker(name, arguments):
    """A worker process."""
    import millpond

    millpond.attach()
    if GPU and "--no-install" not in arguments:
        import torch  # noqa: F401

        millpond.torch.install(mode="pool" if "--pool" in arguments else "replace")
    conn = millpond.connection(timeout=30)
    try:
        WORKERS[name](conn, *[a for a in arguments if not a.startswith("--")])
    except (millpond.Closed, millpond.PeerDied, millpond.OwnerDied):
        pass


def run_one(name, fd):
    """A test, in this process; its result goes to a descriptor."""
    result = {}
    try:
        result["figures"] = TESTS[name]["function"]()
        result["ok"] = True
    except Skip as e:
        result = {"ok": True, "skipped": str(e)}
    except BaseException as e:
        result = {"ok": False, "message": f"{type(e).__name__}: {e}", "trace": short_trace()}
    try:
        text = json.dumps(result)
    except (TypeError, ValueError):
        result["figures"] = repr(result.get("figures"))
        text = json.dumps(result)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    sys.stdout.flush()
    sys.stderr.flush()
    # What hangs at exit is one test's own affair.
    os._exit(0 if result["ok"] else 1)


def short_trace():
    lines = traceback.format_exc().strip().splitlines()
    return "\n".join(lines[-14:])


class Running:
    """A test's process."""

    def __init__(self, name, scale):
        self.name, self.entry = name, TESTS[name]
        self.limit = self.entry["timeout"] * scale
        self.start = time.monotonic()
        read, write = os.pipe()
        out_read, out_write = os.pipe()
        command = [sys.executable, SUITE, "--one", name, "--result-fd", str(write)]
        env = dict(os.environ, MILLPOND_TEST_DRIVER=DRIVER)
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out_write, stderr=out_write, pass_fds=(write,), start_new_session=True
        )
        os.close(write)
        os.close(out_write)
        self.output, self.result = bytearray(), bytearray()
        self.readers = [self._feed(read, self.result), self._feed(out_read, self.output)]

    @staticmethod
    def _feed(fd, into):
        def read():
            while True:
                part = os.read(fd, 65536)
                if not part:
                    break
                into.extend(part)
            os.close(fd)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def poll(self):
        """The case, when it is over."""
        code, late = self.process.poll(), time.monotonic() - self.start > self.limit
        if code is None and not late:
            return None
        # Workers, owners and whatever else it left behind are in its session, or end with it.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            pass
        self.process.wait()
        for reader in self.readers:
            reader.join(2)
        case = {"case": self.name, "seconds": round(time.monotonic() - self.start, 2)}
        output = self.output.decode("utf-8", "replace").strip()
        try:
            case.update(json.loads(bytes(self.result)))
        except ValueError:
            how = f"hung: killed after {self.limit:.0f} s" if code is None else ended(code)
            case.update(ok=False, message=f"{how}, before it had a result")
        if not case["ok"]:
            trace = case.pop("trace", "")
            case["message"] = "\n".join(part for part in (case["message"], trace, "output: " + output[-TAIL:] if output else "") if part)
        elif output:
            case["output"] = output[-600:]
        return case


def ended(code):
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def run_all(names, jobs, seconds, report):
    """Runs tests, `jobs` at a time, those that want to be alone last; no new one once the time is up."""
    end = time.monotonic() + seconds
    for group, width in (([n for n in names if not TESTS[n]["alone"]], jobs), ([n for n in names if TESTS[n]["alone"]], 1)):
        waiting, running = list(group), []
        while waiting or running:
            while waiting and len(running) < width:
                name = waiting.pop(0)
                if time.monotonic() > end - 4:
                    report({"case": name, "ok": False, "message": "not run: no time left", "seconds": 0})
                    continue
                running.append(Running(name, 1.0))
            for one in list(running):
                one.limit = min(one.limit, max(1.0, end - one.start))
                case = one.poll()
                if case is not None:
                    running.remove(one)
                    report(case)
            time.sleep(0.02)
