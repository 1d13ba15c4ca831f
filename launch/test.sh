#!/usr/bin/env bash
# Sets up, then lint, format, types and the whole CPU test suite. Arguments go to pytest:
#   launch/test.sh                          everything (about 22 minutes on two cores)
#   launch/test.sh tests/moe -m 'not slow'  a part
# What is skipped is listed at the end with its reason. .venv/bin/pytest --help lists pytest's own options.
set -uo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
case "${1:-}" in
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' launch/test.sh; exit 0 ;;
esac
bash launch/setup.sh || exit 1

# The tests start their own processes, one thread each, on the CPU also where there are GPUs.
export OMP_NUM_THREADS=1 DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} PATH="$root/.venv/bin:$PATH"
unset PYTHONHOME PYTHONPATH

failed=()
check() {
    printf '\n== %s\n' "$*"
    "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check mypy --no-error-summary
check pytest -rs "$@"

if [ ${#failed[@]} -gt 0 ]; then
    printf '\ntest.sh: failed: %s\n' "$(IFS=';' && echo "${failed[*]}")" >&2
    exit 1
fi
