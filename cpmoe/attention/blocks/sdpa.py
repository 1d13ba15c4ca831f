"""Blocks through the attention kernels inside torch that return their logsumexp.

CPU: the flash kernel. CUDA: the flash kernel for 16-bit inputs, else the memory-efficient one. Every kernel's
backward takes the *global* output and logsumexp.

Shape letters: B batch, T queries or keys of a block, P rectangles of a stack, H query heads, G KV heads, D
head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cpmoe.attention.blocks import kernels_cpu, kernels_cuda
from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
)
from cpmoe.attention.reach import Reach
from cpmoe.attention.scores import Scores
from cpmoe.attention.stacks import Stack

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
        if scores.dropout is not None:
            return "torch's kernels draw dropout by their own places, which differ from layout to layout"
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
        for stack in _pieces(reach, q_BTHD):
            inputs = stack.rows.take(q_BTHD), *block.keys_values(stack.keys)
            q_PTHD, k_PTGD, v_PTGD = map(_rows_last, inputs)
            state.merge(stack, *kernel.forward(q_PTHD, k_PTGD, v_PTGD, stack.kind, scores.scale))

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        reach: Reach,
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        kernel = _kernel(saved.q_BTHD)
        of_queries = saved.grad_out_BTHD, saved.q_BTHD, saved.out_BTHD, saved.lse_BTH
        for stack in _pieces(reach, saved.q_BTHD):
            grad_out_PTHD, q_PTHD, out_PTHD, lse_PTH = map(stack.rows.take, of_queries)
            k_PTGD, v_PTGD = block.keys_values(stack.keys)
            dq_PTHD, dk_PTGD, dv_PTGD = kernel.backward(
                *map(_rows_last, (grad_out_PTHD, q_PTHD, k_PTGD, v_PTGD, out_PTHD)),
                lse_PTH,
                stack.kind,
                saved.scores.scale,
            )
            dq.add(stack.rows, dq_PTHD)
            dkv.add(stack.keys, dk_PTGD, dv_PTGD)


def _kernel(q_BTHD: Tensor) -> Kernel:
    if not q_BTHD.is_cuda:
        return CPU_FLASH
    is_16_bit = q_BTHD.dtype in (torch.bfloat16, torch.float16)
    fits = q_BTHD.shape[-1] <= FLASH_MAX_HEAD_DIM
    is_new = torch.cuda.get_device_capability(q_BTHD.device) >= FLASH_CAPABILITY
    return CUDA_FLASH if is_16_bit and fits and is_new else CUDA_EFFICIENT


_even_pieces: WeakKeyDictionary[Reach, tuple[Stack, ...]] = WeakKeyDictionary()


def _pieces(reach: Reach, q_BTHD: Tensor) -> tuple[Stack, ...]:
    """What the kernels of the device take; once for all layers of a plan."""
    if q_BTHD.is_cuda:
        return reach.stacks
    if reach not in _even_pieces:
        _even_pieces[reach] = tuple(chain.from_iterable(map(kernels_cpu.even_pieces, reach.stacks)))
    return _even_pieces[reach]


def _rows_last(x_BTHD: Tensor) -> Tensor:
    """With last stride 1: the kernels read any other strides, and the CPU one takes this for granted."""
    return x_BTHD if x_BTHD.stride(-1) == 1 else x_BTHD.contiguous()


CPU_FLASH = Kernel(kernels_cpu.forward, kernels_cpu.backward)
CUDA_FLASH = Kernel(kernels_cuda.flash_forward, kernels_cuda.flash_backward)
CUDA_EFFICIENT = Kernel(kernels_cuda.efficient_forward, kernels_cuda.efficient_backward)
