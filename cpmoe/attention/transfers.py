"""Which tokens of each rank travel at which hop of a ring, and back as gradients.

KV moves from hop to hop and carries the tokens that the receiver or a later rank needs; dKV follows the same
way, carries the tokens that can be non-zero, and goes home from the last hop. Where nothing is relayed, each
hop's KV and dKV go straight between their two ranks.

Causal slices: the queries of a slice attend to the tokens of it and of those before it. Where all slices
begin with the same hop, the KV of each travels at that hop once, for its own queries and for later ones, and
is kept until the last of them attended; its dKV is summed there and goes back once. Nothing else is kept,
so that a rank never holds more than one hop's KV of a slice: at further hops the tokens of earlier slices
travel again.

Shape letters: N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cpmoe.attention.geometry import Needs
from cpmoe.attention.ranges import Range, TokenRanges, union

# Relaying is worth its tokens while at most so many cross the ring per token needed: a causal zigzag ring of
# any size stays below, a window of neighbours does not.
MAX_RELAY_EXCESS = 4 / 3


class Transfer(NamedTuple):
    """One send and one receive of this rank; ranks count along the ring."""

    to_rank: int
    from_rank: int
    send: TokenRanges
    receive: TokenRanges


@dataclass(frozen=True)
class SliceTransfers:
    """The transfers for the queries of one causal slice, or of all tokens where there is one slice.

    needs     what the queries of each slice need of its tokens and of those before
    index     the slice
    tokens    local tokens of each slice, the same on every rank
    """

    cp_size: int
    needs: Sequence[Needs]
    index: int
    tokens: Sequence[Range]

    @cached_property
    def distances(self) -> list[int]:
        """Those of the hops, ascending."""
        return self.needs[self.index].distances()

    @cached_property
    def is_relayed(self) -> bool:
        """KV and dKV move from hop to hop; else each hop's go straight between their two ranks."""
        return self.needs[self.index].relay_excess() <= MAX_RELAY_EXCESS

    @cached_property
    def shares_first(self) -> bool:
        """Each slice's tokens travel at the first hop once, for the queries of later slices too."""
        first = {tuple(needs.distances()[:1]) for needs in self.needs}
        return len(self.needs) > 1 and len(first) == 1

    def fetch(self, rank: int, at: int) -> Transfer:
        """What brings `rank` the KV of its hop number `at`."""
        distance = self.distances[at]
        previous = self.distances[at - 1] if self.is_relayed and at else 0
        return Transfer(
            to_rank=(rank + distance - previous) % self.cp_size,
            from_rank=(rank - distance + previous) % self.cp_size,
            send=self._fetched((rank - previous) % self.cp_size, at),
            receive=self._fetched((rank - distance) % self.cp_size, at),
        )

    def deliver(self, rank: int, at: int) -> Transfer:
        """What takes dKV further after hop number `at` of `rank`."""
        distance, following = self.distances[at], self.cp_size
        if self.is_relayed and at + 1 < len(self.distances):
            following = self.distances[at + 1]
        return Transfer(
            to_rank=(rank + following - distance) % self.cp_size,
            from_rank=(rank - following + distance) % self.cp_size,
            send=self._summed((rank - distance) % self.cp_size, at),
            receive=self._summed((rank - following) % self.cp_size, at),
        )

    def _fetched(self, source: int, at: int) -> TokenRanges:
        """Tokens of `source` that travel for hop number `at` and, where relayed, for those after it."""
        if at or not self.shares_first:
            return self._needed(source, at)
        own = self.tokens[self.index]
        return union(slice_._needed(source, 0).within(*own) for slice_ in self._from_here)

    def _summed(self, source: int, at: int) -> TokenRanges:
        """Tokens of `source` whose dKV was added up when hop number `at` is done."""
        done = self.distances[: at + 1] if self.is_relayed else [self.distances[at]]
        needs = self.needs[self.index]
        if not self.shares_first:
            return needs.union(source, done)
        first, own = self.distances[0], self.tokens[self.index]
        # At the first hop dKV of earlier tokens stays with what their own slice sums, that of later queries
        # for these tokens is in.
        apart = [distance for distance in done if distance != first]
        parts = [needs.union(source, done).within(*own)]
        if apart:
            parts.append(needs.union(source, apart).within(0, own[0]))
        if first in done:
            parts += [later.union(source, [first]).within(*own) for later in self.needs[self.index + 1 :]]
        return union(parts)

    def _needed(self, source: int, at: int) -> TokenRanges:
        remaining = self.distances[at:] if self.is_relayed else [self.distances[at]]
        return self.needs[self.index].union(source, remaining)

    @cached_property
    def _from_here(self) -> list[SliceTransfers]:
        """Those of this slice and of the later ones."""
        rest = range(self.index + 1, len(self.needs))
        return [self, *(SliceTransfers(self.cp_size, self.needs, index, self.tokens) for index in rest)]
