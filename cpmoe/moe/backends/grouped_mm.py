"""`torch.nn.functional.grouped_mm`: all experts in one kernel on CUDA.

Shape letters: R rows sorted by expert, M model dim, I expert width, J = 2 I, E experts of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cpmoe.moe.backends.swiglu import swiglu, swiglu_backward


class GroupedMMBackend:
    dtypes = (torch.float32, torch.bfloat16)

    def unsupported(self, dtype, device, hidden, width) -> str | None:
        if dtype not in self.dtypes:
            return f"computes {', '.join(map(str, self.dtypes))} only"
        multiple = 16 // dtype.itemsize
        if hidden % multiple or width % multiple:
            return f"needs hidden_size and moe_intermediate_size to be multiples of {multiple} in {dtype}"
        return None

    def takes_blocks(self, x_RM, blocks) -> bool:
        return False

    def forward(self, x_RM, gate_up_EJM, down_EMI, splits):
        width = down_EMI.shape[2]
        if len(x_RM) == 0:
            return torch.empty_like(x_RM), x_RM.new_empty(0, 2 * width)
        gate_up_RJ = F.grouped_mm(x_RM, gate_up_EJM.transpose(1, 2), offs=splits.offsets_E)
        hidden_RI = swiglu(gate_up_RJ, x_RM.new_empty(len(x_RM), width))
        return F.grouped_mm(hidden_RI, down_EMI.transpose(1, 2), offs=splits.offsets_E), gate_up_RJ

    def backward(self, grad_RM, x_RM, gate_up_RJ, gate_up_EJM, down_EMI, splits):
        if len(x_RM) == 0:
            return torch.empty_like(x_RM), torch.zeros_like(gate_up_EJM), torch.zeros_like(down_EMI)
        offsets_E = splits.offsets_E
        grad_RI = F.grouped_mm(grad_RM, down_EMI, offs=offsets_E)
        hidden_RI, grad_gate_up_RJ = torch.empty_like(grad_RI), torch.empty_like(gate_up_RJ)
        swiglu_backward(grad_RI, gate_up_RJ, hidden_RI, grad_gate_up_RJ)
        grad_down_EMI = F.grouped_mm(grad_RM.t(), hidden_RI, offs=offsets_E)
        grad_gate_up_EJM = F.grouped_mm(grad_gate_up_RJ.t(), x_RM, offs=offsets_E)
        grad_x_RM = F.grouped_mm(grad_gate_up_RJ, gate_up_EJM, offs=offsets_E)
        return grad_x_RM, grad_gate_up_EJM, grad_down_EMI
