"""Backends of the grouped SwiGLU, and the choice among them.

Shape letters: R rows sorted by expert, C rows of one piece, M model dim, I expert width, E experts of
this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertBackend(Protocol):
    """Computes forward and backward of all experts of a rank, outside of autograd."""

    def unsupported(self, dtype: torch.dtype, device: torch.device, hidden: int, width: int) -> str | None:
        """Why this backend can not compute such rows; None where it can."""

    def forward(
        self, x_RM: Tensor, gate_EIM: Tensor, up_EIM: Tensor, down_EMI: Tensor,
        counts: list[int], offsets_E: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Output [R, M] and the pre-activations gate and up [R, I]; expert e has counts[e] rows."""

    def backward(
        self, grad_RM: Tensor, x_RM: Tensor, gate_RI: Tensor, up_RI: Tensor,
        gate_EIM: Tensor, up_EIM: Tensor, down_EMI: Tensor, counts: list[int], offsets_E: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of x and the three weights; 0 for an expert without rows."""


class LoopBackend:
    """One matrix product per expert, in pieces whose intermediate values stay in the cache of a CPU core."""

    piece_rows = 512

    def unsupported(self, dtype, device, hidden, width) -> str | None:
        return None

    def forward(self, x_RM, gate_EIM, up_EIM, down_EMI, counts, offsets_E):
        width = gate_EIM.shape[1]
        gate_RI, up_RI = x_RM.new_empty(len(x_RM), width), x_RM.new_empty(len(x_RM), width)
        y_RM = torch.empty_like(x_RM)
        hidden = self._scratch(x_RM, counts, width)
        for expert, rows, _ in self._pieces(x_RM, counts):
            gate_CI, up_CI = gate_RI[rows], up_RI[rows]
            torch.mm(x_RM[rows], gate_EIM[expert].t(), out=gate_CI)
            torch.mm(x_RM[rows], up_EIM[expert].t(), out=up_CI)
            hidden_CI = torch.ops.aten.silu.out(gate_CI, out=hidden[: len(gate_CI)]).mul_(up_CI)
            torch.mm(hidden_CI, down_EMI[expert].t(), out=y_RM[rows])
        return y_RM, gate_RI, up_RI

    def backward(self, grad_RM, x_RM, gate_RI, up_RI, gate_EIM, up_EIM, down_EMI, counts, offsets_E):
        grad_x_RM = torch.empty_like(x_RM)
        grads = [torch.empty_like(w) for w in (gate_EIM, up_EIM, down_EMI)]
        for expert, count in enumerate(counts):
            if count == 0:
                for grad in grads:
                    grad[expert].zero_()
        scratch = [self._scratch(x_RM, counts, gate_RI.shape[1]) for _ in range(3)]
        for expert, rows, first in self._pieces(x_RM, counts):
            grad_gate_EIM, grad_up_EIM, grad_down_EMI = (grad[expert] for grad in grads)
            gate_CI, up_CI, x_CM, grad_CM = gate_RI[rows], up_RI[rows], x_RM[rows], grad_RM[rows]
            silu_CI, hidden_CI, grad_CI = (buffer[: len(gate_CI)] for buffer in scratch)
            torch.mm(grad_CM, down_EMI[expert], out=grad_CI)
            torch.ops.aten.silu.out(gate_CI, out=silu_CI)
            torch.mul(silu_CI, up_CI, out=hidden_CI)
            _accumulate(grad_down_EMI, grad_CM.t(), hidden_CI, first)
            grad_up_CI = silu_CI.mul_(grad_CI)
            grad_CI.mul_(up_CI)
            grad_gate_CI = torch.ops.aten.silu_backward.grad_input(grad_CI, gate_CI, grad_input=grad_CI)
            _accumulate(grad_up_EIM, grad_up_CI.t(), x_CM, first)
            _accumulate(grad_gate_EIM, grad_gate_CI.t(), x_CM, first)
            torch.mm(grad_up_CI, up_EIM[expert], out=grad_x_RM[rows])
            grad_x_RM[rows].addmm_(grad_gate_CI, gate_EIM[expert])
        return grad_x_RM, *grads

    def _pieces(self, x_RM: Tensor, counts: list[int]) -> Iterator[tuple[int, slice, bool]]:
        """(expert, its next rows, whether they are its first)"""
        limit = self.piece_rows if x_RM.device.type == "cpu" else max(len(x_RM), 1)
        start = 0
        for expert, count in enumerate(counts):
            stop = start + count
            for piece in range(start, stop, limit):
                yield expert, slice(piece, min(piece + limit, stop)), piece == start
            start = stop
        assert start == len(x_RM), (counts, x_RM.shape)

    def _scratch(self, x_RM: Tensor, counts: list[int], width: int) -> Tensor:
        largest = max(counts)
        return x_RM.new_empty(min(largest, self.piece_rows) if x_RM.device.type == "cpu" else largest, width)


def _accumulate(grad: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    if first:
        torch.mm(left, right, out=grad)
    else:
        grad.addmm_(left, right)


class GroupedMMBackend:
    """`torch.nn.functional.grouped_mm`: all experts in one kernel on CUDA."""

    dtypes = (torch.float32, torch.bfloat16)

    def unsupported(self, dtype, device, hidden, width) -> str | None:
        if dtype not in self.dtypes:
            return f"computes {', '.join(map(str, self.dtypes))} only"
        multiple = 16 // dtype.itemsize
        if hidden % multiple or width % multiple:
            return f"needs hidden_size and moe_intermediate_size to be multiples of {multiple} in {dtype}"
        return None

    def forward(self, x_RM, gate_EIM, up_EIM, down_EMI, counts, offsets_E):
        if len(x_RM) == 0:
            empty_RI = x_RM.new_empty(0, gate_EIM.shape[1])
            return torch.empty_like(x_RM), empty_RI, empty_RI.clone()
        gate_RI = F.grouped_mm(x_RM, gate_EIM.transpose(1, 2), offs=offsets_E)
        up_RI = F.grouped_mm(x_RM, up_EIM.transpose(1, 2), offs=offsets_E)
        hidden_RI = F.silu(gate_RI).mul_(up_RI)
        return F.grouped_mm(hidden_RI, down_EMI.transpose(1, 2), offs=offsets_E), gate_RI, up_RI

    def backward(self, grad_RM, x_RM, gate_RI, up_RI, gate_EIM, up_EIM, down_EMI, counts, offsets_E):
        if len(x_RM) == 0:
            weights = (gate_EIM, up_EIM, down_EMI)
            return torch.empty_like(x_RM), *(torch.zeros_like(weight) for weight in weights)
        grad_RI = F.grouped_mm(grad_RM, down_EMI, offs=offsets_E)
        silu_RI = F.silu(gate_RI)
        grad_down_EMI = F.grouped_mm(grad_RM.t(), silu_RI * up_RI, offs=offsets_E)
        grad_up_RI = silu_RI.mul_(grad_RI)
        grad_gate_RI = torch.ops.aten.silu_backward(grad_RI.mul_(up_RI), gate_RI)
        grad_up_EIM = F.grouped_mm(grad_up_RI.t(), x_RM, offs=offsets_E)
        grad_gate_EIM = F.grouped_mm(grad_gate_RI.t(), x_RM, offs=offsets_E)
        grad_x_RM = F.grouped_mm(grad_up_RI, up_EIM, offs=offsets_E)
        grad_x_RM.add_(F.grouped_mm(grad_gate_RI, gate_EIM, offs=offsets_E))
        return grad_x_RM, grad_gate_EIM, grad_up_EIM, grad_down_EMI


BACKENDS: dict[str, ExpertBackend] = {"grouped_mm": GroupedMMBackend(), "loop": LoopBackend()}


def select_backend(
    name: str, dtype: torch.dtype, device: torch.device, hidden: int, width: int
) -> ExpertBackend:
    """The backend of this name, or for "auto" the first of `BACKENDS` that can; on CPU always the loop.

    Raises ValueError where the name is unknown or the backend can not compute such rows, naming those
    that can.
    """
    check_backend_name(name)
    reasons = {key: b.unsupported(dtype, device, hidden, width) for key, b in BACKENDS.items()}
    able = [key for key, reason in reasons.items() if reason is None]
    if name == "auto":
        return BACKENDS["loop" if device.type == "cpu" else able[0]]
    if reasons[name] is not None:
        raise ValueError(
            f"cpmoe.experts.backend = {name!r}: {reasons[name]}, and the rows are {dtype} on {device.type} "
            f"with hidden_size {hidden} and moe_intermediate_size {width}; legal: auto, {', '.join(able)}"
        )
    return BACKENDS[name]


def check_backend_name(name: str) -> None:
    """Raises ValueError where `name` is neither "auto" nor a backend."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"cpmoe.experts.backend = {name!r}: must be one of auto, {', '.join(BACKENDS)}")
