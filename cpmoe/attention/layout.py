"""Which chunks of a sequence each context-parallel rank holds: pure rank arithmetic.

zigzag      2·N chunks; rank r holds chunks r and 2·N − 1 − r, so that every rank has the same causal work
            (Llama 3, arXiv 2407.21783, section 3.3.2)
contiguous  N chunks; rank r holds chunk r

With several causal slices the sequence is cut into slices first and each slice is dealt like that. Local
tokens are in ascending global order, so a document is one contiguous range on every rank.

Shape letters: T local tokens, N ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNKS_PER_RANK = {"zigzag": 2, "contiguous": 1}
LAYOUTS = tuple(CHUNKS_PER_RANK)


def check_layout(layout: str) -> None:
    """Raises ValueError where `layout` is not one of LAYOUTS."""
    if layout not in CHUNKS_PER_RANK:
        raise ValueError(f"attention.layout = {layout!r}: must be one of {', '.join(LAYOUTS)}")


def num_chunks(cp_size: int, num_slices: int = 1, layout: str = "zigzag") -> int:
    """Number of equal chunks the sequence is cut into: its padded length is a multiple of this."""
    check_layout(layout)
    return num_slices * (CHUNKS_PER_RANK[layout] * cp_size if cp_size > 1 else 1)


def padded_length(seq_len: int, cp_size: int, num_slices: int = 1, layout: str = "zigzag") -> int:
    """The smallest length ≥ `seq_len` that the layout can deal out evenly."""
    multiple = num_chunks(cp_size, num_slices, layout)
    return seq_len + -seq_len % multiple


def rank_segments(
    padded_len: int, cp_size: int, cp_rank: int, layout: str = "zigzag", num_slices: int = 1
) -> tuple[tuple[int, int], ...]:
    """Global ranges (start, stop) of rank `cp_rank`, ascending; chunks that touch are one range."""
    chunks = num_chunks(cp_size, num_slices, layout)
    if padded_len <= 0 or padded_len % chunks:
        raise ValueError(
            f"padded length {padded_len}: must be a positive multiple of {chunks}, the chunks of layout "
            f"{layout} with {cp_size} ranks and {num_slices} slices; padded_length() gives it"
        )
    chunk_len, per_slice = padded_len // chunks, chunks // num_slices
    in_slice = [cp_rank]
    if layout == "zigzag" and cp_size > 1:
        in_slice.append(per_slice - 1 - cp_rank)
    segments: list[tuple[int, int]] = []
    for index in range(num_slices):
        for chunk in in_slice:
            start = (index * per_slice + chunk) * chunk_len
            if segments and segments[-1][1] == start:
                segments[-1] = (segments[-1][0], start + chunk_len)
            else:
                segments.append((start, start + chunk_len))
    return tuple(segments)


def shard_indices(
    padded_len: int, cp_size: int, cp_rank: int, layout: str = "zigzag", num_slices: int = 1
) -> Tensor:
    """Global index of each local token, ascending: int64 [T] with T = padded_len / cp_size, on CPU."""
    segments = rank_segments(padded_len, cp_size, cp_rank, layout, num_slices)
    return torch.cat([torch.arange(start, stop) for start, stop in segments])
