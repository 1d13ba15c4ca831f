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

FORMAT = "cpmoe-local-1"


def save_checkpoint(root: Path, step: int, state: dict[str, Any], layout: dict[str, Any], keep: int) -> Path:
    """Writes `state` of every rank as the checkpoint of `step`; all ranks call it.

    `layout` names what must be equal to load it again. Keeps the newest `keep` checkpoints. Returns
    the folder. On an error (a full disk, say) the older checkpoints stay as they are, and every rank
    raises OSError.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    final = root / f"step_{step:08d}"
    partial = root / f".writing_{final.name}"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    outcome: tuple[str, str] | None = None
    try:
        path = partial / _rank_file(rank)
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        outcome = ("ok", _checksum(path))
    except OSError as error:
        outcome = ("error", str(error))
    outcomes: list[tuple[str, str]] = [("", "")] * world_size
    dist.all_gather_object(outcomes, outcome)
    errors = [f"rank {r}: {text}" for r, (kind, text) in enumerate(outcomes) if kind == "error"]
    if errors:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"checkpoint of step {step} not written to {final}: " + "; ".join(errors))
    if rank == 0:
        manifest = {
            "format": FORMAT,
            "step": step,
            "layout": layout,
            "sha256": {_rank_file(r): text for r, (_, text) in enumerate(outcomes)},
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in find_checkpoints(root)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def find_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    return sorted(path for path in root.glob("step_*") if (path / "manifest.json").is_file())


def load_checkpoint(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """The state that this rank saved in `folder`.

    Raises ValueError where the folder holds no checkpoint of this format, was written on another layout
    (naming both values), or is damaged.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"train.resume = {str(folder)!r}: holds no manifest.json, so it is no checkpoint")
    manifest = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"train.resume = {str(folder)!r}: format {manifest.get('format')!r}, must be {FORMAT!r}"
        )
    saved = manifest["layout"]
    different = [
        f"{key}: saved {saved.get(key)!r}, now {layout.get(key)!r}"
        for key in sorted(saved.keys() | layout.keys())
        if saved.get(key) != layout.get(key)
    ]
    if different:
        raise ValueError(
            f"train.resume = {str(folder)!r}: was saved on another layout; it loads on its own only. "
            + "; ".join(different)
            + ". Start with the saved layout, or with train.resume=never and another train.out_dir"
        )
    name = _rank_file(dist.get_rank())
    file = folder / name
    if not file.is_file() or _checksum(file) != manifest["sha256"][name]:
        raise ValueError(f"train.resume = {str(folder)!r}: {name} is missing or damaged (checksum differs)")
    return torch.load(file, map_location="cpu", weights_only=True)


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
