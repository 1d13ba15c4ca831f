"""A softcap, values of another head size, and dropout: in the whole model on layouts of every kind."""

from __future__ import annotations

import functools

import pytest

from cpmoe.attention.slicing import shard_slices
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import Groups
from tests.numerics.cases import case_config, case_step, case_weights
from tests.numerics.compare import failures, step_errors
from tests.numerics.launch import Launches
from tests.numerics.model_jobs import Job, Layout, load_weights, run_jobs
from tests.numerics.reference import StepResult, reference_step

JOBS = {
    1: [
        Job(Layout(1, 1, 1), "bent", attention="auto"),
        Job(Layout(1, 1, 1), "dropout", slicing="batch", recompute="full"),
        Job(Layout(1, 1, 1), "dropout", num_micro_steps=2, slicing="causal"),
    ],
    2: [
        Job(Layout(2, 2, 2), "bent", attention="auto", slicing="causal", recompute="full"),
        Job(Layout(2, 2, 1), "dropout", attention="auto", slicing="causal", recompute="full"),
        Job(Layout(2, 2, 2), "dropout", slicing="batch", policy="overlap", sharding="balanced"),
        Job(Layout(2, 2, 2), "dropout", num_micro_steps=2, strategy="allgather", sharding="striped"),
        Job(Layout(2, 1, 2), "dropout", num_micro_steps=2, recompute="full", dtype="float32"),
        Job(Layout(2, 2, 1, ulysses_size=2), "dropout"),
    ],
    4: [
        Job(Layout(4, 2, 4), "bent", strategy="allgather", sharding="striped", slicing="batch"),
        Job(Layout(4, 4, 1, ulysses_size=2), "bent", num_micro_steps=2),
        Job(Layout(4, 4, 2), "dropout", slicing="causal", recompute="full"),
        Job(Layout(4, 2, 4), "dropout", num_micro_steps=2, slicing="batch"),
    ],
}


@functools.cache
def _launch(world: int) -> Launches[Job]:
    return Launches(run_jobs, world, JOBS[world], per_launch=12)


@functools.cache
def _reference(case: str, num_micro_steps: int) -> StepResult:
    return reference_step(case_config(case), case_weights(case), case_step(case, num_micro_steps))


@pytest.mark.parametrize("job", [job for jobs in JOBS.values() for job in jobs], ids=str)
def test_step_is_that_of_one_process(job: Job) -> None:
    errors = step_errors(
        job.layout, _launch(job.layout.world)[job], _reference(job.case, job.num_micro_steps)
    )
    assert not failures(errors, job.dtype)


def test_evaluation_drops_nothing() -> None:
    config, weights = case_config("dropout"), case_weights("dropout")
    without = config.model_copy(update={"attention_dropout": 0.0})
    (batch,) = case_step("dropout", 1)
    slices = shard_slices(*batch, 1, 0)
    losses = []
    for model_config, trains in ((config, False), (without, True), (config, True)):
        model = CausalLM(model_config, Groups(RankGrid(1), 0), ModelOptions()).double().train(trains)
        load_weights(model, weights)
        losses.append(model(slices, LossScale(1, 1, 1)).loss.item())
    assert losses[0] == losses[1] != losses[2]
