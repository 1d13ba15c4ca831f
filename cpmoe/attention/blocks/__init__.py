"""Backends that compute the attention over one block of keys, by name.

A backend is a module-level object with the methods of `BlockBackend`; adding one is a line in `_BACKENDS`.

Shape letters: B batch, T queries or keys of a block, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cpmoe.attention.blocks.accumulators import (
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
)
from cpmoe.attention.blocks.reference import ReferenceBlocks
from cpmoe.attention.blocks.sdpa import SdpaBlocks
from cpmoe.attention.reach import Reach

__all__ = [
    "BACKENDS",
    "BlockBackend",
    "KeyValueBlock",
    "KeyValueGradient",
    "QueryGradient",
    "RunningSoftmax",
    "SavedForward",
    "select_backend",
]


class BlockBackend(Protocol):
    def unsupported(self, q_BTHD: Tensor, k_BTGD: Tensor) -> str | None:
        """Why this backend cannot compute such inputs, or None where it can."""

    def forward(
        self,
        q_BTHD: Tensor,
        block: KeyValueBlock,
        reach: Reach,
        state: RunningSoftmax,
        scale: float,
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


_BACKENDS: dict[str, BlockBackend] = {"reference": ReferenceBlocks(), "sdpa": SdpaBlocks()}
BACKENDS = ("auto", *_BACKENDS)


def select_backend(name: str, q_BTHD: Tensor, k_BTGD: Tensor) -> BlockBackend:
    """The backend `name` for such inputs; `auto` is sdpa, or reference where sdpa cannot (float64 on CUDA).

    Raises ValueError for an unknown name, and for inputs the named backend does not support, with those
    that do.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention.backend = {name!r}: must be one of {', '.join(BACKENDS)}")
    if name == "auto":
        name = "reference" if q_BTHD.is_cuda and q_BTHD.dtype == torch.float64 else "sdpa"
    reason = _BACKENDS[name].unsupported(q_BTHD, k_BTGD)
    if reason is not None:
        able = [other for other, it in _BACKENDS.items() if it.unsupported(q_BTHD, k_BTGD) is None]
        raise ValueError(
            f"attention.backend = {name!r}: {reason}; backends that can: {', '.join(able) or 'none'}"
        )
    return _BACKENDS[name]
