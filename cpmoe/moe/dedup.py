"""Deduplicated dispatch: a token travels once to each rank that has any of its experts.

The rank of the experts sums their weighted outputs, so one row comes back for each that went. Against the
all-to-all of alltoall.py, T · K rows become Σ_t (ranks among the experts of t), both ways and in backward.
With nodes the journey has two legs: once to each node, to the rank of the same place in it, and from there
once to each rank.

Shape letters: T local tokens, K top-k, M model dim, E global experts, P ranks of the expert group, U rows
on the way, W slots of such a row, R rows of this rank's experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.moe.dispatch import CallCounts, SharedCounts
from cpmoe.moe.leg import Fork, Leg, Parcel, fork
from cpmoe.moe.local import sum_of_experts
from cpmoe.moe.replay import RoutingReplay
from cpmoe.moe.transit import Choices, ComputeExperts
from cpmoe.parallel.groups import Groups


class Stage(NamedTuple):
    """One leg of every journey: its group, and how many experts each of its places has."""

    group: ProcessGroup
    num_places: int
    width: int
    across: bool

    def fork(self, experts_TK: Tensor) -> Fork:
        return fork(experts_TK, self.num_places, self.width)


class Dedup:
    """Tokens travel on `groups.expert`, counts on `groups.meta`; both must be there.

    Where the grid names nodes, tokens travel on `groups.expert_across` and then on `groups.expert_within`.
    """

    def __init__(self, groups: Groups, num_experts: int) -> None:
        grid = groups.grid
        self.meta = groups.meta
        self.num_experts = num_experts
        self.num_ranks = grid.expert_parallel_size
        self.num_nodes = grid.expert_nodes
        self.rank = grid.expert_rank(groups.rank)
        self.per_node = self.num_ranks // self.num_nodes
        self.experts_per_rank = num_experts // self.num_ranks
        within = groups.expert if self.num_nodes == 1 else groups.expert_within
        self.stages: list[Stage] = []
        if groups.expert_across is not None:
            width = self.per_node * self.experts_per_rank
            self.stages.append(Stage(groups.expert_across, self.num_nodes, width, True))
        if within is not None:
            self.stages.append(Stage(within, self.per_node, self.experts_per_rank, False))

    def begin(self, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None) -> DedupTransit:
        return DedupTransit(self, x_TM, choices, replay)

    def count(self, choices: Choices, first: Fork) -> Tensor:
        """What a rank tells the others: its slots of each expert, its rows to each rank and to each node.

        `first` is how its tokens part for the first stage.
        """
        if self.num_nodes == 1:
            return torch.cat([choices.counts_E, first.counts_P])
        to_ranks = fork(choices.indices_TK, self.num_ranks, self.experts_per_rank).counts_P
        return torch.cat([choices.counts_E, to_ranks, first.counts_P])

    def leg_splits(self, counts: SharedCounts, across: bool) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to each place of a stage, and receives from it."""
        node, place = divmod(self.rank, self.per_node)
        to_ranks = counts.host[:, self.num_experts : self.num_experts + self.num_ranks]
        to_nodes = counts.host[:, self.num_experts + self.num_ranks :]
        if across:
            return to_nodes[self.rank].tolist(), to_nodes[place :: self.per_node, node].tolist()
        # Rows for the ranks of this node, by node and place of the rank whose tokens they are.
        mine = to_ranks[:, node * self.per_node : (node + 1) * self.per_node]
        by_place = mine.reshape(self.num_nodes, self.per_node, self.per_node).sum(0)
        return by_place[place].tolist(), by_place[:, place].tolist()


class DedupTransit:
    """A `Transit`: each phase takes what it needs and lets it go."""

    def __init__(
        self, dispatcher: Dedup, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None
    ) -> None:
        self._to = dispatcher
        self._parcel: Parcel | None = Parcel(x_TM, choices.indices_TK, choices.weights_TK)
        first = dispatcher.stages[0].fork(choices.indices_TK)
        self._fork: Fork | None = first
        self._legs: list[Leg] = []
        self._sums: Tensor | None = None
        self.counts = CallCounts(lambda: dispatcher.count(choices, first), dispatcher.meta, replay)

    def dispatch_start(self) -> None:
        self._set_out()

    def dispatch_wait(self) -> None:
        for leg in range(len(self._to.stages)):
            if leg > 0:
                assert self._parcel is not None
                self._fork = self._to.stages[leg].fork(self._parcel.experts_TK)
                self._set_out()
            self._parcel = self._legs[leg].wait()

    def run_experts(self, experts: ComputeExperts) -> None:
        assert self._parcel is not None
        (x_UM, experts_UW, weights_UW), self._parcel = self._parcel, None
        counts = self.counts.read()
        self._sums = sum_of_experts(x_UM, experts_UW, weights_UW, counts, self._to.num_experts, experts)

    def combine_start(self) -> None:
        for leg in reversed(range(len(self._legs))):
            assert self._sums is not None
            self._legs[leg].start_back(self._sums)
            self._sums = None
            if leg > 0:
                self._sums = self._legs.pop().wait_back()

    def combine_wait(self) -> None:
        self._sums = self._legs.pop().wait_back()

    def finish(self) -> Tensor:
        assert self._sums is not None
        return self._sums

    def _set_out(self) -> None:
        """Launches the parcel on its next leg."""
        assert self._parcel is not None and self._fork is not None
        stage = self._to.stages[len(self._legs)]
        splits = self._to.leg_splits(self.counts.read(), stage.across)
        self._legs.append(Leg(stage.group, self._fork, *splits, stage.width))
        self._legs[-1].start(self._parcel)
        self._parcel = self._fork = None
