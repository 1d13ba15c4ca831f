"""The keys that a run of queries sees, as rectangles that a kernel computes at once.

Over the local tokens of two ranks the visible keys of a document are a staircase: from one query to the next
its start and its stop stay or move on by one key. Runs of equal steps become rectangles of three kinds.

Shape letters: T queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["full", "causal", "edge"]


class Rectangle(NamedTuple):
    """Queries [q_start, q_stop) of batch rows [batch_start, batch_stop) attend to keys [k_start, k_stop).

    Local token ranges: queries of this rank, keys of the hop's source rank. `kind`:

    full    every query sees every key
    causal  as many queries as keys, and the i-th query sees the keys up to the i-th
    edge    as many queries as keys, and the i-th query sees the keys from the i-th on: a window's edge

    `opens`: no earlier rectangle in the plan's order touches any of these query rows.
    """

    batch_start: int
    batch_stop: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: Kind = "full"
    opens: bool = False

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs inside, over the batch."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        pairs = queries * keys if self.kind == "full" else queries * (queries + 1) // 2
        return (self.batch_stop - self.batch_start) * pairs


def staircase_rectangles(
    document_T: np.ndarray, start_T: np.ndarray, stop_T: np.ndarray, opens: bool
) -> Iterator[Rectangle]:
    """Rectangles of batch row 0 in which query t sees the keys [start_T[t], stop_T[t]), each pair once.

    Queries of different documents (`document_T`) share none. `opens`: nothing was computed for these
    queries before.
    """
    sees_T = stop_T > start_T
    start_step, stop_step = np.diff(start_T), np.diff(stop_T)
    joins = sees_T[1:] & sees_T[:-1] & (document_T[1:] == document_T[:-1])
    joins &= (start_step >= 0) & (start_step <= 1) & (stop_step >= 0) & (stop_step <= 1)
    step = np.where(joins, 2 * start_step + stop_step, -1)
    turns = np.zeros_like(joins)
    turns[1:] = joins[:-1] & (step[1:] != step[:-1])
    begins_T = sees_T & np.concatenate(([True], ~joins | turns))
    first = np.flatnonzero(begins_T)
    # A run ends where the next begins or a query sees nothing.
    ends_T = sees_T & ~np.append(sees_T[1:] & ~begins_T[1:], False)
    last = np.flatnonzero(ends_T)
    for q_start, q_last in zip(first.tolist(), last.tolist(), strict=True):
        run_step = int(step[q_start]) if q_last > q_start else 0
        run = q_start, q_last + 1, int(start_T[q_start]), int(stop_T[q_start])
        yield from _run_rectangles(*run, moves_start=run_step >= 2, moves_stop=run_step % 2 == 1, opens=opens)


def _run_rectangles(
    q_start: int,
    q_stop: int,
    k_start: int,
    k_stop: int,
    moves_start: bool,
    moves_stop: bool,
    opens: bool,
) -> Iterator[Rectangle]:
    """The first query sees [k_start, k_stop), each later one starts and stops one key further on, or not."""
    band = k_stop - k_start
    # Both ends move: pieces with a triangle at each, which a power of two lets kernels halve evenly.
    piece = 1 << max((band - 1).bit_length() - 1, 0) if moves_start and moves_stop else q_stop - q_start
    for first in range(q_start, q_stop, piece):
        last = min(first + piece, q_stop)
        queries, moved = last - first, first - q_start
        start, stop = k_start + moved * moves_start, k_stop + moved * moves_stop
        full_start, full_stop, is_open = start, stop, opens
        if moves_stop:
            full_stop = stop - 1
            yield Rectangle(0, 1, first, last, full_stop, full_stop + queries, "causal", is_open)
            is_open = False
        if moves_start:
            full_start = start + queries
            if start < full_stop:
                yield Rectangle(0, 1, first, last, start, full_start, "edge", is_open)
                is_open = False
        if full_start < full_stop:
            yield Rectangle(0, 1, first, last, full_start, full_stop, "full", is_open)
