#!/bin/sh
# Builds what a GPU machine without Rust needs and lays it out in .carry/ (or DEST):
#   bin/millpond, bin/millpond-conformance, bin/millpond-micro   the programs
#   bin/contract_steps, bin/owner_tests                           tests of Rust's that run on a GPU too
#   python/millpond/ with libmillpond_torch.so inside            the package
#   benches/traces/                                               the traces that bench replays
#   gpu/                                                          these scripts
# usage: tests/gpu/pack.sh [DEST]        PROFILE=dev: not optimised, for trying the scripts out
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
dest=${1:-$root/.carry}
profile=${PROFILE:-release}
cd "$root"
if [ "$profile" = release ]; then built=release; else built=debug; fi
cargo build --profile "$profile" ${CARGO_FLAGS:-} -p millpond-torch -p millpond-ipc -p millpond-tests --features millpond-ipc/cli
# Of two test programs: where cargo put them.
tests=$(cargo test --no-run --profile "$profile" ${CARGO_FLAGS:-} -p millpond-tests -p millpond-ipc --features millpond-ipc/cli \
    --test contract_steps --test owner --message-format json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
target=${CARGO_TARGET_DIR:-target}/$built
rm -rf "$dest"
mkdir -p "$dest/bin" "$dest/python"
cp -r python/millpond "$dest/python/"
find "$dest/python" -name __pycache__ -type d -prune -exec rm -rf {} +
cp "$target/millpond" "$target/millpond-conformance" "$target/millpond-micro" "$dest/bin/"
for program in $tests; do
    case $(basename "$program") in
    contract_steps-*) cp "$program" "$dest/bin/contract_steps" ;;
    owner-*) cp "$program" "$dest/bin/owner_tests" ;;
    esac
done
cp "$target/libmillpond_torch.so" "$dest/python/millpond/"
cp -r tests/gpu "$dest/gpu"
cp docs/reproductions/interprocess_event_hang.py "$dest/gpu/"
mkdir "$dest/benches"
cp -r benches/traces "$dest/benches/"
# Probes that need neither nvcc nor CUDA's headers, where a C++ compiler is.
if command -v c++ > /dev/null; then
    c++ -O2 -static-libstdc++ -static-libgcc -x c++ tests/gpu/probes/kill_probe.cu -o "$dest/bin/kill_probe" -ldl
fi
strip --strip-debug "$dest"/bin/* "$dest/python/millpond/libmillpond_torch.so"
git rev-parse --short HEAD > "$dest/COMMIT" 2>/dev/null || echo unknown > "$dest/COMMIT"
[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || echo "$(cat "$dest/COMMIT")-dirty" > "$dest/COMMIT"
(cd "$dest" && du -k bin/* python/millpond/libmillpond_torch.so && du -sk .) | awk '{ printf "%8.1f MiB  %s\n", $1 / 1024, $2 }'
echo "packed $(cat "$dest/COMMIT") ($profile) into $dest"
