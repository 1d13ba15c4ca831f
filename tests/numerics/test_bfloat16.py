"""bfloat16 on any layout and ZeRO stage is as exact as the same model on one process in bfloat16.

The error of loss, gradient norm and each gradient against float64 is at most twice that of one process,
as root mean square over six steps, since one rounding of a norm weight's 16 elements is luck. Gradients
are read from the float32 masters, which plain SGD moves; the reference sees the bfloat16 weights that
the model saw in that step. Routes are chosen by wide margins, so that rounding flips none.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from tests.numerics.cases import case_config, case_step
from tests.numerics.compare import gather_full
from tests.numerics.engine_jobs import OPTIMIZERS, EngineJob, run_engine_jobs
from tests.numerics.launch import Launches
from tests.numerics.model_jobs import Layout
from tests.numerics.pairs import cover
from tests.numerics.reference import clip_coefficient, reference_step

BITING = 0.5
LAYOUTS = {
    2: [Layout(2, 2, 2)],
    4: [Layout(4, 1, 1), Layout(4, 2, 4), Layout(4, 4, 2)],
}
GRID = {
    "zero": ("0", "1", "2", "3"),
    "case": ("skewed", "crowded"),
    "num_micro_steps": (1, 3),
    "clip": (0.0, BITING),
}
JOBS = {
    world: [
        EngineJob(**job, optimizer="plain", num_steps=6, dtype="bfloat16")
        for job in cover({"layout": layouts, **GRID})
    ]
    for world, layouts in LAYOUTS.items()
}


def _single(job: EngineJob) -> EngineJob:
    return job._replace(layout=Layout(1, 1, 1), zero="1")


JOBS[1] = list(dict.fromkeys(_single(job) for jobs in JOBS.values() for job in jobs))


@functools.cache
def _launch(world: int) -> Launches[EngineJob]:
    return Launches(run_engine_jobs, world, JOBS[world], per_launch=3)


class _MeanSquare:
    """Relative errors by name, as root mean square over what was added."""

    def __init__(self) -> None:
        self._off: defaultdict[str, float] = defaultdict(float)
        self._size: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, value: Tensor | float, reference: Tensor | float) -> None:
        value, reference = torch.as_tensor(value), torch.as_tensor(reference)
        self._off[name] += (value - reference).square().sum().item()
        self._size[name] += reference.square().sum().item()

    def errors(self) -> dict[str, float]:
        # Experts without tokens have no gradient at all, and must not get one.
        assert all(self._off[name] == 0 for name, size in self._size.items() if size == 0)
        return {name: math.sqrt(self._off[name] / size) for name, size in self._size.items() if size > 0}


@functools.cache
def _errors(job: EngineJob) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the engine, and of the reference's formulas in bfloat16, at the engine's weights."""
    ranks = _launch(job.layout.world)[job]
    weights = [gather_full(job.layout, held) for held in zip(*(rank.weights for rank in ranks), strict=True)]
    engine, naive = _MeanSquare(), _MeanSquare()
    for step in range(job.num_steps):
        seen = {name: value.bfloat16().double() for name, value in weights[step].items()}
        batches = case_step(job.case, job.num_micro_steps, step)
        exact, rounded = (
            reference_step(case_config(job.case), seen, batches, dtype)
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert exact.margin > 0.2
        engine.add("loss", sum(rank.losses[step] for rank in ranks), exact.loss)
        engine.add("norm", ranks[0].norms[step], exact.grad_norm)
        naive.add("loss", rounded.loss, exact.loss)
        step_size = OPTIMIZERS[job.optimizer]["lr"] * clip_coefficient(exact.grad_norm, job.clip)
        for name, grad in exact.grads.items():
            moved = weights[step][name].double() - weights[step + 1][name].double()
            engine.add(name, moved / step_size, grad)
            naive.add(name, rounded.grads[name], grad)
    return engine.errors(), naive.errors()


@pytest.mark.parametrize("job", [job for world in LAYOUTS for job in JOBS[world]], ids=str)
def test_error_is_at_most_twice_that_of_one_process(job: EngineJob) -> None:
    (errors, _), (single, _) = _errors(job), _errors(_single(job))
    assert set(errors) == set(single)
    assert not {name: (error, single[name]) for name, error in errors.items() if error > 2 * single[name]}


@pytest.mark.parametrize("job", JOBS[1], ids=str)
def test_error_of_one_process_is_at_most_twice_that_of_a_naive_model(job: EngineJob) -> None:
    """Else twice the error of one process would allow anything."""
    errors, naive = _errors(job)
    assert not {name: (errors[name], error) for name, error in naive.items() if errors[name] > 2 * error}
