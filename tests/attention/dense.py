"""Attention by its definition: one process, whole sequences, one dense mask. Of cpmoe it knows `Mask` only.

Shape letters: B batch, S full sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpmoe.attention.mask import CAUSAL, Mask


def dense_mask(documents_BS: Tensor, mask: Mask = CAUSAL) -> Tensor:
    """visible[b, i, j]: query i sees key j."""
    same = documents_BS[:, :, None] == documents_BS[:, None, :]
    seen = same & (documents_BS >= 0)[:, :, None]
    place = torch.arange(documents_BS.shape[1])
    before = place[:, None] - place[None]
    left, right = mask.window
    near = torch.ones_like(seen)
    if left is not None:
        near &= before <= left
    if right is not None:
        near &= -before <= right
    # How many tokens of its document stand before each key.
    rank_BS = torch.stack([(row == row.T).tril(-1).sum(1) for row in documents_BS[:, None].mT])
    seen &= near | (rank_BS < mask.num_sinks)[:, None]
    return seen & (before >= 0) if mask.causal else seen


def dense_attention(
    q_BSHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    documents_BS: Tensor,
    mask: Mask = CAUSAL,
    softcap: float = 0.0,
    weights_BHSS: Tensor | None = None,
) -> Tensor:
    """Softmax over the visible keys, times `weights`; 0 for queries that see none. In the inputs' dtype."""
    group = q_BSHD.shape[2] // k_BSGD.shape[2]
    k_BSHD, v_BSHD = (x.repeat_interleave(group, dim=2) for x in (k_BSGD, v_BSGD))
    scores = torch.einsum("bihd,bjhd->bhij", q_BSHD, k_BSHD) / q_BSHD.shape[-1] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = dense_mask(documents_BS, mask)[:, None]
    # Softmax over a fully hidden row is NaN: such rows attend to themselves and are zeroed afterwards.
    padding = (documents_BS < 0)[:, None]
    safe = visible | (torch.eye(documents_BS.shape[1], dtype=torch.bool) & padding[..., None])
    probs = scores.masked_fill(~safe, -torch.inf).softmax(dim=-1).masked_fill(padding[..., None], 0.0)
    if weights_BHSS is not None:
        probs = probs * weights_BHSS.to(probs.dtype)
    return torch.einsum("bhij,bjhd->bihd", probs, v_BSHD)


def dense_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    grad_out_BSHD: Tensor,
    documents_BS: Tensor,
    mask: Mask = CAUSAL,
    softcap: float = 0.0,
    weights_BHSS: Tensor | None = None,
):
    """(out, dq, dk, dv) in the inputs' dtype."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = dense_attention(*leaves, documents_BS, mask, softcap, weights_BHSS)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out_BSHD)
