"""The dropless all-to-all: a row for each token and expert travels to the expert's rank and back.

Shape letters: T local tokens, K top-k, M model dim, R rows (one row is one token for one of its experts).
"""

from __future__ import annotations

from torch import Tensor

from cpmoe.moe.dispatch import CountExchange, RowSplits
from cpmoe.moe.permute import Permutation, permute, sort_by_expert, unpermute
from cpmoe.moe.replay import RoutingReplay
from cpmoe.moe.transit import Choices, ComputeExperts
from cpmoe.parallel.collectives import PendingAllToAll, all_to_all_start, all_to_all_wait
from cpmoe.parallel.groups import Groups


class AllToAll:
    """Rows travel on `groups.expert`, counts on `groups.meta`; the sum over a token's rows is at home."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def begin(self, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None) -> RowTransit:
        return RowTransit(self.groups, x_TM, choices, replay)


class RowTransit:
    """A `Transit`: each phase takes what it needs and lets it go."""

    def __init__(self, groups: Groups, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None) -> None:
        self.group = groups.expert
        self.choices = choices
        self.replay = replay
        self.splits = None if replay is None else replay.splits
        self.exchange: CountExchange | None = None
        if self.splits is None:
            self.exchange = CountExchange(choices.counts_E, groups.meta)
        self._x_TM: Tensor | None = x_TM
        self._permutation: Permutation | None = None
        self._rows_RM: Tensor | None = None
        self._pending: PendingAllToAll | None = None

    def dispatch_start(self) -> None:
        assert self._x_TM is not None
        self._permutation = sort_by_expert(self.choices.indices_TK)
        self._rows_RM, self._x_TM = permute(self._x_TM, self._permutation), None
        splits = self._read_splits()
        num_rows = sum(splits.send)
        if num_rows < len(self._rows_RM):
            self._rows_RM = self._rows_RM[:num_rows]
        self._start(splits.send, splits.receive)

    def dispatch_wait(self) -> None:
        self._wait()

    def run_experts(self, experts: ComputeExperts) -> None:
        assert self.splits is not None and self._rows_RM is not None
        self._rows_RM = experts(self._rows_RM, self.splits)

    def combine_start(self) -> None:
        assert self.splits is not None
        self._start(self.splits.receive, self.splits.send)

    def combine_wait(self) -> None:
        self._wait()

    def finish(self) -> Tensor:
        assert self._rows_RM is not None and self._permutation is not None
        return unpermute(self._rows_RM, self.choices.weights_TK, self._permutation)

    def _read_splits(self) -> RowSplits:
        if self.splits is None:
            assert self.exchange is not None
            self.splits = self.exchange.splits()
            if self.replay is not None:
                self.replay.splits = self.splits
        return self.splits

    def _start(self, send: list[int], receive: list[int]) -> None:
        if self.group is not None:
            assert self._rows_RM is not None
            self._pending = all_to_all_start(self._rows_RM, send, receive, self.group)
            self._rows_RM = None

    def _wait(self) -> None:
        if self.group is not None:
            assert self._pending is not None
            self._rows_RM, self._pending = all_to_all_wait(self._pending), None
