"""The folder of a run: its resolved configuration, what it ran on, and the curve it drew."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from cpmoe.config.resolve import RunConfig

PACKAGES = ("torch", "deepspeed", "triton", "numpy", "datasets", "tokenizers", "pydantic")


def claim_folder(folder: Path) -> FileLock:
    """Makes `folder` and holds it until the lock is released or this process ends.

    Raises ValueError where another run holds it or it can not be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"train.out_dir = {str(folder)!r}: another run is writing there; wait for it, or choose another"
        ) from None
    except OSError as error:
        raise ValueError(f"train.out_dir = {str(folder)!r}: can not be written to: {error}") from error
    return lock


def write_run_files(folder: Path, run: RunConfig) -> None:
    """Saves the resolved recipe and JSON, which start the same run again, and versions and git commit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(run.recipe_tree(), sort_keys=False))
    (folder / "deepspeed.json").write_text(json.dumps(run.json_tree(), indent=2) + "\n")
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Versions, git commit and command line of this process."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "command": sys.argv,
    }


def git_commit() -> str | None:
    """The commit of the source tree, "+changes" added where it differs; None outside a repository."""
    root = Path(__file__).resolve().parents[2]
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_metrics(folder: Path) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """metrics.jsonl as (training, evaluation) records by step.

    Where a run continued from an earlier step, what it had written beyond that step does not count.
    """
    train: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a disk was full, or a machine went down
            continue
        if record["kind"] == "train":
            for records in (train, evaluations):
                while records and next(reversed(records)) >= record["step"]:
                    records.popitem()
        (train if record["kind"] == "train" else evaluations)[record["step"]] = record
    return train, evaluations


def draw_loss_curve(folder: Path, baseline: float | None) -> Path:
    """Draws training and held-out loss, and the bigram baseline where given, into `folder`/loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train, evaluations = read_metrics(folder)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    training = [r["loss"] for r in train.values()]
    axes.plot(list(train), training, color="#7aa6d8", lw=0.8, alpha=0.45)
    axes.plot(list(train), _running_mean(training), color="#7aa6d8", lw=1.6, label="training (running mean)")
    if evaluations:
        losses = [r["loss"] for r in evaluations.values()]
        axes.plot(list(evaluations), losses, "o-", color="#1f4e8c", lw=1.6, ms=4, label="held-out")
        last = (list(evaluations)[-1], losses[-1])
        halo = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}
        axes.annotate(
            f"{losses[-1]:.3f}", last, xytext=(6, 8), textcoords="offset points", ha="right", bbox=halo
        )
    if baseline is not None:
        axes.axhline(baseline, color="#b8860b", ls="--", lw=1.2, label=f"byte bigram model {baseline:.3f}")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    path = folder / "loss.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _running_mean(values: list[float], weight: float = 0.1) -> list[float]:
    """Exponential mean whose first values are plain means, so that the start is not dragged."""
    means: list[float] = []
    for count, value in enumerate(values, start=1):
        share = max(weight, 1 / count)
        means.append(value if not means else means[-1] + share * (value - means[-1]))
    return means
