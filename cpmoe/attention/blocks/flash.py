"""Blocks through the package flash-attn (Dao, arXiv 2307.08691): a varlen call for each kind of rectangle.

Its block function returns the output in 16 bits, so each block of a ring adds a rounding that the Triton
backend does not have: 2.7e-3 instead of 2.1e-3 in bfloat16, on any number of hops.

Shape letters: B batch, T queries or keys of a block, R packed rows, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    query_rows,
)
from cpmoe.attention.reach import Reach
from cpmoe.attention.rectangles import Kind, Rectangle
from cpmoe.attention.scores import Scores

OLDEST, MAX_HEAD_DIM, CAPABILITY = (2, 7), 256, (8, 0)
# (causal, keys before, keys after) of flash-attn, for as many queries as keys; -1 is no limit.
MASKS: dict[Kind, tuple[bool, int, int]] = {
    "full": (False, -1, -1),
    "causal": (True, -1, -1),
    "edge": (False, 0, -1),
}


class _Packed(NamedTuple):
    """Rectangles of one kind, one batch row each, one after the other."""

    kind: Kind
    rectangles: list[Rectangle]
    query_offsets: list[int]
    key_offsets: list[int]

    @classmethod
    def of(cls, kind: Kind, rectangles: Sequence[Rectangle]) -> _Packed:
        single = [
            rectangle._replace(batch_start=row, batch_stop=row + 1)
            for rectangle in rectangles
            for row in range(rectangle.batch_start, rectangle.batch_stop)
        ]
        query_offsets, key_offsets = [0], [0]
        for rectangle in single:
            query_offsets.append(query_offsets[-1] + rectangle.q_stop - rectangle.q_start)
            key_offsets.append(key_offsets[-1] + rectangle.k_stop - rectangle.k_start)
        return cls(kind, single, query_offsets, key_offsets)

    def sizes(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """(first row of each, queries and keys, int32; longest, queries and keys)"""
        longest = [
            max(stop - start for start, stop in pairwise(offsets))
            for offsets in (self.query_offsets, self.key_offsets)
        ]
        query_starts, key_starts = (
            torch.tensor(offsets, dtype=torch.int32).to(device, non_blocking=True)
            for offsets in (self.query_offsets, self.key_offsets)
        )
        return query_starts, key_starts, longest[0], longest[1]

    def queries(self, x_BTHD: Tensor) -> Tensor:
        return torch.cat([x_BTHD[query_rows(rectangle)][0] for rectangle in self.rectangles])

    def keys_values(self, block: KeyValueBlock) -> tuple[Tensor, Tensor]:
        pairs = [block.keys_values(rectangle) for rectangle in self.rectangles]
        return torch.cat([k[0] for k, _ in pairs]), torch.cat([v[0] for _, v in pairs])

    def of_queries(self, x_RHD: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        return self._split(x_RHD, self.query_offsets)

    def of_keys(self, x_RGD: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        return self._split(x_RGD, self.key_offsets)

    def _split(self, x: Tensor, offsets: list[int]) -> Iterator[tuple[Rectangle, Tensor]]:
        for rectangle, (start, stop) in zip(self.rectangles, pairwise(offsets), strict=True):
            yield rectangle, x[None, start:stop]


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
            for (rectangle, out), (_, lse) in parts:
                state.merge(rectangle, out, lse)

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
            for rectangle, dq_BTHD in packed.of_queries(grads[0]):
                dq.add(rectangle, dq_BTHD)
            parts = zip(packed.of_keys(grads[1]), packed.of_keys(grads[2]), strict=True)
            for (rectangle, dk_BTGD), (_, dv_BTGD) in parts:
                dkv.add(rectangle, dk_BTGD, dv_BTGD)


def _missing() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return 'the package flash-attn is not installed (pyproject.toml says how: extra "gpu")'
    version = metadata.version("flash-attn")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"flash-attn {version} is older than {'.'.join(map(str, OLDEST))}"
    return None


def _calls(reach: Reach) -> list[_Packed]:
    """Rectangles that open rows first, as the plan has them, and then by kind."""

    def key(rectangle: Rectangle) -> tuple[bool, Kind]:
        return not rectangle.opens, rectangle.kind

    return [
        _Packed.of(kind, list(group)) for (_, kind), group in groupby(sorted(reach.rectangles, key=key), key)
    ]
