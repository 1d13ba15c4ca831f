"""Where documents lie on the ranks of a ring, and which tokens one rank needs of another.

Pure arithmetic in numpy, over all documents and ranks at once.

Shape letters: S full sequence, N ranks, G segments of a rank, C documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PADDING_DOCUMENT = -1
FAR = np.iinfo(np.int64).max

Range = tuple[int, int]
Segments = tuple[Range, ...]


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

    def __init__(self, segments: Sequence[Segments]) -> None:
        width = max(map(len, segments))
        padded = [list(s) + [(0, 0)] * (width - len(s)) for s in segments]
        self._starts_NG = np.array([[start for start, _ in s] for s in padded])
        self.lengths_NG = np.array([[stop - start for start, stop in s] for s in padded])

    def all_ranks(self, index_C: np.ndarray) -> np.ndarray:
        """[N, C] tokens of each rank before each global index."""
        return np.clip(index_C - self._starts_NG[..., None], 0, self.lengths_NG[..., None]).sum(axis=1)

    def one_rank(self, rank: int, index_C: np.ndarray) -> np.ndarray:
        """[C] tokens of `rank` before each global index."""
        return np.clip(index_C - self._starts_NG[rank, :, None], 0, self.lengths_NG[rank, :, None]).sum(
            axis=0
        )


def crossing(documents_C2: np.ndarray, segments: Sequence[Segments]) -> np.ndarray:
    """The documents that are not inside one segment: only these can need another rank's KV."""
    stops = np.sort(np.array([stop for rank in segments for _, stop in rank]))
    start_C, stop_C = documents_C2.T
    first_C = np.searchsorted(stops, start_C, side="right")
    last_C = np.searchsorted(stops, stop_C, side="left")
    return documents_C2[first_C != last_C]


class Needs:
    """need(source, rank): the source's local tokens that `rank` attends to, over the batch.

    Kept as one hull for each of the source's G segments, so that a buffer has few ranges.
    """

    def __init__(self, segments: Sequence[Segments]) -> None:
        size, width = len(segments), max(map(len, segments))
        self._segments = segments
        self._counter = LocalCounter(segments)
        # Local bounds of segment g of each source: [N, G], empty where it has fewer.
        lengths_NG = self._counter.lengths_NG
        self._last_NG = lengths_NG.cumsum(axis=1)
        self._first_NG = self._last_NG - lengths_NG
        self._start_NNG = np.full((size, size, width), FAR)
        self._stop_NNG = np.zeros((size, size, width), dtype=np.int64)

    def add(self, documents_C2: np.ndarray) -> None:
        """Adds what these documents need, causal and inside each."""
        if len(documents_C2) == 0:
            return
        start_C, stop_C = documents_C2.T
        k_start_NGC = np.maximum(self._counter.all_ranks(start_C)[:, None], self._first_NG[..., None])
        for rank, own_segments in enumerate(self._segments):
            for segment_start, segment_stop in own_segments:
                q_start_C = np.maximum(start_C, segment_start)
                has_queries_C = q_start_C < np.minimum(stop_C, segment_stop)
                k_stop_NC = self._counter.all_ranks(q_start_C)
                k_stop_NGC = np.minimum(k_stop_NC[:, None], self._last_NG[..., None])
                seen_NGC = has_queries_C & (k_stop_NGC > k_start_NGC)
                seen_NGC[rank] = False
                start_NG = np.where(seen_NGC, k_start_NGC, FAR).min(axis=2)
                stop_NG = np.where(seen_NGC, k_stop_NGC, 0).max(axis=2)
                self._start_NNG[:, rank] = np.minimum(self._start_NNG[:, rank], start_NG)
                self._stop_NNG[:, rank] = np.maximum(self._stop_NNG[:, rank], stop_NG)

    def distances(self) -> list[int]:
        """Ring distances > 0 at which any rank needs anything, ascending."""
        source, rank, _ = np.nonzero(self._stop_NNG)
        return np.unique((rank - source) % len(self._segments)).tolist()

    def union(self, source: int, distances: Sequence[int]) -> tuple[Range, ...]:
        """What the ranks at `distances` from `source` need together: ascending ranges that do not touch."""
        ranks = [(source + distance) % len(self._segments) for distance in distances]
        starts = self._start_NNG[source, ranks].min(axis=0).tolist()
        stops = self._stop_NNG[source, ranks].max(axis=0).tolist()
        ranges: list[Range] = []
        for start, stop in zip(starts, stops, strict=True):
            if start >= stop:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return tuple(ranges)
