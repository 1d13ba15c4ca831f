"""The Triton kernels against the float64 definition: in the interpreter, and the same list on a GPU.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

import pytest
import torch

from cpmoe.attention.blocks import select_backend
from cpmoe.attention.mask import Mask
from cpmoe.attention.plan import build_plan
from cpmoe.attention.ring import ring_attention
from cpmoe.attention.scores import Scores
from tests.attention.cases import relative_error
from tests.attention.kernel_cases import KernelCase, by_kernels, naive

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
SCORES = Scores(0.25)
HALF = (torch.bfloat16, torch.float16)
LONG = {"num_queries": 127, "num_keys": 127}
CASES = [
    KernelCase("one-row", num_queries=1, num_keys=1),
    KernelCase("odd-63", num_queries=63, num_keys=63, batch_size=2),
    KernelCase("odd-127", **LONG),
    KernelCase("odd-250", num_queries=250, num_keys=250, num_heads=1),
    *(KernelCase("half", dtype=dtype, **LONG) for dtype in HALF),
    *(KernelCase("half-hops", mask="sinks", num_hops=3, dtype=dtype, **LONG) for dtype in HALF),
    *(KernelCase(f"head-{d}", size_qk=d, size_v=d, scale=d**-0.5) for d in (16, 80, 96, 128, 256)),
    KernelCase("head-20", size_qk=20, size_v=20, scale=20**-0.5),
    KernelCase("head-192-128", size_qk=192, size_v=128, scale=192**-0.5),
    KernelCase("head-80", size_qk=80, size_v=80, dtype=torch.bfloat16),
    KernelCase("group-6", num_heads=12, num_kv_heads=2, mask="documents"),
    KernelCase("group-1", num_heads=3, num_kv_heads=3, mask="window"),
    KernelCase("group-8", num_heads=8, num_kv_heads=1, num_queries=63, num_keys=90),
    KernelCase("documents", mask="documents", batch_size=3),
    KernelCase("window", mask="window", num_queries=200, num_keys=200, num_heads=1),
    KernelCase("sinks", mask="sinks", num_queries=200, num_keys=200, num_heads=1),
    KernelCase("full", mask="full", num_queries=70, num_keys=130),
    KernelCase("hops", num_hops=4, num_keys=64),
    KernelCase("blind-hops", mask="blind", num_hops=3, batch_size=2, num_queries=70, num_keys=40),
    KernelCase("gap-up", mask="full", num_hops=4, lifts=(0.0, 95.0, 300.0, 301.0), num_keys=40),
    KernelCase("gap-down", mask="full", num_hops=3, lifts=(200.0, 100.0, -2000.0), num_keys=40),
    KernelCase("softcap", softcap=3.0, scale=0.5, num_hops=2),
    KernelCase("softcap", softcap=30.0, dtype=torch.bfloat16, mask="documents"),
    KernelCase("dropout", dropout=0.3, mask="sinks", num_hops=2, batch_size=2, num_heads=4, num_kv_heads=2),
    KernelCase("dropout-half", dropout=0.1, softcap=3.0, mask="blind", num_hops=2, dtype=torch.bfloat16),
    *(
        KernelCase(f"descriptors-{d}", size_qk=d, size_v=d, dtype=dtype, mask="sinks", descriptors=True)
        for d, dtype in ((64, torch.bfloat16), (80, torch.float16))
    ),
    KernelCase("strided", strided=True, batch_size=2, mask="sinks", num_heads=4, num_kv_heads=2),
    KernelCase("strided", strided=True, batch_size=2, dtype=torch.bfloat16, num_heads=4, num_kv_heads=2),
]


def _check(case: KernelCase, actual: dict[str, torch.Tensor]) -> None:
    exact = naive(case, torch.float64)
    seen = exact["lse"] > -torch.inf
    assert torch.equal(actual["lse"] > -torch.inf, seen) and not actual["lse"].isnan().any()
    for name in ("out", "dq"):
        assert (actual[name][~seen] == 0).all(), f"{name} of queries that see nothing"
    # flash-attention's rule: at most twice the error of the definition in the same precision; in float32
    # no better than cpmoe promises.
    rounded = naive(case, case.dtype)
    for values in (actual, exact, rounded):
        values["lse"] = values["lse"].masked_fill(~seen, 0.0)
    tolerances = {name: 2 * relative_error(rounded[name], exact[name]) for name in exact}
    if case.dtype == torch.float32:
        promised = {"out": 1e-6, "lse": 1e-6, "dq": 1e-5, "dk": 1e-5, "dv": 1e-5}
        tolerances = {name: max(promised[name], value) for name, value in tolerances.items()}
    for name, reference in exact.items():
        assert relative_error(actual[name], reference) <= tolerances[name], name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case: KernelCase, device: str):
    if device == "cuda" and case.dtype == torch.float32 and case.size_qk > 64:
        pytest.skip("float32 has no configuration for heads wider than 64")
    _check(case, by_kernels(case, device))


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_give_the_same_bits(device: str):
    case = KernelCase("twice", num_heads=4, num_kv_heads=2, dtype=torch.bfloat16, num_hops=2)
    first, second = (by_kernels(case, device) for _ in range(2))
    for name, values in first.items():
        assert torch.equal(values, second[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_error_does_not_grow_with_the_ring(device: str):
    """The same 128 keys in 1, 8 and 32 hops: the error against float64 stays that of one hop."""
    errors = {}
    for num_hops in (1, 8, 32):
        case = KernelCase(
            "growth",
            mask="full",
            num_queries=64,
            num_keys=128 // num_hops,
            num_hops=num_hops,
            num_heads=1,
            dtype=torch.bfloat16,
        )
        actual, exact = by_kernels(case, device), naive(case, torch.float64)
        errors[num_hops] = {name: relative_error(actual[name], exact[name]) for name in actual}
    for name in ("out", "dq", "dk", "dv"):
        assert max(errors[8][name], errors[32][name]) <= 1.1 * errors[1][name], name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mask", "softcap", "size_v"),
    [(Mask(), 0.0, 32), (Mask(window=(20, None), num_sinks=3), 0.5, 32), (Mask(causal=False), 0.0, 24)],
    ids=["causal", "sinks", "all"],
)
def test_as_backend_of_one_rank(mask: Mask, softcap: float, size_v: int, device: str):
    documents_BS = torch.arange(100)[None] // torch.tensor([[60], [33]])
    documents_BS[1, 90:] = -1
    torch.manual_seed(0)
    tensors = [torch.randn(2, 100, *head) for head in ((4, 32), (2, 32), (2, size_v), (4, size_v))]
    scores = Scores(32**-0.5, softcap)
    results = []
    for backend, where, dtype in (("triton", device, torch.float32), ("reference", "cpu", torch.float64)):
        *leaves, grad_out = (x.to(where, dtype).requires_grad_() for x in tensors)
        plan = build_plan(documents_BS, 1, 0, mask=mask)
        out = ring_attention(*leaves, plan, None, None, backend, scores)
        results.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, grad_out))])
    for tolerance, ours, exact in zip((1e-6, 1e-5, 1e-5, 1e-5), *results, strict=True):
        assert relative_error(ours, exact) <= tolerance


def test_what_it_cannot_do_is_said(monkeypatch):
    q, k = torch.zeros(1, 4, 4, 16, device="meta"), torch.zeros(1, 4, 2, 16, device="meta")
    with pytest.raises(ValueError, match=r"'triton': device meta has no Triton kernels \(cuda has"):
        select_backend("triton", q, k, k, SCORES)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"device cpu has no .* TRITON_INTERPRET=1 .* can: reference, sdpa"):
        select_backend("triton", *(torch.zeros(1, 4, h, 16) for h in (4, 2, 2)), SCORES)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'triton': the package triton is not installed"):
        select_backend("triton", q, k, k, SCORES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_limits_of_inputs():
    q, k = torch.zeros(1, 4, 4, 16), torch.zeros(1, 4, 2, 16)
    with pytest.raises(ValueError, match="float64 is not one of bfloat16, float16, float32"):
        select_backend("triton", q.double(), k.double(), k.double(), SCORES)
    with pytest.raises(ValueError, match=r"head size 300 is more than 256, the most for torch\.float32"):
        select_backend("triton", q[..., :1].expand(-1, -1, -1, 300), k, k, SCORES)
    with pytest.raises(ValueError, match=r"'triton': scale -1\.0 is not above 0; .* can: reference, sdpa"):
        select_backend("triton", q, k, k, Scores(-1.0))
