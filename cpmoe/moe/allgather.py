"""Dispatch by all-gather, for few ranks: every rank gets every token and computes what its experts add to it.

A rank receives the T tokens of each other rank and sends as many sums back, whatever the router does: fewer
bytes than the rows of an all-to-all where a token has more experts than there are ranks.

Shape letters: T local tokens, K top-k, M model dim, E experts of this rank, P ranks of the expert group,
A = P · T tokens of all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpmoe.moe.dispatch import CallCounts
from cpmoe.moe.local import sum_of_experts
from cpmoe.moe.replay import RoutingReplay
from cpmoe.moe.transit import Choices, ComputeExperts
from cpmoe.parallel.collectives import PendingGather, all_gather_start, gather_wait, reduce_scatter_start
from cpmoe.parallel.groups import Groups


class AllGather:
    """Tokens travel on `groups.expert`, counts on `groups.meta`; both must be there."""

    def __init__(self, groups: Groups, num_experts: int) -> None:
        assert groups.expert is not None
        self.group = groups.expert
        self.meta = groups.meta
        self.num_experts = num_experts
        self.num_local = num_experts // groups.grid.expert_parallel_size
        self.first = groups.grid.expert_rank(groups.rank) * self.num_local

    def begin(self, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None) -> GatherTransit:
        return GatherTransit(self, x_TM, choices, replay)


class GatherTransit:
    """A `Transit`: each phase takes what it needs and lets it go."""

    def __init__(
        self, dispatcher: AllGather, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None
    ) -> None:
        self._to = dispatcher
        self._num_tokens = len(x_TM)
        self._x_TM: Tensor | None = x_TM
        self._slots_T2K: Tensor | None = torch.cat(
            [choices.weights_TK, choices.indices_TK.to(choices.weights_TK.dtype)], dim=1
        )
        self._rows: PendingGather | None = None
        self._slots: PendingGather | None = None
        self.counts = CallCounts(lambda: self._count(choices), dispatcher.meta, replay)

    def dispatch_start(self) -> None:
        assert self._x_TM is not None and self._slots_T2K is not None
        self._rows = all_gather_start(self._padded(self._x_TM, 0.0), self._to.group)
        slots_T2K = self._padded(self._slots_T2K, float(self._to.num_experts))
        self._slots = all_gather_start(slots_T2K, self._to.group)
        self._x_TM = self._slots_T2K = None

    def dispatch_wait(self) -> None:
        assert self._rows is not None and self._slots is not None
        self._x_TM, self._slots_T2K = gather_wait(self._rows), gather_wait(self._slots)
        self._rows = self._slots = None

    def run_experts(self, experts: ComputeExperts) -> None:
        assert self._x_TM is not None and self._slots_T2K is not None
        weights_AK, slots_AK = self._slots_T2K.chunk(2, dim=1)
        experts_AK = slots_AK.detach().to(torch.int64) - self._to.first
        elsewhere_AK = (experts_AK < 0) | (experts_AK >= self._to.num_local)
        self._x_TM = sum_of_experts(
            self._x_TM,
            experts_AK.masked_fill(elsewhere_AK, self._to.num_local),
            weights_AK.masked_fill(elsewhere_AK, 0),
            self.counts.read(),
            self._to.num_experts,
            experts,
        )
        self._slots_T2K = None

    def combine_start(self) -> None:
        assert self._x_TM is not None
        self._rows, self._x_TM = reduce_scatter_start(self._x_TM, self._to.group), None

    def combine_wait(self) -> None:
        assert self._rows is not None
        self._x_TM, self._rows = gather_wait(self._rows), None

    def finish(self) -> Tensor:
        assert self._x_TM is not None
        return self._x_TM[: self._num_tokens]

    def _count(self, choices: Choices) -> Tensor:
        """What a rank tells the others: its slots of each expert, and its tokens."""
        return F.pad(choices.counts_E, (0, 1), value=self._num_tokens)

    def _padded(self, x: Tensor, value: float) -> Tensor:
        """As many rows as the rank with the most tokens has."""
        missing = int(self.counts.read().host[:, -1].max()) - len(x)
        return F.pad(x, (0, 0, 0, missing), value=value) if missing else x
