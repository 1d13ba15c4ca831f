"""Two hosts that one machine plays (launch/two_hosts.sh): their cable, and the real multi-host launch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed import run_distributed
from tests.launch.support import ROOT, records, tiny, train

SCRIPT = str(ROOT / "launch" / "two_hosts.sh")
QUICKSTART = (ROOT / "recipes" / "quickstart.yaml", ROOT / "ds_configs" / "quickstart.json")
NO_HOSTS = 3
LAYOUT = ("train.micro_batch_size=1", "cpmoe.context_parallel_size=2", "cpmoe.expert_parallel_size=2")

EXCHANGE = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(sys.argv[1])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    peer = socket.create_server(address).accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
start = time.perf_counter()
if rank == 0:
    peer.sendall(bytes(size))
    assert peer.recv(1) == b"."
    print(time.perf_counter() - start)
else:
    while size:
        size -= len(peer.recv(size))
    peer.sendall(b".")
"""


def commands() -> list[str]:
    """The command lines of all processes of this machine."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


def two_hosts(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script; skips, with its reason, where this machine can not play two hosts."""
    environment = {**os.environ, **variables, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", SCRIPT, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    if done.returncode == NO_HOSTS and done.stderr.startswith("two_hosts: "):
        pytest.skip(done.stderr.strip().replace("\n", " "))
    return done


@pytest.fixture
def leaves_nothing(tmp_path: Path):
    """A TMPDIR for the script; afterwards nothing is in it, and no process that names it is left."""
    yield str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 10
    while left := [command for command in commands() if str(tmp_path) in command]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_each_host_is_a_machine_of_its_own(leaves_nothing: str) -> None:
    show = (
        'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK on $(hostname), from $MASTER_ADDR:$MASTER_PORT"; ip -br link'
    )
    done = two_hosts("--plain", "--slots", "2", "--", "bash", "-c", show, TMPDIR=leaves_nothing)
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if " of " in line)
    assert told == [f"{rank} of 4, {rank % 2} on host-{rank // 2}, from 10.77.0.1:29500" for rank in range(4)]
    links = {line.split()[0].partition("@")[0] for line in done.stdout.splitlines() if " of " not in line}
    assert links == {"lo", "eth0"}


def test_the_cable_has_the_rate_that_was_asked_for() -> None:
    size = 2_500_000
    seconds = []
    for rate in ([], ["--rate", "50mbit"]):
        done = two_hosts(*rate, "--plain", "--", sys.executable, "-c", EXCHANGE, str(size))
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    free, limited = seconds
    assert free < limited / 2
    # The first 256 kB pass at once; headers take 3 to 6 per cent.
    least = (size - 256 * 1024) * 8 / 50e6
    assert least < limited < 2 * least


def test_a_rank_that_fails_ends_the_others_and_gives_its_status(leaves_nothing: str) -> None:
    start = time.monotonic()
    fail = 'if [ "$RANK" = 1 ]; then exit 5; fi; sleep 100'
    done = two_hosts("--plain", "--", "bash", "-c", fail, TMPDIR=leaves_nothing)
    assert done.returncode == 5, done.stderr
    assert time.monotonic() - start < 30
    refused = two_hosts("--rate", "fast", "--plain", "--", "true", TMPDIR=leaves_nothing)
    assert "--rate fast" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_which_may_finish(leaves_nothing: str, number: signal.Signals) -> None:
    two_hosts("--plain", "--", "true")
    # What it leaves behind (a shell's children ignore SIGINT) goes too, or the pipe would stay open.
    finish = f"trap 'sleep 0.5; echo $RANK finished; exit' {number.name}; echo starts; sleep 100 & wait"
    process = subprocess.Popen(
        ["bash", SCRIPT, "--plain", "--", "bash", "-c", finish],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": leaves_nothing},
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["starts\n"] * 2
    process.send_signal(number)
    assert sorted(process.communicate(timeout=30)[0].splitlines()) == ["0 finished", "1 finished"]
    assert process.returncode == 128 + number


@pytest.mark.slow
def test_hosts_and_ssh_go_with_the_script_that_was_killed(leaves_nothing: str) -> None:
    two_hosts("--", "true")
    process = subprocess.Popen(
        ["bash", SCRIPT, "--", "bash", "-c", "echo starts; sleep 1000"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": leaves_nothing},
    )
    assert process.stdout is not None and process.stdout.readline() == "starts\n"
    process.kill()
    process.wait()
    shutil.rmtree(*Path(leaves_nothing).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("through", ["deepspeed", "multinode.sh"])
def test_the_launcher_trains_on_two_hosts_what_one_host_trains(tmp_path: Path, through: str) -> None:
    """Ring and all-to-all travel over the cable; the losses are those of one host, to the bit."""
    two_hosts("--", "true")
    recipe, deepspeed = map(str, QUICKSTART)
    settings = ["--recipe", recipe, "--deepspeed_config", deepspeed, *LAYOUT, *tiny(tmp_path, "two", steps=2)]
    if through == "deepspeed":
        command = ["deepspeed", "recipes/pretrain.py", *settings]
    else:
        if not (ROOT / ".venv" / ".setup-stamp").exists():
            pytest.skip("this checkout was not set up by launch/setup.sh")
        # The hosts see no package index: there must be nothing left to install.
        subprocess.run(["bash", "launch/setup.sh"], cwd=ROOT, check=True)
        script = 'exec bash launch/multinode.sh "$HOSTFILE" "$@"'
        command = ["bash", "-c", script, "bash", *settings]
    done = two_hosts("--rate", "1gbit", "--", *command, HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host-0: step 2/2  loss " in done.stdout
    assert "host-1: step" not in done.stdout, "one rank speaks"

    run_distributed(train, 2, *QUICKSTART, [*LAYOUT, *tiny(tmp_path, "one", steps=2)])
    keys = ("step", "loss", "aux_loss", "grad_norm", "tokens_seen")
    one, two = (
        [[record[key] for key in keys] for record in records(tmp_path / run, "train")]
        for run in ("one", "two")
    )
    assert two == one


@pytest.mark.slow
def test_a_run_on_two_hosts_that_is_interrupted_saves(tmp_path: Path) -> None:
    """DeepSpeed closes the connections to its ranks a second before it asks them to stop."""
    two_hosts("--", "true")
    recipe, deepspeed = map(str, QUICKSTART)
    settings = ["--recipe", recipe, "--deepspeed_config", deepspeed, *LAYOUT, *tiny(tmp_path, "run", 99999)]
    process = subprocess.Popen(
        ["bash", SCRIPT, "--", "deepspeed", "recipes/pretrain.py", *settings],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "step 5/" in line:
            process.send_signal(signal.SIGINT)
    log = "".join(seen)
    assert process.wait(timeout=100) == 128 + signal.SIGINT, log
    stopped_at = records(tmp_path / "run", "train")[-1]["step"]
    saved = [path.name for path in (tmp_path / "run").glob("checkpoints/*")]
    assert saved == [f"step_{stopped_at:08d}"], log
    assert not [command for command in commands() if str(tmp_path) in command]
