"""Which ranks form which group: pure arithmetic, no process group.

N ranks carry two decompositions of the same world:

* dense:  N = DP x CP. A sequence is split over CP ranks; DP ranks read other sequences. CP = r x u: rings of
  r ranks pass on keys and values, and u neighbours of a ring's place exchange heads for tokens (Ulysses).
* expert: N = EP x EDP. Experts are split over the EP ranks of one expert group; the EDP ranks that hold
  the same experts are replicas. EP is folded over CP x DP and may be below, equal to or above CP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

AXES = ("ep", "cp", "dp")


@dataclass(frozen=True)
class RankGrid:
    """Rank lists of every group for a world of `world_size` ranks.

    `rank_order` is a permutation of ("ep", "cp", "dp"), innermost (consecutive ranks) first. The order
    of "cp" and "dp" places the rings. "ep" before both makes expert groups of consecutive ranks, "ep"
    last spreads them as far apart as possible, and between them strides them by the size of the first
    axis, so that an expert group crosses that axis.

    `ranks_per_node` consecutive ranks are on one node, where that is of interest: expert groups then have
    parts of their own within a node and across nodes.

    Raises ValueError where the degrees do not divide the world, or an expert group has not equally many
    ranks on each node that it touches.
    """

    world_size: int
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    rank_order: tuple[str, ...] = AXES
    ulysses_size: int = 1
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "context_parallel_size", "expert_parallel_size", "ulysses_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if sorted(self.rank_order) != sorted(AXES):
            raise ValueError(f"rank_order = {self.rank_order}: must be a permutation of {AXES}")
        for name in ("context_parallel_size", "expert_parallel_size"):
            if self.world_size % getattr(self, name):
                raise ValueError(
                    f"{name} = {getattr(self, name)}: must divide the world size {self.world_size}; "
                    f"legal: {divisors(self.world_size)}"
                )
        if self.context_parallel_size % self.ulysses_size:
            raise ValueError(
                f"ulysses_size = {self.ulysses_size}: must divide context_parallel_size "
                f"{self.context_parallel_size}; legal: {divisors(self.context_parallel_size)}"
            )
        if self.world_size % (self.expert_stride * self.expert_parallel_size):
            raise ValueError(
                f"rank_order = {self.rank_order}: expert groups of {self.expert_parallel_size} ranks at "
                f"stride {self.expert_stride} do not tile {self.world_size} ranks; put 'ep' first or last"
            )
        if self.ranks_per_node is not None:
            parts = [self._by_node(ranks) for ranks in self.expert_ranks()]
            if self.world_size % self.ranks_per_node or len({len(p) for part in parts for p in part}) > 1:
                raise ValueError(
                    f"ranks_per_node = {self.ranks_per_node}: nodes must divide {self.world_size} ranks and "
                    f"have equal parts of the expert groups {self.expert_ranks()}"
                )

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.context_parallel_size

    @property
    def ring_size(self) -> int:
        return self.context_parallel_size // self.ulysses_size

    @property
    def expert_replicas(self) -> int:
        """EDP: how many ranks hold the same experts."""
        return self.world_size // self.expert_parallel_size

    @property
    def expert_stride(self) -> int:
        """Distance in ranks between neighbours of one expert group."""
        place = self.rank_order.index("ep")
        if place == 0:
            return 1
        if place == 2:
            return self.expert_replicas
        inner = self.rank_order[0]
        return self.context_parallel_size if inner == "cp" else self.data_parallel_size

    def context_rank(self, rank: int) -> int:
        return rank // self._context_stride % self.context_parallel_size

    def ring_rank(self, rank: int) -> int:
        return self.context_rank(rank) // self.ulysses_size

    def ulysses_rank(self, rank: int) -> int:
        return self.context_rank(rank) % self.ulysses_size

    def data_rank(self, rank: int) -> int:
        stride = self.context_parallel_size if self._context_stride == 1 else 1
        return rank // stride % self.data_parallel_size

    def expert_rank(self, rank: int) -> int:
        return rank // self.expert_stride % self.expert_parallel_size

    def replica_rank(self, rank: int) -> int:
        block = rank // (self.expert_stride * self.expert_parallel_size)
        return block * self.expert_stride + rank % self.expert_stride

    def ring_ranks(self) -> list[list[int]]:
        """One list per ring, DP x u lists of r ranks; the place in a list is the ring rank."""
        size = self.ulysses_size
        return self._gather(
            lambda rank: self.data_rank(rank) * size + self.ulysses_rank(rank), self.data_parallel_size * size
        )

    def ulysses_ranks(self) -> list[list[int]]:
        """DP x r lists of the u ranks at one place of a ring; the place in a list is the Ulysses rank."""
        size = self.ring_size
        return self._gather(
            lambda rank: self.data_rank(rank) * size + self.ring_rank(rank), self.data_parallel_size * size
        )

    def data_ranks(self) -> list[list[int]]:
        """CP lists of the DP ranks that hold the same part of different sequences."""
        return self._gather(self.context_rank, self.context_parallel_size)

    def expert_ranks(self) -> list[list[int]]:
        """EDP lists of EP ranks; together one list holds all experts, in the order of the list."""
        stride, degree = self.expert_stride, self.expert_parallel_size
        return [
            [block * stride * degree + place * stride + offset for place in range(degree)]
            for block in range(self.world_size // (stride * degree))
            for offset in range(stride)
        ]

    @property
    def expert_nodes(self) -> int:
        """How many nodes an expert group spans; 1 where nodes are of no interest."""
        return len(self._by_node(self.expert_ranks()[0]))

    def expert_within_ranks(self) -> list[list[int]]:
        """The part of each expert group on each node; none where that is the whole group."""
        if self.expert_nodes == 1:
            return []
        return [part for ranks in self.expert_ranks() for part in self._by_node(ranks)]

    def expert_across_ranks(self) -> list[list[int]]:
        """The ranks of one place on each node of an expert group; none where there is one node."""
        if self.expert_nodes == 1:
            return []
        return [
            list(column)
            for ranks in self.expert_ranks()
            for column in zip(*self._by_node(ranks), strict=True)
        ]

    def replica_ranks(self) -> list[list[int]]:
        """EP lists of the EDP ranks that hold the same experts."""
        return self._gather(self.expert_rank, self.expert_parallel_size)

    @property
    def _context_stride(self) -> int:
        cp_first = self.rank_order.index("cp") < self.rank_order.index("dp")
        return 1 if cp_first else self.data_parallel_size

    def _by_node(self, ranks: list[int]) -> list[list[int]]:
        if self.ranks_per_node is None:
            return [ranks]
        size = self.ranks_per_node
        return [list(part) for _, part in groupby(ranks, key=lambda rank: rank // size)]

    def _gather(self, key: Callable[[int], int], count: int) -> list[list[int]]:
        lists: list[list[int]] = [[] for _ in range(count)]
        for rank in range(self.world_size):
            lists[key(rank)].append(rank)
        return lists


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending: the legal degrees of an axis."""
    return [d for d in range(1, number + 1) if number % d == 0]
