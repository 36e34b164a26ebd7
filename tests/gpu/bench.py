"""The stage `bench`: `millpond.compare` within the stage's time. `python3 bench.py [--quick] [--driver host] [--json FILE]`.

What is compared, and how, is described in python/millpond/compare."""
import os
import sys

#: In a quick run there is time for the start of few processes.
QUICK_MODES = "native,bump,mp-native,pool-pointer,mp-queue,pipe-copy"


def main():
    from millpond.compare.cli import main as compare

    arguments = [a for a in sys.argv[1:]]
    seconds = os.environ.get("MILLPOND_STAGE_SECONDS")
    if seconds:
        arguments += ["--seconds", str(max(5, int(seconds) - 6))]  # ending takes a little
    if "--quick" in arguments:
        arguments += ["--modes", QUICK_MODES]
    return compare(arguments)


if __name__ == "__main__":
    sys.exit(main())
