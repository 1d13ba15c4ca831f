"""Equal rectangles, stacked so that a kernel computes them in one call.

Documents of one length, the pieces of a window, the rows of a batch: their rectangles are the same but for
their places. Where those are evenly spaced, a stack of them is a view of the tensors; small ones are copied
together from wherever they stand.

Shape letters: P rectangles of a stack, L tokens of one, B batch, T tokens of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cpmoe.attention.ranges import TokenRanges
from cpmoe.attention.rectangles import KINDS, Kind

# Queries and keys together of rectangles that are rather copied than computed by themselves.
SMALL = 256


@dataclass(frozen=True, eq=False)
class TokenRuns:
    """Tokens [start_P[p], start_P[p] + length) of batch row batch_P[p], for each p; int64 [P]."""

    batch_P: np.ndarray
    start_P: np.ndarray
    length: int

    @cached_property
    def step(self) -> tuple[int, int] | None:
        """(batch rows, tokens) from each run to the next, or None where they are not evenly spaced."""
        if len(self.start_P) == 1:
            return 0, self.length
        rows, tokens = np.diff(self.batch_P), np.diff(self.start_P)
        first = int(rows[0]), int(tokens[0])
        is_even = (rows == first[0]).all() and (tokens == first[1]).all() and min(first) >= 0
        return first if is_even else None

    @property
    def are_view(self) -> bool:
        """Whether `take` gives a view."""
        return self.step is not None

    @cached_property
    def overlap(self) -> bool:
        """Whether two runs share a token."""
        order = np.lexsort((self.start_P, self.batch_P))
        same_row, apart = np.diff(self.batch_P[order]) == 0, np.diff(self.start_P[order])
        return bool((same_row & (apart < self.length)).any())

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether the runs are all tokens of a tensor [B, T, ...] of this shape, in order."""
        if len(self.start_P) * self.length != shape[0] * shape[1]:
            return False
        place_P = self.batch_P * shape[1] + self.start_P
        return bool((place_P == np.arange(len(place_P)) * self.length).all())

    def within(self, tokens: TokenRanges) -> TokenRuns:
        """The same runs, which are local tokens of a rank, in a buffer that holds `tokens`."""
        if tokens not in self._within:
            places_P = tokens.places(self.start_P, self.length)
            same = np.array_equal(places_P, self.start_P)
            self._within[tokens] = self if same else TokenRuns(self.batch_P, places_P, self.length)
        return self._within[tokens]

    def part(self, first: int, length: int) -> TokenRuns:
        """Of each run `length` tokens from its token `first` on."""
        return TokenRuns(self.batch_P, self.start_P + first, length)

    def take(self, x_BT: Tensor) -> Tensor:
        """x_BT [B, T, ...] → [P, L, ...]: a view where the runs are evenly spaced, else a copy."""
        if self.step is None:
            return x_BT[self._index(x_BT.device)]
        rows, tokens = self.step
        stride = x_BT.stride()
        return x_BT.as_strided(
            (len(self.start_P), self.length, *x_BT.shape[2:]),
            (rows * stride[0] + tokens * stride[1], *stride[1:]),
            x_BT.storage_offset() + int(self.batch_P[0]) * stride[0] + int(self.start_P[0]) * stride[1],
        )

    def put(self, x_BT: Tensor, values_PL: Tensor) -> None:
        """Writes what `take` reads; the runs must not overlap."""
        if self.step is None:
            x_BT[self._index(x_BT.device)] = values_PL
        else:
            self.take(x_BT).copy_(values_PL)

    def add(self, x_BT: Tensor, values_PL: Tensor) -> None:
        """Adds values_PL [P, L, ...] to the tokens of the runs; they may overlap."""
        if self.step is None:
            index = self._index(x_BT.device)
            x_BT.index_put_(index, values_PL.to(x_BT.dtype), accumulate=True)
        elif not self.overlap:
            self.take(x_BT).add_(values_PL)
        else:
            for row, start, values_L in zip(
                self.batch_P.tolist(), self.start_P.tolist(), values_PL.unbind(), strict=True
            ):
                x_BT[row, start : start + self.length].add_(values_L)

    def _index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        index = self._indices.get(device)
        if index is None:
            token_PL = self.start_P[:, None] + np.arange(self.length)
            index = torch.from_numpy(self.batch_P)[:, None].to(device), torch.from_numpy(token_PL).to(device)
            self._indices[device] = index
        return index

    @cached_property
    def _within(self) -> dict[TokenRanges, TokenRuns]:
        return {}

    @cached_property
    def _indices(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


@dataclass(frozen=True, eq=False)
class Stack:
    """Rectangles of one kind and size: queries `rows`, keys `keys` in local tokens of the source rank."""

    kind: Kind
    opens: bool
    rows: TokenRuns
    keys: TokenRuns

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs inside."""
        queries, keys = self.rows.length, self.keys.length
        return len(self.rows.start_P) * (
            queries * keys if self.kind == "full" else queries * (queries + 1) // 2
        )


def stack_rectangles(columns: np.ndarray, part_R: np.ndarray) -> Iterator[Stack]:
    """Stacks of the rectangles `columns` [7, R]: batch row, q_start, q_stop, k_start, k_stop, kind, opens.

    Those that open query rows come first. No two rectangles of one part and kind may share queries.
    """
    if part_R.size == 0:
        return
    batch_R, q_start_R, q_stop_R, k_start_R, k_stop_R, kind_R, opens_R = columns
    keys = (1 - opens_R, part_R, kind_R, q_stop_R - q_start_R, k_stop_R - k_start_R)
    order = np.lexsort((k_start_R, q_start_R, batch_R, *keys[::-1]))
    keys_K = np.stack(keys)[:, order]
    begins = np.flatnonzero(np.append(True, (keys_K[:, 1:] != keys_K[:, :-1]).any(axis=0)))
    places_3 = np.stack((batch_R, q_start_R, k_start_R))[:, order]
    for first, last in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
        closed, _, kind, num_queries, num_keys = keys_K[:, first].tolist()
        for batch_P, q_start_P, k_start_P in _even_parts(places_3[:, first:last], num_queries + num_keys):
            yield Stack(
                KINDS[kind],
                not closed,
                TokenRuns(batch_P, q_start_P, num_queries),
                TokenRuns(batch_P, k_start_P, num_keys),
            )


def _even_parts(places_3P: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Equal rectangles cut into stacks: small ones together, large ones as far as they are evenly spaced."""
    if size <= SMALL or places_3P.shape[1] <= 2:
        yield places_3P
        return
    steps = np.diff(places_3P)
    changes = np.append(True, (steps[:, 1:] != steps[:, :-1]).any(axis=0))
    first = 0
    for place in np.flatnonzero(changes).tolist():
        if place > first:
            yield places_3P[:, first : place + 1]
            first = place + 1
    yield places_3P[:, first:]
