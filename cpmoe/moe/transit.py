"""How tokens reach their experts and come back: the phases that every dispatcher has.

Shape letters: T local tokens, K top-k, M model dim, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from cpmoe.moe.dispatch import CallCounts, RowSplits
from cpmoe.moe.replay import RoutingReplay


class ComputeExperts(Protocol):
    """The experts of a rank."""

    def __call__(self, rows_RM: Tensor, splits: RowSplits, weights: Sequence[Tensor] | None = None) -> Tensor:
        """rows [R, M] as `splits.blocks` says that they lie → [R, M]; `weights` stand in for `parameters`."""

    def parameters(self) -> Iterator[Tensor]: ...


class Choices(NamedTuple):
    """Which experts each token goes to, and what their outputs are multiplied by.

    indices_TK  int64, global experts, no expert twice in a token; E (one past the last) where a slot is empty
    weights_TK  float32 (float64 in a float64 model), with gradient; 0 where a slot is empty
    counts_E    int64, this rank's slots of each global expert
    """

    indices_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor


class Transit(Protocol):
    """The tokens of one call of a layer on their way. The phases run in this order, each of them once.

    `counts` are those of the call, of which the first E are the rows of each expert.

    All ranks of the expert group run them together, also without a token. What a schedule places between a
    start and its wait overlaps with the transfer, in forward and in backward.
    """

    counts: CallCounts

    def dispatch_start(self) -> None:
        """Reads the counts, brings tokens to the order they travel in and launches them."""

    def dispatch_wait(self) -> None:
        """Waits for what this rank's experts compute."""

    def run_experts(self, experts: ComputeExperts) -> None:
        """The experts of this rank on the rows that came."""

    def combine_start(self) -> None:
        """Launches what the experts computed on its way back."""

    def combine_wait(self) -> None:
        """Waits for what belongs to this rank's tokens."""

    def finish(self) -> Tensor:
        """The weighted sum of each token's experts [T, M] in the type of the tokens; 0 without an expert."""


class Dispatcher(Protocol):
    """One way to travel; a layer has one."""

    def begin(self, x_TM: Tensor, choices: Choices, replay: RoutingReplay | None) -> Transit:
        """Starts telling the other ranks how many rows come; a replayed call knows that already."""
