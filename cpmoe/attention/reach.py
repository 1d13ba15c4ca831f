"""The keys of one rank that each query of another, or of the same one, sees.

Shape letters: B batch, T local queries, C distinct rows of a batch, R rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cpmoe.attention.geometry import LocalCounter
from cpmoe.attention.layout import Segments
from cpmoe.attention.mask import Visible
from cpmoe.attention.rectangles import KINDS, Rectangle, staircase_rectangles
from cpmoe.attention.stacks import Stack, stack_rectangles


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

    def within(self, first: int, last: int) -> RowReach:
        """The same of the keys [first, last) alone."""
        return RowReach(self.document, *(bound_T.clip(first, last) for bound_T in self[1:]))


@dataclass(frozen=True, eq=False)
class Reach:
    """What this rank's queries see of the keys of one rank.

    rows_C       the distinct rows of the batch
    place_B      which of them each batch row is, int64 [B]
    is_own       the keys are this rank's own, so that every real query sees at least itself
    source       all tokens of the rank whose keys they are
    """

    rows_C: Sequence[RowReach]
    place_B: np.ndarray
    is_own: bool
    source: Segments = ()

    def within(self, first: int, last: int, is_own: bool) -> Reach:
        """What they see of the keys [first, last) alone; `is_own` as for these."""
        return Reach([row.within(first, last) for row in self.rows_C], self.place_B, is_own, self.source)

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """Rectangles that hold each visible (query, key) pair once; those that open query rows come first.

        One for equal rectangles in consecutive batch rows.
        """
        columns, _ = self._columns
        columns = columns[:, np.lexsort((columns[0], *columns[1:]))]
        batch, same = columns[0], (columns[1:, 1:] == columns[1:, :-1]).all(axis=0)
        joins = same & (np.diff(batch) == 1)
        first, last = np.append(True, ~joins)[: len(batch)], np.append(~joins, True)[: len(batch)]
        merged = np.stack((batch[first], batch[last] + 1, *columns[1:, first]))
        merged = merged[:, np.lexsort((*merged[6::-1], -merged[7]))]
        *bounds, kind, opens = merged.tolist()
        kinds = [KINDS[place] for place in kind]
        return tuple(map(Rectangle, *bounds, kinds, map(bool, opens)))

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The same rectangles, equal ones together; what backends walk over."""
        return tuple(stack_rectangles(*self._columns))

    @cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Rectangles as columns [7, R], the number of the batch row first; and [R] 1 where they are sinks."""
        tables, parts = [np.zeros((7, 0), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for place, row in enumerate(self.rows_C):
            batch = np.flatnonzero(self.place_B == place)
            window = staircase_rectangles(row.document, row.start, row.stop, opens=self.is_own)
            sinks = staircase_rectangles(row.document, row.sink_start, row.sink_stop, opens=False)
            for part, found in enumerate((window, sinks)):
                count = len(found.kind)
                tables.append(np.stack((batch.repeat(count), *(np.tile(x, len(batch)) for x in found))))
                parts.append(np.full(len(batch) * count, part))
        return np.concatenate(tables, axis=1), np.concatenate(parts)

    @cached_property
    def num_pairs(self) -> int:
        """(query, key) pairs over the batch."""
        pairs_C = [
            int((row.stop - row.start).sum() + (row.sink_stop - row.sink_start).sum()) for row in self.rows_C
        ]
        return sum(pairs_C[place] for place in self.place_B.tolist())
