"""Top-k softmax router.

Shape letters: T local tokens, M model dim, E global experts, K top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpmoe.moe.replay import RoutingReplay


class Routing(NamedTuple):
    """What the router says about T tokens. Float tensors are float32, or float64 in a float64 model.

    probs_TE     softmax over all experts, with gradient; 0 at padding
    indices_TK   int64, the chosen experts, best first; E (one past the last expert) at padding
    weights_TK   what the outputs of the chosen experts are multiplied by, with gradient; 0 at padding
    logsumexp_T  of the logits, with gradient; 0 at padding
    """

    probs_TE: Tensor
    indices_TK: Tensor
    weights_TK: Tensor
    logsumexp_T: Tensor


class Router(nn.Module):
    """Softmax over all experts, then the K best (Shazeer et al., 2017; Fedus et al., 2021).

    With `normalize` the K weights are divided by their sum (HF `norm_topk_prob`). Equal scores go to the
    expert of the lowest index. Computes in float32 whatever the type of the input, in float64 for
    float64 input. Does not communicate.
    """

    def __init__(self, hidden_size: int, num_experts: int, num_experts_per_tok: int, normalize: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.num_experts_per_tok = num_experts_per_tok
        self.normalize = normalize

    def forward(
        self, x_TM: Tensor, mask_T: Tensor | None = None, replay: RoutingReplay | None = None
    ) -> Routing:
        """x_TM [T, M]; mask_T bool [T] is False at padding, which no expert gets (None: no padding)."""
        wide = torch.promote_types(x_TM.dtype, torch.float32)
        logits_TE = F.linear(x_TM.to(wide), self.weight.to(wide))
        probs_TE = logits_TE.softmax(-1)
        logsumexp_T = logits_TE.logsumexp(-1)
        indices_TK = None if replay is None else replay.indices_TK
        if indices_TK is None:
            indices_TK = stable_topk(probs_TE.detach(), self.num_experts_per_tok)
            if replay is not None:
                replay.indices_TK = indices_TK
        weights_TK = probs_TE.gather(-1, indices_TK)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        if mask_T is not None:
            padding_T = ~mask_T
            probs_TE = probs_TE.masked_fill(padding_T[:, None], 0)
            logsumexp_T = logsumexp_T.masked_fill(padding_T, 0)
            weights_TK = weights_TK.masked_fill(padding_T[:, None], 0)
            indices_TK = indices_TK.masked_fill(padding_T[:, None], self.weight.shape[0])
        return Routing(probs_TE, indices_TK, weights_TK, logsumexp_T)


def stable_topk(scores_TE: Tensor, k: int) -> Tensor:
    """Indices [T, K] of the K largest scores, best first; of equal ones the lowest index comes first.

    `torch.topk` promises no order among equal scores.
    """
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def count_rows(indices_TK: Tensor, num_experts: int) -> Tensor:
    """How many rows each global expert gets: int64 [E]. Padding (index E) is not counted; no host sync."""
    flat = indices_TK.reshape(-1)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return counts[:num_experts]
