"""A batch of whole sequences cut to the tokens of one context-parallel rank. No process group, no GPU.

Shape letters: B batch, S full sequence, T local tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cpmoe.attention.geometry import PADDING_DOCUMENT
from cpmoe.attention.layout import LAYOUTS, padded_length, shard_indices, token_indices
from cpmoe.attention.mask import CAUSAL, Mask
from cpmoe.attention.plan import AttentionPlan, build_plan, deal_batch

__all__ = ["IGNORED_LABEL", "LAYOUTS", "SequenceShard", "padded_length", "shard_batch", "shard_indices"]

IGNORED_LABEL = -100
FULL_ATTENTION = {"full_attention": CAUSAL}


@dataclass(frozen=True)
class SequenceShard:
    """What one rank holds of a batch; tensors int64, [B, T] where not said otherwise.

    tokens_BT     token ids; 0 on padding
    labels_BT     next token in the whole sequence, -100 where there is none
    positions_BT  RoPE position: the token's place in its document
    documents_BT  document ids; -1 on padding
    index_T       place of each local token in the padded sequence [T]
    sequences_B   number of each sequence in the data set [B]; with `index_T` it names a token on any layout
    plans         what this rank's attention computes and sends, for each kind of layer
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    index_T: Tensor
    sequences_B: Tensor
    plans: Mapping[str, AttentionPlan]

    @property
    def plan(self) -> AttentionPlan:
        """The plan of a model whose layers are all of one kind."""
        (plan,) = self.plans.values()
        return plan

    @property
    def follows(self) -> bool:
        """Whether these tokens also attend to those of the causal slice before them."""
        return any(plan.num_tokens > plan.num_queries for plan in self.plans.values())


def shard_batch(
    tokens_BS: Tensor,
    labels_BS: Tensor,
    positions_BS: Tensor,
    documents_BS: Tensor,
    cp_size: int,
    cp_rank: int,
    layout: str = "zigzag",
    num_slices: int = 1,
    masks: Mapping[str, Mask] = FULL_ATTENTION,
    ulysses_size: int = 1,
    slice_index: int | None = None,
    sequences_B: Tensor | None = None,
) -> SequenceShard:
    """Pads whole sequences to the layout's grid and takes the tokens of rank `cp_rank`.

    All inputs int64 [B, S], equal on every rank of the ring; labels are already shifted and positions
    already restart in each document, since neither can be computed from a shard. `documents_BS` are ids
    ≥ 0, or -1 for padding; see `build_plan` for what they must satisfy. `masks` names the kinds of layers and
    what each sees. With `ulysses_size` u the layout deals to CP / u places, whose tokens u ranks share in
    order. `slice_index` chooses one causal slice of `num_slices`, whose plan has the keys of the earlier
    ones too; None takes all in one. `sequences_B` are the numbers of the sequences, 0, 1 … if None. Raises
    ValueError for unequal shapes, an unknown layout or ill-formed documents.
    """
    shapes = {tuple(x.shape) for x in (tokens_BS, labels_BS, positions_BS, documents_BS)}
    if len(shapes) != 1 or tokens_BS.dim() != 2 or tokens_BS.numel() == 0:
        raise ValueError(f"tokens, labels, positions and documents must all be one [B, S] > 0; got {shapes}")
    seq_len = tokens_BS.shape[1]
    padded_len = padded_length(seq_len, cp_size, num_slices, layout, ulysses_size)
    ring_size, ring_rank = cp_size // ulysses_size, cp_rank // ulysses_size

    def padded(x_BS: Tensor, value: int) -> Tensor:
        return F.pad(x_BS, (0, padded_len - seq_len), value=value)

    documents_BS = padded(documents_BS, PADDING_DOCUMENT)
    segments = deal_batch(documents_BS, ring_size, layout, num_slices, tuple(masks.values()))
    plans = {
        kind: build_plan(documents_BS, ring_size, ring_rank, layout, num_slices, mask, segments, slice_index)
        for kind, mask in masks.items()
    }
    index = token_indices(segments[ring_rank])
    if slice_index is not None:
        index = index.reshape(num_slices, -1)[slice_index]
    index_UT = index.reshape(ulysses_size, -1)
    index_T = torch.from_numpy(index_UT[cp_rank % ulysses_size]).to(tokens_BS.device)
    return SequenceShard(
        tokens_BT=padded(tokens_BS, 0)[:, index_T],
        labels_BT=padded(labels_BS, IGNORED_LABEL)[:, index_T],
        positions_BT=padded(positions_BS, 0)[:, index_T],
        documents_BT=documents_BS[:, index_T],
        index_T=index_T,
        sequences_B=torch.arange(len(tokens_BS)) if sequences_B is None else sequences_B,
        plans=plans,
    )
