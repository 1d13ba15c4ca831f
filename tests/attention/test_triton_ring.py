"""Ring and all-gather attention over several processes with the Triton kernels, in their interpreter.

Some of the cases of test_exact.py, in float32 and in 16 bits.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.attention.cases import Case, documents, expected, gathered, relative_error, run_cases
from tests.attention.test_exact import GRIDS, NAMES, tolerances_of
from tests.distributed import run_distributed

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="no interpreter where there is a GPU")

SINGLE = {
    2: ("inside-chunk-and-edges", "padding", "window-8-sinks"),
    3: ("over-all-ranks",),
}


def _grid(world_size: int) -> list[Case]:
    cases = GRIDS[world_size]
    single = [
        replace(case, backend="triton", dtype=torch.float32)
        for case in cases
        if case.name in SINGLE[world_size] and case.backend == "reference"
    ]
    half = [
        replace(case, backend="triton")
        for case in cases
        if case.backend == "sdpa" and case.strategy == "ring" and case.dtype.itemsize == 2
    ]
    return single + half


CASES = {world_size: _grid(world_size) for world_size in SINGLE}


@cache
def _results(world_size: int) -> list[list[list[torch.Tensor]]]:
    per_rank = run_distributed(run_cases, world_size, CASES[world_size])
    return [list(parts) for parts in zip(*per_rank, strict=True)]


@pytest.mark.parametrize(
    ("world_size", "index"),
    [
        pytest.param(world_size, index, id=f"{world_size}-{case}")
        for world_size, cases in CASES.items()
        for index, case in enumerate(cases)
    ],
)
def test_output_and_gradients(world_size: int, index: int):
    case = CASES[world_size][index]
    actual, reference = gathered(case, _results(world_size)[index]), expected(case)
    padding_BS = documents(case) < 0
    for name, ours, exact, tolerance in zip(
        NAMES, actual, reference, tolerances_of(case, world_size, reference), strict=True
    ):
        assert ours.dtype == case.dtype, name
        assert torch.equal(ours[padding_BS], torch.zeros_like(ours[padding_BS])), f"{name} of padding"
        assert relative_error(ours, exact) <= tolerance, name
