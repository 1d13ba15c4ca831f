"""Tile sizes, warps and pipeline stages by architecture, head size and dtype: a table, no tuning at run time.

Every entry is compiled ahead for its architecture in the tests (compile.py) and must not spill registers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from cpmoe.kernels.architectures import Architecture

KernelName = Literal["forward", "dq", "dkv"]


class Tiles(NamedTuple):
    """A tile has `block_m` query rows and `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (kernel, widest padded head size up to which the entry holds) -> tiles; 16-bit inputs.
_HALF: dict[str, dict[tuple[KernelName, int], Tiles]] = {
    "sm_80": {
        ("forward", 64): Tiles(128, 64, 4, 3),
        ("forward", 128): Tiles(128, 64, 8, 2),
        ("forward", 256): Tiles(64, 64, 8, 1),
        ("forward", 512): Tiles(64, 64, 8, 1),
        ("dq", 64): Tiles(128, 64, 8, 2),
        ("dq", 128): Tiles(64, 64, 8, 2),
        ("dq", 256): Tiles(64, 32, 8, 1),
        ("dq", 512): Tiles(32, 32, 8, 1),
        ("dkv", 64): Tiles(32, 64, 8, 2),
        ("dkv", 128): Tiles(32, 64, 8, 2),
        ("dkv", 256): Tiles(32, 32, 8, 1),
        ("dkv", 512): Tiles(32, 32, 8, 1),
    },
    "sm_90": {
        ("forward", 64): Tiles(128, 128, 8, 3),
        ("forward", 128): Tiles(128, 128, 8, 2),
        ("forward", 256): Tiles(128, 64, 8, 2),
        ("forward", 512): Tiles(128, 64, 8, 2),
        ("dq", 64): Tiles(128, 128, 8, 2),
        ("dq", 128): Tiles(128, 64, 8, 2),
        ("dq", 256): Tiles(64, 64, 8, 2),
        ("dq", 512): Tiles(64, 32, 8, 2),
        ("dkv", 64): Tiles(64, 128, 8, 2),
        ("dkv", 128): Tiles(64, 64, 8, 2),
        ("dkv", 256): Tiles(16, 64, 8, 2),
        ("dkv", 512): Tiles(32, 32, 8, 1),
    },
    "sm_100": {
        ("forward", 64): Tiles(128, 128, 8, 3),
        ("forward", 128): Tiles(128, 64, 8, 3),
        ("forward", 256): Tiles(64, 64, 8, 2),
        ("forward", 512): Tiles(64, 64, 8, 2),
        ("dq", 64): Tiles(128, 128, 8, 2),
        ("dq", 128): Tiles(128, 64, 8, 2),
        ("dq", 256): Tiles(64, 64, 8, 2),
        ("dq", 512): Tiles(64, 64, 8, 1),
        ("dkv", 64): Tiles(64, 128, 8, 2),
        ("dkv", 128): Tiles(64, 64, 8, 2),
        ("dkv", 256): Tiles(32, 32, 8, 1),
        ("dkv", 512): Tiles(32, 32, 8, 1),
    },
    "gfx942": {
        ("forward", 64): Tiles(128, 64, 4, 2),
        ("forward", 128): Tiles(128, 64, 8, 1),
        ("forward", 256): Tiles(64, 32, 4, 1),
        ("forward", 512): Tiles(64, 32, 4, 1),
        ("dq", 64): Tiles(128, 64, 8, 1),
        ("dq", 128): Tiles(64, 64, 4, 1),
        ("dq", 256): Tiles(32, 32, 4, 1),
        ("dq", 512): Tiles(32, 32, 4, 1),
        ("dkv", 64): Tiles(32, 64, 4, 1),
        ("dkv", 128): Tiles(32, 64, 4, 1),
        ("dkv", 256): Tiles(16, 32, 8, 1),
        ("dkv", 512): Tiles(16, 32, 8, 1),
    },
}

# With a softcap, where the entry of heads twice as wide is too narrow for tcgen05.
_SOFTCAP: dict[tuple[str, KernelName, int], Tiles] = {("sm_100", "dkv", 128): Tiles(64, 64, 8, 2)}

# float32, by how it is multiplied; everywhere the same. Exact products keep whole rows of both operands in
# registers where there are no matrix units for them, so wider heads would spill.
_SINGLE: dict[str, dict[tuple[KernelName, int], Tiles]] = {
    "ieee": {
        ("forward", 64): Tiles(32, 32, 8, 1),
        ("dq", 64): Tiles(32, 32, 8, 1),
        ("dkv", 64): Tiles(16, 16, 4, 1),
    },
    "tf32": {
        ("forward", 64): Tiles(64, 32, 8, 1),
        ("dq", 64): Tiles(64, 32, 8, 1),
        ("dkv", 64): Tiles(32, 32, 4, 1),
    },
}

# Small, so that short sequences have several tiles, unlike each other, so that nothing mixes them up.
_INTERPRETER = Tiles(64, 32, 4, 1)
# Of the kernel that prepares query rows.
ROWS = Tiles(64, 1, 4, 1)


def tiles_for(
    kernel: KernelName,
    architecture: Architecture,
    width: int,
    dtype: torch.dtype,
    precision: str,
    descriptors: bool,
    softcap: bool,
) -> Tiles:
    """The entry for heads padded to `width`, the larger of QK's and V's, at most `max_width`.

    A softcap keeps one more value per score: in 16 bits it takes the entry of heads twice as wide.
    """
    if architecture == "interpreter":
        return _INTERPRETER
    if architecture in WITH_DESCRIPTORS and not descriptors:
        architecture = "sm_80"
    if softcap and dtype != torch.float32 and (architecture, kernel, width) in _SOFTCAP:
        return _SOFTCAP[architecture, kernel, width]
    table = _SINGLE[precision] if dtype == torch.float32 else _HALF[architecture]
    wanted = 2 * width if softcap and dtype != torch.float32 else width
    return table[kernel, min(limit for name, limit in table if name == kernel and limit >= wanted)]


# Their entries hold for loads through descriptors; other loads take the entries of sm_80.
WITH_DESCRIPTORS = ("sm_90", "sm_100")


def max_width(architecture: Architecture, dtype: torch.dtype) -> int:
    """The widest heads there are entries for."""
    return 64 if dtype == torch.float32 and architecture != "interpreter" else 256
