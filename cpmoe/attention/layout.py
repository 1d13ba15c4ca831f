"""Which tokens of a sequence each context-parallel rank holds: pure rank arithmetic.

contiguous  N chunks; rank r holds chunk r
zigzag      2·N chunks; rank r holds chunks r and 2·N − 1 − r, so that every rank has the same causal work
            (Llama 3, arXiv 2407.21783, section 3.3.2)
striped     rank r holds tokens r, r + N, r + 2·N … (Brandon et al., "Striped Attention", arXiv 2311.09431)
balanced    8·N chunks, 8 to each rank, dealt by the attention work of the batch at hand

With several causal slices the sequence is cut into slices first and each slice is dealt like that. Local
tokens are in ascending global order, so a document is one contiguous range on every rank.

Shape letters: S padded sequence, T local tokens, N ranks, W chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNKS_PER_RANK = {"zigzag": 2, "contiguous": 1, "striped": 1, "balanced": 8}
LAYOUTS = tuple(CHUNKS_PER_RANK)


class Segment(NamedTuple):
    """Tokens start, start + step, … of a sequence, `length` of them."""

    start: int
    length: int
    step: int = 1

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + (self.length - 1) * self.step + 1


Segments = tuple[Segment, ...]


def check_layout(layout: str) -> None:
    """Raises ValueError where `layout` is not one of LAYOUTS."""
    if layout not in CHUNKS_PER_RANK:
        raise ValueError(f"attention.layout = {layout!r}: must be one of {', '.join(LAYOUTS)}")


def num_chunks(cp_size: int, num_slices: int = 1, layout: str = "zigzag") -> int:
    """Number of equal chunks the sequence is cut into: its padded length is a multiple of this."""
    check_layout(layout)
    return num_slices * (CHUNKS_PER_RANK[layout] * cp_size if cp_size > 1 else 1)


def padded_length(
    seq_len: int, cp_size: int, num_slices: int = 1, layout: str = "zigzag", ulysses_size: int = 1
) -> int:
    """The smallest length ≥ `seq_len` that the layout can deal out evenly over CP / `ulysses_size` places."""
    multiple = math.lcm(num_chunks(cp_size // ulysses_size, num_slices, layout), num_slices * cp_size)
    return seq_len + -seq_len % multiple


def deal(
    padded_len: int,
    cp_size: int,
    layout: str = "zigzag",
    num_slices: int = 1,
    work_S: np.ndarray | None = None,
) -> list[Segments]:
    """Every rank's tokens, ascending; chunks that touch are one segment.

    `balanced` needs `work_S`, the work of each token [S], and gives every rank of each slice the same number
    of chunks: the heaviest chunk left goes to the rank that has least and still lacks chunks.
    Raises ValueError where the layout cannot deal out `padded_len` tokens evenly.
    """
    chunks = num_chunks(cp_size, num_slices, layout)
    if padded_len <= 0 or padded_len % chunks:
        raise ValueError(
            f"padded length {padded_len}: must be a positive multiple of {chunks}, the chunks of layout "
            f"{layout} with {cp_size} ranks and {num_slices} slices; padded_length() gives it"
        )
    if cp_size == 1:
        return [(Segment(0, padded_len),)]
    if layout == "striped":
        return [(Segment(rank, padded_len // cp_size, cp_size),) for rank in range(cp_size)]
    per_slice = chunks // num_slices
    if layout == "balanced":
        assert work_S is not None, "the balanced layout is dealt by work"
        work_W = work_S.reshape(chunks, -1).sum(axis=1)
        owners = np.concatenate([_by_work(work, cp_size) for work in work_W.reshape(num_slices, -1)])
    else:
        ascending = np.arange(cp_size)
        once = ascending if layout == "contiguous" else np.concatenate((ascending, ascending[::-1]))
        owners = np.tile(once, num_slices)
    assert len(owners) == num_slices * per_slice
    length = padded_len // chunks
    return [_joined(np.flatnonzero(owners == rank).tolist(), length) for rank in range(cp_size)]


def _by_work(work_W: np.ndarray, cp_size: int) -> np.ndarray:
    """Owner of each chunk: longest processing time first, the same number of chunks for each rank."""
    lacking = np.full(cp_size, len(work_W) // cp_size)
    loads = np.zeros(cp_size)
    owners = np.empty(len(work_W), dtype=np.int64)
    for chunk in np.argsort(-work_W, kind="stable").tolist():
        rank = int(np.argmin(np.where(lacking > 0, loads, np.inf)))
        owners[chunk] = rank
        loads[rank] += work_W[chunk]
        lacking[rank] -= 1
    return owners


def _joined(chunks: Sequence[int], length: int) -> Segments:
    segments: list[Segment] = []
    for chunk in chunks:
        start = chunk * length
        if segments and segments[-1].stop == start:
            segments[-1] = Segment(segments[-1].start, segments[-1].length + length)
        else:
            segments.append(Segment(start, length))
    return tuple(segments)


def token_indices(segments: Segments) -> np.ndarray:
    """Global index of each token of the segments, ascending: int64 [T]."""
    return np.concatenate([np.arange(s.start, s.stop, s.step) for s in segments])


def shard_indices(
    padded_len: int, cp_size: int, cp_rank: int, layout: str = "zigzag", num_slices: int = 1
) -> Tensor:
    """Global index of each local token, ascending: int64 [T] with T = padded_len / cp_size, on CPU.

    For the layouts that are the same for every batch: all but balanced.
    """
    return torch.from_numpy(token_indices(deal(padded_len, cp_size, layout, num_slices)[cp_rank]))
