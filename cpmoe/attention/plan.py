"""What each rank of a ring computes and sends: rectangles of the attention matrix, hop by hop.

Pure arithmetic on the documents of the whole sequence, which every rank of the ring has, so all ranks
agree without talking. Causality, documents and layout become, once per batch and for all layers:

- hops: at a hop of distance d, rank r attends to the KV of rank r − d. Distance 0 is its own KV. A distance
  that no rank needs is left out: it is neither computed nor sent, and transfers jump over it.
- rectangles: ranges of local query and key tokens. Local tokens are in global order, so a document is one
  range on every rank. On the rank's own KV a document is one causal rectangle; two different ranks hold
  disjoint chunks, so there it is a few full ones.
- transfers: KV moves from hop to hop and carries the tokens that the receiver or a later rank needs; dKV
  follows the same way, carries the tokens that can be non-zero, and goes home from the last hop.

Shape letters: B batch, S full sequence, T local tokens, N ranks, G segments of a rank, C documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cpmoe.attention.geometry import LocalCounter, Needs, Range, Segments, crossing, document_ranges
from cpmoe.attention.layout import rank_segments


class Rectangle(NamedTuple):
    """Queries [q_start, q_stop) of batch rows [batch_start, batch_stop) attend to keys [k_start, k_stop).

    Local token ranges: queries of this rank, keys of the hop's source rank. `causal`: the ranges are
    equal and query i sees keys ≤ i; else every query sees every key. `opens`: no earlier rectangle in
    the plan's order touches any of these query rows.
    """

    batch_start: int
    batch_stop: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    opens: bool = False

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs inside, over the batch."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        pairs = queries * (queries + 1) // 2 if self.causal else queries * keys
        return (self.batch_stop - self.batch_start) * pairs


@dataclass(frozen=True)
class TokenRanges:
    """Which local tokens of a rank stand in a packed buffer: ascending ranges that do not touch."""

    ranges: tuple[Range, ...]

    @cached_property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def wire_tokens(self) -> int:
        """Tokens of a transfer: at least one, since NCCL wants a send and a receive on every rank."""
        return max(self.num_tokens, 1)

    def place(self, start: int, stop: int) -> int:
        """Where local tokens [start, stop), all inside one range, begin in the buffer."""
        offset = 0
        for range_start, range_stop in self.ranges:
            if range_start <= start and stop <= range_stop:
                return offset + start - range_start
            offset += range_stop - range_start
        raise AssertionError(f"tokens [{start}, {stop}) are not in {self.ranges}")


class Transfer(NamedTuple):
    """One send and one receive of this rank; ranks count along the ring."""

    to_rank: int
    from_rank: int
    send: TokenRanges
    receive: TokenRanges


@dataclass(frozen=True)
class Hop:
    """What a rank does while it holds the KV of rank `source`.

    distance    (rank − source) mod N
    rectangles  to compute, in this order; keys counted in the source's local tokens
    """

    distance: int
    source: int
    rectangles: tuple[Rectangle, ...]


@dataclass(frozen=True)
class RemoteHop(Hop):
    """A hop with the KV of another rank.

    fetch    KV transfer that brings the source's tokens `fetch.receive`
    deliver  dKV transfer after this hop: sends the sum over the hops so far for `source` and receives what
             the next hop adds to, or at the last hop the finished sum for this rank's own KV
    """

    fetch: Transfer
    deliver: Transfer


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of rank `cp_rank` for one batch, the same for all layers.

    own     the hop of distance 0, which needs no transfer
    remote  the others, by ascending distance
    """

    cp_size: int
    cp_rank: int
    batch_size: int
    num_tokens: int
    own: Hop
    remote: tuple[RemoteHop, ...]

    @property
    def hops(self) -> tuple[Hop, ...]:
        return (self.own, *self.remote)

    @property
    def all_tokens(self) -> TokenRanges:
        """Every local token of a rank."""
        return TokenRanges(((0, self.num_tokens),))

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that this rank computes; 4·H·D FLOPs each in forward."""
        return sum(r.num_pairs for hop in self.hops for r in hop.rectangles)


def build_plan(
    documents_BS: Tensor, cp_size: int, cp_rank: int, layout: str = "zigzag", num_slices: int = 1
) -> AttentionPlan:
    """The plan of rank `cp_rank` for causal attention inside documents.

    `documents_BS` int64 [B, S] on CPU, S padded to the layout (`padded_length`), equal on all ranks of the
    ring: document ids ≥ 0, each on one contiguous run of tokens, -1 on padding, which nobody sees and
    which sees nothing. Raises ValueError otherwise.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank = {cp_rank}: must be in [0, {cp_size})")
    batch_size, padded_len = documents_BS.shape
    segments = [rank_segments(padded_len, cp_size, rank, layout, num_slices) for rank in range(cp_size)]
    counter, needs = LocalCounter(segments), Needs(segments)
    # Rows of equal structure are planned once.
    structures: dict[bytes, tuple[np.ndarray, list[int]]] = {}
    for row, ids_S in enumerate(documents_BS.numpy()):
        documents_C2 = document_ranges(ids_S, row)
        structures.setdefault(documents_C2.tobytes(), (documents_C2, []))[1].append(row)
    rectangles: list[dict[Rectangle, list[int]]] = [{} for _ in range(cp_size)]
    for documents_C2, rows in structures.values():
        crossing_C2 = crossing(documents_C2, segments)
        needs.add(crossing_C2)
        for source in range(cp_size):
            found = (
                _own_rectangles(documents_C2, counter, cp_rank)
                if source == cp_rank
                else _remote_rectangles(crossing_C2, segments[cp_rank], counter, cp_rank, source)
            )
            for rectangle in found:
                rectangles[source].setdefault(rectangle, []).extend(rows)
    merged = [_merge_rows(found) for found in rectangles]
    return AttentionPlan(
        cp_size=cp_size,
        cp_rank=cp_rank,
        batch_size=batch_size,
        num_tokens=padded_len // cp_size,
        own=Hop(0, cp_rank, merged[cp_rank]),
        remote=_remote_hops(cp_size, cp_rank, merged, needs),
    )


def _own_rectangles(documents_C2: np.ndarray, counter: LocalCounter, rank: int) -> list[Rectangle]:
    """Per document one causal rectangle: the first, and on this hop the only one, of its queries."""
    starts, stops = (counter.one_rank(rank, edges_C).tolist() for edges_C in documents_C2.T)
    return [
        Rectangle(0, 1, start, stop, start, stop, causal=True, opens=True)
        for start, stop in zip(starts, stops, strict=True)
        if start < stop
    ]


def _remote_rectangles(
    documents_C2: np.ndarray, own_segments: Segments, counter: LocalCounter, rank: int, source: int
) -> list[Rectangle]:
    """Per document: queries of a segment see the source's tokens before that segment.

    Segments that see the same keys are neighbours in the local order and become one rectangle.
    """
    if len(documents_C2) == 0:
        return []
    start_C, stop_C = documents_C2.T
    k_start_C = counter.one_rank(source, start_C)
    merged: dict[tuple[int, int], Rectangle] = {}
    for segment_start, segment_stop in own_segments:
        q_start_C = np.maximum(start_C, segment_start)
        q_stop_C = np.minimum(stop_C, segment_stop)
        k_stop_C = counter.one_rank(source, q_start_C)
        local_start_C = counter.one_rank(rank, q_start_C)
        for c in np.flatnonzero((q_start_C < q_stop_C) & (k_stop_C > k_start_C)).tolist():
            q_start, k_stop = int(local_start_C[c]), int(k_stop_C[c])
            q_stop = q_start + int(q_stop_C[c] - q_start_C[c])
            if (c, k_stop) in merged:
                merged[c, k_stop] = merged[c, k_stop]._replace(q_stop=q_stop)
            else:
                merged[c, k_stop] = Rectangle(0, 1, q_start, q_stop, int(k_start_C[c]), k_stop, causal=False)
    return list(merged.values())


def _merge_rows(found: dict[Rectangle, list[int]]) -> tuple[Rectangle, ...]:
    """Rectangles that stand in consecutive batch rows become one."""
    merged = []
    for rectangle, rows in found.items():
        row_array = np.sort(np.array(rows))
        for run in np.split(row_array, np.flatnonzero(np.diff(row_array) > 1) + 1):
            first, last = int(run[0]), int(run[-1])
            merged.append(rectangle._replace(batch_start=first, batch_stop=last + 1))
    return tuple(sorted(merged))


def _remote_hops(
    cp_size: int, cp_rank: int, rectangles: Sequence[tuple[Rectangle, ...]], needs: Needs
) -> tuple[RemoteHop, ...]:
    def needed(of_rank: int, at: Sequence[int]) -> TokenRanges:
        return TokenRanges(needs.union(of_rank % cp_size, at))

    distances = needs.distances()
    hops = []
    for index, distance in enumerate(distances):
        source = (cp_rank - distance) % cp_size
        previous = distances[index - 1] if index else 0
        following = distances[index + 1] if index + 1 < len(distances) else cp_size
        remaining, done = distances[index:], distances[: index + 1]
        step_in, step_out = distance - previous, following - distance
        fetch = Transfer(
            to_rank=(cp_rank + step_in) % cp_size,
            from_rank=(cp_rank - step_in) % cp_size,
            send=needed(cp_rank - previous, remaining),
            receive=needed(source, remaining),
        )
        deliver = Transfer(
            to_rank=(cp_rank + step_out) % cp_size,
            from_rank=(cp_rank - step_out) % cp_size,
            send=needed(source, done),
            receive=needed(cp_rank - following, done),
        )
        hops.append(RemoteHop(distance, source, rectangles[source], fetch, deliver))
    return tuple(hops)
