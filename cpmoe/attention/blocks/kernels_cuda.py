"""torch's CUDA attention kernels that return their logsumexp, by their operators.

Flash: 16-bit, fewer KV heads than query heads directly. Memory-efficient: also float32 and older GPUs.
Neither is given a window: its edge is a causal triangle of the tokens in reverse order.

Shape letters: B batch, T queries or keys of a block, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cpmoe.attention.rectangles import Kind

# Mask types of the memory-efficient kernel, and the multiple its logsumexp is padded to.
EFFICIENT_NO_MASK, EFFICIENT_CAUSAL_TOP_LEFT, EFFICIENT_LSE_MULTIPLE = 0, 1, 32


def _edges_reversed(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` for edge rectangles too: every tensor it takes and gives has its tokens in dim 1."""

    @wraps(kernel)
    def call(*tensors_kind_scale: Any) -> Any:
        *tensors, kind, scale = tensors_kind_scale
        if kind != "edge":
            return kernel(*tensors, kind, scale)
        results = kernel(*(x.flip(1) for x in tensors), "causal", scale)
        return tuple(x.flip(1) for x in results)

    return call


@_edges_reversed
def flash_forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    out_BTHD, lse_BHT, *_ = torch.ops.aten._flash_attention_forward(
        q_BTHD,
        k_BTGD,
        v_BTGD,
        None,
        None,
        q_BTHD.shape[1],
        k_BTGD.shape[1],
        0.0,
        kind == "causal",
        False,
        scale=scale,
    )
    return out_BTHD, lse_BHT.transpose(1, 2)


@_edges_reversed
def flash_backward(
    grad_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    kind: Kind,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # Read only with dropout.
    random_state = torch.empty(2, dtype=torch.uint64, device=q_BTHD.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out_BTHD,
        q_BTHD,
        k_BTGD,
        v_BTGD,
        out_BTHD,
        lse_BTH.transpose(1, 2).contiguous(),
        None,
        None,
        q_BTHD.shape[1],
        k_BTGD.shape[1],
        0.0,
        kind == "causal",
        random_state,
        random_state,
        scale=scale,
    )


def _per_query_head(x_BTGD: Tensor, num_heads: int) -> Tensor:
    """The memory-efficient kernel has no grouped heads: each KV head once per query head, locally."""
    num_kv_heads = x_BTGD.shape[2]
    return x_BTGD if num_kv_heads == num_heads else x_BTGD.repeat_interleave(num_heads // num_kv_heads, dim=2)


@_edges_reversed
def efficient_forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, kind: Kind, scale: float
) -> tuple[Tensor, Tensor]:
    num_queries, num_heads = q_BTHD.shape[1:3]
    out_BTHD, lse_BHT, *_ = torch.ops.aten._efficient_attention_forward(
        q_BTHD,
        _per_query_head(k_BTGD, num_heads),
        _per_query_head(v_BTGD, num_heads),
        None,
        None,
        None,
        None,
        None,
        0.0,
        EFFICIENT_CAUSAL_TOP_LEFT if kind == "causal" else EFFICIENT_NO_MASK,
        True,
        scale=scale,
    )
    return out_BTHD, lse_BHT[..., :num_queries].transpose(1, 2)


@_edges_reversed
def efficient_backward(
    grad_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    kind: Kind,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_queries, num_heads = q_BTHD.shape[1:3]
    num_kv_heads = k_BTGD.shape[2]
    padding = -num_queries % EFFICIENT_LSE_MULTIPLE
    # Read only with dropout.
    random_state = torch.zeros((), dtype=torch.int64)
    dq_BTHD, dk_BTHD, dv_BTHD, _ = torch.ops.aten._efficient_attention_backward(
        grad_out_BTHD,
        q_BTHD,
        _per_query_head(k_BTGD, num_heads),
        _per_query_head(v_BTGD, num_heads),
        None,
        out_BTHD.contiguous(),
        None,
        None,
        num_queries,
        k_BTGD.shape[1],
        F.pad(lse_BTH.transpose(1, 2), (0, padding), value=torch.inf).contiguous(),
        0.0,
        random_state,
        random_state,
        EFFICIENT_CAUSAL_TOP_LEFT if kind == "causal" else EFFICIENT_NO_MASK,
        False,
        scale=scale,
    )
    if num_kv_heads == num_heads:
        return dq_BTHD, dk_BTHD, dv_BTHD
    dk_BTGD, dv_BTGD = (x.unflatten(2, (num_kv_heads, -1)).sum(dim=3) for x in (dk_BTHD, dv_BTHD))
    return dq_BTHD, dk_BTGD, dv_BTGD
