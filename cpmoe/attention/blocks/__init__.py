"""Backends that compute the attention over one block of keys, by name.

A backend is a module-level object with the methods of `BlockBackend`; adding one is a line in `_BACKENDS`.

Shape letters: B batch, T queries or keys of a block, H query heads, G KV heads, D head dim (that of V, and so
of the output, may be another than that of Q and K).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

from torch import Tensor

from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    KeyValueSizes,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    pack,
)
from cpmoe.attention.blocks.flash import FlashBlocks
from cpmoe.attention.blocks.reference import ReferenceBlocks
from cpmoe.attention.blocks.sdpa import SdpaBlocks
from cpmoe.attention.blocks.triton import TritonBlocks
from cpmoe.attention.reach import Reach
from cpmoe.attention.scores import Scores

__all__ = [
    "BACKENDS",
    "BlockBackend",
    "KeyValueBlock",
    "KeyValueGradient",
    "KeyValueSizes",
    "QueryGradient",
    "RunningSoftmax",
    "SavedForward",
    "pack",
    "select_backend",
]


logger = logging.getLogger(__name__)


class BlockBackend(Protocol):
    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scores: Scores) -> str | None:
        """Why this backend cannot compute such scores of such inputs, or None where it can."""

    def forward(
        self,
        q_BTHD: Tensor,
        block: KeyValueBlock,
        reach: Reach,
        state: RunningSoftmax,
        scores: Scores,
    ) -> None:
        """Merges the attention over the keys of `block` in `reach` into `state`."""

    def backward(
        self,
        saved: SavedForward,
        block: KeyValueBlock,
        reach: Reach,
        dq: QueryGradient,
        dkv: KeyValueGradient,
    ) -> None:
        """Adds the gradients of the same to `dq` and `dkv`."""


_BACKENDS: dict[str, BlockBackend] = {
    "reference": ReferenceBlocks(),
    "sdpa": SdpaBlocks(),
    "triton": TritonBlocks("ieee"),
    "triton_tf32": TritonBlocks("tf32"),
    "flash": FlashBlocks(),
}
BACKENDS = ("auto", *_BACKENDS)


def select_backend(name: str, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, scores: Scores) -> BlockBackend:
    """The backend `name` for such inputs and scores; `auto` is the first that can: on CUDA of triton, sdpa,
    reference, elsewhere of sdpa, reference.

    Raises ValueError for an unknown name, and for what the named backend does not support, with those
    that do.
    """
    wanted = q_BTHD, k_BTGD, v_BTGD, scores
    if name not in BACKENDS:
        raise ValueError(f"attention.backend = {name!r}: must be one of {', '.join(BACKENDS)}")
    if name == "auto":
        ladder = ("triton", "sdpa", "reference") if q_BTHD.is_cuda else ("sdpa", "reference")
        refusals = {other: _BACKENDS[other].unsupported(*wanted) for other in ladder}
        name = next((other for other, refusal in refusals.items() if refusal is None), "reference")
        passed_over = [f"{other}: {refusals[other]}" for other in ladder[: ladder.index(name)]]
        _say_once(name, "; ".join(passed_over) or f"the first choice on {q_BTHD.device.type}")
    reason = _BACKENDS[name].unsupported(*wanted)
    if reason is not None:
        others = [other for other, it in _BACKENDS.items() if it.unsupported(*wanted) is None]
        raise ValueError(
            f"attention.backend = {name!r}: {reason}; backends that can: {', '.join(others) or 'none'}"
        )
    return _BACKENDS[name]


@cache
def _say_once(name: str, reason: str) -> None:
    logger.info("attention.backend auto is %s (%s)", name, reason)
