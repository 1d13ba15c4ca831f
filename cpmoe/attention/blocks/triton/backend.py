"""Blocks through the kernels of this package, which continue the running sums in place.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

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
from cpmoe.attention.blocks.triton.configs import WITH_DESCRIPTORS, max_width
from cpmoe.attention.dropout import key_names
from cpmoe.attention.ranges import TokenRanges
from cpmoe.attention.reach import Reach
from cpmoe.attention.scores import Scores
from cpmoe.attention.spans import spans_of_reach
from cpmoe.kernels.architectures import architecture_of, no_kernels

if TYPE_CHECKING:
    from cpmoe.attention.blocks.triton.launch import Problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TritonBlocks:
    """`float32`: how float32 inputs are multiplied: exactly, or fast with tf32's 10 bits of mantissa."""

    float32: Literal["ieee", "tf32"] = "ieee"

    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scores: Scores) -> str | None:
        missing = no_kernels(q_BTHD.device)
        if missing is not None:
            return missing
        if q_BTHD.dtype not in DTYPES:
            return f"{q_BTHD.dtype} is not one of bfloat16, float16, float32"
        widest = max_width(architecture_of(q_BTHD.device), q_BTHD.dtype)
        wider = max(q_BTHD.shape[-1], v_BTGD.shape[-1])
        if wider > widest:
            return f"head size {wider} is more than {widest}, the most for {q_BTHD.dtype}"
        if scores.scale <= 0:
            return f"scale {scores.scale} is not above 0"
        return None

    def forward(
        self, q_BTHD: Tensor, block: KeyValueBlock, reach: Reach, state: RunningSoftmax, scores: Scores
    ) -> None:
        self._problem(q_BTHD, block, reach, scores).forward(*state.storage()).run()

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        reach: Reach,
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        from cpmoe.attention.blocks.triton.launch import query_rows

        grad_out_BTHD, lse_BTH = _rows_last(saved.grad_out_BTHD), saved.lse_BTH
        if dq.rows is None:
            batch_size, num_queries, num_heads = lse_BTH.shape
            dq.rows = lse_BTH.new_empty(2, batch_size, num_heads, num_queries)
            query_rows(grad_out_BTHD, saved.out_BTHD, lse_BTH, dq.rows).run()
        problem = self._problem(saved.q_BTHD, block, reach, saved.scores, grad_out_BTHD)
        problem.dq(grad_out_BTHD, dq.rows, *dq.storage()).run()
        places_U, covers_all = _places(block.tokens, dkv.tokens, lse_BTH.device)
        dk_BTGD, dv_BTGD, continues = dkv.storage(covers_all)
        problem.dkv(grad_out_BTHD, dq.rows, dk_BTGD, dv_BTGD, places_U, continues).run()

    def _problem(
        self, q_BTHD: Tensor, block: KeyValueBlock, reach: Reach, scores: Scores, *others: Tensor
    ) -> Problem:
        """For kernels that also load `others`."""
        from cpmoe.attention.blocks.triton.launch import Problem, fits_descriptor

        q_BTHD, k_BTGD, v_BTGD = (_rows_last(x) for x in (q_BTHD, block.k_BTGD, block.v_BTGD))
        architecture = architecture_of(q_BTHD.device)
        fits = fits_descriptor(q_BTHD, k_BTGD, v_BTGD, *others)
        names = None if scores.dropout is None else key_names(reach, block.tokens, q_BTHD.device)
        return Problem(
            q_BTHD,
            k_BTGD,
            v_BTGD,
            spans_of_reach(reach, block.tokens),
            scores,
            precision=self.float32,
            architecture=architecture,
            descriptors=architecture in WITH_DESCRIPTORS and fits,
            key_names=names,
        )


def _rows_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=256)
def _places(tokens: TokenRanges, sums: TokenRanges, device: torch.device) -> tuple[Tensor, bool]:
    """(places, covers all): where each token of a KV buffer stands in the sums, int32 [U], or -1.

    And whether every token of the sums has such a place.
    """
    places_U = torch.full((tokens.wire_tokens,), -1, dtype=torch.int32)
    local_U, local_sums = (_local_tokens(x) for x in (tokens, sums))
    found, at, place = np.intersect1d(local_U, local_sums, assume_unique=True, return_indices=True)
    places_U[torch.from_numpy(at)] = torch.from_numpy(place.astype(np.int32))
    return places_U.to(device), len(found) == sums.wire_tokens


def _local_tokens(tokens: TokenRanges) -> np.ndarray:
    return np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in tokens.ranges)])
