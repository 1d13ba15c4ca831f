"""What each rank of a ring computes and sends, hop by hop.

Pure arithmetic on the documents of the whole sequence, which every rank of the ring has, so all ranks
agree without talking. Mask, documents and layout become, once per batch and for all layers with that mask:

- hops: at a hop of distance d, rank r attends to the KV of rank r − d. Distance 0 is its own KV. A distance
  that no rank needs is left out: it is neither computed nor sent, and transfers jump over it.
- reach: the keys of the source that each local query sees, and the rectangles they make up.
- transfers: which of a rank's tokens travel at which hop (transfers.py). KV moves from hop to hop; where most
  ranks would only pass on what they do not need, as with a window, each hop fetches from the source itself.

Shape letters: B batch, S full sequence, T local tokens, N ranks, C distinct rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cpmoe.attention.geometry import LocalCounter, Needs, document_ranges
from cpmoe.attention.layout import Segments, deal, token_indices
from cpmoe.attention.mask import CAUSAL, Mask, Visible, visible_keys
from cpmoe.attention.ranges import Range, TokenRanges
from cpmoe.attention.reach import Reach, RowReach
from cpmoe.attention.rectangles import Rectangle
from cpmoe.attention.transfers import SliceTransfers, Transfer

__all__ = ["AttentionPlan", "Hop", "Rectangle", "RemoteHop", "TokenRanges", "Transfer", "build_plan"]


@dataclass(frozen=True)
class Hop:
    """What a rank does while it holds the KV of rank `source`.

    distance  (rank − source) mod N
    reach     the keys of the source that this rank's queries see
    parts     the same by causal slice: this one's keys, then those of the slices before, last to first
    """

    distance: int
    source: int
    reach: Reach
    parts: tuple[Reach, ...]

    @property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """To compute, in this order; keys counted in the source's local tokens."""
        return tuple(chain.from_iterable(part.rectangles for part in self.parts))


@dataclass(frozen=True)
class RemoteHop(Hop):
    """A hop with the KV of another rank.

    fetch    KV transfer that brings the source's tokens `fetch.receive`; it sends from the blocks of the hop
             before, or where nothing is relayed from the own ones
    deliver  dKV transfer after this hop: sends the sum over the hops so far for `source` and receives what
             the next hop adds to, or at the last hop, and where nothing is relayed, a sum for the own KV
    by_slice tokens of earlier slices came with the transfers of those, and their dKV goes with theirs
    """

    fetch: Transfer
    deliver: Transfer
    by_slice: bool


class HopBytes(NamedTuple):
    """Bytes that a rank sends for one hop: KV in forward and, after the first hop, again in backward; dKV."""

    kv: int
    dkv: int


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of rank `cp_rank` for one batch, the same for all layers of one mask.

    num_queries  this rank's tokens that attend; num_tokens: those attended to, the queries last, after the
                tokens of earlier causal slices
    own         the hop of distance 0, which needs no transfer
    remote      the others, by ascending distance
    is_relayed  KV and dKV move from hop to hop; else each hop's go straight between their two ranks
    pairs_N     (query, key) pairs that each rank of the ring computes; 4·H·D FLOPs each in forward
    segments    tokens of the sequence that each rank of the ring holds
    """

    cp_size: int
    cp_rank: int
    batch_size: int
    num_queries: int
    num_tokens: int
    own: Hop
    remote: tuple[RemoteHop, ...]
    is_relayed: bool
    pairs_N: tuple[int, ...]
    segments: tuple[Segments, ...]

    @property
    def hops(self) -> tuple[Hop, ...]:
        return (self.own, *self.remote)

    @property
    def all_tokens(self) -> TokenRanges:
        """Every local token of a rank that is attended to."""
        return TokenRanges(((0, self.num_tokens),))

    @property
    def own_tokens(self) -> TokenRanges:
        """Those of them that are this slice's own."""
        return TokenRanges(((self.num_tokens - self.num_queries, self.num_tokens),))

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that this rank computes."""
        return self.pairs_N[self.cp_rank]

    def flops(self, num_heads: int, head_dim: int) -> list[int]:
        """FLOPs of each rank in forward, a multiply-add counted as two: the products QKᵀ and PV."""
        return [4 * num_heads * head_dim * pairs for pairs in self.pairs_N]

    def sent_bytes(self, num_kv_heads: int, head_dim: int, kv_bytes: int, dkv_bytes: int) -> list[HopBytes]:
        """What this rank sends for each remote hop; `kv_bytes` and `dkv_bytes` are those of one element."""
        width = 2 * self.batch_size * num_kv_heads * head_dim
        return [
            HopBytes(
                width * hop.fetch.send.wire_tokens * kv_bytes,
                width * hop.deliver.send.wire_tokens * dkv_bytes,
            )
            for hop in self.remote
        ]

    @property
    def imbalance(self) -> float:
        """Pairs of the rank that has most, over their mean; 1.0 where there are none."""
        total = sum(self.pairs_N)
        return max(self.pairs_N) * self.cp_size / total if total else 1.0


def visible_rows(documents_BS: Tensor, mask: Mask) -> tuple[list[Visible], np.ndarray]:
    """What the tokens of each distinct row see, and which of them each batch row is, int64 [B].

    Rows of equal structure are planned once. Raises ValueError for ill-formed documents.
    """
    places: dict[bytes, int] = {}
    rows_C: list[Visible] = []
    place_B = np.empty(len(documents_BS), dtype=np.int64)
    for row, ids_S in enumerate(documents_BS.numpy()):
        documents_C2 = document_ranges(ids_S, row)
        key = documents_C2.tobytes()
        if key not in places:
            places[key] = len(rows_C)
            rows_C.append(visible_keys(documents_C2, len(ids_S), mask))
        place_B[row] = places[key]
    return rows_C, place_B


def deal_batch(
    documents_BS: Tensor, cp_size: int, layout: str, num_slices: int, masks: Sequence[Mask]
) -> list[Segments]:
    """Every rank's tokens of a batch, for layers with any of `masks`; see `build_plan` for the documents."""
    work_S = None
    if layout == "balanced":
        work_S = np.sum([_token_work(*visible_rows(documents_BS, mask)) for mask in masks], axis=0)
    return deal(documents_BS.shape[1], cp_size, layout, num_slices, work_S)


def build_plan(
    documents_BS: Tensor,
    cp_size: int,
    cp_rank: int,
    layout: str = "zigzag",
    num_slices: int = 1,
    mask: Mask = CAUSAL,
    segments: Sequence[Segments] | None = None,
    slice_index: int | None = None,
) -> AttentionPlan:
    """The plan of rank `cp_rank` for attention under `mask` inside documents.

    `slice_index`: only the tokens of this causal slice are queries, and keys are those of this slice and
    the ones before it; None for all tokens in one plan.

    `documents_BS` int64 [B, S] on CPU, S padded to the layout (`padded_length`), equal on all ranks of the
    ring: document ids ≥ 0, each on one contiguous run of tokens, -1 on padding, which nobody sees and
    which sees nothing. `segments` are the tokens of each rank where they are not simply those of the layout
    for this mask, as with layers of different masks in layout balanced. Raises ValueError otherwise.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank = {cp_rank}: must be in [0, {cp_size})")
    batch_size, padded_len = documents_BS.shape
    rows_C, place_B = visible_rows(documents_BS, mask)
    if segments is None:
        segments = deal_batch(documents_BS, cp_size, layout, num_slices, (mask,))
    slices, rows_SC, index = [(0, padded_len)], [rows_C], 0
    if slice_index is not None:
        assert mask.causal, "a slice sees none of a later one"
        slice_len = padded_len // num_slices
        slices = [(start, start + slice_len) for start in range(0, padded_len, slice_len)]
        rows_SC = [[row.of_queries(*queries) for row in rows_C] for queries in slices]
        index = slice_index
    needs = [_needs(segments, *pair) for pair in zip(rows_SC, slices, strict=True)]
    tokens = [(start // cp_size, stop // cp_size) for start, stop in slices]
    transfers = SliceTransfers(cp_size, needs, index, tokens)
    rows_C, (first, last) = rows_SC[index], tokens[index]
    index_T = token_indices(segments[cp_rank])[first:last]

    def reach(source: int) -> tuple[Reach, tuple[Reach, ...]]:
        counter, is_own = LocalCounter(segments[source]), source == cp_rank
        rows = [RowReach.of(visible, index_T, counter) for visible in rows_C]
        whole = Reach(rows, place_B, is_own, segments[source])
        if index == 0:
            return whole, (whole,)
        parts = [whole.within(*tokens[at], is_own and at == index) for at in range(index, -1, -1)]
        return whole, tuple(parts)

    remote = []
    for at, distance in enumerate(transfers.distances):
        source = (cp_rank - distance) % cp_size
        moves = transfers.fetch(cp_rank, at), transfers.deliver(cp_rank, at)
        by_slice = at == 0 and transfers.shares_first
        remote.append(RemoteHop(distance, source, *reach(source), *moves, by_slice))
    work_S = _token_work(rows_C, place_B)
    return AttentionPlan(
        cp_size=cp_size,
        cp_rank=cp_rank,
        batch_size=batch_size,
        num_queries=last - first,
        num_tokens=last,
        own=Hop(0, cp_rank, *reach(cp_rank)),
        remote=tuple(remote),
        is_relayed=transfers.is_relayed,
        pairs_N=tuple(int(sum(work_S[s.start : s.stop : s.step].sum() for s in own)) for own in segments),
        segments=tuple(segments),
    )


def _needs(segments: Sequence[Segments], rows_C: Sequence[Visible], queries: Range) -> Needs:
    needs = Needs(segments)
    for visible in rows_C:
        needs.add(visible, queries)
    return needs


def _token_work(rows_C: Sequence[Visible], place_B: np.ndarray) -> np.ndarray:
    """[S] keys that the token at each place sees, over the batch."""
    counts = np.bincount(place_B)
    return np.sum([n * visible.num_keys for n, visible in zip(counts, rows_C, strict=True)], axis=0)
