#!/usr/bin/env bash
# Runs recipes/pretrain.py on every host of a hostfile, through DeepSpeed's launcher and pdsh.
#
#   launch/multinode.sh HOSTFILE --recipe R [--deepspeed_config J] [section.key=value ...]
#   launch/multinode.sh launch/hostfile --recipe recipes/small.yaml --deepspeed_config ds_configs/bf16_zero1.json
#
# Needs: pdsh here; ssh without a password to every host; this folder, with its .venv, at the same path on every host
# (a shared file system, or a copy and launch/setup.sh on each); the prepared data and train.out_dir on a shared file system.
#
# Environment: hosts get the variables here whose names start with NCCL, PYTHON, MLFLOW, MV2 or UCX, and those of
# .deepspeed_env, in this folder or in ~, one NAME=value a line. No comments and no empty lines there: each line must
# hold "=". What clusters often need in it:
#   NCCL_SOCKET_IFNAME=eth0      the network of the GPUs' traffic, where there are several
#   GLOO_SOCKET_IFNAME=eth0      the same for CPU runs, which also need DS_ACCELERATOR=cpu and OMP_NUM_THREADS=N
#   HF_HOME=/shared/huggingface  a cache that all hosts see
# Users, ports and keys of ssh belong in ~/.ssh/config. DEEPSPEED_OPTIONS adds options of the launcher, such as
# "--master_addr 10.0.0.1 --master_port 29501"; without them the master is the first address of the first host.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$root/launch/multinode.sh"; }
die() { printf 'multinode: %s\n' "$@" >&2; exit 2; }

case "${1:-}" in
    '') usage >&2; exit 2 ;;
    -h | --help) usage; exit 0 ;;
esac
[ -f "$1" ] || die "$1 is no file. Write one \"host slots=N\" a line; launch/hostfile.example shows how."
hostfile=$(realpath "$1")
shift
cd "$root"

for file in "$HOME/.deepspeed_env" .deepspeed_env; do
    if [ -f "$file" ] && grep -nvm1 '=' "$file" >/dev/null; then
        die "$file line $(grep -nvm1 '=' "$file" | cut -d: -f1) holds no \"=\"; the launcher takes NAME=value lines only, no comments, no empty lines."
    fi
done
command -v pdsh >/dev/null || die "pdsh is not installed here (Debian, Ubuntu: apt-get install pdsh)."
bash launch/setup.sh

export PATH="$root/.venv/bin:$PATH"
read -ra options <<<"${DEEPSPEED_OPTIONS:-}"
hosts=$(awk '!/^[[:space:]]*(#|$)/ { print $1 }' "$hostfile" | paste -sd, -)
pdsh -S -R ssh -w "$hosts" "test -x '$root/.venv/bin/deepspeed'" ||
    die "a host (above) refuses ssh without a password, or has no $root/.venv: run launch/setup.sh on it."

command=(deepspeed --hostfile "$hostfile" "${options[@]}" recipes/pretrain.py "$@")
printf '$ %s\n' "${command[*]}"
exec "${command[@]}"
