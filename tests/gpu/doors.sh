#!/bin/sh
# Fetches what the pyisolate and comfy-env doors need on a machine without a network, and lays it out beside pack.sh's work.
# usage: tests/gpu/doors.sh [DEST]       DEST: the folder that pack.sh made (default .carry). After pack.sh, which empties it.
# Pure Python wheels, 0.6 MB in all: they run under every Python from 3.10 on, so under the GPU machine's 3.12 too. uv is not among
# them (18 MB): pyisolate asks it for a venv only, and uv's own --seed needs a network; cases_doors.py puts `python -m venv` there.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
dest=${1:-$root/.carry}/doors
rm -rf "$dest"
mkdir -p "$dest"
${PYTHON:-python3} -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --platform any -d "$dest" \
    pyisolate==0.10.2 comfy-env==0.4.46 packaging==26.4 tomli==2.5.0 tomli-w==1.2.0 typing_extensions==4.16.0
du -k "$dest"/*.whl | awk '{ total += $1; printf "%6d KiB  %s\n", $1, $2 } END { printf "%6d KiB  in all\n", total }'
