"""The definition of a block, with whole score matrices: any device and floating dtype, slow.

Computes in float64 for float64 inputs, else in float32.

Shape letters: B batch, T queries, U keys, G KV heads, R query heads per KV head, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    accumulation_dtype,
)
from cpmoe.attention.dropout import Dropout, kept, key_names
from cpmoe.attention.reach import Reach
from cpmoe.attention.rectangles import Kind
from cpmoe.attention.scores import Scores
from cpmoe.attention.stacks import Stack


class ReferenceBlocks:
    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scores: Scores) -> str | None:
        return None if q_BTHD.is_floating_point() else f"{q_BTHD.dtype} is not a floating dtype"

    def forward(
        self,
        q_BTHD: Tensor,
        block: KeyValueBlock,
        reach: Reach,
        state: RunningSoftmax,
        scores: Scores,
    ) -> None:
        dtype = accumulation_dtype(q_BTHD.dtype)
        for stack in reach.stacks:
            k_BUGD, v_BUGD = (x.to(dtype) for x in block.keys_values(stack.keys))
            q_BTGRD = _grouped(stack.rows.take(q_BTHD).to(dtype), k_BUGD.shape[2])
            scores_BGRTU = _scores(q_BTGRD, k_BUGD, scores, stack.kind)
            lse_BGRT = torch.logsumexp(scores_BGRTU, dim=-1)
            probs_BGRTU = _probabilities(scores_BGRTU, lse_BGRT)
            if scores.dropout is not None:
                probs_BGRTU *= _weights(scores.dropout, block, reach, stack, probs_BGRTU)
            out_BTGRD = torch.einsum("bgrtu,bugd->btgrd", probs_BGRTU, v_BUGD)
            state.merge(stack, out_BTGRD.flatten(2, 3), lse_BGRT.flatten(1, 2).transpose(1, 2))

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        reach: Reach,
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        dtype = saved.lse_BTH.dtype
        of_queries = saved.q_BTHD, saved.grad_out_BTHD, saved.lse_BTH, saved.delta_BTH
        for stack in reach.stacks:
            k_BUGD, v_BUGD = (x.to(dtype) for x in block.keys_values(stack.keys))
            num_kv_heads = k_BUGD.shape[2]
            q_BTHD, grad_out_BTHD, lse_BTH, delta_BTH = map(stack.rows.take, of_queries)
            q_BTGRD, grad_out_BTGRD = (_grouped(x.to(dtype), num_kv_heads) for x in (q_BTHD, grad_out_BTHD))
            lse_BGRT, delta_BGRT = (
                x.transpose(1, 2).unflatten(1, (num_kv_heads, -1)) for x in (lse_BTH, delta_BTH)
            )
            scores_BGRTU = _scores(q_BTGRD, k_BUGD, saved.scores, stack.kind)
            probs_BGRTU = _probabilities(scores_BGRTU, lse_BGRT)
            dprobs_BGRTU = torch.einsum("btgrd,bugd->bgrtu", grad_out_BTGRD, v_BUGD)
            weighted_BGRTU = probs_BGRTU
            if saved.scores.dropout is not None:
                weights_BGRTU = _weights(saved.scores.dropout, block, reach, stack, probs_BGRTU)
                weighted_BGRTU, dprobs_BGRTU = (x * weights_BGRTU for x in (probs_BGRTU, dprobs_BGRTU))
            dscores_BGRTU = probs_BGRTU * (dprobs_BGRTU - delta_BGRT[..., None]) * saved.scores.scale
            if saved.scores.softcap:
                # d tanh(x) = 1 − tanh(x)²; a hidden score is -inf and its probability 0.
                slope_BGRTU = 1 - (scores_BGRTU / saved.scores.softcap).square()
                dscores_BGRTU *= slope_BGRTU.masked_fill_(scores_BGRTU == -torch.inf, 0.0)
            dq.add(stack.rows, torch.einsum("bgrtu,bugd->btgrd", dscores_BGRTU, k_BUGD).flatten(2, 3))
            dkv.add(
                stack.keys,
                torch.einsum("bgrtu,btgrd->bugd", dscores_BGRTU, q_BTGRD),
                torch.einsum("bgrtu,btgrd->bugd", weighted_BGRTU, grad_out_BTGRD),
            )


def _grouped(x_BTHD: Tensor, num_kv_heads: int) -> Tensor:
    return x_BTHD.unflatten(2, (num_kv_heads, -1))


def _scores(q_BTGRD: Tensor, k_BUGD: Tensor, scores: Scores, kind: Kind) -> Tensor:
    scores_BGRTU = torch.einsum("btgrd,bugd->bgrtu", q_BTGRD, k_BUGD) * scores.scale
    if scores.softcap:
        scores_BGRTU = scores_BGRTU.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if kind != "full":
        all_TU = torch.ones(scores_BGRTU.shape[-2:], dtype=torch.bool, device=k_BUGD.device)
        hidden_TU = all_TU.triu(1) if kind == "causal" else all_TU.tril(-1)
        scores_BGRTU.masked_fill_(hidden_TU, -torch.inf)
    return scores_BGRTU


def _weights(
    dropout: Dropout, block: KeyValueBlock, reach: Reach, stack: Stack, probs_BGRTU: Tensor
) -> Tensor:
    """1 / (1 − rate) where a query keeps a key, else 0, like the probabilities."""
    names_U = key_names(reach, block.tokens, probs_BGRTU.device)
    keys_BU = stack.keys.within(block.tokens).take(names_U.expand(block.k_BTGD.shape[0], -1))
    queries_2BT = torch.stack([stack.rows.take(names_BT) for names_BT in dropout.queries_2BT])
    kept_BHTU = kept(dropout, queries_2BT, keys_BU)
    return kept_BHTU.view_as(probs_BGRTU).to(probs_BGRTU.dtype).div_(1 - dropout.rate)


def _probabilities(scores_BGRTU: Tensor, lse_BGRT: Tensor) -> Tensor:
    """exp(scores − lse), 0 for queries that see nothing."""
    return torch.exp(scores_BGRTU - torch.where(lse_BGRT == -torch.inf, 0.0, lse_BGRT)[..., None])
