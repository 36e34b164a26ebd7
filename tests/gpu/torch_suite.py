"""millpond under torch, on a GPU: `python3 torch_suite.py [--quick] [--json FILE] [--match TEXT,TEXT] [--list] [--show]`.

Every test is a process of its own (see harness.py). The tests are in cases_*.py.
"""
import argparse
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--match", help="only tests whose names hold one of these")
    parser.add_argument("--skip", default="", help="none whose names hold one of these")
    parser.add_argument("--driver", choices=("cuda", "host"), default=os.environ.get("MILLPOND_TEST_DRIVER", "cuda"))
    parser.add_argument("--jobs", type=int, default=max(2, min(12, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the output of tests that pass too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--result-fd", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["MILLPOND_TEST_DRIVER"] = options.driver
    import harness

    cases = "allocator graphs handoff death queues doors tiers copies programs watch recording two_gpus".split()
    for module in (f"cases_{name}" for name in cases):
        __import__(module)
    if options.worker:
        return harness.be_worker(options.worker[0], options.worker[1:])
    if options.one:
        return harness.run_one(options.one, options.result_fd)
    if options.list:
        for name, entry in harness.TESTS.items():
            print(f"{name:44} {(entry['function'].__doc__ or '').strip().splitlines()[0]}")
        return 0
    return run(harness, options)


def run(harness, options):
    wanted = options.match.split(",") if options.match else None
    names, cases, skipped = [], [], {}
    try:
        import importlib.util

        has_torch = importlib.util.find_spec("torch") is not None
    except ImportError:
        has_torch = False
    for name, entry in harness.TESTS.items():
        if (wanted and not any(w in name for w in wanted)) or any(w and w in name for w in options.skip.split(",")):
            continue
        if options.quick and not entry["quick"] and not wanted:
            continue
        if not has_torch:
            skipped[name] = "torch is not installed here"
        elif not harness.GPU and not entry["host"]:
            skipped[name] = "needs a GPU"
        else:
            names.append(name)
    figures, start = {}, time.monotonic()

    def report(case):
        cases.append(case)
        if case.get("skipped"):
            skipped[case["case"]] = case["skipped"]
        word = "skip " if case.get("skipped") else "ok   " if case["ok"] else "FAIL "
        print(f"{word} {case['case']} ({case['seconds']} s)", end="")
        print(f": {case['skipped']}" if case.get("skipped") else f": {json.dumps(case['figures'])}" if case.get("figures") else "")
        if not case["ok"] or (options.show and case.get("output")):
            print("\n".join("      " + line for line in (case.get("message") or case.get("output") or "").splitlines()))
        if case.get("figures"):
            figures[case["case"]] = case["figures"]
        sys.stdout.flush()
        write()

    def write():
        ran = [c for c in cases if not c.get("skipped")]
        failed = sum(not c["ok"] for c in ran)
        all_ = {
            "driver": options.driver, "quick": options.quick, "passed": len(ran) - failed, "failed": failed, "skipped": len(skipped),
            "skips": skipped, "seconds": round(time.monotonic() - start, 1), "cases": cases, "figures": figures,
        }
        if options.json:
            with open(options.json + ".new", "w") as file:
                json.dump(all_, file, indent=1)
            os.replace(options.json + ".new", options.json)
        return all_

    write()
    for name, why in skipped.items():
        print(f"skip  {name}: {why}")
    seconds = float(os.environ.get("MILLPOND_STAGE_SECONDS", "3600"))
    os.environ["MILLPOND_TEST_QUICK"] = "1" if options.quick else "0"
    harness.run_all(names, options.jobs, seconds, report)
    done = write()
    print(f"{done['passed']} passed, {done['failed']} failed, {done['skipped']} skipped in {done['seconds']} s")
    return 1 if done["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
