"""Checkpoints of one layout: each rank writes what it holds, and the folder appears whole or not at all.

    checkpoints/step_00000120/manifest.json     layout, world size, checksum of every file
    checkpoints/step_00000120/rank_00000.pt     what rank 0 holds

A checkpoint is written beside its place and renamed, so that a killed run leaves the last one intact.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpmoe.parallel.agreement import fail_together

FORMAT = "cpmoe-local-1"
ADVICE = "Remove this folder, and the run continues from the checkpoint before it"


def save_checkpoint(root: Path, step: int, state: dict[str, Any], layout: dict[str, Any], keep: int) -> Path:
    """Writes `state` of every rank as the checkpoint of `step`; all ranks call it.

    `layout` names what must be equal to load it again. Of the checkpoints up to `step` the newest `keep`
    stay. Returns the folder. On an error (a full disk, say) the older checkpoints stay as they are, and
    every rank raises OSError.
    """
    final = root / f"step_{step:08d}"
    partial = root / f".writing_{final.name}"
    leads = dist.get_rank() == 0
    try:
        with fail_together(OSError):
            if leads:
                _clear_leftovers(root)
                partial.mkdir(parents=True)
        checksum = ""
        with fail_together(OSError):
            checksum = _write(partial / _rank_file(dist.get_rank()), state)
        checksums = [""] * dist.get_world_size()
        dist.all_gather_object(checksums, checksum)
        with fail_together(OSError):
            if leads:
                _publish(partial, final, step, layout, checksums)
                _remove_old(root, final, keep)
    except OSError as error:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"checkpoint of step {step} not written to {final}: {error}") from error
    return final


def find_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    return sorted(
        path
        for path in root.glob("step_*")
        if path.name.removeprefix("step_").isdecimal() and (path / "manifest.json").is_file()
    )


def step_of(checkpoint: Path) -> int:
    """The step after which a folder that `find_checkpoints` found was written."""
    return int(checkpoint.name.removeprefix("step_"))


def _write(path: Path, state: dict[str, Any]) -> str:
    """Brings `state` to the disk and returns the file's checksum."""
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        # What torch makes of a disk that is full in the middle of a tensor.
        if isinstance(error.__context__, OSError):
            raise OSError(str(error.__context__)) from error
        raise
    return _checksum(path)


def _publish(partial: Path, final: Path, step: int, layout: dict[str, Any], checksums: list[str]) -> None:
    """Adds the manifest and gives the folder its name, in the place of one that is there already."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "layout": layout,
        "sha256": {_rank_file(rank): checksum for rank, checksum in enumerate(checksums)},
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    _sync(partial / "manifest.json")
    _sync(partial)
    replaced = final.with_name(f".replaced_{final.name}")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_old(root: Path, newest: Path, keep: int) -> None:
    for old in [path for path in find_checkpoints(root) if path.name <= newest.name][:-keep]:
        # A file system that does not let go of one (NFS, say) is no reason to stop.
        shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(root: Path) -> None:
    """Removes what a run that was killed while it saved has left."""
    for pattern in (".writing_step_*", ".replaced_step_*"):
        for leftover in root.glob(pattern):
            shutil.rmtree(leftover)


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """The state that this rank saved in `folder`.

    Raises ValueError where the folder holds no checkpoint of this format, was written on another layout
    (naming both values), or is damaged.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"train.resume = {str(folder)!r}: holds no manifest.json, so it is no checkpoint")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"train.resume = {str(folder)!r}: manifest.json is damaged: {error}. {ADVICE}"
        ) from None
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"train.resume = {str(folder)!r}: format {manifest.get('format')!r}, must be {FORMAT!r}"
        )
    different = _differences(manifest["layout"], layout)
    if different:
        raise ValueError(
            f"train.resume = {str(folder)!r}: was saved on another layout; it loads on its own only. "
            + "; ".join(different)
            + ". Start with the saved layout, or with train.resume=never and another train.out_dir"
        )
    name = _rank_file(dist.get_rank())
    file = folder / name
    if not file.is_file() or _checksum(file) != manifest["sha256"][name]:
        raise ValueError(
            f"train.resume = {str(folder)!r}: {name} is missing or damaged (checksum differs). {ADVICE}"
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def _differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """One text for each setting that differs, by its dotted path."""
    texts = []
    for key in sorted(saved.keys() | now.keys()):
        then, value = saved.get(key), now.get(key)
        if isinstance(then, dict) and isinstance(value, dict):
            texts += _differences(then, value, f"{prefix}{key}.")
        elif then != value:
            texts.append(f"{prefix}{key}: saved {then!r}, now {value!r}")
    return texts


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
