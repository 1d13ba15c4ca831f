"""The model on its groups is the model of one process: loss, every gradient, routed counts, on any layout.

Covers (DP, CP, EP) over 1, 2 and 4 processes with EP below, equal to and above CP. Every layout meets
every case of cases.py in float64; accumulation, recomputation, strategy, sharding and the chunk of the
cross entropy are spread so that every pair of settings occurs (pairs.py). float32 adds the block and
expert backends in the same way. All jobs of a world size run in one launch.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from tests.numerics.cases import CASES, case_config, case_step, case_weights
from tests.numerics.compare import LOSS_TOLERANCE_AFTER_20_STEPS, failures, relative_difference, step_errors
from tests.numerics.launch import Launches
from tests.numerics.model_jobs import STEP_SIZE, Job, Layout, is_expert, run_jobs
from tests.numerics.pairs import cover
from tests.numerics.reference import ReferenceSGD, StepResult, reference_step

WORLDS = (1, 2, 4)
DEGREES = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}
LAYOUTS = {
    world: [Layout(world, cp, ep) for cp, ep in itertools.product(DEGREES[world], repeat=2)]
    for world in WORLDS
}
# Rings of strided ranks, and expert groups that cross them.
LAYOUTS[4] += [
    Layout(4, 2, 2, ("dp", "cp", "ep")),
    Layout(4, 2, 2, ("cp", "ep", "dp")),
    Layout(4, 2, 4, ("dp", "cp", "ep")),
]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_micro_steps": (1, 3),
    "recompute": ("none", "full"),
    "strategy": ("ring", "allgather"),
    "sharding": ("zigzag", "contiguous", "striped", "balanced"),
    "policy": ("serial", "overlap"),
    "slicing": ("none", "batch", "causal"),
    "loss_chunk_tokens": (1024, 3),
    "dispatcher": ("alltoall", "dedup", "hierarchical", "allgather"),
    "max_rows": (0, 48),
}
# The four heads of each case, and KV heads that are fewer.
ULYSSES = [
    Job(Layout(world, world, 1, ulysses_size=size), case, strategy=strategy, policy=policy, slicing=slicing)
    for world, size, case, strategy, policy, slicing in (
        (2, 2, "packed", "ring", "overlap", "causal"),
        (4, 2, "sliding", "ring", "serial", "none"),
        (4, 2, "ragged", "allgather", "overlap", "batch"),
        (4, 2, "ragged", "ring", "overlap", "causal"),
        (4, 4, "crowded", "ring", "serial", "causal"),
    )
]
BACKENDS = {"attention": ("reference", "sdpa"), "experts": ("loop", "grouped_mm")}


def _jobs(world: int) -> list[Job]:
    grid = {"layout": LAYOUTS[world], "case": tuple(CASES), **OPTIONS}
    exact = [Job(**job) for job in cover(grid, full=("layout", "case"))]
    single = [Job(**job, dtype="float32") for job in cover(grid | BACKENDS, apart=[("layout", "case")])]
    return exact + single


JOBS = {world: _jobs(world) for world in WORLDS}
# 20 steps of plain SGD, which hides no wrong gradient scale.
TRAINED = [
    Job(layout, case, num_steps=20, dtype=dtype)
    for layout, case in (
        (Layout(2, 2, 2), "packed"),
        (Layout(4, 2, 4), "skewed"),
        (Layout(4, 4, 2), "crowded"),
    )
    for dtype in ("float64", "float32")
]
for _job in TRAINED + ULYSSES:
    JOBS[_job.layout.world].append(_job)


@functools.cache
def _reference(case: str, num_micro_steps: int) -> StepResult:
    return reference_step(case_config(case), case_weights(case), case_step(case, num_micro_steps))


@functools.cache
def _launch(world: int) -> Launches[Job]:
    # The jobs of a layout lie together and share its groups.
    return Launches(run_jobs, world, JOBS[world], per_launch=12)


def _errors(job: Job) -> dict[str, float]:
    return step_errors(job.layout, _launch(job.layout.world)[job], _reference(job.case, job.num_micro_steps))


@functools.cache
def _trained_losses(case: str, num_steps: int) -> list[float]:
    weights, losses, optimizer = case_weights(case), [], ReferenceSGD(STEP_SIZE)
    for step in range(num_steps):
        result = reference_step(case_config(case), weights, case_step(case, 1, step))
        losses.append(result.loss)
        weights = optimizer.step(weights, result.grads)
    return losses


@pytest.mark.parametrize("job", [job for world in WORLDS for job in _jobs(world)] + ULYSSES, ids=str)
def test_step_is_that_of_one_process(job: Job) -> None:
    assert not failures(_errors(job), job.dtype)


@pytest.mark.parametrize("job", TRAINED, ids=str)
def test_losses_of_20_steps_are_those_of_one_process(job: Job) -> None:
    ranks = _launch(job.layout.world)[job]
    reference = _trained_losses(job.case, job.num_steps)
    assert reference[-1] < reference[0]
    for step, loss in enumerate(reference):
        error = relative_difference(sum(rank.losses[step] for rank in ranks), loss)
        assert error <= LOSS_TOLERANCE_AFTER_20_STEPS[job.dtype], f"step {step}"


@pytest.mark.parametrize("world", WORLDS)
def test_summed_gradients_are_bit_equal_on_all_copies(world: int) -> None:
    """Dense over all ranks, experts over the ranks that hold the same ones."""
    for job, ranks in _launch(world).items():
        replicas = job.layout.grid.replica_ranks()
        for name in ranks[0].digests:
            for copies in replicas if is_expert(name) else [range(world)]:
                assert len({ranks[rank].digests[name] for rank in copies}) == 1, f"{job}: {name}"


@pytest.mark.parametrize("world", WORLDS)
def test_a_second_run_is_bit_identical(world: int) -> None:
    again = JOBS[world][::7]
    for job, ranks in Launches(run_jobs, world, again, per_launch=6).items():
        for rank, first in zip(ranks, _launch(world)[job], strict=True):
            assert (rank.loss, rank.digests) == (first.loss, first.digests), job
