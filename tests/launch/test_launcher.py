"""The commands that people type, through the real `deepspeed` launcher on two CPU processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launch.support import RECIPES, ROOT, records, tiny

# The policy is given, since runs are compared to the bit, and two that measure may choose differently.
LAYOUT = (
    "train.micro_batch_size=1",
    "cpmoe.context_parallel_size=2",
    "cpmoe.expert_parallel_size=2",
    "cpmoe.coschedule.policy=overlap",
)
STEPS = 60


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pretrain(*arguments: str) -> list[str]:
    launcher = ["deepspeed", "--quiet", "--num_accelerators", "2", "--master_port", str(free_port())]
    return [*launcher, "recipes/pretrain.py", *arguments]


def quickstart(overrides: list[str]) -> list[str]:
    files = ("--recipe", "recipes/quickstart.yaml", "--deepspeed_config", "ds_configs/quickstart.json")
    return pretrain(*files, *LAYOUT, *overrides)


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**environment(), **variables}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launcher")


@pytest.fixture(scope="module")
def whole(folder: Path) -> subprocess.CompletedProcess[str]:
    """An uninterrupted run by launch/quickstart.sh, in `folder`/whole."""
    if not (ROOT / ".venv" / ".setup-stamp").exists():
        pytest.skip("this checkout was not set up by launch/setup.sh")
    done = run(["bash", "launch/quickstart.sh", *LAYOUT, *tiny(folder, "whole", STEPS)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_quickstart_trains_and_says_where_everything_is(
    folder: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    out = folder / "whole"
    assert [record["step"] for record in records(out, "train")] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records(out, "eval")] == [STEPS]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list(out.glob("tensorboard/**/events.out.tfevents.*"))
    assert (out / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").is_file()
    assert yaml.safe_load((out / "recipe.yaml").read_text())["train"]["steps"] == STEPS

    lines = whole.stdout.splitlines()
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/\d+  loss ", line))]
    assert steps == list(range(1, STEPS + 1)), "one line a step, from one rank"
    for place in ("loss.png", "checkpoints", "metrics.jsonl"):
        assert f"{out / place}" in whole.stdout
    assert f"tensorboard --logdir {out.parent}\n" in whole.stdout
    for loss in ("held-out loss", "bigram model"):
        assert re.search(rf"{loss} +\d+\.\d+", whole.stdout)
    assert "Traceback" not in whole.stderr


def test_a_run_stopped_by_sigterm_continues_to_the_bit(
    folder: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    command = quickstart(tiny(folder, "stopped", STEPS))
    out = folder / "stopped"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 5/"):
            # As a scheduler or a closed terminal does: to the launcher and its ranks alike.
            os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    log = "".join(seen)
    stopped_at = records(out, "train")[-1]["step"]
    assert 5 <= stopped_at < STEPS, log
    assert [path.name for path in out.glob("checkpoints/*")] == [f"step_{stopped_at:08d}"], log
    assert "Traceback" not in log

    resumed = run(command)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"at step {stopped_at}" in resumed.stdout
    keys = ("step", "loss", "aux_loss", "grad_norm", "lr", "tokens_seen")
    expected, found = (
        [{key: record[key] for key in keys} for record in records(folder / name, "train")]
        for name in ("whole", "stopped")
    )
    assert found == expected


def test_ctrl_c_brings_the_prompt_back_after_the_last_rank(
    folder: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    out = folder / "interrupted"
    process = subprocess.Popen(
        ["bash", "launch/quickstart.sh", *LAYOUT, *tiny(folder, "interrupted", 99999)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 5/"):
            os.killpg(process.pid, signal.SIGINT)
            break
    process.wait(timeout=100)
    running = [" ".join(found.info["cmdline"] or ()) for found in psutil.process_iter(["cmdline"])]
    assert not [command for command in running if str(out) in command]
    log = "".join([*seen, process.stdout.read()])
    assert process.returncode == 128 + signal.SIGINT, log
    stopped_at = records(out, "train")[-1]["step"]
    assert [path.name for path in out.glob("checkpoints/*")] == [f"step_{stopped_at:08d}"], log
    assert f"stopped at step {stopped_at} of 99999" in log
    assert "Traceback" not in log and "Terminated" not in log


def test_a_damaged_checkpoint_is_told_by_the_rank_that_read_it(
    folder: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    out = folder / "damaged"
    shutil.copytree(folder / "whole" / "checkpoints", out / "checkpoints")
    (out / "checkpoints" / f"step_{STEPS:08d}" / "rank_00001.pt").write_bytes(b"damaged")
    failed = run(quickstart(tiny(folder, "damaged", STEPS + 1)))
    assert failed.returncode != 0
    assert re.findall(r"rank 1: .*rank_00001.pt.*damaged", failed.stderr), failed.stderr


def test_a_faulty_setting_is_told_once(folder: Path) -> None:
    # The launcher ends all ranks when the first one leaves. Rank 0, which speaks, is slow here.
    slow = folder / "slow"
    slow.mkdir()
    delay = "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(3)\n"
    (slow / "sitecustomize.py").write_text(delay)
    command = quickstart([*tiny(folder, "faulty", 2), "data.sequence_length=64"])
    failed = run(command, PYTHONPATH=str(slow))
    assert failed.returncode != 0
    assert failed.stderr.count("data.sequence_length = 64") == 1, failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr
    assert not (folder / "faulty").exists()


def header_commands(recipe: Path) -> list[str]:
    """The commands in a recipe's header, continuation lines joined."""
    header = recipe.read_text().split("\nmodel:")[0]
    text = "\n".join(line.removeprefix("#").strip() for line in header.splitlines()).replace("\\\n", "")
    return [line for line in text.splitlines() if re.match(r"(\w+=\S+ )*(deepspeed|python) ", line)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_commands_of_a_recipes_header_run(folder: Path, recipe: Path) -> None:
    commands = header_commands(recipe)
    assert any("recipes/pretrain.py" in command for command in commands)
    for command in commands:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        assert f"recipes/{recipe.name}" in words
        if words[0] == "deepspeed":
            words = [word for word in words if word != "--quiet"]
            assert words[3] == "recipes/pretrain.py", "the launcher, what it starts on, the script, its files"
            words = pretrain(*words[4:], *LAYOUT, *tiny(folder, recipe.stem, 2))
        done = run(words)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert len(records(folder / recipe.stem, "train")) == 2
