"""Where documents lie on the ranks of a ring, and which tokens one rank needs of another.

Pure arithmetic in numpy, over all documents and ranks at once.

Shape letters: S full sequence, N ranks, G segments of a rank, K kinds of need, E needs, I indices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpmoe.attention.layout import Segments
from cpmoe.attention.mask import Visible
from cpmoe.attention.ranges import Range, TokenRanges, joined

PADDING_DOCUMENT = -1
FAR = np.iinfo(np.int64).max


def document_ranges(ids_S: np.ndarray, row: int) -> np.ndarray:
    """Global (start, stop) of each document of one sequence, padding left out: int64 [documents, 2]."""
    if ids_S.min() < PADDING_DOCUMENT:
        raise ValueError(f"documents[{row}] has id {ids_S.min()}: must be ≥ 0, or -1 for padding")
    edges = np.flatnonzero(np.diff(ids_S)) + 1
    starts = np.concatenate(([0], edges))
    stops = np.concatenate((edges, [len(ids_S)]))
    ids = ids_S[starts]
    real = ids != PADDING_DOCUMENT
    values, runs = np.unique(ids[real], return_counts=True)
    if (runs > 1).any():
        raise ValueError(
            f"documents[{row}] has id {values[runs > 1][0]} on {runs.max()} separate runs of tokens: "
            "must be one contiguous run"
        )
    return np.stack((starts[real], stops[real]), axis=1).astype(np.int64)


class LocalCounter:
    """Counts a rank's tokens before a global index: how global ranges become local ones."""

    def __init__(self, segments: Segments) -> None:
        self._starts_G = np.array([s.start for s in segments])
        self._counts_G = np.array([s.length for s in segments])
        self._steps_G = np.array([s.step for s in segments])
        self._before_G = self._counts_G.cumsum() - self._counts_G

    def __call__(self, index_I: np.ndarray) -> np.ndarray:
        """[I] tokens of the rank before each global index."""
        place_I = np.searchsorted(self._starts_G, index_I, side="right") - 1
        inside_I = -(-(index_I - self._starts_G[place_I]) // self._steps_G[place_I])
        count_I = self._before_G[place_I] + np.minimum(inside_I, self._counts_G[place_I])
        return np.where(place_I < 0, 0, count_I)


class Needs:
    """need(source, rank): the source's local tokens that `rank` attends to, over the batch.

    One range for each kind of need and each of the source's segments, so that a buffer has few ranges. The
    kinds are the keys before a chunk of queries, those after it, and sinks that a window left behind.
    """

    KINDS = 3

    def __init__(self, segments: Sequence[Segments]) -> None:
        size, width = len(segments), max(map(len, segments))
        self._segments = segments
        self._start_KNNG = np.full((self.KINDS, size, size, width), FAR)
        self._stop_KNNG = np.zeros((self.KINDS, size, size, width), dtype=np.int64)

    def add(self, visible: Visible, queries: Range | None = None) -> None:
        """Adds what the queries of one sequence need; `queries`: where they lie, if not everywhere."""
        if len(self._segments) == 1:
            return
        if self._segments[0][0].step > 1:
            self._add_striped(visible)
        else:
            self._add_chunks(visible, *(queries or (0, len(visible.start))))

    def _add_chunks(self, visible: Visible, q_start: int, q_stop: int) -> None:
        """start and stop never fall, so a chunk's first query reaches furthest back, its last furthest on."""
        chunks = [
            (rank, max(segment.start, q_start), min(segment.stop, q_stop) - 1)
            for rank, own in enumerate(self._segments)
            for segment in own
            if segment.start < q_stop and q_start < segment.stop
        ]
        ranks_E, first_E, last_E = np.array(chunks).T
        start_KE = np.stack((visible.start[first_E], last_E + 1, visible.sink_start[first_E]))
        stop_KE = np.stack((first_E, visible.stop[last_E], visible.sink_stop[first_E]))
        kind_KE, rank_KE = np.broadcast_arrays(np.arange(self.KINDS)[:, None], ranks_E)
        for source, own in enumerate(self._segments):
            held = 0
            for place, segment in enumerate(own):
                k_start_KE = np.maximum(start_KE - segment.start, 0) + held
                k_stop_KE = np.minimum(stop_KE - segment.start, segment.length) + held
                seen_KE = (k_stop_KE > k_start_KE) & (ranks_E != source)
                at = kind_KE[seen_KE], source, rank_KE[seen_KE], place
                np.minimum.at(self._start_KNNG, at, k_start_KE[seen_KE])
                np.maximum.at(self._stop_KNNG, at, k_stop_KE[seen_KE])
                held += segment.length

    def _add_striped(self, visible: Visible) -> None:
        """By key: if queries up to d tokens on see it, so do the d ranks after its own; likewise before."""
        size, seq_len = len(self._segments), len(visible.start)
        index_S = np.arange(seq_len)
        on_S = np.searchsorted(visible.start, index_S, side="right") - 1 - index_S
        back_S = index_S - np.searchsorted(visible.stop, index_S, side="right")
        # Where no query sees the key, as with the queries of a slice only.
        on_S = np.where(on_S >= -back_S, on_S, 0)
        distance_D = np.arange(1, size)
        for kind, on, back in ((0, on_S, back_S), (2, _sink_reach(visible), np.zeros_like(index_S))):
            for source in range(size):
                on_T, back_T = on[source::size], back[source::size]
                first_D = np.minimum(
                    _first_reaching(on_T, distance_D), _first_reaching(back_T, size - distance_D)
                )
                last_D = np.maximum(
                    _last_reaching(on_T, distance_D), _last_reaching(back_T, size - distance_D)
                )
                seen_D = last_D >= first_D
                at = kind, source, (source + distance_D[seen_D]) % size, 0
                self._start_KNNG[at] = np.minimum(self._start_KNNG[at], first_D[seen_D])
                self._stop_KNNG[at] = np.maximum(self._stop_KNNG[at], last_D[seen_D] + 1)

    def distances(self) -> list[int]:
        """Ring distances > 0 at which any rank needs anything, ascending."""
        _, source, rank, _ = np.nonzero(self._stop_KNNG)
        return np.unique((rank - source) % len(self._segments)).tolist()

    def union(self, source: int, distances: Sequence[int]) -> TokenRanges:
        """What the ranks at `distances` from `source` need together."""
        ranks = [(source + distance) % len(self._segments) for distance in distances]
        starts = self._start_KNNG[:, source, ranks].min(axis=1).ravel().tolist()
        stops = self._stop_KNNG[:, source, ranks].max(axis=1).ravel().tolist()
        return TokenRanges(
            joined((start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)
        )

    def relay_excess(self) -> float:
        """Tokens that cross the ring where each rank passes on what later ones need, per token needed."""
        size = len(self._segments)
        source_N1 = np.arange(size)[:, None]
        rank_ND = (source_N1 + np.arange(1, size)) % size
        start, stop = (x[:, source_N1, rank_ND] for x in (self._start_KNNG, self._stop_KNNG))
        needed = np.maximum(stop - start, 0).sum()
        for bounds, widen in ((start, np.minimum), (stop, np.maximum)):
            bounds[:, :, ::-1] = widen.accumulate(bounds[:, :, ::-1], axis=2)
        is_hop_D = np.isin(np.arange(1, size), self.distances())
        relayed = np.maximum(stop - start, 0)[:, :, is_hop_D].sum()
        return relayed / max(needed, 1)


def _sink_reach(visible: Visible) -> np.ndarray:
    """[S] how many tokens after it the last query stands that sees a token as a sink; 0 for others."""
    index_I = np.flatnonzero(visible.sink_stop > visible.sink_start)
    is_last_I = np.diff(visible.document_start[index_I], append=-1) != 0
    reach_S = np.zeros(len(visible.start), dtype=np.int64)
    for last in index_I[is_last_I].tolist():
        sinks = np.arange(visible.sink_start[last], visible.sink_stop[last])
        reach_S[sinks] = last - sinks
    return reach_S


def _first_reaching(reach_T: np.ndarray, distance_D: np.ndarray) -> np.ndarray:
    """[D] place of the first token whose reach is at least each distance; T where there is none."""
    return np.searchsorted(np.maximum.accumulate(reach_T), distance_D)


def _last_reaching(reach_T: np.ndarray, distance_D: np.ndarray) -> np.ndarray:
    """[D] place of the last token whose reach is at least each distance; -1 where there is none."""
    return len(reach_T) - 1 - _first_reaching(reach_T[::-1], distance_D)
