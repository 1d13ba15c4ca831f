"""The keys that a run of queries sees, as rectangles that a kernel computes at once.

Over the local tokens of two ranks the visible keys of a document are a staircase: from one query to the next
its start and its stop stay or move on by one key. Runs of equal steps become rectangles of three kinds.

Shape letters: T queries, R rectangles or runs of equal steps.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["full", "causal", "edge"]
# What stands for each kind in arrays.
KINDS: tuple[Kind, ...] = ("causal", "edge", "full")


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


class RowRectangles(NamedTuple):
    """Rectangles of one row of a batch as arrays, int64 [R] each; `kind` counts in KINDS."""

    q_start: np.ndarray
    q_stop: np.ndarray
    k_start: np.ndarray
    k_stop: np.ndarray
    kind: np.ndarray
    opens: np.ndarray


class _Runs(NamedTuple):
    """Runs of queries of which each sees as many keys further on than the one before, int64 [R] each.

    The first query sees [k_start, k_stop); `start_step` and `stop_step` are 0 or 1.
    """

    q_start: np.ndarray
    q_stop: np.ndarray
    k_start: np.ndarray
    k_stop: np.ndarray
    start_step: np.ndarray
    stop_step: np.ndarray


def staircase_rectangles(
    document_T: np.ndarray, start_T: np.ndarray, stop_T: np.ndarray, opens: bool
) -> RowRectangles:
    """Rectangles in which query t sees the keys [start_T[t], stop_T[t]), each pair once.

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
    first_R = np.flatnonzero(begins_T)
    # A run ends where the next begins or a query sees nothing.
    last_R = np.flatnonzero(sees_T & ~np.append(sees_T[1:] & ~begins_T[1:], False))
    step_R = np.where(last_R > first_R, np.append(step, -1)[first_R], 0)
    bounds = start_T[first_R], stop_T[first_R]
    runs = _cut(_Runs(first_R, last_R + 1, *bounds, start_step=step_R // 2, stop_step=step_R % 2))
    return _run_rectangles(runs, opens)


def _cut(runs: _Runs) -> _Runs:
    """Runs in which both ends move, cut to pieces, since there will be a triangle at each end.

    Pieces of a power of two are what kernels halve evenly.
    """
    band_R = runs.k_stop - runs.k_start
    power_R = np.left_shift(1, np.maximum(np.frexp(band_R - 1)[1] - 1, 0))
    piece_R = np.where(runs.start_step & runs.stop_step, power_R, runs.q_stop - runs.q_start)
    count_R = -((runs.q_start - runs.q_stop) // piece_R)
    number = np.arange(count_R.sum()) - np.repeat(count_R.cumsum() - count_R, count_R)
    length = np.repeat(piece_R, count_R)
    q_start, q_stop, k_start, k_stop, start_step, stop_step = np.repeat(np.stack(runs), count_R, axis=1)
    moved = number * length
    return _Runs(
        q_start + moved,
        np.minimum(q_start + moved + length, q_stop),
        k_start + moved * start_step,
        k_stop + moved * stop_step,
        start_step,
        stop_step,
    )


def _run_rectangles(runs: _Runs, opens: bool) -> RowRectangles:
    """The triangle at each end that moves, and what is full between them."""
    length_R = runs.q_stop - runs.q_start
    full_start_R = runs.k_start + runs.start_step * length_R
    full_stop_R = runs.k_stop - runs.stop_step
    opens_R = np.full(len(length_R), opens)
    parts = []
    for kind, found_R, k_start_R, k_stop_R in (
        ("causal", runs.stop_step == 1, full_stop_R, full_stop_R + length_R),
        ("edge", (runs.start_step == 1) & (runs.k_start < full_stop_R), runs.k_start, full_start_R),
        ("full", full_start_R < full_stop_R, full_start_R, full_stop_R),
    ):
        kind_R = np.full_like(length_R, KINDS.index(kind))
        columns = runs.q_start, runs.q_stop, k_start_R, k_stop_R, kind_R, opens_R
        parts.append(np.stack(columns)[:, found_R])
        opens_R &= ~found_R
    return RowRectangles(*np.concatenate(parts, axis=1))
