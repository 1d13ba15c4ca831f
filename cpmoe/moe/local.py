"""What the experts of one rank add to tokens that are all here.

Shape letters: T tokens here, K slots of a token, M model dim, R rows.
"""

from __future__ import annotations

from torch import Tensor

from cpmoe.moe.dispatch import SharedCounts
from cpmoe.moe.permute import permute, sort_by_expert, unpermute
from cpmoe.moe.transit import ComputeExperts


def sum_of_experts(
    x_TM: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    counts: SharedCounts,
    num_experts: int,
    experts: ComputeExperts,
) -> Tensor:
    """y[t] = Σ_k weights[t, k] · expert experts[t, k] of this rank (x[t]) → [T, M] in the type of x.

    experts_TK int64, by their number on this rank; one past the last where a slot is empty, and its weight 0.
    `counts` are those of the call over all `num_experts`.
    """
    splits = counts.local_splits(num_experts)
    permutation = sort_by_expert(experts_TK)
    rows_RM = experts(permute(x_TM, permutation, sum(splits.counts)), splits)
    return unpermute(rows_RM, weights_TK, permutation)
