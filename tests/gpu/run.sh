#!/bin/sh
# Everything that a GPU machine can say about millpond, in one command, from what pack.sh laid out.
# usage: tests/gpu/run.sh [--quick] [--driver cuda|host] [--only conformance,micro,contract,torch,bench,demo,stress] [--carry DIR] OUTDIR
# Writes OUTDIR/results.json and OUTDIR/log.txt; prints a summary last. At most 10 minutes, with --quick 3.
here=$(cd "$(dirname "$0")" && pwd)
limit=580
for word in "$@"; do [ "$word" = --quick ] && limit=185; done
PYTHONUNBUFFERED=1 exec timeout -k 5 "$limit" "${PYTHON:-python3}" "$here/run.py" "$@"
