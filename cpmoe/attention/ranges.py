"""Which of a rank's tokens stand in a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Range = tuple[int, int]


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
        return int(self.places(np.array([start]), stop - start)[0])

    def places(self, start_P: np.ndarray, length: int) -> np.ndarray:
        """Where runs of `length` local tokens, each inside one range, begin in the buffer: int64 [P]."""
        starts, stops = np.array(self.ranges, dtype=np.int64).reshape(-1, 2).T
        range_P = np.searchsorted(starts, start_P, side="right") - 1
        assert (range_P >= 0).all() and (start_P + length <= stops[range_P]).all(), (start_P, self.ranges)
        before = (stops - starts).cumsum() - stops
        return start_P + before[range_P]

    def within(self, first: int, last: int) -> TokenRanges:
        """Those of the tokens that are in [first, last)."""
        clipped = ((max(start, first), min(stop, last)) for start, stop in self.ranges)
        return TokenRanges(tuple((start, stop) for start, stop in clipped if start < stop))

    def common(self, other: TokenRanges) -> Iterator[tuple[int, int, int]]:
        """(place in this buffer, place in the other, length) of each run of tokens that both hold."""
        for start, stop in self.ranges:
            for first, last in other.within(start, stop).ranges:
                yield self.place(first, last), other.place(first, last), last - first


def union(parts: Iterable[TokenRanges]) -> TokenRanges:
    """The tokens that any of `parts` holds."""
    return TokenRanges(joined(bounds for part in parts for bounds in part.ranges))


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same tokens as ascending ranges that neither overlap nor touch."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)
