"""Every kernel in every default configuration, as calls on meta tensors to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import Tensor

from cpmoe.kernels.architectures import COMPILED, Compiled
from cpmoe.moe.backends.triton.configs import KernelName

if TYPE_CHECKING:
    from cpmoe.kernels.launch import Launch

# hidden_size and moe_intermediate_size: multiples of every tile, and of 16 alone.
SIZES = ((2048, 768), (2832, 1424))
NUM_EXPERTS, NUM_ROWS = 16, 4096


class Entry(NamedTuple):
    """`transposed`: with the weight as [E, N, K], as the down projection has it in forward."""

    kernel: KernelName
    architecture: Compiled
    dtype: torch.dtype
    hidden: int
    width: int
    precision: str
    transposed: bool

    @property
    def needs_matrix_unit(self) -> bool:
        return self.dtype.itemsize == 2 or self.precision == "tf32"

    def launch(self) -> Launch:
        """Its call, on tensors without storage; for a process without TRITON_INTERPRET."""
        return _launch(self)

    def __str__(self) -> str:
        kind = "bfloat16" if self.dtype == torch.bfloat16 else f"float32 {self.precision}"
        name = self.kernel.replace("_", " ") + (" transposed" if self.transposed else "")
        return f"{self.architecture} experts' {name} {kind} {self.hidden} x {self.width}"


def entries() -> Iterator[Entry]:
    """bfloat16 stands for float16, which compiles alike."""
    kinds = ((torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32"))
    for architecture, kernel in product(COMPILED, get_args(KernelName)):
        for (hidden, width), (dtype, precision) in product(SIZES, kinds):
            for transposed in (False, True) if kernel == "product" else (False,):
                yield Entry(kernel, architecture, dtype, hidden, width, precision, transposed)


def _launch(entry: Entry) -> Launch:
    from cpmoe.moe.backends.triton.launch import Problem

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=entry.dtype, device="meta")

    hidden, width = entry.hidden, entry.width
    counts = [NUM_ROWS // NUM_EXPERTS] * NUM_EXPERTS
    offsets_E = torch.empty(NUM_EXPERTS, dtype=torch.int32, device="meta")
    problem = Problem(counts, offsets_E, entry.precision, entry.architecture)
    rows_RM, rows_RI, rows_RJ = (empty(NUM_ROWS, size) for size in (hidden, width, 2 * width))
    down_EMI, gate_up_EJM = empty(NUM_EXPERTS, hidden, width), empty(NUM_EXPERTS, 2 * width, hidden)
    if entry.kernel == "gate_up":
        return problem.gate_up(rows_RM, gate_up_EJM, rows_RJ, rows_RI)
    if entry.kernel == "gate_up_gradient":
        return problem.gate_up_gradient(rows_RM, down_EMI, rows_RJ, rows_RI, empty(NUM_ROWS, 2 * width))
    if entry.kernel == "weight_gradient":
        return problem.weight_gradient(rows_RJ, rows_RM, gate_up_EJM)
    if entry.transposed:
        return problem.product(rows_RI, down_EMI, rows_RM, transposed=True)
    return problem.product(rows_RJ, gate_up_EJM, rows_RM, transposed=False)
