#!/usr/bin/env bash
# Runs a command on two hosts that this machine plays: two network namespaces joined by a cable, with an sshd in each.
#
#   launch/two_hosts.sh [--rate 1gbit] [--slots N] -- deepspeed recipes/pretrain.py --recipe R ...
#   launch/two_hosts.sh [--rate 1gbit] [--slots N] --plain -- python script.py ...
#
#   --rate R    limits the cable to R in each direction (what tc takes: 1gbit, 200mbit, ...); without it, it is as fast as
#               this machine copies
#   --slots N   processes on each host (default 1)
#   --plain     starts the command N times on each host, itself, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
#               MASTER_PORT set; when one fails the others are ended. No sshd and no pdsh are needed then.
#
# Otherwise the command runs once, on host-0, from where "ssh host-0" and "ssh host-1" work. The file that $HOSTFILE names
# lists both hosts; to `deepspeed` it is given as --hostfile. DS_ACCELERATOR=cpu and OMP_NUM_THREADS=1 unless set otherwise.
#
# Needs root, and iproute2; without --plain also openssh-server and pdsh. Hosts share this machine's files and cores, but see
# no other network. Keys and settings of ssh are made for this one run; nothing of this machine's own is read or changed.
# Exits with the status of the command; 2 for wrong arguments; 3, saying why, where hosts can not be made here.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$root/launch/two_hosts.sh"; }
die() { printf 'two_hosts: %s\n' "${@:2}" >&2; exit "$1"; }

rate='' slots=1 plain=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --rate | --slots)
            [ $# -gt 1 ] || die 2 "$1 needs a value"
            if [ "$1" = --rate ]; then rate=$2; else slots=$2; fi
            shift 2 ;;
        --plain) plain=yes; shift ;;
        --) shift; break ;;
        -*) die 2 "$1 is no option; launch/two_hosts.sh --help lists them" ;;
        *) break ;;
    esac
done
[[ $slots =~ ^[1-9][0-9]*$ ]] || die 2 "--slots $slots: must be a whole number, 1 or more"
if [ $# -eq 0 ]; then usage >&2; exit 2; fi

need() { # COMMAND PACKAGE
    PATH=$PATH:/usr/sbin:/sbin command -v "$1" || die 3 "$1 is not installed here (Debian, Ubuntu: apt-get install $2)"
}
[ "$(id -u)" -eq 0 ] || die 3 "needs root, to make network namespaces: sudo launch/two_hosts.sh ..."
ip=$(need ip iproute2)
tc=$(need tc iproute2)
need unshare util-linux >/dev/null
if [ -z "$plain" ]; then
    sshd=$(need sshd openssh-server)
    ssh=$(need ssh openssh-client)
    need pdsh pdsh >/dev/null
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/cpmoe-two-hosts-XXXXXX")
hosts=() # the first process of each host; its namespaces and all that runs in them end with it
commands=() # the leaders of the commands' process groups
addresses=(10.77.0.1 10.77.0.2)
tear_down() {
    local pid
    for pid in "${hosts[@]}" "${commands[@]/#/-}"; do kill -KILL -- "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap tear_down EXIT

# The /proc that a new process space starts with is still that of this one: it tells the number by which we know the host.
first_process='
    read -r pid _ </proc/self/stat
    mount -t proc proc /proc && hostname "$1" && echo "$pid" >"$2.new" && mv "$2.new" "$2"
    sleep infinity & wait'
for i in 0 1; do
    setpriv --pdeathsig KILL unshare --net --uts --pid --mount --fork --kill-child \
        bash -c "$first_process" bash "host-$i" "$work/pid-$i" 2>"$work/unshare.log" &
    while [ ! -e "$work/pid-$i" ]; do
        kill -0 $! 2>/dev/null || die 3 "no namespaces for a host: $(cat "$work/unshare.log")" \
            "(a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN: docker run --privileged)"
        sleep 0.05
    done
    disown
    hosts+=("$(cat "$work/pid-$i")")
done
on_host() { nsenter --target "${hosts[$1]}" --net --uts "${@:2}"; }

on_host 0 "$ip" link add eth0 type veth peer name eth0 netns "${hosts[1]}" ||
    die 3 "no virtual cable (veth) between the hosts"
for i in 0 1; do
    on_host $i "$ip" addr add "${addresses[$i]}/24" dev eth0
    on_host $i "$ip" link set lo up
    on_host $i "$ip" link set eth0 up
    if [ -n "$rate" ]; then
        on_host $i "$tc" qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 200ms ||
            die 3 "tc does not limit the cable to --rate $rate"
    fi
done

export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export PATH="$root/.venv/bin:$PATH"

start_ssh() {
    local i locked=no
    ssh-keygen -q -t ed25519 -N '' -C two_hosts -f "$work/key"
    printf 'two-hosts %s\n' "$(cut -d' ' -f1,2 "$work/key.pub")" >"$work/known_hosts"
    # sshd refuses an account whose password is locked, unless PAM decides.
    if grep -q '^root:!' /etc/shadow; then locked=yes; fi
    mkdir -p /run/sshd # sshd wants it; the service of its package makes it
    mkdir "$work/bin"
    printf '#!/bin/sh\nexec %q -F %q "$@"\n' "$ssh" "$work/ssh_config" >"$work/bin/ssh"
    chmod +x "$work/bin/ssh"
    cat >"$work/ssh_config" <<END
Host *
    User root
    IdentityFile $work/key
    IdentitiesOnly yes
    UserKnownHostsFile $work/known_hosts
    HostKeyAlias two-hosts
    LogLevel ERROR
END
    for i in 0 1; do
        printf 'Host host-%s\n    HostName %s\n' $i "${addresses[$i]}" >>"$work/ssh_config"
        printf 'host-%s slots=%s\n' $i "$slots" >>"$work/hostfile"
        cat >"$work/sshd_config" <<END
ListenAddress ${addresses[$i]}
HostKey $work/key
AuthorizedKeysFile $work/key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM $locked
PidFile none
SetEnv DS_ACCELERATOR=$DS_ACCELERATOR OMP_NUM_THREADS=$OMP_NUM_THREADS GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
END
        on_host $i --pid --mount "$sshd" -f "$work/sshd_config" -E "$work/sshd-$i.log" ||
            die 3 "no sshd on host-$i" "$(cat "$work/sshd-$i.log")"
    done
    for i in 0 1; do
        on_host 0 "$work/bin/ssh" "host-$i" true || die 3 "ssh host-$i does not work" "$(cat "$work/sshd-$i.log")"
    done
}

# Each command leads a process group of its own, so that a signal reaches all of it, and this script ends after it.
set -m
start() { # HOST COMMAND ...
    setpriv --pdeathsig TERM nsenter --target "${hosts[$1]}" --net --uts "${@:2}" </dev/null &
    commands+=($!)
}
signalled=''
signal_all() {
    local pid
    signalled=yes
    for pid in $(jobs -pr); do kill "-$1" -- "-$pid" 2>/dev/null || true; done
}
trap 'signal_all INT' INT
trap 'signal_all TERM' TERM

if [ -n "$plain" ]; then
    for ((rank = 0; rank < 2 * slots; rank++)); do
        start $((rank / slots)) env RANK=$rank LOCAL_RANK=$((rank % slots)) WORLD_SIZE=$((2 * slots)) \
            LOCAL_WORLD_SIZE="$slots" MASTER_ADDR="${addresses[0]}" MASTER_PORT=29500 "$@"
    done
else
    start_ssh
    export HOSTFILE=$work/hostfile PATH="$work/bin:$PATH"
    command=("$@")
    if [ "$(basename -- "$1")" = deepspeed ]; then command=("$1" --hostfile "$HOSTFILE" "${@:2}"); fi
    start 0 "${command[@]}"
fi

status=0
while [ -n "$(jobs -pr)" ]; do
    wait -n 2>/dev/null && code=0 || code=$? # also returns, with the signal's number, where this script got one
    if [ "$code" -ne 0 ] && [ "$status" -eq 0 ]; then status=$code; fi
    if [ "$status" -ne 0 ] && [ -z "$signalled" ]; then signal_all TERM; fi
done
# Interrupted, the launcher returns while its ranks on the hosts still finish a step and save.
for ((waited = 0; waited < 300; waited++)); do
    [ -n "$signalled" ] && [ -z "$plain" ] || break
    on_host 0 --pid --mount pgrep -f deepspeed.launcher.launch >/dev/null ||
        on_host 1 --pid --mount pgrep -f deepspeed.launcher.launch >/dev/null || break
    sleep 0.2
done
exit "$status"
