"""Rows in the order of their experts, and back to the order of their tokens; all inside one rank.

Shape letters: T local tokens, K top-k, M model dim, E experts, R rows (one row is one token for one of its
experts), P ranks of the expert group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Permutation(NamedTuple):
    """A stable sort of the T·K slots (token t, choice k) by expert; padding slots come last.

    order_R      int64 [T·K]: the slot t·K + k of each sorted row
    position_TK  int64 [T, K]: the sorted row of each slot
    """

    order_R: Tensor
    position_TK: Tensor


def sort_by_expert(indices_TK: Tensor) -> Permutation:
    """indices_TK int64 [T, K]: chosen experts, padding above every expert."""
    flat = indices_TK.reshape(-1)
    order_R = flat.sort(stable=True).indices
    position = torch.empty_like(order_R)
    position[order_R] = torch.arange(len(order_R), device=order_R.device)
    return Permutation(order_R, position.view(indices_TK.shape))


def permute(x_TM: Tensor, permutation: Permutation, num_rows: int) -> Tensor:
    """Copies each token to its rows: x_TM [T, M] → the first `num_rows` sorted rows, [R, M]."""
    return _Permute.apply(x_TM, permutation.order_R[:num_rows], permutation.position_TK)


def collect(rows_RM: Tensor, permutation: Permutation) -> Tensor:
    """The transpose of `permute`: the sum of each token's rows, [T, M]; rows past R count as 0."""
    return _Collect.apply(rows_RM, *permutation)


def unpermute(rows_RM: Tensor, weights_TK: Tensor, permutation: Permutation) -> Tensor:
    """y[t] = Σ_k weights[t, k] · rows[position[t, k]] → [T, M] in the type of the rows.

    rows_RM holds the R sorted rows that are no padding; padding tokens get 0. Sums in the type of the
    weights (float32 for bfloat16 rows), in the order of k: deterministic, forward and backward.
    """
    return _Unpermute.apply(rows_RM, weights_TK, *permutation)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TM, order_R, position_TK):  # type: ignore[override]
        ctx.save_for_backward(position_TK)
        return x_TM.index_select(0, order_R // position_TK.shape[1])

    @staticmethod
    def backward(ctx, grad_RM):  # type: ignore[override]
        (position_TK,) = ctx.saved_tensors
        return _sum_rows(grad_RM, position_TK, None), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RM, order_R, position_TK):  # type: ignore[override]
        ctx.save_for_backward(order_R[: len(rows_RM)])
        ctx.top_k = position_TK.shape[1]
        return _sum_rows(rows_RM, position_TK, None)

    @staticmethod
    def backward(ctx, grad_TM):  # type: ignore[override]
        (order_R,) = ctx.saved_tensors
        return grad_TM.index_select(0, order_R // ctx.top_k), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RM, weights_TK, order_R, position_TK):  # type: ignore[override]
        ctx.save_for_backward(rows_RM, weights_TK, order_R)
        return _sum_rows(rows_RM, position_TK, weights_TK)

    @staticmethod
    def backward(ctx, grad_TM):  # type: ignore[override]
        rows_RM, weights_TK, order_R = ctx.saved_tensors
        grad_RM = torch.empty_like(rows_RM)
        weights, grad_weights = weights_TK.flatten(), torch.zeros_like(weights_TK).flatten()
        # In pieces, so that the products for the weights' gradient are no third tensor of all rows.
        limit = 1024 if rows_RM.device.type == "cpu" else 16384
        for start in range(0, len(rows_RM), limit):
            piece_CM, grad_CM = rows_RM[start : start + limit], grad_RM[start : start + limit]
            slots_C = order_R[start : start + len(piece_CM)]
            torch.index_select(grad_TM, 0, slots_C // weights_TK.shape[1], out=grad_CM)
            grad_weights[slots_C] = (grad_CM.to(weights.dtype) * piece_CM).sum(-1)
            grad_CM.mul_(weights[slots_C, None])
        return grad_RM, grad_weights.view_as(weights_TK), None, None


def _sum_rows(rows_RM: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, M]: Σ_k weights[t, k] · rows[position[t, k]]; positions past the rows must have weight 0.

    Without weights those within the rows have weight 1.
    """
    num_rows, num_tokens = len(rows_RM), len(position_TK)
    if num_rows == 0 or num_tokens == 0:
        return rows_RM.new_zeros(num_tokens, *rows_RM.shape[1:])
    wide = torch.promote_types(rows_RM.dtype, torch.float32)
    if num_rows < position_TK.numel():
        if weights_TK is None:
            weights_TK = (position_TK < num_rows).to(wide)
        position_TK = position_TK.clamp_max(num_rows - 1)
    if wide == rows_RM.dtype:
        return F.embedding_bag(position_TK, rows_RM, mode="sum", per_sample_weights=weights_TK)
    sum_TM = rows_RM.new_zeros((num_tokens, rows_RM.shape[1]), dtype=wide)
    for k in range(position_TK.shape[1]):
        chosen_TM = rows_RM.index_select(0, position_TK[:, k])
        if weights_TK is None:
            sum_TM.add_(chosen_TM)
        else:
            sum_TM.addcmul_(chosen_TM, weights_TK[:, k, None])
    return sum_TM.to(rows_RM.dtype)


def regroup(rows_RM: Tensor, blocks: list[list[int]]) -> Tensor:
    """Rows by rank, then expert, as they arrive → by expert, then rank. No copy where the two agree."""
    if len(blocks) == 1 or len(blocks[0]) == 1:
        return rows_RM
    return _Transpose.apply(rows_RM, blocks)


def ungroup(rows_RM: Tensor, blocks: list[list[int]]) -> Tensor:
    """The inverse of `regroup`, for the way back; `blocks` are the same [P][E / P] as there."""
    return regroup(rows_RM, [list(column) for column in zip(*blocks, strict=True)])


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RM, blocks):  # type: ignore[override]
        ctx.blocks = blocks
        return _transpose_blocks(rows_RM, blocks)

    @staticmethod
    def backward(ctx, grad_RM):  # type: ignore[override]
        return _transpose_blocks(grad_RM, [list(column) for column in zip(*ctx.blocks, strict=True)]), None


def _transpose_blocks(rows_RM: Tensor, blocks: list[list[int]]) -> Tensor:
    pieces = rows_RM.split([count for block in blocks for count in block])
    width = len(blocks[0])
    return torch.cat([piece for start in range(width) for piece in pieces[start::width]])
