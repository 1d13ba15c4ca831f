"""Blocks through the attention kernels inside torch that return their logsumexp.

CPU: the flash kernel. CUDA: the flash kernel for 16-bit inputs, else the memory-efficient one. Every kernel's
backward takes the *global* output and logsumexp.

Shape letters: B batch, T queries or keys of a block, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from cpmoe.attention.blocks import kernels_cpu, kernels_cuda
from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    query_rows,
)
from cpmoe.attention.reach import Reach
from cpmoe.attention.rectangles import Rectangle
from cpmoe.attention.scores import Scores

FLASH_MAX_HEAD_DIM = 256
FLASH_CAPABILITY = (8, 0)


class Kernel(NamedTuple):
    """forward(q, k, v, kind, scale) -> (out_BTHD, lse_BTH).

    backward(grad_out, q, k, v, out, lse_BTH, kind, scale) -> (dq, dk, dv). q and the like are [B, T, H, D],
    k and v [B, T, G, D], all with last stride 1.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class SdpaBlocks:
    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scores: Scores) -> str | None:
        if scores.softcap:
            return "torch's kernels have no softcap"
        if v_BTGD.shape[-1] != k_BTGD.shape[-1]:
            return f"head size {v_BTGD.shape[-1]} of V must be {k_BTGD.shape[-1]}, that of K"
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
        reach: Reach,
        state: RunningSoftmax,
        scores: Scores,
    ) -> None:
        kernel = _kernel(q_BTHD)
        for rectangle in _pieces(reach.rectangles, q_BTHD):
            k_BTGD, v_BTGD = (_rows_last(x) for x in block.keys_values(rectangle))
            q_rows_BTHD = _rows_last(q_BTHD[query_rows(rectangle)])
            out_BTHD, lse_BTH = kernel.forward(q_rows_BTHD, k_BTGD, v_BTGD, rectangle.kind, scores.scale)
            state.merge(rectangle, out_BTHD, lse_BTH)

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        reach: Reach,
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        kernel = _kernel(saved.q_BTHD)
        for rectangle in _pieces(reach.rectangles, saved.q_BTHD):
            rows = query_rows(rectangle)
            k_BTGD, v_BTGD = (_rows_last(x) for x in block.keys_values(rectangle))
            dq_BTHD, dk_BTGD, dv_BTGD = kernel.backward(
                _rows_last(saved.grad_out_BTHD[rows]),
                _rows_last(saved.q_BTHD[rows]),
                k_BTGD,
                v_BTGD,
                _rows_last(saved.out_BTHD[rows]),
                saved.lse_BTH[rows],
                rectangle.kind,
                saved.scores.scale,
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


def _pieces(rectangles: Sequence[Rectangle], q_BTHD: Tensor) -> Iterable[Rectangle]:
    if q_BTHD.is_cuda:
        return rectangles
    return chain.from_iterable(map(kernels_cpu.even_pieces, rectangles))


def _rows_last(x_BTHD: Tensor) -> Tensor:
    """With last stride 1: the kernels read any other strides, and the CPU one takes this for granted."""
    return x_BTHD if x_BTHD.stride(-1) == 1 else x_BTHD.contiguous()


CPU_FLASH = Kernel(kernels_cpu.forward, kernels_cpu.backward)
CUDA_FLASH = Kernel(kernels_cuda.flash_forward, kernels_cuda.flash_backward)
CUDA_EFFICIENT = Kernel(kernels_cuda.efficient_forward, kernels_cuda.efficient_backward)
