"""Grouped SwiGLU experts: stacked weights and one autograd Function over a registry of backends.

Shape letters: R rows, M model dim, I expert width, J = 2 I, E experts of this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from cpmoe.moe.backends import ExpertBackend, check_backend_name, select_backend
from cpmoe.moe.dispatch import RowSplits
from cpmoe.moe.permute import regroup, ungroup


class Experts(nn.Module):
    """The experts of this rank: y = down(silu(gate(x)) · up(x)) per expert (Shazeer, 2020), no biases.

    gate_up_proj [E, J, M] holds the I rows of gate, then those of up; down_proj [E, M, I]: the layout of
    transformers' fused experts, in which `projections` of one expert are contiguous views.
    `first_expert` is the global index of expert 0. Does not communicate.
    Raises ValueError where `backend` is unknown, and at the first forward where it can not compute the
    type, device or shape of the rows.
    """

    def __init__(
        self, num_experts: int, first_expert: int, hidden_size: int, width: int, std: float, backend: str
    ) -> None:
        super().__init__()
        check_backend_name(backend)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))
        self.first_expert = first_expert
        self.initializer_range = std
        self.backend = backend

    def forward(self, rows_RM: Tensor, splits: RowSplits, weights: Sequence[Tensor] | None = None) -> Tensor:
        """rows_RM [R, M] as they arrived: by rank, then expert, splits.blocks of them → [R, M] likewise.

        `weights` stand in for the parameters, in their order.
        """
        gate_up_EJM, down_EMI = weights or (self.gate_up_proj, self.down_proj)
        hidden, width = self.down_proj.shape[-2:]
        backend = select_backend(self.backend, rows_RM.dtype, rows_RM.device, hidden, width)
        blocks = splits.blocks
        if backend.takes_blocks(rows_RM, blocks):
            return _GroupedSwiGLU.apply(rows_RM, gate_up_EJM, down_EMI, splits, backend)
        sorted_RM, splits = regroup(rows_RM, blocks), replace(splits, blocks=[splits.counts])
        y_RM = _GroupedSwiGLU.apply(sorted_RM, gate_up_EJM, down_EMI, splits, backend)
        return ungroup(y_RM, blocks)


class _GroupedSwiGLU(torch.autograd.Function):
    """Saves the parameters themselves, no views of them: ZeRO-3 frees and refills `param.data` in between."""

    @staticmethod
    def forward(ctx, x_RM, gate_up_EJM, down_EMI, splits: RowSplits, backend: ExpertBackend):  # type: ignore[override]
        y_RM, gate_up_RJ = backend.forward(x_RM, gate_up_EJM, down_EMI, splits)
        ctx.save_for_backward(x_RM, gate_up_RJ, gate_up_EJM, down_EMI)
        ctx.splits, ctx.backend = splits, backend
        return y_RM

    @staticmethod
    def backward(ctx, grad_RM):  # type: ignore[override]
        grads = ctx.backend.backward(grad_RM.contiguous(), *ctx.saved_tensors, ctx.splits)
        return *grads, None, None


def projections(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, [out, in]) of what one expert's slice of a parameter of `Experts` holds; views of it.

    gate_up_proj [J, M] → gate_proj and up_proj [I, M]; down_proj [M, I] itself: the names and shapes of one
    expert in Hugging Face checkpoints.
    """
    if name == "gate_up_proj":
        gate, up = weight.chunk(2)
        yield "gate_proj", gate
        yield "up_proj", up
    else:
        yield name, weight


def init_experts(experts: Experts, seed: int, name: str) -> None:
    """Draws the weights from normal(0, initializer_range), the same for any expert-parallel degree.

    Each projection of each global expert has a generator of its own, seeded by `seed`, the projection's full
    name (`name` is that of the module) and the expert's global index.
    """
    with torch.no_grad():
        for parameter_name, parameter in experts.named_parameters():
            for index, expert in enumerate(parameter):
                for projection_name, projection in projections(parameter_name, expert):
                    label = f"{seed}/{name}.{projection_name}/{experts.first_expert + index}"
                    digest = hashlib.sha256(label.encode()).digest()
                    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                    values = torch.empty(projection.shape, dtype=torch.float32)
                    projection.copy_(values.normal_(0, experts.initializer_range, generator=generator))
