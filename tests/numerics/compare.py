"""What "the same" means: relative errors against the reference, in the tolerances of exactness.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.numerics.model_jobs import Layout, RankResult, is_expert
from tests.numerics.reference import StepResult

LOSS_TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
GRADIENT_TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
LOSS_TOLERANCE_AFTER_20_STEPS = {"float64": 1e-9, "float32": 1e-4}


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; a reference of zeros must be met exactly."""
    difference, size = (value.double() - reference).norm().item(), reference.norm().item()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def relative_difference(value: float, reference: float) -> float:
    """The same for one number."""
    return relative_error(
        torch.tensor(value, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    )


def gather_full(layout: Layout, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors : dense ones of rank 0, experts in the order of the expert group."""
    group = layout.grid.expert_ranks()[0]
    return {
        name: torch.cat([parts[rank][name] for rank in group]) if is_expert(name) else value
        for name, value in parts[0].items()
    }


def step_errors(layout: Layout, ranks: Sequence[RankResult], reference: StepResult) -> dict[str, float]:
    """Relative errors of the step by name: losses, counts (0 right, 1 wrong), each gradient."""
    errors = {
        name: relative_difference(sum(getattr(rank, name) for rank in ranks), getattr(reference, name))
        for name in ("loss", "cross_entropy", "aux", "zloss")
    }
    errors["counts"] = float(any(not torch.equal(rank.counts_GLE, reference.counts_GLE) for rank in ranks))
    grads = gather_full(layout, [rank.grads for rank in ranks])
    assert set(grads) == set(reference.grads)
    return errors | {name: relative_error(grad, reference.grads[name]) for name, grad in grads.items()}


def failures(errors: Mapping[str, float], dtype: str) -> dict[str, float]:
    """The errors above the tolerance of `dtype`; also those that are no number."""
    losses = ("loss", "cross_entropy", "aux", "zloss", "counts")
    return {
        name: error
        for name, error in errors.items()
        if not error <= (LOSS_TOLERANCE if name in losses else GRADIENT_TOLERANCE)[dtype]
    }
