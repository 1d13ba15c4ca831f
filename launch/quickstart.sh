#!/usr/bin/env bash
# Sets up, then trains recipes/quickstart.yaml with context and expert parallelism 2 on all GPUs, or on two CPU processes.
# Arguments change settings:
#   launch/quickstart.sh train.steps=100 cpmoe.expert_parallel_size=1
# Every start trains anew in a folder of its own; train.out_dir=runs/... continues the run of that folder.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
for argument in "$@"; do
    if [[ ! $argument =~ ^[a-z]+(\.[A-Za-z0-9_]+)+= ]]; then
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "launch/quickstart.sh"
        if [[ $argument = -h || $argument = --help ]]; then exit 0; fi
        printf '\nquickstart: %s is no section.key=value\n' "$argument" >&2
        exit 2
    fi
done

bash launch/setup.sh
export PATH="$root/.venv/bin:$PATH"
unset PYTHONHOME PYTHONPATH

settings=("$@")
default() { # adds a setting that the person did not give
    local given
    for given in "${settings[@]}"; do
        if [[ $given = "${1%%=*}="* ]]; then return; fi
    done
    settings+=("$1")
}

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
variables=()
if [ "$gpus" -eq 0 ] || [ "${DS_ACCELERATOR:-}" = cpu ]; then
    processes=2
    resources=(--num_accelerators 2)
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    if [ -r /sys/fs/cgroup/cpu.max ] && read -r quota period </sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then
        allowed=$((quota < period ? 1 : quota / period))
        cores=$((allowed < cores ? allowed : cores))
    fi
    threads=$((cores > processes ? cores / processes : 1))
    variables=(DS_ACCELERATOR=cpu "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}")
else
    processes=1
    while [ $((processes * 2)) -le "$gpus" ]; do processes=$((processes * 2)); done
    resources=(--num_gpus "$processes")
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then # the launcher ignores it beside --num_gpus
        resources=(--include "localhost:$(cut -d, -f"1-$processes" <<<"$CUDA_VISIBLE_DEVICES")")
    fi
fi
if [ "$processes" -eq 1 ]; then
    default cpmoe.context_parallel_size=1
    default cpmoe.expert_parallel_size=1
elif [ "$processes" -gt 8 ]; then # at least one sequence for each ring of two
    default "train.global_batch_size=$((processes / 2))"
fi
default "train.out_dir=runs/quickstart-$(date +%Y%m%d-%H%M%S)"

port=29500
while (: </dev/tcp/127.0.0.1/$port) 2>/dev/null; do port=$((port + 1)); done
command=(deepspeed --quiet "${resources[@]}")
if [ "$port" -ne 29500 ]; then command+=(--master_port "$port"); fi
command+=(recipes/pretrain.py --recipe recipes/quickstart.yaml --deepspeed_config ds_configs/quickstart.json "${settings[@]}")

printf '\n$ source .venv/bin/activate\n$ %s\n\n' "${variables[*]:+${variables[*]} }${command[*]}"

# The launcher leaves its ranks behind at Ctrl-C. So it gets a process group that the terminal does not signal, a request to
# stop goes to the process that passes it on to the ranks, and the prompt comes back after the last of them.
set -m
env "${variables[@]}" "${command[@]}" </dev/null &
launcher=$!
set +m
stopped=''
stop() { # STATUS
    if [ -n "$stopped" ]; then kill -KILL -- "-$launcher" 2>/dev/null || true; fi
    stopped=$1
    python - "$launcher" <<END || true
import psutil, sys
command = psutil.Process(int(sys.argv[1]))
launchers = [child for child in command.children() if "deepspeed.launcher.launch" in child.cmdline()]
for process in launchers or [command]:
    process.terminate()
END
}
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
status=0
while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher" 2>/dev/null && status=0 || status=$?
done
exit "${stopped:-$status}"
