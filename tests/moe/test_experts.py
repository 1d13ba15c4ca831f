"""Backends of the grouped SwiGLU against plain products per expert, and the choice among them."""

from __future__ import annotations

import pytest
import torch

from cpmoe.moe.backends import BACKENDS, LoopBackend, select_backend
from cpmoe.moe.dispatch import RowSplits
from cpmoe.moe.experts import Experts, init_experts
from tests.moe.reference import swiglu
from tests.moe.runs import relative_error

HIDDEN, WIDTH = 16, 24
COUNTS = {
    "balanced": [4, 4, 4],
    "first, middle and last idle": [0, 5, 0, 7, 0],
    "one has all": [0, 0, 9],
    "one row": [1],
    "no row": [0, 0],
}


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan():
    """Rows or gradients that nobody writes can not pass by luck."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def splits(counts: list[int]) -> RowSplits:
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    return RowSplits(send=[sum(counts)], blocks=[counts], counts=counts, offsets_E=offsets)


def make(counts: list[int], backend: str, dtype: torch.dtype) -> tuple[Experts, torch.Tensor, torch.Tensor]:
    experts = Experts(len(counts), 0, HIDDEN, WIDTH, 0.5, backend)
    init_experts(experts, seed=1, name="experts")
    generator = torch.Generator().manual_seed(2)
    x, cotangent = torch.randn(2, sum(counts), HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return experts.to(dtype), x.requires_grad_(), cotangent


def results(counts: list[int], backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    experts, x, cotangent = make(counts, backend, dtype)
    y = experts(x, splits(counts))
    y.backward(cotangent)
    assert x.grad is not None
    grads = [p.grad for p in experts.parameters()]
    assert all(g is not None for g in grads)
    return [y.detach(), x.grad, *grads]


def expected(counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """In float64 from the values that `dtype` holds."""
    experts, x, cotangent = make(counts, "loop", dtype)
    x = x.detach().double().requires_grad_()
    gate, up, down = weights = [p.detach().double().requires_grad_() for p in experts.parameters()]
    outputs = [swiglu(rows, gate[e], up[e], down[e]) for e, rows in enumerate(x.split(counts))]
    y = torch.cat(outputs)
    grads = torch.autograd.grad(y, [x, *weights], cotangent.double(), allow_unused=True)
    return [
        y.detach(),
        *(torch.zeros_like(v) if g is None else g for g, v in zip(grads, [x, *weights], strict=True)),
    ]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("backend", "dtype", "forward", "gradient"),
    [
        ("loop", torch.float64, 1e-12, 1e-10),
        ("loop", torch.float32, 1e-6, 1e-5),
        ("grouped_mm", torch.float32, 1e-6, 1e-5),
    ],
)
def test_matches_products_per_expert(counts, backend, dtype, forward, gradient):
    y, *grads = results(counts, backend, dtype)
    y_expected, *grads_expected = expected(counts, dtype)
    assert relative_error(y, y_expected) <= forward
    for grad, grad_expected in zip(grads, grads_expected, strict=True):
        assert grad.dtype == dtype and grad.shape == grad_expected.shape
        assert relative_error(grad, grad_expected) <= gradient


def test_loop_in_pieces_matches(monkeypatch):
    monkeypatch.setattr(LoopBackend, "piece_rows", 3)
    counts = [7, 0, 3, 4]
    for value, value_expected in zip(
        results(counts, "loop", torch.float64), expected(counts, torch.float64), strict=True
    ):
        assert relative_error(value, value_expected) <= 1e-12


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_bfloat16_is_no_worse_than_twice_a_plain_bfloat16_swiglu(backend):
    counts = [6, 0, 11]
    exact = expected(counts, torch.bfloat16)
    experts, x, cotangent = make(counts, "loop", torch.bfloat16)
    plain = torch.cat(
        [
            torch.nn.functional.linear(torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T), down)
            for rows, gate, up, down in zip(x.split(counts), *experts.parameters(), strict=True)
        ]
    )
    naive = [plain, *torch.autograd.grad(plain, [x, *experts.parameters()], cotangent)]
    for value, value_naive, value_exact in zip(
        results(counts, backend, torch.bfloat16), naive, exact, strict=True
    ):
        assert relative_error(value, value_exact) <= 2 * relative_error(value_naive, value_exact)


def test_every_backend_is_tested():
    assert set(BACKENDS) == {"loop", "grouped_mm"}


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_parameters_freed_and_refilled_between_forward_and_backward(backend):
    """What ZeRO-3 does: it swaps `param.data`, so backward must read the parameter and keep no view of it."""
    counts = [4, 0, 5]
    experts, x, cotangent = make(counts, backend, torch.float32)
    y = experts(x, splits(counts))
    kept = [p.data.clone() for p in experts.parameters()]
    for parameter in experts.parameters():
        parameter.data.fill_(float("nan"))
        parameter.data = torch.empty(0)
    for parameter, values in zip(experts.parameters(), kept, strict=True):
        parameter.data = values
    grads = torch.autograd.grad(y, [x, *experts.parameters()], cotangent)
    _, *undisturbed = results(counts, backend, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(grads, undisturbed, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype", "hidden", "message"),
    [
        ("triton3", torch.float32, 16, r"backend = 'triton3': must be one of auto, grouped_mm, loop"),
        ("grouped_mm", torch.float64, 16, r"'grouped_mm': computes torch.float32.*legal: auto, loop"),
        ("grouped_mm", torch.float32, 18, r"multiples of 4 in torch.float32.*legal: auto, loop"),
        ("grouped_mm", torch.bfloat16, 12, r"multiples of 8 in torch.bfloat16.*legal: auto, loop"),
    ],
)
def test_what_a_backend_can_not_do_is_refused(name, dtype, hidden, message):
    with pytest.raises(ValueError, match=message):
        select_backend(name, dtype, torch.device("cpu"), hidden, 16)


@pytest.mark.parametrize(
    ("device", "dtype", "hidden", "chosen"),
    [
        ("cuda", torch.bfloat16, 16, "grouped_mm"),
        ("cuda", torch.float64, 16, "loop"),
        ("cuda", torch.bfloat16, 12, "loop"),
        ("cpu", torch.float32, 16, "loop"),
    ],
)
def test_auto_takes_the_first_that_can(device, dtype, hidden, chosen):
    assert select_backend("auto", dtype, torch.device(device), hidden, 16) is BACKENDS[chosen]


def test_an_unknown_backend_is_refused_when_the_layer_is_built():
    with pytest.raises(ValueError, match=r"backend = 'fast'"):
        Experts(2, 0, HIDDEN, WIDTH, 0.02, "fast")
