"""One matrix product per expert: the reference, float64, and the fastest on CPUs.

Shape letters: R rows, C rows of one piece, M model dim, I expert width, J = 2 I, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cpmoe.moe.backends.swiglu import swiglu, swiglu_backward
from cpmoe.moe.dispatch import RowSplits


class Piece(NamedTuple):
    """Some rows of one expert; `is_first`: no piece before it was of this expert."""

    expert: int
    rows: slice
    is_first: bool


class LoopBackend:
    """On CPUs in pieces whose intermediate values stay in the cache of a core, from rows as they arrived."""

    piece_rows = 512
    # Smaller blocks of one rank and expert than this are worth a copy that makes them one block per expert.
    block_rows = 256

    def unsupported(self, dtype, device, hidden, width) -> str | None:
        return None

    def takes_blocks(self, x_RM: Tensor, blocks: list[list[int]]) -> bool:
        filled = sum(count > 0 for block in blocks for count in block)
        return x_RM.device.type == "cpu" and len(x_RM) >= self.block_rows * filled

    def forward(self, x_RM, gate_up_EJM, down_EMI, splits):
        gate_up_RJ, y_RM = x_RM.new_empty(len(x_RM), gate_up_EJM.shape[1]), torch.empty_like(x_RM)
        pieces = self._pieces(x_RM, splits)
        (hidden,) = _scratch(x_RM, pieces, down_EMI.shape[2])
        for expert, rows, _ in pieces:
            gate_up_CJ = torch.mm(x_RM[rows], gate_up_EJM[expert].t(), out=gate_up_RJ[rows])
            hidden_CI = swiglu(gate_up_CJ, hidden[: len(gate_up_CJ)])
            torch.mm(hidden_CI, down_EMI[expert].t(), out=y_RM[rows])
        return y_RM, gate_up_RJ

    def backward(self, grad_RM, x_RM, gate_up_RJ, gate_up_EJM, down_EMI, splits):
        grad_x_RM = torch.empty_like(x_RM)
        grad_gate_up_EJM, grad_down_EMI = torch.empty_like(gate_up_EJM), torch.empty_like(down_EMI)
        for expert, count in enumerate(splits.counts):
            if count == 0:
                grad_gate_up_EJM[expert].zero_()
                grad_down_EMI[expert].zero_()
        pieces = self._pieces(x_RM, splits)
        width = down_EMI.shape[2]
        scratch = _scratch(x_RM, pieces, width, width, 2 * width)
        for expert, rows, is_first in pieces:
            x_CM, grad_CM, gate_up_CJ = x_RM[rows], grad_RM[rows], gate_up_RJ[rows]
            grad_CI, hidden_CI, grad_gate_up_CJ = (buffer[: len(x_CM)] for buffer in scratch)
            torch.mm(grad_CM, down_EMI[expert], out=grad_CI)
            swiglu_backward(grad_CI, gate_up_CJ, hidden_CI, grad_gate_up_CJ)
            _add_product(grad_down_EMI[expert], grad_CM.t(), hidden_CI, is_first)
            _add_product(grad_gate_up_EJM[expert], grad_gate_up_CJ.t(), x_CM, is_first)
            torch.mm(grad_gate_up_CJ, gate_up_EJM[expert], out=grad_x_RM[rows])
        return grad_x_RM, grad_gate_up_EJM, grad_down_EMI

    def _pieces(self, x_RM: Tensor, splits: RowSplits) -> list[Piece]:
        limit = self.piece_rows if x_RM.device.type == "cpu" else max(len(x_RM), 1)
        return list(_pieces(splits.blocks, limit))


def _pieces(blocks: list[list[int]], limit: int) -> Iterator[Piece]:
    """At most `limit` rows each, expert by expert; blocks [P][E] of rows lie by rank, then by expert."""
    starts, start = [], 0
    for block in blocks:
        starts.append([start + sum(block[:expert]) for expert in range(len(block))])
        start += sum(block)
    for expert in range(len(blocks[0])):
        is_first = True
        for block, first_rows in zip(blocks, starts, strict=True):
            stop = first_rows[expert] + block[expert]
            for row in range(first_rows[expert], stop, limit):
                yield Piece(expert, slice(row, min(row + limit, stop)), is_first)
                is_first = False


def _scratch(x_RM: Tensor, pieces: list[Piece], *widths: int) -> list[Tensor]:
    longest = max((piece.rows.stop - piece.rows.start for piece in pieces), default=0)
    return [x_RM.new_empty(longest, width) for width in widths]


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    if is_first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)
