"""Grouped SwiGLU on rows in blocks of ranks and experts: through `Experts`, and by plain products."""

from __future__ import annotations

import torch
from torch import Tensor

from cpmoe.moe.dispatch import RowSplits
from cpmoe.moe.experts import Experts, init_experts
from tests.moe.reference import swiglu

HIDDEN, WIDTH = 16, 24
Blocks = list[list[int]]


def splits(blocks: Blocks, device: str = "cpu") -> RowSplits:
    counts = [sum(column) for column in zip(*blocks, strict=True)]
    offsets = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    return RowSplits(send=[sum(counts)], blocks=blocks, counts=counts, offsets_E=offsets)


def make(
    blocks: Blocks,
    backend: str,
    dtype: torch.dtype,
    hidden: int = HIDDEN,
    width: int = WIDTH,
    device: str = "cpu",
) -> tuple[Experts, Tensor, Tensor]:
    """(experts, x, gradient of the output)"""
    experts = Experts(len(blocks[0]), 0, hidden, width, 0.5, backend)
    init_experts(experts, seed=1, name="experts")
    generator = torch.Generator().manual_seed(2)
    rows = sum(map(sum, blocks))
    x, cotangent = torch.randn(2, rows, hidden, generator=generator, dtype=torch.float64).to(device, dtype)
    return experts.to(device, dtype), x.requires_grad_(), cotangent


def results(
    blocks: Blocks, backend: str, dtype: torch.dtype, device: str = "cpu", **sizes: int
) -> list[Tensor]:
    """Output, and gradients of x and the weights."""
    experts, x, cotangent = make(blocks, backend, dtype, device=device, **sizes)
    y = experts(x, splits(blocks, device))
    y.backward(cotangent)
    assert x.grad is not None
    grads = [p.grad for p in experts.parameters()]
    assert all(g is not None for g in grads)
    return [value.detach().cpu() for value in (y, x.grad, *grads)]


def plain_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """With torch's own silu: the exponential of the definition overflows in float16."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def naive(
    blocks: Blocks, dtype: torch.dtype, computed: torch.dtype | None = None, **sizes: int
) -> list[Tensor]:
    """The same from the values that `dtype` holds, by autograd, computed in `computed` (None: `dtype`)."""
    experts, x, cotangent = make(blocks, "loop", dtype, **sizes)
    leaves = [value.detach().to(computed or dtype).requires_grad_() for value in (x, *experts.parameters())]
    rows, gate_up, down = leaves
    compute = plain_swiglu if rows.element_size() == 2 else swiglu
    pieces = rows.split([count for block in blocks for count in block])
    outputs = []
    for index, piece in enumerate(pieces):
        expert = index % len(blocks[0])
        outputs.append(compute(piece, *gate_up[expert].chunk(2), down[expert]))
    y = torch.cat(outputs)
    grads = torch.autograd.grad(y, leaves, cotangent.to(y.dtype), allow_unused=True)
    filled = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, leaves, strict=True)]
    return [y.detach(), *filled]


def expected(blocks: Blocks, dtype: torch.dtype, **sizes: int) -> list[Tensor]:
    """In float64 from the values that `dtype` holds."""
    return naive(blocks, dtype, torch.float64, **sizes)
