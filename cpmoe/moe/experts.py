"""Grouped SwiGLU experts: stacked weights, one autograd Function, a registry of backends.

Shape letters: R rows sorted by expert, M model dim, I expert width, E experts of this rank.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from cpmoe.moe.backends import ExpertBackend, check_backend_name, select_backend
from cpmoe.moe.dispatch import RowSplits


class Experts(nn.Module):
    """The experts of this rank: y = down(silu(gate(x)) · up(x)) per expert (Shazeer, 2020), no biases.

    gate_proj, up_proj [E, I, M] and down_proj [E, M, I], each expert in the orientation of nn.Linear.
    `first_expert` is the global index of expert 0. Does not communicate.
    Raises ValueError where `backend` is unknown, and at the first forward where it can not compute the
    type, device or shape of the rows.
    """

    def __init__(
        self, num_experts: int, first_expert: int, hidden_size: int, width: int, std: float, backend: str
    ) -> None:
        super().__init__()
        check_backend_name(backend)
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))
        self.first_expert = first_expert
        self.initializer_range = std
        self.backend = backend

    def forward(self, rows_RM: Tensor, splits: RowSplits) -> Tensor:
        """rows_RM [R, M] sorted by expert, splits.counts[e] rows for expert e → [R, M]."""
        width, hidden = self.gate_proj.shape[-2:]
        backend = select_backend(self.backend, rows_RM.dtype, rows_RM.device, hidden, width)
        return _GroupedSwiGLU.apply(rows_RM, self.gate_proj, self.up_proj, self.down_proj, splits, backend)


class _GroupedSwiGLU(torch.autograd.Function):
    """Saves the parameters themselves, no views of them: ZeRO-3 frees and refills `param.data` in between."""

    @staticmethod
    def forward(ctx, x_RM, gate_EIM, up_EIM, down_EMI, splits: RowSplits, backend: ExpertBackend):  # type: ignore[override]
        y_RM, gate_RI, up_RI = backend.forward(
            x_RM, gate_EIM, up_EIM, down_EMI, splits.counts, splits.offsets_E
        )
        ctx.save_for_backward(x_RM, gate_RI, up_RI, gate_EIM, up_EIM, down_EMI)
        ctx.splits, ctx.backend = splits, backend
        return y_RM

    @staticmethod
    def backward(ctx, grad_RM):  # type: ignore[override]
        splits = ctx.splits
        grads = ctx.backend.backward(
            grad_RM.contiguous(), *ctx.saved_tensors, splits.counts, splits.offsets_E
        )
        return *grads, None, None


def init_experts(experts: Experts, seed: int, name: str) -> None:
    """Draws the weights from normal(0, initializer_range), the same for any expert-parallel degree.

    Each global expert of each tensor has a generator of its own, seeded by `seed`, the tensor's full name
    (`name` is that of the module) and the expert's global index.
    """
    with torch.no_grad():
        for parameter_name, parameter in experts.named_parameters():
            for index in range(parameter.shape[0]):
                label = f"{seed}/{name}.{parameter_name}/{experts.first_expert + index}"
                digest = hashlib.sha256(label.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                values = torch.empty(parameter.shape[1:], dtype=torch.float32)
                parameter[index].copy_(values.normal_(0, experts.initializer_range, generator=generator))
