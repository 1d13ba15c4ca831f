"""Traces of chosen steps in the run's folder: a Chrome trace of all ranks, and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from cpmoe.coschedule.timeline import Panel, chrome_trace, draw
from cpmoe.coschedule.trace import PhaseTrace, RankTrace


def start_trace(device: torch.device) -> PhaseTrace:
    """A trace whose times count from a moment at which all ranks were at one place; collective."""
    dist.barrier()
    return PhaseTrace(device)


def gather_trace(trace: PhaseTrace) -> list[RankTrace]:
    """What every rank recorded; on rank 0, nothing on others. Collective."""
    is_first = dist.get_rank() == 0
    ranks = [RankTrace()] * dist.get_world_size()
    dist.gather_object(trace.result(), ranks if is_first else None, dst=0)
    return ranks if is_first else []


def write_trace(folder: Path, step: int, ranks: list[RankTrace], title: str) -> Path:
    """Writes traces/step-N.json and traces/step-N.png below `folder`; returns the picture's path."""
    folder = folder / "traces"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step}.json"
    path.write_text(json.dumps(chrome_trace(ranks)) + "\n")
    draw([Panel(title, ranks)], path.with_suffix(".png"))
    return path.with_suffix(".png")
