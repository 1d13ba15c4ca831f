"""Training through the DeepSpeed engine is training on one process, in every ZeRO stage and layout.

float32 over 1, 2 and 4 processes: every layout (EP below, equal to and above CP) meets every ZeRO stage;
cases, accumulation, clipping that bites and none, SGD with and without momentum, and recomputation are
spread so that every pair of settings occurs, but for case with layout, stage and dispatcher (the model's
own grid has every case on every layout). So is the optimizer on the CPU at stages 2 and 3, on fewer layouts.
SGD, since Adam hides a wrong gradient scale; AdamW runs 20 steps in each stage. Loss and gradient norm
are compared in every step and the weights at the end, which shows the clip coefficient too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from tests.numerics.cases import CASES, case_config, case_step, case_weights
from tests.numerics.compare import LOSS_TOLERANCE_AFTER_20_STEPS, gather_full, relative_difference
from tests.numerics.engine_jobs import OPTIMIZERS, EngineJob, run_engine_jobs
from tests.numerics.launch import Launches
from tests.numerics.model_jobs import Layout, is_expert
from tests.numerics.pairs import cover
from tests.numerics.reference import ReferenceAdamW, ReferenceSGD, clip_coefficient, reference_step
from tests.numerics.test_model_grid import LAYOUTS, WORLDS

STAGES = ("0", "1", "2", "3")
OFFLOADED = ("2-offload", "3-offload")
BITING = 0.5  # below every norm of these steps
OPTIONS = {
    "num_micro_steps": (1, 3),
    "clip": (0.0, BITING),
    "optimizer": ("sgd", "momentum"),
    "recompute": ("none", "full"),
    "policy": ("serial", "overlap"),
    "slices": ("auto", "causal"),
    "dispatcher": ("alltoall", "dedup", "hierarchical", "allgather"),
    "max_rows": (0, 48),
}
FLOAT32_ROUNDING = 2.0**-24


def _jobs(world: int) -> list[EngineJob]:
    layouts = [layout for layout in LAYOUTS[world] if layout.order != ("cp", "ep", "dp")]
    grid = {"layout": layouts, "zero": STAGES, "case": tuple(CASES), **OPTIONS}
    apart = [("layout", "case"), ("zero", "case"), ("case", "dispatcher")]
    jobs = cover(grid, full=("layout", "zero"), apart=apart)
    if world > 1:
        offload = {
            "layout": [Layout(world, world, world)],
            "zero": OFFLOADED,
            "case": ["packed"],
            "clip": (0.0, BITING),
        }
        jobs += cover(
            {**offload, "num_micro_steps": (1, 3), "clip": (0.0, BITING), "optimizer": ["momentum"]}
        )
    return [EngineJob(**job) for job in jobs]


JOBS = {world: _jobs(world) for world in WORLDS}
ADAMW = [
    EngineJob(layout, zero, case, clip=BITING, optimizer="adamw", num_steps=20)
    for layout, zero, case in (
        (Layout(2, 2, 2), "0", "packed"),
        (Layout(4, 2, 4), "1", "skewed"),
        (Layout(4, 4, 2), "2", "starved"),
        (Layout(4, 2, 2), "3", "packed"),
    )
]
for _job in ADAMW:
    JOBS[_job.layout.world].append(_job)


@dataclass
class Trajectory:
    """What one process computes: per step, and the weights and the length of their way at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    margin: float = float("inf")
    weights: dict[str, Tensor] = field(default_factory=dict)
    way: dict[str, float] = field(default_factory=dict)


@functools.cache
def _reference(case: str, num_micro_steps: int, clip: float, optimizer: str, num_steps: int) -> Trajectory:
    settings = OPTIMIZERS[optimizer]
    if settings["name"] == "adamw":
        betas = tuple(settings["betas"])
        update: ReferenceAdamW | ReferenceSGD = ReferenceAdamW(
            settings["lr"], betas, weight_decay=settings["weight_decay"]
        )
    else:
        update = ReferenceSGD(settings["lr"], settings.get("momentum", 0.0), settings["weight_decay"])
    config, weights = case_config(case), case_weights(case)
    found = Trajectory(way=dict.fromkeys(weights, 0.0))
    for step in range(num_steps):
        result = reference_step(config, weights, case_step(case, num_micro_steps, step))
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
        found.margin = min(found.margin, result.margin)
        moved = update.step(weights, result.grads, clip_coefficient(result.grad_norm, clip))
        for name, weight in weights.items():
            found.way[name] += (moved[name] - weight).norm().item()
        weights = moved
    found.weights = weights
    return found


def _reference_of(job: EngineJob) -> Trajectory:
    return _reference(job.case, job.num_micro_steps, job.clip, job.optimizer, job.num_steps)


@functools.cache
def _launch(world: int) -> Launches[EngineJob]:
    # Workers end after ZeRO-3, and new ones take seconds to start: its jobs lie together.
    jobs = sorted(JOBS[world], key=lambda job: job.zero.startswith("3"))
    return Launches(run_engine_jobs, world, jobs, per_launch=3)


def _errors(job: EngineJob) -> dict[str, float]:
    """Relative errors of loss and norm, the largest over the steps, and of each weight's way.

    The error of a weight is taken over the length of its way plus what float32 rounds off the weight
    itself in every step: so its tolerance is that of a gradient.
    """
    ranks, reference = _launch(job.layout.world)[job], _reference_of(job)
    losses = [sum(rank.losses[step] for rank in ranks) for step in range(job.num_steps)]
    errors = {
        "loss": max(map(relative_difference, losses, reference.losses)),
        "norm": max(map(relative_difference, ranks[0].norms, reference.norms)),
    }
    weights = gather_full(job.layout, [rank.weights[-1] for rank in ranks])
    assert set(weights) == set(reference.weights)
    for name, weight in reference.weights.items():
        off = (weights[name].double() - weight).norm().item()
        rounding = job.num_steps * FLOAT32_ROUNDING * weight.norm().item()
        errors[name] = max(off - rounding, 0.0) / reference.way[name]
    return errors


@pytest.mark.parametrize("job", [job for world in WORLDS for job in _jobs(world)], ids=str)
def test_training_is_that_of_one_process(job: EngineJob) -> None:
    reference = _reference_of(job)
    assert reference.margin > 1e-5  # float32 can not flip a route
    assert not job.clip or min(reference.norms) > job.clip
    tolerance = {"loss": 1e-6}
    wrong = {name: error for name, error in _errors(job).items() if not error <= tolerance.get(name, 1e-5)}
    assert not wrong


@pytest.mark.parametrize("job", ADAMW, ids=str)
def test_20_steps_of_adamw_are_those_of_one_process(job: EngineJob) -> None:
    ranks, reference = _launch(job.layout.world)[job], _reference_of(job)
    assert reference.losses[-1] < reference.losses[0]
    for step, loss in enumerate(reference.losses):
        error = relative_difference(sum(rank.losses[step] for rank in ranks), loss)
        assert error <= LOSS_TOLERANCE_AFTER_20_STEPS["float32"], f"step {step}"


@pytest.mark.parametrize("world", WORLDS)
def test_replicas_are_bit_equal(world: int) -> None:
    """Dense weights on all ranks, experts on the ranks that hold the same ones; norms on all ranks."""
    for job, ranks in _launch(world).items():
        assert all(rank.norms == ranks[0].norms for rank in ranks), job
        for name in ranks[0].digests:
            for copies in job.layout.grid.replica_ranks() if is_expert(name) else [range(world)]:
                assert len({ranks[rank].digests[name] for rank in copies}) == 1, f"{job}: {name}"
