"""Many jobs in few launches of the processes; tests then look their result up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tests.distributed import run_distributed

J = TypeVar("J")


class Launches(Mapping[J, list[Any]]):
    """Each job's results, one per rank, of `run_jobs(rank, world_size, jobs)`.

    At most `per_launch` jobs share a process group: the groups they create poll until it ends, and a few
    hundred of them slow everything down. They run when the first of them is looked up.
    """

    def __init__(
        self, run_jobs: Callable[..., list[Any]], world_size: int, jobs: Sequence[J], per_launch: int
    ) -> None:
        self._run_jobs, self._world_size = run_jobs, world_size
        parts = [tuple(jobs[start : start + per_launch]) for start in range(0, len(jobs), per_launch)]
        self._part_of = {job: part for part in parts for job in part}
        self._results: dict[J, list[Any]] = {}

    def __getitem__(self, job: J) -> list[Any]:
        if job not in self._results:
            part = self._part_of[job]
            by_rank = run_distributed(self._run_jobs, self._world_size, part, timeout=240)
            self._results |= {
                job: list(ranks) for job, ranks in zip(part, zip(*by_rank, strict=True), strict=True)
            }
        return self._results[job]

    def __iter__(self) -> Iterator[J]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)
