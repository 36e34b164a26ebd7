"""One mode's process: it comes up, says which cases it has, and measures a slice of one for each line that it reads. Where a
section has more to tell than times, it is asked for that at the end."""

import json
import os
import sys
import time


def main():
    settings = json.loads(sys.argv[1])
    # Whatever else writes to stdout must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        bench = make(settings)
        say(answers, {"cases": list(bench.cases), "notes": bench.notes})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                if "report" in asked:
                    say(answers, {"report": bench.report()})
                    continue
                n, ns = bench.cases[asked["case"]](asked["ms"])
                say(answers, {"n": n, "ns": ns})
            except Exception as e:
                say(answers, {"error": f"{type(e).__name__}: {e}"})
        bench.close()
    except Exception as e:
        say(answers, {"error": f"{type(e).__name__}: {e}"})
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)  # what the libraries do at their ends is not measured


def say(answers, what):
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def make(settings):
    """The mode's cases: an object with `cases` {name: function of milliseconds -> (operations, nanoseconds)}, `notes`, `close()`."""
    section = settings["section"]
    if section == "allocation":
        from .allocation import Allocation

        return Allocation(settings)
    if section == "replay":
        from .replay import Replay

        return Replay(settings)
    from .handoff import Handoff

    return Handoff(settings)


def timed(operation, ms, batch=1):
    """Runs an operation for so long, at least once: (operations, nanoseconds). A tenth of it before, unmeasured."""
    clock = time.perf_counter_ns
    end = clock() + ms * 100_000
    while True:
        operation()
        if clock() >= end:
            break
    n, start = 0, clock()
    end = start + ms * 1_000_000
    while True:
        for _ in range(batch):
            operation()
        n += batch
        now = clock()
        if now >= end:
            return n, now - start


if __name__ == "__main__":
    main()
