"""The dropless all-to-all: a row for each token and expert travels to the expert's rank and back.

Shape letters: T local tokens, K top-k, M model dim, R rows (one row is one token for one of its experts).
"""

from __future__ import annotations

from torch import Tensor

from cpmoe.moe.dispatch import CallCounts, RowSplits
from cpmoe.moe.permute import Permutation, permute, sort_by_expert, unpermute
from cpmoe.moe.replay import RoutingReplay
from cpmoe.moe.transit import Choices, ComputeExperts
from cpmoe.parallel.collectives import PendingAllToAll, all_to_all_start, all_to_all_wait
from cpmoe.parallel.groups import Groups


class AllToAll:
    """Rows travel on `groups.expert`, counts on `groups.meta`; the sum over a token's rows is at home."""

    def __init__(self, groups: Groups, num_experts: int) -> None:
        self.groups = groups
        self.num_experts = num_experts

    def begin(self, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None) -> RowTransit:
        return RowTransit(self, x_TM, choices, replay)


class RowTransit:
    """A `Transit`: each phase takes what it needs and lets it go."""

    def __init__(
        self, dispatcher: AllToAll, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None
    ) -> None:
        self.group = dispatcher.groups.expert
        self.num_experts = dispatcher.num_experts
        self.choices = choices
        self.counts = CallCounts(lambda: choices.counts_E, dispatcher.groups.meta, replay)
        self._x_TM: Tensor | None = x_TM
        self._splits: RowSplits | None = None
        self._permutation: Permutation | None = None
        self._rows_RM: Tensor | None = None
        self._pending: PendingAllToAll | None = None

    def dispatch_start(self) -> None:
        assert self._x_TM is not None
        self._permutation = sort_by_expert(self.choices.indices_TK)
        splits = self._splits = self.counts.read().row_splits(self.num_experts)
        self._rows_RM, self._x_TM = permute(self._x_TM, self._permutation, sum(splits.send)), None
        self._start(splits.send, splits.receive)

    def dispatch_wait(self) -> None:
        self._wait()

    def run_experts(self, experts: ComputeExperts) -> None:
        assert self._splits is not None and self._rows_RM is not None
        self._rows_RM = experts(self._rows_RM, self._splits)

    def combine_start(self) -> None:
        assert self._splits is not None
        self._start(self._splits.receive, self._splits.send)

    def combine_wait(self) -> None:
        self._wait()

    def finish(self) -> Tensor:
        assert self._rows_RM is not None and self._permutation is not None
        return unpermute(self._rows_RM, self.choices.weights_TK, self._permutation)

    def _start(self, send: list[int], receive: list[int]) -> None:
        if self.group is not None:
            assert self._rows_RM is not None
            self._pending = all_to_all_start(self._rows_RM, send, receive, self.group)
            self._rows_RM = None

    def _wait(self) -> None:
        if self.group is not None:
            assert self._pending is not None
            self._rows_RM, self._pending = all_to_all_wait(self._pending), None
