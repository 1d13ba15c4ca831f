"""Contestants of a benchmark: teams of processes that take turns on the same cores."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

# What one process does in a turn; what it returns reaches the caller of `Team.turn`.
Work = Callable[[], Any]


def _serve(
    connection: Connection,
    make: Callable[..., Work],
    rank: int,
    size: int,
    threads: int,
    store: str,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), DS_ACCELERATOR="cpu")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(minutes=10),
        )
        work = make(rank, size, *args)
        connection.send((0.0, None))
        while connection.recv():
            dist.barrier()
            start = time.perf_counter()
            result = work()
            connection.send((time.perf_counter() - start, result))
    except EOFError:
        return
    except BaseException:
        connection.send((None, traceback.format_exc()))


class Team:
    """`size` gloo processes of `threads` threads; they sleep on a pipe while it is not their turn.

    Each process calls the module-level function `make(rank, size, *args)` once; what that returns is
    called in every turn.
    """

    def __init__(self, make: Callable[..., Work], size: int, threads: int, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="cpmoe-bench-")
        store = os.path.join(self._folder.name, "store")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, make, rank, size, threads, store, args), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._answers()

    def turn(self) -> tuple[float, list[Any]]:
        """Every process works once. Returns (seconds of the slowest, results in rank order)."""
        for connection in self._connections:
            connection.send(True)
        answers = self._answers()
        return max(seconds for seconds, _ in answers), [result for _, result in answers]

    def _answers(self) -> list[tuple[float, Any]]:
        answers = []
        for rank, connection in enumerate(self._connections):
            seconds, result = connection.recv()
            if seconds is None:
                raise RuntimeError(f"benchmark process {rank}:\n{result}")
            answers.append((seconds, result))
        return answers

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def take_turns(teams: Mapping[str, Team], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds per turn of each team: `rounds` rounds of one turn each, after `warmup` uncounted ones."""
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    for turn in range(warmup + rounds):
        for name, team in teams.items():
            elapsed, _ = team.turn()
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def paired_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over rounds of ours / theirs."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))
