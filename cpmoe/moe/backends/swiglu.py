"""The SwiGLU between the two grouped products, and its gradient, in a handful of passes over memory.

Shape letters: C rows, I expert width, J = 2 I (gate, then up).
"""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_up_CJ: Tensor, hidden_CI: Tensor) -> Tensor:
    """Writes silu(gate) · up to `hidden`, and returns it."""
    gate_CI, up_CI = gate_up_CJ.chunk(2, dim=-1)
    return torch.ops.aten.silu.out(gate_CI, out=hidden_CI).mul_(up_CI)


def swiglu_backward(grad_CI: Tensor, gate_up_CJ: Tensor, hidden_CI: Tensor, grad_gate_up_CJ: Tensor) -> None:
    """Writes silu(gate) · up to `hidden`, and the gradient of its inputs, `grad` being that of `hidden`.

    d silu(g) / dg = s + silu(g) (1 - s) with s = sigmoid(g), so that one exponential serves all. 16-bit
    types are computed in float32.
    """
    if gate_up_CJ.element_size() == 2:
        wide_CI, wide_CJ = torch.empty_like(hidden_CI, dtype=torch.float32), gate_up_CJ.float()
        wide_grad_CJ = torch.empty_like(wide_CJ)
        swiglu_backward(grad_CI.float(), wide_CJ, wide_CI, wide_grad_CJ)
        hidden_CI.copy_(wide_CI)
        grad_gate_up_CJ.copy_(wide_grad_CJ)
        return
    gate_CI, up_CI = gate_up_CJ.chunk(2, dim=-1)
    grad_gate_CI, grad_up_CI = grad_gate_up_CJ.chunk(2, dim=-1)
    sigmoid_CI = torch.sigmoid(gate_CI, out=grad_gate_CI)
    silu_CI = torch.mul(gate_CI, sigmoid_CI, out=hidden_CI)
    torch.mul(silu_CI, grad_CI, out=grad_up_CI)
    one = torch.ones((), dtype=silu_CI.dtype, device=silu_CI.device)
    torch.lerp(sigmoid_CI, one, silu_CI, out=grad_gate_CI).mul_(grad_CI).mul_(up_CI)
    hidden_CI.mul_(up_CI)
