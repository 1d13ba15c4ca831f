"""torch's CPU flash kernel, causal blocks cut so that it skips what is masked.

The kernel computes whole blocks of 512 keys up to the diagonal: of 1,024 causal tokens 75 % instead of
50 %. A causal block is therefore halved until its diagonal blocks are short: each halving leaves squares
below the diagonal, which the kernel computes at full rate, and all squares of one size are one batched call.

Computes in float32, or float64 for float64: on CPUs without 16-bit matrix units that is faster too.

Shape letters: B batch, T queries or keys, H query heads, G KV heads, D head dim, P squares of one size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpmoe.attention.blocks.accumulators import accumulation_dtype, merge_
from cpmoe.attention.plan import Rectangle

# Diagonal blocks are at least this long and, but for a remainder, shorter than twice this.
DIAGONAL = 128


def even_pieces(rectangle: Rectangle) -> tuple[Rectangle, ...]:
    """A causal rectangle as one that halves evenly and two for the last few rows; others as they are."""
    length = rectangle.q_stop - rectangle.q_start
    rest = length % (1 << _halvings(length)) if rectangle.causal else 0
    if rest == 0:
        return (rectangle,)
    q_cut, k_cut = rectangle.q_stop - rest, rectangle.k_stop - rest
    return (
        rectangle._replace(q_stop=q_cut, k_stop=k_cut),
        rectangle._replace(q_start=q_cut, k_stop=k_cut, causal=False),
        rectangle._replace(q_start=q_cut, k_start=k_cut, opens=False),
    )


def forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_BTHD, lse_BTH) of one rectangle, in the compute dtype."""
    dtype = accumulation_dtype(q_BTHD.dtype)
    q_BTHD, k_BTGD, v_BTGD = (x.to(dtype) for x in (q_BTHD, k_BTGD, v_BTGD))
    if not causal:
        return _forward((q_BTHD, k_BTGD, v_BTGD), False, scale)
    batch_size, num_blocks = q_BTHD.shape[0], 1 << _halvings(q_BTHD.shape[1])
    diagonal = tuple(_blocks(x, num_blocks) for x in (q_BTHD, k_BTGD, v_BTGD))
    out_BTHD, lse_BTH = (_whole(x, batch_size) for x in _forward(diagonal, True, scale))
    while num_blocks > 1:
        num_blocks //= 2
        square = _late(q_BTHD, num_blocks), _early(k_BTGD, num_blocks), _early(v_BTGD, num_blocks)
        part = _forward(tuple(x.flatten(0, 1) for x in square), False, scale)
        new_out, new_lse = (x.unflatten(0, (batch_size, num_blocks)) for x in part)
        merge_(_late(out_BTHD, num_blocks), _late(lse_BTH, num_blocks), new_out, new_lse)
    return out_BTHD, lse_BTH


def backward(
    grad_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_BTHD, dk_BTGD, dv_BTGD) of one rectangle, from the global output and logsumexp."""
    dtype = accumulation_dtype(q_BTHD.dtype)
    rows = (grad_out_BTHD.to(dtype), q_BTHD.to(dtype), out_BTHD.to(dtype), lse_BTH)
    keys = (k_BTGD.to(dtype), v_BTGD.to(dtype))
    if not causal:
        return _backward(rows, keys, False, scale)
    batch_size, num_blocks = q_BTHD.shape[0], 1 << _halvings(q_BTHD.shape[1])
    row_blocks, key_blocks = (tuple(_blocks(x, num_blocks) for x in xs) for xs in (rows, keys))
    grads = _backward(row_blocks, key_blocks, True, scale)
    dq_BTHD, dk_BTGD, dv_BTGD = (_whole(x, batch_size) for x in grads)
    while num_blocks > 1:
        num_blocks //= 2
        late_rows = tuple(_late(x, num_blocks).flatten(0, 1) for x in rows)
        early_keys = tuple(_early(x, num_blocks).flatten(0, 1) for x in keys)
        parts = _backward(late_rows, early_keys, False, scale)
        sums = _late(dq_BTHD, num_blocks), _early(dk_BTGD, num_blocks), _early(dv_BTGD, num_blocks)
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


def _forward(queries_keys_values: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q_BHTD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in queries_keys_values)
    out_BHTD, lse_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTD, k_BGTD, v_BGTD, 0.0, causal, scale=scale
    )
    return out_BHTD.transpose(1, 2), lse_BHT.transpose(1, 2)


def _backward(
    rows: tuple[Tensor, ...], keys: tuple[Tensor, ...], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out_BHTD, q_BHTD, out_BHTD, lse_BHT = (x.transpose(1, 2) for x in rows)
    k_BGTD, v_BGTD = (x.transpose(1, 2) for x in keys)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out_BHTD, q_BHTD, k_BGTD, v_BGTD, out_BHTD, lse_BHT, 0.0, causal, scale=scale
    )
    dq_BTHD, dk_BTGD, dv_BTGD = (x.transpose(1, 2) for x in grads)
    return dq_BTHD, dk_BTGD, dv_BTGD
