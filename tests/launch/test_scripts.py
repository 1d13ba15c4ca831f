"""What the scripts refuse before they start anything."""

from __future__ import annotations

import os
import shutil
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


def test_help_of_the_tests_starts_none() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "test.sh"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Arguments go to pytest" in done.stdout and "==" not in done.stdout


@pytest.mark.parametrize("fails", [False, True])
def test_continuous_integration_goes_on_where_packages_can_not_be_had(tmp_path: Path, fails: bool) -> None:
    """The real .ci/run, as root where pdsh is missing, beside a test.sh that only says that it runs."""
    for folder in (".ci", "launch", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "launch" / "test.sh").write_text("echo tests run\n")
    scripts = {"id": "echo 0", "apt-get": f"echo $* >>{tmp_path}/asked; exit {100 if fails else 0}"}
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    environment = {"PATH": str(tmp_path / "bin")}
    done = subprocess.run(["bash", tmp_path / ".ci/run"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "tests run\n")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "-qq update" and (len(asked) == 1 or "pdsh" in asked[1])
    assert ("not installed; what needs them is skipped" in done.stderr) == fails


def test_the_example_hostfile_is_one() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(ROOT / "launch" / "hostfile.example"))) == {"node-0": 8, "node-1": 8}
