#!/usr/bin/env bash
# Makes .venv: the pinned versions of constraints.txt, cpmoe itself (editable) and the tools of its tests.
# Takes a fraction of a second when nothing changed. Environment:
#   PYTHON=python3.12   the interpreter to use (default: python3, or the first newer one found)
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/.setup-stamp
log=$venv/setup.log
unset PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.10 or newer is needed; ${PYTHON:-python3} is $(version_of "${PYTHON:-python3}" || echo 'not there')." \
        "Install one, or name one: PYTHON=/path/to/python3.12 $0"
}

has_nvidia_driver() { [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }

# Everything the environment is made from, as one line.
fingerprint() {
    local driver=no
    if has_nvidia_driver; then driver=yes; fi
    printf 'python %s root %s nvidia %s files %s\n' "$(version_of "$venv/bin/python")" "$root" "$driver" \
        "$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum | tr ' ' '-')"
}

pip() {
    printf '\n$ pip %s\n' "$*" >>"$log"
    (cd "$root" && "$venv/bin/python" -m pip "$@") >>"$log" 2>&1
}

# PyPI's torch for Linux is a CUDA build of several GB. Where there is no NVIDIA driver, a CPU build is taken from pip's
# own sources, else from PyTorch's index; where there is one, a CPU build that pip might prefer is ruled out.
torch_requirement() {
    local version
    version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$root/constraints.txt")
    if [ "$(uname -s)" != Linux ]; then
        echo "torch==$version"
    elif has_nvidia_driver; then
        echo "torch==$version,!=$version+cpu"
    elif pip install --no-deps "torch==$version+cpu" ||
        pip install --no-deps --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 5 "torch==$version+cpu"; then
        echo "torch==$version+cpu"
    else
        say "no CPU build of torch $version at hand; taking the default build (large)" >&2
        echo "torch==$version"
    fi
}

install() {
    local torch script
    torch=$(torch_requirement)
    pip install -c constraints.txt -e '.[dev]' "$torch" || return 1
    # pip gives DeepSpeed's scripts a first line that a space in the path breaks.
    if [[ $root == *\ * ]]; then
        for script in "$venv"/bin/*; do
            if grep -qIF "#!$venv/bin/python" "$script"; then
                sed -i.bak '1s|^#!.*|#!/usr/bin/env python|' "$script" && rm "$script.bak"
            fi
        done
    fi
}

# One set-up at a time; the second one then finds nothing to do. (macOS has no flock.)
if command -v flock >/dev/null; then
    exec 9<"${BASH_SOURCE[0]}"
    flock 9
fi

if [ -n "${PYTHON:-}" ]; then
    python=$(find_python)
    if [ "$(version_of "$python")" != "$(version_of "$venv/bin/python")" ]; then rm -f "$stamp"; fi
fi
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then
    exit 0
fi

command -v "${CXX:-g++}" >/dev/null ||
    say "note: no C++ compiler here. The main job needs none; compiled operators of DeepSpeed and Triton do (apt-get install g++)."

started=$SECONDS
# A .venv without a stamp was left by an interrupted set-up, and a stamp of another folder means that it was moved: start afresh.
if [ ! -f "$stamp" ] || ! grep -qF " root $root nvidia " "$stamp" || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    say "making .venv with Python $(version_of "$python") ($python)"
    "$python" -m venv --clear "$venv" || die "could not make $venv (Debian, Ubuntu: apt-get install python3-venv)"
fi
rm -f "$stamp"
: >"$log"
say "installing the versions of constraints.txt (log: $log)"
if ! install; then
    tail -n 25 "$log" >&2
    die "the installation failed; the whole log is in $log. The next set-up starts afresh."
fi
fingerprint >"$stamp"
say "done in $((SECONDS - started)) s"
