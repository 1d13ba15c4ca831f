"""Blocks through the attention kernels inside torch that return their logsumexp.

CPU: the flash kernel, float32 and float64; 16-bit inputs are computed in float32, which is faster on CPUs
without 16-bit matrix units and rounds less. It takes fewer KV heads than query heads directly.

Shape letters: B batch, T queries or keys of a block, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    accumulation_dtype,
    query_rows,
)
from cpmoe.attention.plan import Rectangle


class SdpaBlocks:
    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor) -> str | None:
        return None

    def forward(
        self,
        q_BTHD: Tensor,
        block: KeyValueBlock,
        rectangles: Sequence[Rectangle],
        state: RunningSoftmax,
        scale: float,
    ) -> None:
        for rectangle in rectangles:
            k_BTGD, v_BTGD = block.keys_values(rectangle)
            q_rows_BTHD = q_BTHD[query_rows(rectangle)]
            out_BTHD, lse_BTH = _cpu_forward(q_rows_BTHD, k_BTGD, v_BTGD, rectangle.causal, scale)
            state.merge(rectangle, out_BTHD, lse_BTH)

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        rectangles: Sequence[Rectangle],
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        for rectangle in rectangles:
            k_BTGD, v_BTGD = block.keys_values(rectangle)
            dq_BTHD, dk_BTGD, dv_BTGD = _cpu_backward(saved, rectangle, k_BTGD, v_BTGD)
            dq.add(rectangle, dq_BTHD)
            dkv.add(rectangle, dk_BTGD, dv_BTGD)


def _heads_first(x_BTHD: Tensor) -> Tensor:
    """[B, H, T, D] in the compute dtype. The CPU kernel takes the last stride for 1, unchecked."""
    x_BTHD = x_BTHD.to(accumulation_dtype(x_BTHD.dtype))
    if x_BTHD.stride(-1) != 1:
        x_BTHD = x_BTHD.contiguous()
    return x_BTHD.transpose(1, 2)


def _cpu_forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out_BHTD, lse_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_first(q_BTHD), _heads_first(k_BTGD), _heads_first(v_BTGD), 0.0, causal, scale=scale
    )
    return out_BHTD.transpose(1, 2), lse_BHT.transpose(1, 2)


def _cpu_backward(
    saved: SavedForward, rectangle: Rectangle, k_BTGD: Tensor, v_BTGD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = query_rows(rectangle)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(saved.grad_out_BTHD[rows]),
        _heads_first(saved.q_BTHD[rows]),
        _heads_first(k_BTGD),
        _heads_first(v_BTGD),
        _heads_first(saved.out_BTHD[rows]),
        saved.lse_BTH[rows].transpose(1, 2),
        0.0,
        rectangle.causal,
        scale=saved.scale,
    )
    dq_BTHD, dk_BTGD, dv_BTGD = (grad.transpose(1, 2) for grad in grads)
    return dq_BTHD, dk_BTGD, dv_BTGD
