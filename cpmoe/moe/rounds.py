"""A budget of rows: where more would arrive on some rank than it allows, a call travels in rounds.

Each round dispatches a part of every rank's rows, runs the experts on them and combines, before the next one
begins; backward computes it again. So what one rank holds at a time is bounded whatever the router does, and
no row is dropped. All ranks of the expert group know all counts, therefore they agree on the rounds.

Shape letters: T local tokens, K top-k, M model dim, E global experts, P ranks of the expert group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cpmoe.moe.dispatch import RowSplits
from cpmoe.moe.permute import sort_by_expert
from cpmoe.moe.replay import RoutingReplay
from cpmoe.moe.router import count_rows
from cpmoe.moe.transit import Choices, ComputeExperts, Dispatcher, Transit


def num_rounds(rows_PP: np.ndarray, max_rows: int, num_nodes: int = 1) -> int:
    """The fewest rounds in which no rank gets more than `max_rows` rows at once, at least 1.

    rows_PP [P, P]: rows from each rank (first axis) to each. A round takes the next ⌈rows / rounds⌉ of each
    pair, or one less. With several nodes the ranks between are ranks that get rows too: those of one place of
    all nodes send to that place of a node what is for any of its ranks. `max_rows` is at least P.
    """
    assert max_rows >= len(rows_PP), (max_rows, rows_PP.shape)
    rounds = max(-(-_most(rows_PP, num_nodes) // max_rows), 1)
    while _most(-(-rows_PP // rounds), num_nodes) > max_rows:
        rounds += 1
    return rounds


def _most(rows_PP: np.ndarray, num_nodes: int) -> int:
    """Rows of the rank that gets most of them, here or on the way."""
    most = int(rows_PP.sum(0).max())
    if num_nodes > 1:
        by_node = rows_PP.reshape(num_nodes, -1, num_nodes, len(rows_PP) // num_nodes)
        most = max(most, int(by_node.sum(axis=(0, 3)).max()))
    return most


def round_of_slots(indices_TK: Tensor, counts_E: Tensor, num_ranks: int, rounds: int) -> Tensor:
    """In which round each slot travels: int64 [T, K]; of an empty slot it has no meaning.

    The slots bound for one rank are dealt in the order of the tokens, so that each round has about the same
    mix of experts.
    """
    width = len(counts_E) // num_ranks
    position_TK = sort_by_expert(indices_TK // width).position_TK
    rows_P = counts_E.view(num_ranks, width).sum(1)
    # One rank more for the empty slots.
    rows_P = torch.cat([rows_P, rows_P.new_ones(1)])
    place_TK = indices_TK // width
    turn_TK = position_TK - (rows_P.cumsum(0) - rows_P)[place_TK]
    return turn_TK * rounds // rows_P[place_TK].clamp_min(1)


class Budget:
    """A `Dispatcher` that travels as `inner` does while no rank gets more than `max_rows` rows.

    Else it travels in rounds of `in_rounds`, whose transfers all lie in the phase of the experts.
    """

    def __init__(
        self, inner: Dispatcher, in_rounds: Dispatcher, num_ranks: int, num_nodes: int, max_rows: int
    ) -> None:
        self.inner = inner
        self.in_rounds = in_rounds
        self.num_ranks = num_ranks
        self.num_nodes = num_nodes
        self.max_rows = max_rows

    def begin(self, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None) -> BudgetTransit:
        return BudgetTransit(self, x_TM, choices, replay)


class BudgetTransit:
    """A `Transit`; `rounds` is known from `dispatch_start` on."""

    def __init__(
        self, dispatcher: Budget, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None
    ) -> None:
        self._to = dispatcher
        self._inner: Transit | None = dispatcher.inner.begin(x_TM, choices, replay)
        self.counts = self._inner.counts
        self._waiting: tuple[Tensor, Choices] | None = (x_TM, choices)
        self._replay = replay
        self._y_TM: Tensor | None = None
        self.rounds = 1

    def dispatch_start(self) -> None:
        assert self._inner is not None and self._waiting is not None
        _, choices = self._waiting
        num_experts, ranks = len(choices.counts_E), self._to.num_ranks
        rows_PP = self.counts.read().host[:, :num_experts].reshape(ranks, ranks, -1).sum(-1)
        self.rounds = num_rounds(rows_PP, self._to.max_rows, self._to.num_nodes)
        if self.rounds > 1:
            self._inner = None
        else:
            self._waiting = None
            self._inner.dispatch_start()

    def dispatch_wait(self) -> None:
        if self._inner is not None:
            self._inner.dispatch_wait()

    def run_experts(self, experts: ComputeExperts) -> None:
        if self._inner is not None:
            self._inner.run_experts(experts)
            return
        assert self._waiting is not None
        (x_TM, choices), self._waiting = self._waiting, None
        journey = Journey(self._to, self.rounds, choices, experts, self._replay)
        self._y_TM = _InRounds.apply(journey, x_TM, choices.weights_TK, *experts.parameters())

    def combine_start(self) -> None:
        if self._inner is not None:
            self._inner.combine_start()

    def combine_wait(self) -> None:
        if self._inner is not None:
            self._inner.combine_wait()

    def finish(self) -> Tensor:
        if self._inner is not None:
            return self._inner.finish()
        assert self._y_TM is not None
        return self._y_TM


class _StandIn:
    """Experts with other tensors in the place of their parameters."""

    def __init__(self, experts: ComputeExperts, weights: Sequence[Tensor]) -> None:
        self._experts, self._weights = experts, weights

    def __call__(self, rows_RM: Tensor, splits: RowSplits, weights: Sequence[Tensor] | None = None) -> Tensor:
        return self._experts(rows_RM, splits, self._weights if weights is None else weights)

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._weights)


class Journey:
    """The rounds of one call: in which of them each slot travels, and what a recomputed one need not ask."""

    def __init__(
        self, dispatcher: Budget, rounds: int, choices: Choices, experts: ComputeExperts,
        replay: RoutingReplay | None,
    ) -> None:  # fmt: skip
        self.rounds = rounds
        self._dispatcher = dispatcher.in_rounds
        self._indices_TK = choices.indices_TK
        self._num_experts = len(choices.counts_E)
        self._round_TK = round_of_slots(choices.indices_TK, choices.counts_E, dispatcher.num_ranks, rounds)
        self._experts = experts
        kept = [] if replay is None else replay.rounds
        if not kept:
            kept.extend(RoutingReplay() for _ in range(rounds))
        self._replays = kept

    def travel(self, index: int, x_TM: Tensor, weights_TK: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """What round `index` adds to the output: [T, M]."""
        elsewhere_TK = self._round_TK != index
        indices_TK = self._indices_TK.masked_fill(elsewhere_TK, self._num_experts)
        weights_TK = weights_TK.masked_fill(elsewhere_TK, 0)
        choices = Choices(indices_TK, weights_TK, count_rows(indices_TK, self._num_experts))
        transit = self._dispatcher.begin(x_TM, choices, self._replays[index])
        transit.dispatch_start()
        transit.dispatch_wait()
        transit.run_experts(_StandIn(self._experts, parameters))
        transit.combine_start()
        transit.combine_wait()
        return transit.finish()


class _InRounds(torch.autograd.Function):
    """Keeps the inputs alone; backward runs one round after the other again, with gradient.

    Sums over rounds are float32 at least. The parameters are stood in for by leaves of their own, so that
    what hangs on the gradient of a parameter sees it once, whole.
    """

    @staticmethod
    def forward(ctx, journey: Journey, x_TM, weights_TK, *parameters):  # type: ignore[override]
        ctx.journey = journey
        ctx.save_for_backward(x_TM, weights_TK, *parameters)
        y_TM = torch.zeros_like(x_TM, dtype=torch.promote_types(x_TM.dtype, torch.float32))
        for index in range(journey.rounds):
            y_TM += journey.travel(index, x_TM, weights_TK, parameters)
        return y_TM.to(x_TM.dtype)

    @staticmethod
    def backward(ctx, grad_TM):  # type: ignore[override]
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        sums: list[Tensor] = []
        for index in range(ctx.journey.rounds):
            leaves = [value.detach().requires_grad_(need) for value, need in zip(inputs, needed, strict=True)]
            with torch.enable_grad():
                end = _End.apply(ctx.journey.travel(index, leaves[0], leaves[1], leaves[2:]), grad_TM)
            grads = torch.autograd.grad(end, [leaf for leaf in leaves if leaf.requires_grad])
            if sums:
                for total, grad in zip(sums, grads, strict=True):
                    total += grad
            else:
                sums = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
            del grads  # else they would live through the next round
        found = iter(sums)
        return None, *(
            next(found).to(value.dtype) if need else None for value, need in zip(inputs, needed, strict=True)
        )


class _End(torch.autograd.Function):
    """Where the backward of a round begins, with the gradient of its output: that need not be kept itself."""

    @staticmethod
    def forward(ctx, y_TM, grad_TM):  # type: ignore[override]
        ctx.save_for_backward(grad_TM)
        return y_TM.new_zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[override]
        return ctx.saved_tensors[0], None
