"""torch's CPU flash kernel, triangles cut so that it skips what is masked.

The kernel computes whole blocks of 512 keys up to the diagonal: of 1,024 causal tokens 75 % instead of
50 %, and it knows no window's edge. A triangle is therefore halved until its diagonal blocks are short: each
halving leaves squares beside the diagonal, which the kernel computes at full rate, and all squares of one
size are one batched call. The squares join late queries with early keys in a causal triangle, early queries
with late keys at a window's edge, whose diagonal blocks take a mask.

Computes in float32, or float64 for float64: on CPUs without 16-bit matrix units that is faster too.

Shape letters: B batch, T queries or keys, H query heads, G KV heads, D head dim, P squares of one size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpmoe.attention.blocks.accumulators import accumulation_dtype, merge_
from cpmoe.attention.rectangles import Kind
from cpmoe.attention.stacks import Stack

# Diagonal blocks are at least this long and, but for a remainder, shorter than twice this.
DIAGONAL = 128


def even_pieces(stack: Stack) -> tuple[Stack, ...]:
    """Triangles as ones that halve evenly and two for the rows or keys left over; others as they are."""
    rows, keys, length = stack.rows, stack.keys, stack.rows.length
    rest = 0 if stack.kind == "full" else length % (1 << _halvings(length))
    if rest == 0:
        return (stack,)
    even = length - rest
    main = Stack(stack.kind, stack.opens, rows.part(0, even), keys.part(0, even))
    last_rows, last_keys = rows.part(even, rest), keys.part(even, rest)
    if stack.kind == "causal":
        beside = Stack("full", stack.opens, last_rows, main.keys)
        return main, beside, Stack("causal", False, last_rows, last_keys)
    beside = Stack("full", False, main.rows, last_keys)
    return main, beside, Stack("edge", stack.opens, last_rows, last_keys)


def forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_BTHD, lse_BTH) of one rectangle, in the compute dtype."""
    dtype = accumulation_dtype(q_BTHD.dtype)
    q_BTHD, k_BTGD, v_BTGD = (x.to(dtype) for x in (q_BTHD, k_BTGD, v_BTGD))
    if kind == "full":
        return _forward((q_BTHD, k_BTGD, v_BTGD), kind, scale)
    batch_size, num_blocks = q_BTHD.shape[0], 1 << _halvings(q_BTHD.shape[1])
    diagonal = tuple(_blocks(x, num_blocks) for x in (q_BTHD, k_BTGD, v_BTGD))
    out_BTHD, lse_BTH = (_whole(x, batch_size) for x in _forward(diagonal, kind, scale))
    rows, keys = (_late, _early) if kind == "causal" else (_early, _late)
    while num_blocks > 1:
        num_blocks //= 2
        square = rows(q_BTHD, num_blocks), keys(k_BTGD, num_blocks), keys(v_BTGD, num_blocks)
        part = _forward(tuple(x.flatten(0, 1) for x in square), "full", scale)
        new_out, new_lse = (x.unflatten(0, (batch_size, num_blocks)) for x in part)
        merge_(rows(out_BTHD, num_blocks), rows(lse_BTH, num_blocks), new_out, new_lse)
    return out_BTHD, lse_BTH


def backward(
    grad_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    kind: Kind,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_BTHD, dk_BTGD, dv_BTGD) of one rectangle, from the global output and logsumexp."""
    dtype = accumulation_dtype(q_BTHD.dtype)
    of_rows = (grad_out_BTHD.to(dtype), q_BTHD.to(dtype), out_BTHD.to(dtype), lse_BTH)
    of_keys = (k_BTGD.to(dtype), v_BTGD.to(dtype))
    if kind == "full":
        return _backward(of_rows, of_keys, kind, scale)
    batch_size, num_blocks = q_BTHD.shape[0], 1 << _halvings(q_BTHD.shape[1])
    row_blocks, key_blocks = (tuple(_blocks(x, num_blocks) for x in xs) for xs in (of_rows, of_keys))
    grads = _backward(row_blocks, key_blocks, kind, scale)
    dq_BTHD, dk_BTGD, dv_BTGD = (_whole(x, batch_size) for x in grads)
    rows, keys = (_late, _early) if kind == "causal" else (_early, _late)
    while num_blocks > 1:
        num_blocks //= 2
        square_rows = tuple(rows(x, num_blocks).flatten(0, 1) for x in of_rows)
        square_keys = tuple(keys(x, num_blocks).flatten(0, 1) for x in of_keys)
        parts = _backward(square_rows, square_keys, "full", scale)
        sums = rows(dq_BTHD, num_blocks), keys(dk_BTGD, num_blocks), keys(dv_BTGD, num_blocks)
        for total, part in zip(sums, parts, strict=True):
            total.add_(part.unflatten(0, (batch_size, num_blocks)))
    return dq_BTHD, dk_BTGD, dv_BTGD


def _halvings(length: int) -> int:
    return max(0, (length // DIAGONAL).bit_length() - 1)


def _blocks(x: Tensor, num_blocks: int) -> Tensor:
    """[B, T, ...] -> [B·P, T/P, ...]"""
    return x.unflatten(1, (num_blocks, -1)).flatten(0, 1)


def _whole(x: Tensor, batch_size: int) -> Tensor:
    """[B·P, T/P, ...] -> [B, T, ...]"""
    return x.unflatten(0, (batch_size, -1)).flatten(1, 2)


def _early(x: Tensor, num_blocks: int) -> Tensor:
    """First half of each block: a view [B, P, T/2P, ...]."""
    return x.unflatten(1, (num_blocks, 2, -1))[:, :, 0]


def _late(x: Tensor, num_blocks: int) -> Tensor:
    """Second half of each block: a view [B, P, T/2P, ...]."""
    return x.unflatten(1, (num_blocks, 2, -1))[:, :, 1]


def _edge_mask(length: int, dtype: torch.dtype) -> Tensor:
    """[T, T] added to scores: hides the keys before each query's own place."""
    return torch.full((length, length), -torch.inf, dtype=dtype).tril(-1)


def _forward(queries_keys_values: tuple[Tensor, ...], kind: Kind, scale: float) -> tuple[Tensor, Tensor]:
    q_BHTD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in queries_keys_values)
    mask = _edge_mask(q_BHTD.shape[2], q_BHTD.dtype) if kind == "edge" else None
    out_BHTD, lse_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTD, k_BGTD, v_BGTD, 0.0, kind == "causal", attn_mask=mask, scale=scale
    )
    return out_BHTD.transpose(1, 2), lse_BHT.transpose(1, 2)


def _backward(
    rows: tuple[Tensor, ...], keys: tuple[Tensor, ...], kind: Kind, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out_BHTD, q_BHTD, out_BHTD, lse_BHT = (x.transpose(1, 2) for x in rows)
    k_BGTD, v_BGTD = (x.transpose(1, 2) for x in keys)
    mask = _edge_mask(q_BHTD.shape[2], q_BHTD.dtype) if kind == "edge" else None
    inputs = grad_out_BHTD, q_BHTD, k_BGTD, v_BGTD, out_BHTD, lse_BHT
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, 0.0, kind == "causal", attn_mask=mask, scale=scale
    )
    dq_BHTD, dk_BGTD, dv_BGTD = grads
    return dq_BHTD.transpose(1, 2), dk_BGTD.transpose(1, 2), dv_BGTD.transpose(1, 2)
