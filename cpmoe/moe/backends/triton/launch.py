"""From tensors to kernel calls: arguments, grid and configuration, for running and for compiling ahead.

Shape letters: R rows sorted by expert, M model dim, I expert width, J = 2 I, E experts of this rank; K inner
and N outer size of a product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from cpmoe.kernels.architectures import Architecture
from cpmoe.kernels.launch import Launch
from cpmoe.moe.backends.triton.configs import SWIZZLE, KernelName, Tiles, tiles_for
from cpmoe.moe.backends.triton.rows import gate_up_gradient_kernel, gate_up_kernel, product_kernel
from cpmoe.moe.backends.triton.weights import weight_gradient_kernel


@dataclass(frozen=True)
class Problem:
    """What the kernels of one call share. All tensors are contiguous, of one dtype.

    counts     [E] on the host: rows of each expert
    offsets_E  int32, on the device: where each expert's rows end
    precision  how float32 is multiplied: ieee or tf32
    """

    counts: list[int]
    offsets_E: Tensor
    precision: str
    architecture: Architecture
    _starts_by_tile: dict[int, Tensor] = field(default_factory=dict)

    def gate_up(self, x_RM: Tensor, weight_EJM: Tensor, gate_up_RJ: Tensor, hidden_RI: Tensor) -> Launch:
        """Writes the pre-activations and silu(gate) · up."""
        tiles = self._tiles("gate_up", x_RM)
        arguments = {
            "x_ptr": x_RM,
            "gate_up_weight_ptr": weight_EJM,
            "gate_up_ptr": gate_up_RJ,
            "hidden_ptr": hidden_RI,
            "starts_ptr": self._starts(tiles),
        }
        constants = {"K": x_RM.shape[1], "WIDTH": hidden_RI.shape[1]}
        column_tiles = triton.cdiv(hidden_RI.shape[1], tiles.block_n // 2)
        return self._by_rows(gate_up_kernel, column_tiles, arguments, constants, tiles)

    def product(self, a_RK: Tensor, weight: Tensor, out_RN: Tensor, transposed: bool) -> Launch:
        """Writes a [R, K] times weight [E, K, N], or where it is transposed [E, N, K]."""
        tiles = self._tiles("product", a_RK)
        arguments = {
            "a_ptr": a_RK,
            "weight_ptr": weight,
            "out_ptr": out_RN,
            "starts_ptr": self._starts(tiles),
        }
        constants = {"K": a_RK.shape[1], "N": out_RN.shape[1], "TRANSPOSED": transposed}
        column_tiles = triton.cdiv(out_RN.shape[1], tiles.block_n)
        return self._by_rows(product_kernel, column_tiles, arguments, constants, tiles)

    def gate_up_gradient(
        self,
        grad_RM: Tensor,
        down_EMI: Tensor,
        gate_up_RJ: Tensor,
        hidden_RI: Tensor,
        grad_gate_up_RJ: Tensor,
    ) -> Launch:
        """Writes hidden again, and the gradient of the pre-activations."""
        tiles = self._tiles("gate_up_gradient", grad_RM)
        arguments = {
            "grad_ptr": grad_RM,
            "down_weight_ptr": down_EMI,
            "gate_up_ptr": gate_up_RJ,
            "hidden_ptr": hidden_RI,
            "grad_gate_up_ptr": grad_gate_up_RJ,
            "starts_ptr": self._starts(tiles),
        }
        constants = {"K": grad_RM.shape[1], "WIDTH": hidden_RI.shape[1]}
        column_tiles = triton.cdiv(hidden_RI.shape[1], tiles.block_n)
        return self._by_rows(gate_up_gradient_kernel, column_tiles, arguments, constants, tiles)

    def weight_gradient(self, a_RN: Tensor, b_RK: Tensor, out_ENK: Tensor) -> Launch:
        """Writes Σ a ⊗ b over each expert's rows, 0 for an expert without rows."""
        tiles = self._tiles("weight_gradient", a_RN)
        arguments = {"a_ptr": a_RN, "b_ptr": b_RK, "out_ptr": out_ENK, "starts_ptr": self._starts(tiles)}
        num_experts, outer, inner = out_ENK.shape
        constants = {**self._constants(tiles, a_RN), "K": inner, "N": outer}
        grid = (triton.cdiv(outer, tiles.block_m) * triton.cdiv(inner, tiles.block_n), num_experts)
        return Launch(weight_gradient_kernel, grid, arguments, constants, tiles)

    def _by_rows(
        self, kernel: Any, column_tiles: int, arguments: dict[str, Any], sizes: dict[str, Any], tiles: Tiles
    ) -> Launch:
        num_experts = len(self.counts)
        constants = {
            **self._constants(tiles, next(iter(arguments.values()))),
            **sizes,
            "NUM_EXPERTS": num_experts,
            "EXPERTS": triton.next_power_of_2(num_experts),
        }
        row_tiles = sum(triton.cdiv(count, tiles.block_m) for count in self.counts)
        return Launch(kernel, (row_tiles * column_tiles,), arguments, constants, tiles)

    def _constants(self, tiles: Tiles, operand: Tensor) -> dict[str, Any]:
        return {
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "SWIZZLE": SWIZZLE,
            "PRECISION": self.precision,
            "UPCAST": self.architecture == "interpreter" and operand.dtype == torch.bfloat16,
        }

    def _tiles(self, kernel: KernelName, operand: Tensor) -> Tiles:
        return tiles_for(kernel, self.architecture, operand.dtype, self.precision)

    def _starts(self, tiles: Tiles) -> Tensor:
        """int32 [2, E + 1]; see rows.py."""
        if tiles.block_m not in self._starts_by_tile:
            ends_E = self.offsets_E
            counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
            tiles_E = (counts_E + tiles.block_m - 1) // tiles.block_m
            starts = torch.stack((ends_E, tiles_E.cumsum(0, dtype=torch.int32)))
            self._starts_by_tile[tiles.block_m] = pad(starts, (1, 0))
        return self._starts_by_tile[tiles.block_m]
