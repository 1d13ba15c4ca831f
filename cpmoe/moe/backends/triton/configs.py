"""Tile sizes, warps and pipeline stages by architecture and dtype: a table, no tuning at run time.

Every entry is compiled ahead for its architecture in the tests and must not spill registers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from cpmoe.kernels.architectures import Architecture

KernelName = Literal["gate_up", "product", "gate_up_gradient", "weight_gradient"]


class Tiles(NamedTuple):
    """A tile of the output is [block_m, block_n], summed in steps of block_k."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# 16-bit operands.
_HALF: dict[str, dict[KernelName, Tiles]] = {
    "sm_80": {
        "gate_up": Tiles(128, 128, 32, 8, 4),
        "product": Tiles(128, 128, 32, 8, 4),
        "gate_up_gradient": Tiles(128, 64, 32, 8, 4),
        "weight_gradient": Tiles(128, 128, 32, 8, 4),
    },
    "sm_90": {
        "gate_up": Tiles(128, 128, 64, 8, 3),
        "product": Tiles(128, 128, 64, 8, 3),
        "gate_up_gradient": Tiles(128, 64, 64, 8, 3),
        "weight_gradient": Tiles(128, 128, 64, 8, 3),
    },
    "sm_100": {
        "gate_up": Tiles(128, 128, 64, 8, 3),
        "product": Tiles(128, 128, 64, 8, 3),
        "gate_up_gradient": Tiles(128, 128, 64, 8, 3),
        "weight_gradient": Tiles(128, 128, 64, 8, 3),
    },
    "gfx942": {
        "gate_up": Tiles(128, 128, 32, 8, 2),
        "product": Tiles(128, 128, 32, 8, 2),
        "gate_up_gradient": Tiles(128, 128, 32, 8, 2),
        "weight_gradient": Tiles(128, 128, 32, 8, 2),
    },
}
# float32, by how it is multiplied; everywhere the same.
_SINGLE: dict[str, dict[KernelName, Tiles]] = {
    "ieee": {
        "gate_up": Tiles(64, 64, 16, 8, 2),
        "product": Tiles(64, 64, 16, 8, 2),
        "gate_up_gradient": Tiles(64, 64, 16, 8, 2),
        "weight_gradient": Tiles(64, 64, 16, 8, 2),
    },
    "tf32": {
        "gate_up": Tiles(128, 64, 32, 4, 3),
        "product": Tiles(128, 64, 32, 4, 3),
        "gate_up_gradient": Tiles(128, 64, 32, 8, 2),
        "weight_gradient": Tiles(128, 64, 32, 4, 3),
    },
}

# Small, so that few rows fill several tiles; unlike each other, so that nothing mixes them up.
_INTERPRETER = Tiles(16, 32, 16, 4, 1)

# Row tiles that programs go over before the next column tile.
SWIZZLE = 8


def tiles_for(kernel: KernelName, architecture: Architecture, dtype: torch.dtype, precision: str) -> Tiles:
    if architecture == "interpreter":
        return _INTERPRETER
    table = _SINGLE[precision] if dtype == torch.float32 else _HALF[architecture]
    return table[kernel]
