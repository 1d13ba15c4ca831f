"""Load balance: losses and statistics as pure functions of sums and counts. Nothing here communicates.

Shape letters: E global experts, K top-k, T tokens in scope. Every function takes leading dimensions
(layers, sequences) before E.
"""

from __future__ import annotations

import torch
from torch import Tensor


def switch_aux_loss(probs_sum_E: Tensor, counts_E: Tensor, num_experts_per_tok: int) -> Tensor:
    """This rank's share of the balance loss: E / (K T²) · Σ_i c_i · Σ_{t on this rank} p_{t,i}.

    probs_sum_E  float [..., E]: router probabilities summed over this rank's real tokens, with gradient
    counts_E     int [..., E]: routed rows per expert, summed by the caller over *all ranks* in scope
    returns      [...]: 1 under perfect balance when summed over the ranks; T is counts_E.sum() / K

    Counts carry no gradient, therefore the sum of the shares over ranks is the loss of the whole scope,
    value and gradient, however tokens are split (Fedus et al., 2021, eq. 4, with K experts a token as in
    Megatron-Core). The scope is one micro-step: under gradient accumulation the losses of the
    micro-steps are averaged, which differs from one loss over all of their tokens.
    """
    num_experts = counts_E.shape[-1]
    counts_E = counts_E.to(probs_sum_E.dtype)
    rows = counts_E.sum(-1, keepdim=True).clamp_min(1)
    fraction_E = counts_E / rows
    tokens = rows.squeeze(-1) / num_experts_per_tok
    return num_experts * (fraction_E * probs_sum_E).sum(-1) / tokens


def router_z_loss(zsum: Tensor, num_tokens: int | Tensor) -> Tensor:
    """This rank's share of the z-loss: Σ_{t on this rank} logsumexp² / num_tokens (Zoph et al., 2022, eq. 5).

    `num_tokens` counts the real tokens of the whole scope over all ranks, so that the sum of the shares
    is the mean over tokens. A mean of the ranks' means is another value where tokens are uneven.
    """
    return zsum / max(num_tokens, 1) if isinstance(num_tokens, int) else zsum / num_tokens.clamp_min(1)


def max_over_mean_load(counts_E: Tensor) -> Tensor:
    """Rows of the fullest expert over the mean: [...]; 1 is perfect balance, E all on one, 0 no rows."""
    counts_E = counts_E.to(torch.float64)
    mean = counts_E.mean(-1)
    return torch.where(mean > 0, counts_E.amax(-1) / mean.clamp_min(1e-30), 0.0)


def max_violation(counts_E: Tensor) -> Tensor:
    """MaxVio: (max_i c_i - mean) / mean, 0 is perfect balance (Wang et al., 2024, eq. 4); 0 if no rows."""
    return (max_over_mean_load(counts_E) - 1).clamp_min(0)
