"""Rust's own tests on a GPU, and what the driver does by itself: `python3 contract.py [--driver cuda|host] [--json FILE]`.

The tests are programs that pack.sh carries (`bin/contract_steps`, `bin/owner_tests`); on the host driver those that need a GPU are skipped.
"""
import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--bin", required=True, help="the folder of the programs")
    parser.add_argument("--quick", action="store_true", help="only the steps")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    gpu = options.driver == "cuda"
    seconds = float(os.environ.get("MILLPOND_STAGE_SECONDS", "600"))
    end = time.monotonic() + seconds
    found = {"driver": options.driver, "passed": 0, "failed": 0, "skipped": 0, "cases": [], "figures": {}}

    def report(case):
        found["cases"].append(case)
        found["skipped" if case.get("skipped") else "passed" if case["ok"] else "failed"] += 1
        word = "skip " if case.get("skipped") else "ok   " if case["ok"] else "FAIL "
        print(f"{word} {case['case']} ({case.get('seconds', 0)} s): {case.get('skipped') or case.get('message') or case.get('figures', '')}", flush=True)
        if case.get("figures"):
            found["figures"][case["case"]] = case["figures"]
        if options.json:
            with open(options.json + ".new", "w") as file:
                json.dump(found, file, indent=1)
            os.replace(options.json + ".new", options.json)

    def case(name, body, *arguments):
        start = time.monotonic()
        try:
            result = {"case": name, "ok": True, **body(max(2.0, end - start), *arguments)}
        except subprocess.TimeoutExpired as e:
            result = {"case": name, "ok": False, "message": f"not done within {e.timeout:.0f} s: {tail(e.output)}"}
        except Exception as e:
            result = {"case": name, "ok": False, "message": f"{type(e).__name__}: {e}"[:3000]}
        return {**result, "seconds": round(time.monotonic() - start, 2)}

    rust = lambda program, name, *more: case(name, rust_test, os.path.join(options.bin, program), name, options.driver, more)  # noqa: E731
    # It compares what the card has in use before and after: nothing else may run.
    context = "the_owner_of_a_gpu_has_no_context_and_gives_everything_back"
    apart = "needs a GPU" if not gpu else "not in a quick run" if options.quick else ""
    report({"case": f"gpu::{context}", "ok": True, "skipped": apart} if apart else rust("owner_tests", f"gpu::{context}", "--ignored"))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        others = [pool.submit(rust, "contract_steps", "killed_at_every_step")]
        if apart:
            report({"case": "interprocess_event_hang", "ok": True, "skipped": apart})
        else:
            others.append(pool.submit(case, "interprocess_event_hang", reproduction))
        for done in concurrent.futures.as_completed(others):
            report(done.result())
    print(f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped")
    return 1 if found["failed"] else 0


def rust_test(seconds, program, name, driver, more):
    """One test of a Rust test program, in its own process."""
    env = dict(os.environ, MILLPOND_TEST_DRIVER=driver, RUST_BACKTRACE="0")
    command = [program, "--exact", name, "--nocapture", "--test-threads=1", *more]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    said = done.stdout.decode("utf-8", "replace")
    # A name that is not there is no failure to the program.
    if done.returncode or not re.search(r"^test result: ok\. 1 passed", said, re.M):
        raise AssertionError(f"exit code {done.returncode}: {tail(said)}")
    return {}


def reproduction(seconds):
    """docs/reproductions/interprocess_event_hang.py, a short form: whether the driver's event hangs is its own affair and a figure here;
    that a word is released by one store is ours."""
    program = next(path for path in (os.path.join(HERE, folder, "interprocess_event_hang.py") for folder in (".", "../../docs/reproductions")) if os.path.exists(path))
    command = [sys.executable, program, "--watch", "3", "--cases", "event-killed,word-lives,word-killed"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    said = done.stdout.decode("utf-8", "replace")
    result = json.loads(said.strip().splitlines()[-1])
    cases = {one["case"]: one for one in result.get("cases", ())}
    if done.returncode or not all(one["waited_before"] for one in cases.values()):
        raise AssertionError(f"exit code {done.returncode}: {tail(said)}")
    released = cases["word-killed"]["released_by_a_store_ms"]
    if released is None or cases["word-lives"]["released_ms"] is None:
        raise AssertionError(f"a word did not release its waiter: {tail(said)}")
    return {"figures": {"event_hangs": bool(result["hung"]), "watched_s": 3, "word_released_by_a_store_ms": released}}


def tail(text):
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return (text or "")[-2500:]


if __name__ == "__main__":
    sys.exit(main())
