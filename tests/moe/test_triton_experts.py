"""The kernels of the experts against plain products: in Triton's interpreter, and the same list on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.expert_cases import expected, naive, results
from tests.moe.runs import relative_error

pytest.importorskip("triton", reason="Triton is not installed")

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, for the GPU"),
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
# Tiles in the interpreter are of 16 rows: experts with less, exactly one and several of them.
RAGGED = "ragged, first, middle and last idle"
BLOCKS = {
    RAGGED: [[0, 5, 0, 19, 16, 0]],
    "one has all": [[0, 0, 21]],
    "one row": [[1]],
    "no row": [[0, 0]],
    "from two ranks": [[3, 0, 2], [1, 0, 6]],
}
# Multiples of no tile; in the interpreter several tiles each way.
SIZES = {"hidden": 36, "width": 20}


@pytest.fixture
def _fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_fresh_memory_is_nan")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in BLOCKS),
        (RAGGED, torch.float16),
        (RAGGED, torch.bfloat16),
    ],
)
def test_output_and_gradients(name, dtype, device):
    """At most twice the error of a plain SwiGLU in the same type; in float32 what cpmoe promises."""
    blocks = BLOCKS[name]
    exact, rounded = expected(blocks, dtype, **SIZES), naive(blocks, dtype, **SIZES)
    promised = (1e-6, 1e-5, 1e-5, 1e-5) if dtype == torch.float32 else (0.0,) * 4
    actual = results(blocks, "triton", dtype, device, **SIZES)
    for value, value_rounded, value_exact, least in zip(actual, rounded, exact, promised, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, value_exact) <= max(
            2 * relative_error(value_rounded, value_exact), least
        )


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_give_the_same_bits(device):
    blocks = BLOCKS["from two ranks"]
    first, second = (results(blocks, "triton", torch.bfloat16, device, **SIZES) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("far", ["rows", "experts"])
def test_addresses_have_64_bits(far, device):
    """Rows and experts that begin 2^31 elements into their tensors, which are else untouched memory."""
    from cpmoe.kernels.architectures import architecture_of
    from cpmoe.moe.backends.triton.launch import Problem

    size_in, size_out = (1024, 16) if far == "rows" else (16, 1024)
    first_row, expert = (2**21, 0) if far == "rows" else (0, 2**17)
    counts = [0] * expert + [3]
    offsets = torch.zeros(len(counts), dtype=torch.int32, device=device)
    offsets[-1] = 3
    rows = torch.empty(first_row + 3, size_in, dtype=torch.float16, device=device)
    weight = torch.empty(expert + 1, size_in, size_out, dtype=torch.float16, device=device)
    out = torch.empty(first_row + 3, size_out, dtype=torch.float16, device=device)
    gradient = torch.empty_like(weight)
    rows[first_row:] = torch.randn(3, size_in)
    weight[expert] = torch.randn(size_in, size_out)
    problem = Problem(counts, offsets, "ieee", architecture_of(rows.device))

    def run_far(launch):
        starts = launch.arguments["starts_ptr"].clone()
        starts[0] += first_row
        replace(launch, arguments=launch.arguments | {"starts_ptr": starts}).run()

    run_far(problem.product(rows, weight, out, transposed=False))
    ours = rows[first_row:].double()
    assert relative_error(out[first_row:], ours @ weight[expert].double()) < 1e-3
    if far == "rows":
        run_far(problem.weight_gradient(rows, out, gradient))
        assert relative_error(gradient[0], ours.T @ out[first_row:].double()) < 1e-3
