"""Every kernel in every default configuration, as calls on meta tensors to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cpmoe.attention.blocks.triton.configs import WITH_DESCRIPTORS, KernelName
from cpmoe.attention.scores import Scores
from cpmoe.attention.spans import KeySpans
from cpmoe.kernels.architectures import COMPILED, Architecture

if TYPE_CHECKING:
    from cpmoe.kernels.launch import Launch

KERNELS: tuple[KernelName, ...] = ("forward", "dq", "dkv")
HEAD_SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128))
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 256, 8, 2


class Entry(NamedTuple):
    """A kernel that continues earlier sums, over spans with sinks; `softcap`: with one."""

    kernel: KernelName
    architecture: Architecture
    dtype: torch.dtype
    size_qk: int
    size_v: int
    precision: str
    softcap: bool

    @property
    def needs_matrix_unit(self) -> bool:
        """Whether it must run on the matrix units: 16-bit products of the common head sizes."""
        return self.dtype.itemsize == 2 and {self.size_qk, self.size_v} <= {64, 128}

    def launch(self) -> Launch:
        """Its call, on tensors without storage; for a process without TRITON_INTERPRET."""
        return _launch(self)

    def __str__(self) -> str:
        sizes = f"{self.size_qk}" if self.size_qk == self.size_v else f"{self.size_qk}/{self.size_v}"
        kind = "bfloat16" if self.dtype == torch.bfloat16 else f"float32 {self.precision}"
        return f"{self.architecture} {self.kernel} {kind} {sizes}{' softcap' if self.softcap else ''}"


def entries() -> Iterator[Entry]:
    """bfloat16 stands for float16, which compiles alike; float32 has heads of up to 64 only."""
    for architecture, kernel in product(COMPILED, KERNELS):
        for sizes, softcap in product(HEAD_SIZES, (False, True)):
            yield Entry(kernel, architecture, torch.bfloat16, *sizes, "ieee", softcap)
        for precision in ("ieee", "tf32"):
            yield Entry(kernel, architecture, torch.float32, 64, 64, precision, False)


def _launch(entry: Entry) -> Launch:
    from cpmoe.attention.blocks.triton.launch import Problem

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def sums(num_heads: int, size: int) -> Tensor:
        return empty(1, NUM_TOKENS, num_heads, size)

    def input_(num_heads: int, size: int) -> Tensor:
        return empty(1, NUM_TOKENS, num_heads, size, dtype=entry.dtype)

    start = torch.zeros(1, NUM_TOKENS, dtype=torch.int32)
    stop = torch.arange(1, NUM_TOKENS + 1, dtype=torch.int32)[None]
    problem = Problem(
        input_(NUM_HEADS, entry.size_qk),
        input_(NUM_KV_HEADS, entry.size_qk),
        input_(NUM_KV_HEADS, entry.size_v),
        KeySpans(start, stop, NUM_TOKENS, start, start),
        Scores(entry.size_qk**-0.5, softcap=30.0 if entry.softcap else 0.0),
        precision=entry.precision,
        architecture=entry.architecture,
        descriptors=entry.architecture in WITH_DESCRIPTORS and entry.dtype != torch.float32,
    )
    if entry.kernel == "forward":
        out, lse = sums(NUM_HEADS, entry.size_v), empty(1, NUM_TOKENS, NUM_HEADS)
        return problem.forward(out, lse, continues=True)
    grad_out, rows = input_(NUM_HEADS, entry.size_v), empty(2, 1, NUM_HEADS, NUM_TOKENS)
    if entry.kernel == "dq":
        return problem.dq(grad_out, rows, sums(NUM_HEADS, entry.size_qk), continues=True)
    dk, dv = (sums(NUM_KV_HEADS, size) for size in (entry.size_qk, entry.size_v))
    places = empty(NUM_TOKENS, dtype=torch.int32)
    return problem.dkv(grad_out, rows, dk, dv, places, continues=True)
