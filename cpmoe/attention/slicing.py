"""A micro-batch cut into slices, whose phases a schedule may interleave: each is a shard of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cpmoe.attention.mask import Mask
from cpmoe.attention.sharding import FULL_ATTENTION, SequenceShard, shard_batch

SLICINGS = ("none", "batch", "causal")


def shard_slices(
    tokens_BS: Tensor,
    labels_BS: Tensor,
    positions_BS: Tensor,
    documents_BS: Tensor,
    cp_size: int,
    cp_rank: int,
    layout: str = "zigzag",
    slicing: str = "none",
    masks: Mapping[str, Mask] = FULL_ATTENTION,
    ulysses_size: int = 1,
    sequences_B: Tensor | None = None,
) -> tuple[SequenceShard, ...]:
    """`shard_batch` of one slice, or of two.

    slicing  none: one slice
             batch: two halves of the sequences, where there are two or more
             causal: two halves of every sequence, each dealt over the ring by itself; the tokens of the
             second attend to the KV of both
    """
    assert slicing in SLICINGS, slicing
    fields = (tokens_BS, labels_BS, positions_BS, documents_BS)
    sequences_B = torch.arange(len(tokens_BS)) if sequences_B is None else sequences_B
    if slicing == "causal":
        return tuple(
            shard_batch(*fields, cp_size, cp_rank, layout, 2, masks, ulysses_size, slice_index, sequences_B)
            for slice_index in range(2)
        )
    batch_size = tokens_BS.shape[0]
    half = (batch_size + 1) // 2 if slicing == "batch" else batch_size
    return tuple(
        shard_batch(
            tokens_BS[rows], labels_BS[rows], positions_BS[rows], documents_BS[rows],
            cp_size, cp_rank, layout, 1, masks, ulysses_size, sequences_B=sequences_B[rows],
        )
        for rows in (slice(0, half), slice(half, batch_size))
        if rows.start < rows.stop
    )  # fmt: skip
