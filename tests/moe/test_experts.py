"""Backends of the grouped SwiGLU against plain products per expert, and the choice among them."""

from __future__ import annotations

import logging

import pytest
import torch

from cpmoe.moe import backends
from cpmoe.moe.backends import BACKENDS, select_backend
from cpmoe.moe.backends.loop import LoopBackend
from cpmoe.moe.experts import Experts, init_experts, projections
from tests.moe.expert_cases import HIDDEN, expected, make, naive, results, splits
from tests.moe.runs import relative_error

BLOCKS = {
    "balanced": [[4, 4, 4]],
    "first, middle and last idle": [[0, 5, 0, 7, 0]],
    "one has all": [[0, 0, 9]],
    "one row": [[1]],
    "no row": [[0, 0]],
    "from two ranks": [[3, 0, 2], [1, 0, 6]],
    "from three ranks, one of which sends nothing": [[0, 2], [0, 0], [5, 1]],
    "no row from two ranks": [[0, 0], [0, 0]],
}
LIMITS = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (1e-6, 1e-5),
}


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan():
    """Rows or gradients that nobody writes can not pass by luck."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("loop", torch.float64), ("loop", torch.float32), ("grouped_mm", torch.float32)],
)
def test_matches_products_per_expert(blocks, backend, dtype):
    y, *grads = results(blocks, backend, dtype)
    y_expected, *grads_expected = expected(blocks, dtype)
    forward, gradient = LIMITS[dtype]
    assert relative_error(y, y_expected) <= forward
    for grad, grad_expected in zip(grads, grads_expected, strict=True):
        assert grad.dtype == dtype and grad.shape == grad_expected.shape
        assert relative_error(grad, grad_expected) <= gradient


@pytest.mark.parametrize("block_rows", [0, 1000], ids=["as they arrived", "by expert"])
@pytest.mark.parametrize("blocks", [[[7, 0, 3, 4]], [[7, 0, 3, 4], [0, 0, 2, 8], [1, 0, 0, 5]]])
def test_loop_in_pieces_matches(monkeypatch, blocks, block_rows):
    monkeypatch.setattr(LoopBackend, "piece_rows", 3)
    monkeypatch.setattr(LoopBackend, "block_rows", block_rows)
    for value, value_expected in zip(
        results(blocks, "loop", torch.float64), expected(blocks, torch.float64), strict=True
    ):
        assert relative_error(value, value_expected) <= 1e-12


def test_loop_copies_small_blocks_together_and_leaves_large_ones():
    rows = LoopBackend.block_rows
    x, loop = torch.empty(3 * rows, 1), LoopBackend()
    assert loop.takes_blocks(x, [[rows, 0], [0, 2 * rows]])
    assert not loop.takes_blocks(x, [[rows - 1, 1], [rows, rows]])
    assert not loop.takes_blocks(x.to("meta"), [[rows, 0], [0, 2 * rows]])


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_bfloat16_is_no_worse_than_twice_a_plain_bfloat16_swiglu(backend):
    blocks = [[6, 0, 11]]
    exact, plain = expected(blocks, torch.bfloat16), naive(blocks, torch.bfloat16)
    for value, value_naive, value_exact in zip(
        results(blocks, backend, torch.bfloat16), plain, exact, strict=True
    ):
        assert relative_error(value, value_exact) <= 2 * relative_error(value_naive, value_exact)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_parameters_freed_and_refilled_between_forward_and_backward(backend):
    """What ZeRO-3 does: it swaps `param.data`, so backward must read the parameter and keep no view of it."""
    blocks = [[4, 0, 5]]
    experts, x, cotangent = make(blocks, backend, torch.float32)
    y = experts(x, splits(blocks))
    kept = [p.data.clone() for p in experts.parameters()]
    for parameter in experts.parameters():
        parameter.data.fill_(float("nan"))
        parameter.data = torch.empty(0)
    for parameter, values in zip(experts.parameters(), kept, strict=True):
        parameter.data = values
    grads = torch.autograd.grad(y, [x, *experts.parameters()], cotangent)
    _, *undisturbed = results(blocks, backend, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(grads, undisturbed, strict=True))


def test_projections_are_contiguous_views():
    experts = Experts(2, 0, HIDDEN, 24, 0.5, "loop")
    init_experts(experts, 0, "experts")
    for name, parameter in experts.named_parameters():
        views = dict(projections(name, parameter.detach()[1]))
        assert all(view.is_contiguous() for view in views.values())
        assert torch.equal(torch.cat(list(views.values())), parameter[1])
        for view in views.values():
            view.zero_()
        assert torch.count_nonzero(parameter[1]) == 0
    gate, up = dict(projections("gate_up_proj", experts.gate_up_proj[0])).items()
    assert (gate[0], up[0]) == ("gate_proj", "up_proj") and gate[1].shape == up[1].shape == (24, HIDDEN)


@pytest.mark.parametrize(
    ("name", "dtype", "hidden", "message"),
    [
        ("fast", torch.float32, 16, r"backend = 'fast': must be one of auto, grouped_mm, triton, loop"),
        ("triton", torch.float64, 16, r"'triton': computes torch.bfloat16.*legal: auto, loop"),
        ("grouped_mm", torch.float64, 16, r"'grouped_mm': computes torch.float32.*legal: auto, loop"),
        ("grouped_mm", torch.float32, 18, r"multiples of 4 in torch.float32.*legal: auto, triton, loop"),
        ("grouped_mm", torch.bfloat16, 12, r"multiples of 8 in torch.bfloat16.*legal: auto, triton, loop"),
    ],
)
def test_what_a_backend_can_not_do_is_refused(name, dtype, hidden, message):
    with pytest.raises(ValueError, match=message):
        select_backend(name, dtype, torch.device("cpu"), hidden, 16)


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes `auto` believe in a GPU of some architecture."""
    for cached in (select_backend, backends._say_once):
        cached.cache_clear()

    def install(architecture: str) -> None:
        monkeypatch.setattr(backends, "architecture_of", lambda device: architecture)
        monkeypatch.setattr("cpmoe.moe.backends.triton.backend.no_kernels", lambda device: None)

    yield install
    select_backend.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "dtype", "hidden", "chosen"),
    [
        ("sm_90", torch.bfloat16, 16, "grouped_mm"),
        ("sm_100", torch.bfloat16, 16, "grouped_mm"),
        ("sm_90", torch.bfloat16, 12, "triton"),
        ("sm_90", torch.float32, 16, "triton"),
        ("sm_80", torch.bfloat16, 16, "triton"),
        ("gfx942", torch.float16, 16, "triton"),
        ("sm_90", torch.float64, 16, "loop"),
        (None, torch.float32, 16, "loop"),
    ],
)
def test_auto_takes_the_first_that_can(on_gpu, architecture, dtype, hidden, chosen):
    if architecture is not None:
        on_gpu(architecture)
    device = torch.device("cpu" if architecture is None else "cuda")
    assert select_backend("auto", dtype, device, hidden, 16) is BACKENDS[chosen]


def test_without_triton_older_gpus_take_what_torch_has(on_gpu, monkeypatch):
    on_gpu("sm_80")
    missing = "cpmoe.moe.backends.triton.backend.no_kernels"
    monkeypatch.setattr(missing, lambda device: "the package triton is not installed")
    device = torch.device("cuda")
    assert select_backend("auto", torch.bfloat16, device, 16, 16) is BACKENDS["grouped_mm"]
    with pytest.raises(
        ValueError, match=r"'triton': the package triton is not .* legal: auto, grouped_mm, loop"
    ):
        select_backend("triton", torch.bfloat16, device, 16, 16)


def test_an_unknown_backend_is_refused_when_the_layer_is_built():
    with pytest.raises(ValueError, match=r"backend = 'fast'"):
        Experts(2, 0, HIDDEN, 24, 0.02, "fast")


def test_the_choice_of_auto_and_its_reason_are_logged_once(on_gpu, caplog):
    with caplog.at_level(logging.INFO, logger="cpmoe.moe.backends"):
        for _ in range(2):
            select_backend("auto", torch.float32, torch.device("cpu"), 16, 16)
        on_gpu("sm_90")
        for hidden in (12, 20):
            select_backend("auto", torch.bfloat16, torch.device("cuda"), hidden, 16)
    reason = "grouped_mm: needs hidden_size and moe_intermediate_size to be multiples of 8 in torch.bfloat16"
    assert [record.message for record in caplog.records] == [
        "experts.backend auto is loop (the fastest on cpu)",
        f"experts.backend auto is triton ({reason})",
    ]
