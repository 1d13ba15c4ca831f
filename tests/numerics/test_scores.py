"""Scores that are bent and values of another head size, in the whole model on layouts of every kind."""

from __future__ import annotations

import functools

import pytest

from tests.numerics.cases import case_config, case_step, case_weights
from tests.numerics.compare import failures, step_errors
from tests.numerics.launch import launch
from tests.numerics.model_jobs import Job, Layout, RankResult, run_jobs
from tests.numerics.reference import StepResult, reference_step

JOBS = {
    1: [Job(Layout(1, 1, 1), "bent", attention="auto")],
    2: [Job(Layout(2, 2, 2), "bent", attention="auto", slicing="causal", recompute="full")],
    4: [
        Job(Layout(4, 2, 4), "bent", strategy="allgather", sharding="striped", slicing="batch"),
        Job(Layout(4, 4, 1, ulysses_size=2), "bent", num_micro_steps=2),
    ],
}


@functools.cache
def _launch(world: int) -> dict[Job, list[RankResult]]:
    return launch(run_jobs, world, JOBS[world], per_launch=12)


@functools.cache
def _reference(case: str, num_micro_steps: int) -> StepResult:
    return reference_step(case_config(case), case_weights(case), case_step(case, num_micro_steps))


@pytest.mark.parametrize("job", [job for jobs in JOBS.values() for job in jobs], ids=str)
def test_step_is_that_of_one_process(job: Job) -> None:
    errors = step_errors(
        job.layout, _launch(job.layout.world)[job], _reference(job.case, job.num_micro_steps)
    )
    assert not failures(errors, job.dtype)
