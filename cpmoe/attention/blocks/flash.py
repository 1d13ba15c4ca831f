"""Blocks through the package flash-attn (Dao, arXiv 2307.08691): a varlen call for each kind of rectangle.

Its block function returns the output in 16 bits, so each block of a ring adds a rounding that the Triton
backend does not have: 2.7e-3 instead of 2.1e-3 in bfloat16, on any number of hops.

Shape letters: B batch, T queries or keys of a block, P rectangles of a stack, R packed rows, H query heads,
G KV heads, D head dim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
)
from cpmoe.attention.reach import Reach
from cpmoe.attention.rectangles import Kind
from cpmoe.attention.scores import Scores
from cpmoe.attention.stacks import Stack, TokenRuns

OLDEST, MAX_HEAD_DIM, CAPABILITY = (2, 7), 256, (8, 0)
# (causal, keys before, keys after) of flash-attn, for as many queries as keys; -1 is no limit.
MASKS: dict[Kind, tuple[bool, int, int]] = {
    "full": (False, -1, -1),
    "causal": (True, -1, -1),
    "edge": (False, 0, -1),
}


class _Packed(NamedTuple):
    """Stacks of one kind, one rectangle after the other."""

    kind: Kind
    stacks: list[Stack]

    def sizes(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """(first row of each rectangle, queries and keys, int32; longest, queries and keys)"""
        starts, longest = [], []
        for runs in ([stack.rows for stack in self.stacks], [stack.keys for stack in self.stacks]):
            lengths = np.repeat([r.length for r in runs], [len(r.start_P) for r in runs])
            offsets = np.append(0, lengths.cumsum()).astype(np.int32)
            starts.append(torch.from_numpy(offsets).to(device, non_blocking=True))
            longest.append(int(lengths.max()))
        return starts[0], starts[1], longest[0], longest[1]

    def queries(self, x_BTHD: Tensor) -> Tensor:
        return torch.cat([stack.rows.take(x_BTHD).flatten(0, 1) for stack in self.stacks])

    def keys_values(self, block: KeyValueBlock) -> tuple[Tensor, Tensor]:
        pairs = [block.keys_values(stack.keys) for stack in self.stacks]
        return torch.cat([k.flatten(0, 1) for k, _ in pairs]), torch.cat([v.flatten(0, 1) for _, v in pairs])

    def of_queries(self, x_RHD: Tensor) -> Iterator[tuple[Stack, Tensor]]:
        """Each stack with its own [P, T, ...] of the packed rows."""
        return self._split(x_RHD, [stack.rows for stack in self.stacks])

    def of_keys(self, x_RGD: Tensor) -> Iterator[tuple[Stack, Tensor]]:
        return self._split(x_RGD, [stack.keys for stack in self.stacks])

    def _split(self, x: Tensor, runs: list[TokenRuns]) -> Iterator[tuple[Stack, Tensor]]:
        parts = x.split([len(r.start_P) * r.length for r in runs])
        for stack, r, part in zip(self.stacks, runs, parts, strict=True):
            yield stack, part.unflatten(0, (-1, r.length))


class FlashBlocks:
    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scores: Scores) -> str | None:
        missing = _missing()
        if missing:
            return missing
        dtype, head_dim = q_BTHD.dtype, q_BTHD.shape[-1]
        if not q_BTHD.is_cuda:
            return f"device {q_BTHD.device.type} has no flash-attn kernels (cuda has)"
        if torch.cuda.get_device_capability(q_BTHD.device) < CAPABILITY:
            return "the GPU is older than compute capability 8.0"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"{dtype} is not one of bfloat16, float16"
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            return f"head size {head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}"
        if scores.dropout is not None:
            return "flash-attn draws dropout by its own places, which differ from layout to layout"
        if v_BTGD.shape[-1] != head_dim:
            return f"head size {v_BTGD.shape[-1]} of V must be {head_dim}, that of K"
        return None

    def forward(
        self, q_BTHD: Tensor, block: KeyValueBlock, reach: Reach, state: RunningSoftmax, scores: Scores
    ) -> None:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        for packed in _calls(reach):
            causal, before, after = MASKS[packed.kind]
            out_RHD, lse_HR, *_ = _flash_attn_varlen_forward(
                packed.queries(q_BTHD),
                *packed.keys_values(block),
                *packed.sizes(q_BTHD.device),
                0.0,
                scores.scale,
                causal=causal,
                window_size_left=before,
                window_size_right=after,
                softcap=scores.softcap,
            )
            parts = zip(packed.of_queries(out_RHD), packed.of_queries(lse_HR.mT), strict=True)
            for (stack, out_PTHD), (_, lse_PTH) in parts:
                state.merge(stack, out_PTHD, lse_PTH)

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        reach: Reach,
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        for packed in _calls(reach):
            causal, before, after = MASKS[packed.kind]
            grad_out_RHD, q_RHD, out_RHD, lse_RH = (
                packed.queries(x) for x in (saved.grad_out_BTHD, saved.q_BTHD, saved.out_BTHD, saved.lse_BTH)
            )
            k_RGD, v_RGD = packed.keys_values(block)
            grads = torch.empty_like(q_RHD), torch.empty_like(k_RGD), torch.empty_like(v_RGD)
            _flash_attn_varlen_backward(
                grad_out_RHD,
                q_RHD,
                k_RGD,
                v_RGD,
                out_RHD,
                lse_RH.mT.contiguous(),
                *grads,
                *packed.sizes(q_RHD.device),
                0.0,
                saved.scores.scale,
                causal=causal,
                window_size_left=before,
                window_size_right=after,
                softcap=saved.scores.softcap,
                alibi_slopes=None,
                deterministic=True,
            )
            for stack, dq_PTHD in packed.of_queries(grads[0]):
                dq.add(stack.rows, dq_PTHD)
            parts = zip(packed.of_keys(grads[1]), packed.of_keys(grads[2]), strict=True)
            for (stack, dk_PTGD), (_, dv_PTGD) in parts:
                dkv.add(stack.keys, dk_PTGD, dv_PTGD)


def _missing() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return 'the package flash-attn is not installed (pyproject.toml says how: extra "gpu")'
    version = metadata.version("flash-attn")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"flash-attn {version} is older than {'.'.join(map(str, OLDEST))}"
    return None


def _calls(reach: Reach) -> list[_Packed]:
    """One for each kind of the stacks that open rows, which come first, and of the others."""

    def key(stack: Stack) -> tuple[bool, Kind]:
        return not stack.opens, stack.kind

    return [_Packed(kind, list(group)) for (_, kind), group in groupby(sorted(reach.stacks, key=key), key)]
