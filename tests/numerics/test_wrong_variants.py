"""Wrong variants that look plausible must be seen: the comparison of the grid reports each of them.

The faults of exactness.md and reported_faults.md, made on purpose in what surrounds the model, or in the
reference formulas where the model gives no handle.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.numerics.cases import case_config, case_step, case_weights
from tests.numerics.compare import failures, relative_difference, step_errors
from tests.numerics.launch import Launches
from tests.numerics.model_jobs import Job, Layout, run_jobs
from tests.numerics.reference import Batch, reference_step

ROUTER = "model.layers.1.mlp.router.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"
# Fault, the case and layout that show it, and one quantity that must be off by 1 % or more.
WRONG = [
    (Job(Layout(4, 4, 2), "uneven", fault="mean_of_local_means"), KEYS),
    (Job(Layout(4, 2, 2), "uneven", 3, fault="mean_of_local_means"), ROUTER),
    (Job(Layout(2, 2, 1), "one_label", fault="mean_of_local_means"), "lm_head.weight"),
    (Job(Layout(4, 4, 2), "skewed", fault="local_counts"), "aux"),
    (Job(Layout(4, 4, 2), "skewed", fault="local_counts"), ROUTER),
    (Job(Layout(2, 2, 1), "packed", fault="local_positions"), KEYS),
    (Job(Layout(2, 2, 1), "packed", fault="late_shift"), KEYS),
    (Job(Layout(2, 2, 1), "packed", sharding="contiguous", fault="late_shift"), KEYS),
    (Job(Layout(4, 2, 2), "packed", fault="experts_over_world"), "model.layers.1.mlp.experts.down_proj"),
]


@functools.cache
def _launch(world: int) -> Launches[Job]:
    jobs = list(dict.fromkeys(job for job, _ in WRONG if job.layout.world == world))
    return Launches(run_jobs, world, jobs, per_launch=6)


@pytest.mark.parametrize(("job", "quantity"), WRONG, ids=str)
def test_a_fault_around_the_model_is_seen(job: Job, quantity: str) -> None:
    reference = reference_step(
        case_config(job.case), case_weights(job.case), case_step(job.case, job.num_micro_steps)
    )
    errors = step_errors(job.layout, _launch(job.layout.world)[job], reference)
    assert errors[quantity] > 1e-2
    assert quantity in failures(errors, "float32")


def test_counts_of_the_whole_step_are_another_loss() -> None:
    """exactness.md defines the balance loss by each micro-step's counts; the grid can tell."""
    config, weights, batches = case_config("ragged"), case_weights("ragged"), case_step("ragged", 3)
    whole = Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    micro, step = (reference_step(config, weights, steps) for steps in (batches, [whole]))
    assert step.cross_entropy == pytest.approx(micro.cross_entropy, rel=1e-14)
    assert relative_difference(step.aux, micro.aux) > 1e-3


def test_a_norm_without_experts_is_another_clip() -> None:
    grads = reference_step(case_config("packed"), case_weights("packed"), case_step("packed", 1)).grads
    norms = [
        torch.stack([g.norm() for name, g in grads.items() if keep or ".experts." not in name]).norm().item()
        for keep in (True, False)
    ]
    assert relative_difference(norms[1], norms[0]) > 1e-2
