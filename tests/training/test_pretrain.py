"""The training script without its launcher: what a rank says when it, or another one, fails alone."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cpmoe.training.hang import HANG_STATUS
from tests.training.support import tiny_run, write_text

ROOT = Path(__file__).parents[2]


def _start(folder: Path, rank: int, port: int, *overrides: str) -> "subprocess.Popen[str]":
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    environment = {**os.environ, **own, **shared, "OMP_NUM_THREADS": "1"}
    files = ("--recipe", str(folder / "recipe.yaml"), "--deepspeed_config", str(folder / "deepspeed.json"))
    return subprocess.Popen(
        [sys.executable, "recipes/pretrain.py", *files, *overrides],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a tiny run in it."""
    write_text(tmp_path)
    tiny_run(tmp_path, 2)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({**recipe, "train": {**recipe["train"], "steps": 9999}})
    )
    return tmp_path


def _errors_after(folder: Path, number: signal.Signals, status: int, *overrides: str) -> str:
    """What rank 0 of a running pair says when rank 1 gets a signal that it can not note, and ends with."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_start(folder, rank, port, *overrides) for rank in range(2)]
    assert ranks[0].stdout is not None
    while not ranks[0].stdout.readline().startswith("step 2/"):
        assert ranks[0].poll() is None, ranks[0].communicate()[1]
    ranks[1].send_signal(number)
    errors = ranks[0].communicate(timeout=60)[1]
    ranks[1].kill()
    ranks[1].communicate()
    assert ranks[0].returncode == status and "Traceback" not in errors
    return errors


def test_a_killed_rank_ends_the_others_with_a_sentence(folder):
    errors = _errors_after(folder, signal.SIGKILL, 1)
    assert re.search(r"lost another rank, .*; it was lost in step \d+: \w+", errors)


def test_a_stopped_rank_is_noticed(folder):
    errors = _errors_after(folder, signal.SIGSTOP, HANG_STATUS, "train.hang_timeout=3")
    assert re.search(r"rank 0: nothing got done for 3 s in step \d+: \w+", errors)
    told = (folder / "run" / "hangs" / "rank-0.txt").read_text()
    assert told.splitlines()[0] in errors and "in _one_step" in told


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.source=nowhere.txt", "rank 1: data.source"),
        ("data.path=recipe.yaml/data", "rank 1: data.path"),
    ],
)
def test_a_rank_that_alone_can_not_prepare_its_data_says_so(folder, override, message):
    alone = _start(folder, 1, 29999, override.replace("recipe.yaml", str(folder / "recipe.yaml")))
    errors = alone.communicate(timeout=100)[1]
    assert alone.returncode == 2
    assert errors.startswith(message) and "Traceback" not in errors


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        failed = _start(folder, 0, port)
        errors = failed.communicate(timeout=60)[1]
    assert failed.returncode == 1 and "Traceback" not in errors
    assert f"port {port} is taken" in errors and f"--master_port {port + 1}" in errors
