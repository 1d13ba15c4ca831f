"""Many jobs in few launches of the processes; tests then look their result up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.distributed import run_distributed

J = TypeVar("J")


def launch(
    run_jobs: Callable[..., list[Any]], world_size: int, jobs: Sequence[J], *, per_launch: int
) -> dict[J, list[Any]]:
    """Each job's results, one per rank, of `run_jobs(rank, world_size, jobs)`.

    At most `per_launch` jobs share a process group: the groups they create poll until it ends, and a few
    hundred of them slow everything down.
    """
    results: dict[J, list[Any]] = {}
    for start in range(0, len(jobs), per_launch):
        part = list(itertools.islice(jobs, start, start + per_launch))
        by_rank = run_distributed(run_jobs, world_size, part, timeout=240)
        results |= {job: list(ranks) for job, ranks in zip(part, zip(*by_rank, strict=True), strict=True)}
    return results
