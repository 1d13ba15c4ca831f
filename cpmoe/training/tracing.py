"""Traces of chosen steps in the run's folder: a Chrome trace of all ranks, and its picture."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch.distributed as dist

from cpmoe.coschedule.timeline import chrome_trace, draw
from cpmoe.coschedule.trace import PhaseTrace, Span


class StepTrace(PhaseTrace):
    """A trace whose times count from a moment at which all ranks were at one place; collective."""

    def __init__(self) -> None:
        super().__init__()
        dist.barrier()
        self._origin = time.perf_counter()

    def gather(self) -> list[list[Span]]:
        """The spans of every rank, seconds since the start; on rank 0, nothing on others. Collective."""
        mine = [
            span._replace(start=span.start - self._origin, stop=span.stop - self._origin)
            for span in self.spans
        ]
        is_first = dist.get_rank() == 0
        ranks: list[list[Span]] = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(mine, ranks if is_first else None, dst=0)
        return ranks if is_first else []


def write_trace(folder: Path, step: int, ranks: list[list[Span]], title: str) -> Path:
    """Writes traces/step-N.json and traces/step-N.png below `folder`; returns the picture's path."""
    folder = folder / "traces"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step}.json"
    path.write_text(json.dumps(chrome_trace(ranks)) + "\n")
    draw(ranks, path.with_suffix(".png"), title)
    return path.with_suffix(".png")
