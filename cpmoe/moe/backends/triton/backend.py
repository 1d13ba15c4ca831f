"""Experts through the kernels of this package.

Shape letters: R rows sorted by expert, M model dim, I expert width, J = 2 I, E experts of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpmoe.kernels.architectures import architecture_of, no_kernels
from cpmoe.moe.dispatch import RowSplits

if TYPE_CHECKING:
    from cpmoe.moe.backends.triton.launch import Problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonExperts:
    """Three kernels forward and backward each product, with the SwiGLU inside those that make its inputs.

    float32 is multiplied exactly, or in tf32 where `torch.set_float32_matmul_precision` allows it.
    """

    def unsupported(self, dtype, device, hidden, width) -> str | None:
        missing = no_kernels(device)
        if missing is not None:
            return missing
        return None if dtype in DTYPES else f"computes {', '.join(map(str, DTYPES))} only"

    def takes_blocks(self, x_RM, blocks) -> bool:
        return False

    def forward(self, x_RM, gate_up_EJM, down_EMI, splits):
        problem = _problem(x_RM, splits)
        gate_up_RJ = x_RM.new_empty(len(x_RM), gate_up_EJM.shape[1])
        hidden_RI, y_RM = x_RM.new_empty(len(x_RM), down_EMI.shape[2]), torch.empty_like(x_RM)
        problem.gate_up(x_RM, gate_up_EJM, gate_up_RJ, hidden_RI).run()
        problem.product(hidden_RI, down_EMI, y_RM, transposed=True).run()
        return y_RM, gate_up_RJ

    def backward(self, grad_RM, x_RM, gate_up_RJ, gate_up_EJM, down_EMI, splits):
        problem = _problem(x_RM, splits)
        hidden_RI, grad_gate_up_RJ = (
            x_RM.new_empty(len(x_RM), down_EMI.shape[2]),
            torch.empty_like(gate_up_RJ),
        )
        problem.gate_up_gradient(grad_RM, down_EMI, gate_up_RJ, hidden_RI, grad_gate_up_RJ).run()
        grad_gate_up_EJM, grad_down_EMI = torch.empty_like(gate_up_EJM), torch.empty_like(down_EMI)
        problem.weight_gradient(grad_RM, hidden_RI, grad_down_EMI).run()
        del hidden_RI  # before the gradient of the rows, so that one may take the place of the other
        problem.weight_gradient(grad_gate_up_RJ, x_RM, grad_gate_up_EJM).run()
        grad_x_RM = torch.empty_like(x_RM)
        problem.product(grad_gate_up_RJ, gate_up_EJM, grad_x_RM, transposed=False).run()
        return grad_x_RM, grad_gate_up_EJM, grad_down_EMI


def _problem(x_RM: Tensor, splits: RowSplits) -> Problem:
    from cpmoe.moe.backends.triton.launch import Problem

    fast = x_RM.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return Problem(splits.counts, splits.offsets_E, "tf32" if fast else "ieee", architecture_of(x_RM.device))
