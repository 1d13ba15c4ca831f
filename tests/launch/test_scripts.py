"""What the scripts refuse before they start anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.support import ROOT


def refused(script: str, *arguments: str, **variables: str) -> str:
    """What `launch/script` says to these arguments, which it must not accept."""
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / script), *arguments],
        cwd="/",
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("argument", ["--train.steps=3", "steps=3", "train.steps"])
def test_quickstart_takes_settings_only(argument: str) -> None:
    assert f"{argument} is no section.key=value" in refused("quickstart.sh", argument)


def test_multinode_needs_a_hostfile() -> None:
    assert "HOSTFILE --recipe R" in refused("multinode.sh")
    # DeepSpeed itself would run on this machine alone and not say so.
    assert "nowhere/hostfile is no file" in refused("multinode.sh", "nowhere/hostfile", "--recipe", "R")


@pytest.mark.parametrize("line", ["# a comment", "", "NCCL_DEBUG"])
def test_multinode_names_the_line_that_deepspeed_cannot_read(tmp_path: Path, line: str) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"NCCL_SOCKET_IFNAME=eth0\n{line}\nNCCL_DEBUG=INFO\n")
    hostfile = ROOT / "launch" / "hostfile.example"
    told = refused("multinode.sh", str(hostfile), "--recipe", "R", HOME=str(tmp_path))
    assert f"{tmp_path / '.deepspeed_env'} line 2 holds no" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "launch/two_hosts.sh [--rate 1gbit]"),
        (["--plain"], "launch/two_hosts.sh [--rate 1gbit]"),
        (["--rate"], "--rate needs a value"),
        (["--slots", "0", "true"], "--slots 0: must be a whole number"),
        (["--bandwidth", "1gbit", "true"], "--bandwidth is no option"),
    ],
)
def test_two_hosts_takes_its_own_options_only(arguments: list[str], told: str) -> None:
    assert told in refused("two_hosts.sh", *arguments)


def test_the_example_hostfile_is_one() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(ROOT / "launch" / "hostfile.example"))) == {"node-0": 8, "node-1": 8}
