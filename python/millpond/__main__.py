"""`python -m millpond demo ...`; everything else is the `millpond` program's."""

import os
import sys


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["demo"]:
        from .demo import main as demo

        return demo(arguments[1:])
    from ._owner import program_path
    from .errors import Error

    try:
        path = program_path()
    except Error as e:
        print(f"millpond: {e}", file=sys.stderr)
        return 1
    os.execv(path, [path, *arguments])


if __name__ == "__main__":
    sys.exit(main())
