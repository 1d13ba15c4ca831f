"""What the first forward of a MoE layer decided, kept for a recomputed forward.

Shape letters: T local tokens, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from cpmoe.moe.dispatch import SharedCounts


@dataclass
class RoutingReplay:
    """Makes the recomputed forward of activation checkpointing route exactly as the first one did.

    One holder serves one layer in one micro-step (and one slice of it): the first forward fills it, every
    later one takes the chosen experts and what the ranks counted from it. Near-tie scores can then not flip,
    collectives keep their sizes, and no counts travel again. Probabilities are computed anew, with
    gradient, and gathered at the kept indices.
    """

    indices_TK: Tensor | None = None
    counts: SharedCounts | None = None
    # Of each round, where the call travels in rounds.
    rounds: list[RoutingReplay] = field(default_factory=list)
