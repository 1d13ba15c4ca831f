"""Blocks through the attention kernels inside torch that return their logsumexp.

CPU: the flash kernel, in float32 or float64; 16-bit inputs are computed in float32, which is faster on
CPUs without 16-bit matrix units and rounds less. CUDA: the flash kernel for 16-bit inputs, else the
memory-efficient one. Every kernel's backward takes the *global* output and logsumexp.

Shape letters: B batch, T queries or keys of a block, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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

FLASH_MAX_HEAD_DIM = 256
FLASH_CAPABILITY = (8, 0)
# Mask types of the memory-efficient kernel, and the multiple its logsumexp is padded to.
EFFICIENT_NO_MASK, EFFICIENT_CAUSAL_TOP_LEFT, EFFICIENT_LSE_MULTIPLE = 0, 1, 32


class Kernel(NamedTuple):
    """forward(q, k, v, causal, scale) -> (out_BTHD, lse_BTH).

    backward(grad_out, q, k, v, out, lse_BTH, causal, scale) -> (dq, dk, dv). q and the like are [B, T, H, D],
    k and v [B, T, G, D], all with last stride 1.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class SdpaBlocks:
    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor) -> str | None:
        dtype, device, head_dim = q_BTHD.dtype, q_BTHD.device.type, q_BTHD.shape[-1]
        if device not in ("cpu", "cuda"):
            return f"device {device} has no kernel that returns its logsumexp (cpu and cuda have)"
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"{dtype} is not one of float64, float32, bfloat16, float16"
        if device == "cuda" and dtype == torch.float64:
            return "torch's CUDA kernels have no float64"
        if device == "cuda" and head_dim * dtype.itemsize % 16:
            return f"head size {head_dim} in {dtype} is no multiple of the 16 bytes that CUDA kernels load"
        return None

    def forward(
        self,
        q_BTHD: Tensor,
        block: KeyValueBlock,
        rectangles: Sequence[Rectangle],
        state: RunningSoftmax,
        scale: float,
    ) -> None:
        kernel = _kernel(q_BTHD)
        for rectangle in rectangles:
            k_BTGD, v_BTGD = (_rows_last(x) for x in block.keys_values(rectangle))
            q_rows_BTHD = _rows_last(q_BTHD[query_rows(rectangle)])
            out_BTHD, lse_BTH = kernel.forward(q_rows_BTHD, k_BTGD, v_BTGD, rectangle.causal, scale)
            state.merge(rectangle, out_BTHD, lse_BTH)

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        rectangles: Sequence[Rectangle],
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        kernel = _kernel(saved.q_BTHD)
        for rectangle in rectangles:
            rows = query_rows(rectangle)
            k_BTGD, v_BTGD = (_rows_last(x) for x in block.keys_values(rectangle))
            dq_BTHD, dk_BTGD, dv_BTGD = kernel.backward(
                _rows_last(saved.grad_out_BTHD[rows]),
                _rows_last(saved.q_BTHD[rows]),
                k_BTGD,
                v_BTGD,
                _rows_last(saved.out_BTHD[rows]),
                saved.lse_BTH[rows],
                rectangle.causal,
                saved.scale,
            )
            dq.add(rectangle, dq_BTHD)
            dkv.add(rectangle, dk_BTGD, dv_BTGD)


def _kernel(q_BTHD: Tensor) -> Kernel:
    if not q_BTHD.is_cuda:
        return CPU_FLASH
    is_16_bit = q_BTHD.dtype in (torch.bfloat16, torch.float16)
    fits = q_BTHD.shape[-1] <= FLASH_MAX_HEAD_DIM
    is_new = torch.cuda.get_device_capability(q_BTHD.device) >= FLASH_CAPABILITY
    return CUDA_FLASH if is_16_bit and fits and is_new else CUDA_EFFICIENT


def _rows_last(x_BTHD: Tensor) -> Tensor:
    """With last stride 1: the kernels read any other strides, and the CPU one takes this for granted."""
    return x_BTHD if x_BTHD.stride(-1) == 1 else x_BTHD.contiguous()


def _cpu_view(x_BTHD: Tensor) -> Tensor:
    return x_BTHD.to(accumulation_dtype(x_BTHD.dtype)).transpose(1, 2)


def _cpu_flash_forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out_BHTD, lse_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _cpu_view(q_BTHD), _cpu_view(k_BTGD), _cpu_view(v_BTGD), 0.0, causal, scale=scale
    )
    return out_BHTD.transpose(1, 2), lse_BHT.transpose(1, 2)


def _cpu_flash_backward(
    grad_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _cpu_view(grad_out_BTHD),
        _cpu_view(q_BTHD),
        _cpu_view(k_BTGD),
        _cpu_view(v_BTGD),
        _cpu_view(out_BTHD),
        lse_BTH.transpose(1, 2),
        0.0,
        causal,
        scale=scale,
    )
    dq_BTHD, dk_BTGD, dv_BTGD = (grad.transpose(1, 2) for grad in grads)
    return dq_BTHD, dk_BTGD, dv_BTGD


def _cuda_flash_forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float
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
        causal,
        False,
        scale=scale,
    )
    return out_BTHD, lse_BHT.transpose(1, 2)


def _cuda_flash_backward(
    grad_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    causal: bool,
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
        causal,
        random_state,
        random_state,
        scale=scale,
    )


def _per_query_head(x_BTGD: Tensor, num_heads: int) -> Tensor:
    """The memory-efficient kernel has no grouped heads: each KV head once per query head, locally."""
    num_kv_heads = x_BTGD.shape[2]
    return x_BTGD if num_kv_heads == num_heads else x_BTGD.repeat_interleave(num_heads // num_kv_heads, dim=2)


def _cuda_efficient_forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, causal: bool, scale: float
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
        EFFICIENT_CAUSAL_TOP_LEFT if causal else EFFICIENT_NO_MASK,
        True,
        scale=scale,
    )
    return out_BTHD, lse_BHT[..., :num_queries].transpose(1, 2)


def _cuda_efficient_backward(
    grad_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    causal: bool,
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
        EFFICIENT_CAUSAL_TOP_LEFT if causal else EFFICIENT_NO_MASK,
        False,
        scale=scale,
    )
    if num_kv_heads == num_heads:
        return dq_BTHD, dk_BTHD, dv_BTHD
    dk_BTGD, dv_BTGD = (x.unflatten(2, (num_kv_heads, -1)).sum(dim=3) for x in (dk_BTHD, dv_BTHD))
    return dq_BTHD, dk_BTGD, dv_BTGD


CPU_FLASH = Kernel(_cpu_flash_forward, _cpu_flash_backward)
CUDA_FLASH = Kernel(_cuda_flash_forward, _cuda_flash_backward)
CUDA_EFFICIENT = Kernel(_cuda_efficient_forward, _cuda_efficient_backward)
