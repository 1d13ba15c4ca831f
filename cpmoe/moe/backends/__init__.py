"""Backends of the grouped SwiGLU, by name, and the choice among them.

A backend is a module-level object with the methods of `ExpertBackend`; adding one is a line in `BACKENDS`.

Shape letters: R rows, M model dim, I expert width, J = 2 I, E experts of this rank.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cpmoe.kernels.architectures import architecture_of
from cpmoe.moe.backends.grouped_mm import GroupedMMBackend
from cpmoe.moe.backends.loop import LoopBackend
from cpmoe.moe.backends.triton import TritonExperts
from cpmoe.moe.dispatch import RowSplits

__all__ = ["BACKENDS", "ExpertBackend", "check_backend_name", "select_backend"]

logger = logging.getLogger(__name__)


class ExpertBackend(Protocol):
    """Computes forward and backward of all experts of a rank, outside of autograd."""

    def unsupported(self, dtype: torch.dtype, device: torch.device, hidden: int, width: int) -> str | None:
        """Why this backend can not compute such rows; None where it can."""

    def takes_blocks(self, x_RM: Tensor, blocks: list[list[int]]) -> bool:
        """Whether it wants the rows as they arrived, by rank, then expert; else all of an expert together."""

    def forward(
        self, x_RM: Tensor, gate_up_EJM: Tensor, down_EMI: Tensor, splits: RowSplits
    ) -> tuple[Tensor, Tensor]:
        """Output [R, M] and the pre-activations [R, J]: gate, then up. `splits.blocks` says how rows lie."""

    def backward(
        self,
        grad_RM: Tensor,
        x_RM: Tensor,
        gate_up_RJ: Tensor,
        gate_up_EJM: Tensor,
        down_EMI: Tensor,
        splits: RowSplits,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x and the two weights; 0 for an expert without rows."""


BACKENDS: dict[str, ExpertBackend] = {
    "grouped_mm": GroupedMMBackend(),
    "triton": TritonExperts(),
    "loop": LoopBackend(),
}


@cache
def select_backend(
    name: str, dtype: torch.dtype, device: torch.device, hidden: int, width: int
) -> ExpertBackend:
    """The backend of this name; for "auto" the first that can of those that `_ladder` names.

    Raises ValueError where the name is unknown or the backend can not compute such rows, naming those
    that can.
    """
    check_backend_name(name)
    reasons = {key: b.unsupported(dtype, device, hidden, width) for key, b in BACKENDS.items()}
    if name == "auto":
        ladder, why = _ladder(dtype, device)
        name = next(key for key in ladder if reasons[key] is None)
        passed_over = [f"{key}: {reasons[key]}" for key in ladder[: ladder.index(name)]]
        _say_once(name, "; ".join(passed_over) or why)
    if reasons[name] is not None:
        able = [key for key, reason in reasons.items() if reason is None]
        raise ValueError(
            f"cpmoe.experts.backend = {name!r}: {reasons[name]}, and the rows are {dtype} on {device.type} "
            f"with hidden_size {hidden} and moe_intermediate_size {width}; legal: auto, {', '.join(able)}"
        )
    return BACKENDS[name]


def _ladder(dtype: torch.dtype, device: torch.device) -> tuple[tuple[str, ...], str]:
    """Backends, fastest first, and what they are chosen for. `grouped_mm` loops over the experts on the host
    but for bfloat16 on NVIDIA's GPUs from sm_90 on."""
    if device.type != "cuda":
        return ("loop",), f"the fastest on {device.type}"
    architecture = architecture_of(device)
    why = f"the fastest in {dtype} on {architecture}"
    if architecture in ("sm_90", "sm_100") and dtype == torch.bfloat16:
        return ("grouped_mm", "triton", "loop"), why
    return ("triton", "grouped_mm", "loop"), why


def check_backend_name(name: str) -> None:
    """Raises ValueError where `name` is neither "auto" nor a backend."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"cpmoe.experts.backend = {name!r}: must be one of auto, {', '.join(BACKENDS)}")


@cache
def _say_once(name: str, reason: str) -> None:
    logger.info("experts.backend auto is %s (%s)", name, reason)
