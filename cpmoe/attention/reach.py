"""The keys of one rank that each query of another, or of the same one, sees.

Shape letters: B batch, T local queries, C distinct rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cpmoe.attention.geometry import LocalCounter
from cpmoe.attention.mask import Visible
from cpmoe.attention.rectangles import Rectangle, staircase_rectangles


class RowReach(NamedTuple):
    """One row of a batch: each query sees the keys [start, stop) and [sink_start, sink_stop), int64 [T].

    Keys are local tokens of the source rank; `document` tells queries of different documents apart.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    sink_start: np.ndarray
    sink_stop: np.ndarray

    @classmethod
    def of(cls, visible: Visible, index_T: np.ndarray, counter: LocalCounter) -> RowReach:
        """What the queries at global places `index_T` see of the rank whose tokens `counter` counts."""
        return cls(visible.document_start[index_T], *(counter(bound_S[index_T]) for bound_S in visible[1:]))


@dataclass(frozen=True, eq=False)
class Reach:
    """What this rank's queries see of the keys of one rank.

    rows_C       the distinct rows of the batch
    place_B      which of them each batch row is, int64 [B]
    is_own       the keys are this rank's own, so that every real query sees at least itself
    """

    rows_C: Sequence[RowReach]
    place_B: np.ndarray
    is_own: bool

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """Rectangles that hold each visible (query, key) pair once; those that open query rows come first."""
        found: dict[Rectangle, list[int]] = {}
        for place, row in enumerate(self.rows_C):
            rows = np.flatnonzero(self.place_B == place).tolist()
            window = staircase_rectangles(row.document, row.start, row.stop, opens=self.is_own)
            sinks = staircase_rectangles(row.document, row.sink_start, row.sink_stop, opens=False)
            for rectangle in (*window, *sinks):
                found.setdefault(rectangle, []).extend(rows)
        return _merge_rows(found)

    @cached_property
    def num_pairs(self) -> int:
        """(query, key) pairs over the batch."""
        pairs_C = [
            int((row.stop - row.start).sum() + (row.sink_stop - row.sink_start).sum()) for row in self.rows_C
        ]
        return sum(pairs_C[place] for place in self.place_B.tolist())


def _merge_rows(found: dict[Rectangle, list[int]]) -> tuple[Rectangle, ...]:
    """Rectangles that stand in consecutive batch rows become one."""
    merged = []
    for rectangle, rows in found.items():
        row_array = np.sort(np.array(rows))
        for run in np.split(row_array, np.flatnonzero(np.diff(row_array) > 1) + 1):
            first, last = int(run[0]), int(run[-1])
            merged.append(rectangle._replace(batch_start=first, batch_stop=last + 1))
    return tuple(sorted(merged, key=lambda rectangle: (not rectangle.opens, rectangle)))
