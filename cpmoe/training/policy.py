"""Under which policy of the co-schedule each step runs: as given, or measured in the first steps and chosen.

Which one is faster differs between machines, and the two sum in different orders, so two runs that measure
may differ as two layouts do. A run's own record makes it continue to the bit: a step that ran before runs
under the same policy again, and a choice once made stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from cpmoe.config.policy import differences
from cpmoe.config.resolve import RunConfig
from cpmoe.coschedule.choice import Measurement, Timing
from cpmoe.parallel.groups import Groups
from cpmoe.training.console import say

RECORD = "coschedule.json"


class StepPolicies:
    """The policy and the slicing of each step. Unsliced is serial: the model's schedule of one slice is.

    All ranks make one and use it alike.
    """

    def __init__(self, run: RunConfig, groups: Groups, folder: Path, device: torch.device) -> None:
        self.run = run
        self.groups = groups
        self.path = folder / RECORD
        self.device = device
        self.measurement: Measurement | None = None
        self._recorded: dict[int, str] = {}
        if run.policy == "auto":
            self._take_up(run.recipe.train.resume != "never")

    @contextmanager
    def step(self, step: int, counts: bool = True) -> Iterator[tuple[str, str]]:
        """Around the work of a step: its policy and its slicing. Collective while steps are measured.

        The time of a step that `counts` not is no part of the measurement.
        """
        measurement = self.measurement
        if measurement is None:
            yield self.run.policy, self.run.slicing
            return
        policy = self._recorded.get(step) or measurement.next_policy()
        is_measured = measurement.choice is None and step not in self._recorded
        if is_measured:
            self._synchronize()
            dist.barrier(self.groups.world)
        start = time.perf_counter()
        yield policy, self.run.slicing if policy == "overlap" else "none"
        if is_measured:
            self._synchronize()
            measurement.add(step, self._slowest(time.perf_counter() - start), counts)
            self._record(measurement)

    def _take_up(self, resumes: bool) -> None:
        """Starts to measure, or goes on where the record of this run's folder ends; collective."""
        found: list[list[Timing]] = [[]]
        if self.groups.rank == 0 and resumes:
            found = [self._read()]
        dist.broadcast_object_list(found, src=0)
        self.measurement = Measurement(found[0])
        self._recorded = {timing.step: timing.policy for timing in found[0]}

    def _read(self) -> list[Timing]:
        try:
            record = json.loads(self.path.read_text())
        except FileNotFoundError:
            return []
        if differences(record["conditions"], self.run.conditions):
            return []
        return [Timing(*timing) for timing in record["timings"]]

    def _record(self, measurement: Measurement) -> None:
        if self.groups.rank != 0:
            return
        record = {
            "policy": measurement.choice,
            "summary": str(measurement) if measurement.choice else "",
            "timings": measurement.timings,
            "conditions": self.run.conditions,
        }
        # Whole or not at all: a machine may go down meanwhile.
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(record) + "\n")
        partial.replace(self.path)
        if measurement.choice is not None:
            say(f"co-schedule: {measurement.choice}; {measurement} ({self.path})")

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks."""
        tensor = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        if self.groups.world is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.groups.world)
        return tensor.item()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
