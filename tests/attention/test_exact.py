"""Ring and all-gather attention on 1 to 4 gloo processes against the dense float64 definition."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from cpmoe.attention.layout import LAYOUTS
from cpmoe.attention.mask import CAUSAL, Mask
from cpmoe.attention.ring import ring_attention
from cpmoe.attention.sharding import shard_batch
from tests.attention.cases import (
    Case,
    documents,
    everywhere,
    expected,
    gathered,
    inputs,
    make_groups,
    relative_error,
    run_case,
    run_cases,
)
from tests.attention.dense import dense_gradients, dense_mask
from tests.distributed import run_distributed

WORLD_SIZES = (1, 2, 3, 4)
NAMES = ("out", "dq", "dk", "dv")


def _grid(world_size: int) -> list[Case]:
    """Boundaries inside chunks, on edges of zigzag chunks and on rank edges of both layouts."""
    chunk = 6
    seq_len = 2 * world_size * chunk
    inside = (chunk, chunk // 2, 1, 1, seq_len - chunk - chunk // 2 - 2)
    exact = everywhere(
        [
            Case("one-document", ((seq_len,), (seq_len,))),
            Case("inside-chunk-and-edges", (inside, (2 * chunk, seq_len - 2 * chunk))),
            Case("over-all-ranks", ((1, seq_len - 3, 2), (seq_len // 2, seq_len // 2))),
            Case("one-token-documents", ((1,) * seq_len, (3,) * (seq_len // 3))),
            Case("padding", ((seq_len - 5, -5), (-seq_len,), (4, -3, seq_len - 8, -1))),
            Case("length-7", ((7,), (5, 2))),
            Case("length-23-strided", ((23,), (9, 14)), contiguous=False),
            Case("lse-gap", ((seq_len,), (seq_len - 9, 9)), gap_tokens=chunk),
            Case("multi-query", ((seq_len,),), num_heads=3, num_kv_heads=1),
            Case("equal-heads", ((seq_len - 1,),), num_heads=2, num_kv_heads=2, head_dim=5),
            *_masked(world_size),
        ]
    )
    exact += _exchanging_heads(world_size) + _bent_and_unequal(world_size) + _sliced(world_size)
    documents_ = ((seq_len // 2 + 3, seq_len // 2 - 3), (seq_len - 4, -4))
    rounded = [
        Case("rounded", documents_, dtype=dtype, backend=backend, strategy=strategy, head_dim=16)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for strategy, backend in (("ring", "sdpa"), ("ring", "reference"), ("allgather", "sdpa"))
    ]
    rounded += [
        Case("dkv", documents_, dtype=torch.bfloat16, strategy=strategy, head_dim=16, dkv_dtype="bfloat16")
        for strategy in ("ring", "allgather")
    ]
    window = Mask(window=(9, None), num_sinks=2)
    rounded += [
        Case("rounded-window", documents_, layout, window, dtype=dtype, head_dim=16)
        for layout, dtype in (("striped", torch.bfloat16), ("balanced", torch.float16))
    ]
    return exact + rounded


def _exchanging_heads(world_size: int) -> list[Case]:
    """Ulysses alone and around a ring, with KV heads that it divides, divides after copying, and one."""
    rows = ((world_size * 7 + 1, 3, 2), (world_size * 7 + 6,))
    window = Mask(window=(9, None), num_sinks=2)
    return [
        Case(
            "heads", rows, layout, mask, strategy, ulysses_size=size, num_heads=12, num_kv_heads=num_kv_heads
        )
        for size in (2, 3, 4)
        if world_size % size == 0
        for layout, mask, strategy, num_kv_heads in (
            ("zigzag", CAUSAL, "ring", 12),
            ("zigzag", window, "ring", 4),
            ("balanced", CAUSAL, "allgather", 6),
            ("striped", Mask(causal=False), "ring", 1),
            ("contiguous", window, "ring", 2),
        )
    ] + [
        Case("heads-half", rows, dtype=torch.bfloat16, ulysses_size=2, num_kv_heads=1)
        for _ in range(world_size % 2 == 0)
    ]


def _bent_and_unequal(world_size: int) -> list[Case]:
    """A softcap that bends most scores, and heads of V that are smaller or larger than those of Q and K."""
    seq_len = 12 * world_size
    rows = ((seq_len - 7, 4, 3), (seq_len,))
    plain = Case("values-3", rows, size_v=3, head_dim=6, backend="reference")
    bent = replace(plain, name="softcap-values-7", size_v=7, softcap=0.5)
    window = Mask(window=(8, None), num_sinks=2)
    return [
        plain,
        replace(plain, strategy="allgather", layout="striped"),
        replace(bent, mask=window, layout="contiguous"),
        replace(bent, backend="auto", mask=window),
        replace(bent, strategy="allgather", mask=Mask(causal=False)),
        *(replace(bent, ulysses_size=size) for size in (2, 4) if world_size % size == 0),
        *_dropped(world_size, replace(plain, name="dropout", size_v=None, dropout=0.3)),
    ]


def _dropped(world_size: int, case: Case) -> list[Case]:
    """Some of the probabilities, the same in every layout and way around the ring."""
    window = Mask(window=(8, None), num_sinks=2)
    return [
        case,
        replace(case, strategy="allgather", layout="striped", mask=Mask(causal=False), dtype=torch.float32),
        replace(case, layout="balanced", mask=window, softcap=0.5, size_v=3, backend="auto"),
        replace(case, num_slices=2),
        *(replace(case, ulysses_size=n, num_kv_heads=1) for n in (2, 4) if world_size % n == 0),
    ]


def _sliced(world_size: int) -> list[Case]:
    """Documents in one slice and over both, slices of which one needs no other rank, windows, sinks."""
    half = 6 * world_size
    whole, inside = ((2 * half,), (half - 3, half + 3)), ((half, 3, half - 3),)
    mostly_second = ((1,) * half + (half,), (-half, half))
    window = Mask(window=(9, None), num_sinks=2)
    cases = [
        Case("slices", rows, layout, mask, strategy, backend)
        for rows, layout, mask, strategy, backend in (
            (whole, "zigzag", CAUSAL, "ring", "sdpa"),
            (whole, "striped", window, "ring", "reference"),
            (whole, "balanced", CAUSAL, "allgather", "sdpa"),
            (inside, "contiguous", CAUSAL, "ring", "sdpa"),
            (inside, "zigzag", window, "ring", "sdpa"),
            (mostly_second, "zigzag", CAUSAL, "ring", "reference"),
            (mostly_second, "contiguous", window, "allgather", "reference"),
            (((23,), (9, 14)), "zigzag", Mask(window=(3, None)), "ring", "sdpa"),
            (((23,), (9, 14)), "striped", CAUSAL, "ring", "sdpa"),
        )
    ]
    cases += [
        Case("slices-heads", whole, layout, mask, ulysses_size=2, num_kv_heads=1)
        for layout, mask in (("zigzag", CAUSAL), ("balanced", window))
        if world_size % 2 == 0
    ]
    cases.append(Case("slices-half", whole, dtype=torch.bfloat16, head_dim=16))
    return [replace(case, num_slices=2) for case in cases]


def _masked(world_size: int) -> list[Case]:
    """Windows shorter and longer than a chunk, over documents that end in chunks and at rank edges."""
    seq_len = 12 * world_size
    edge = seq_len // max(world_size, 2)
    rows = ((edge, seq_len - edge - 5, 5), (seq_len,))
    padded = ((seq_len - 9, -2, 7), (3, -1, seq_len - 4))
    return [
        Case("itself-only", rows, mask=Mask(window=(0, None))),
        Case("window-4", rows, mask=Mask(window=(4, None))),
        Case("window-8-sinks", rows, mask=Mask(window=(8, None), num_sinks=3), num_heads=2, num_kv_heads=1),
        Case("window-3-padding", padded, mask=Mask(window=(3, None), num_sinks=1)),
        Case("bidirectional", padded, mask=Mask(causal=False)),
        Case("two-sided", rows, mask=Mask(causal=False, window=(5, 2))),
        Case("two-sided-sinks", padded, mask=Mask(causal=False, window=(2, 7), num_sinks=4)),
        Case("ahead", rows, mask=Mask(causal=False, window=(1, None))),
    ]


LONG = [
    Case("length-698", ((698,),), num_heads=2, num_kv_heads=1),
    Case("length-698", ((300, 398),), layout="contiguous", num_heads=2, num_kv_heads=1, dtype=torch.float32),
    Case("length-2999", ((2999,),), num_heads=1, num_kv_heads=1, dtype=torch.float32),
]
WINDOW = Mask(window=(300, None), num_sinks=20)
# Windows whose triangles the CPU kernel halves.
LONG_WINDOWS = [
    Case("window-300", ((1400,),), num_heads=2, num_kv_heads=1, mask=WINDOW, layout=layout)
    for layout in ("contiguous", "zigzag", "striped")
]
GRIDS = {world_size: _grid(world_size) for world_size in WORLD_SIZES}
GRIDS[2] += LONG_WINDOWS
GRIDS[4] += LONG


@cache
def _results(world_size: int) -> list[list[list[torch.Tensor]]]:
    """Per case, per rank; every case of a world size shares one start of the processes."""
    per_rank = run_distributed(run_cases, world_size, GRIDS[world_size])
    return [list(parts) for parts in zip(*per_rank, strict=True)]


_expected = cache(expected)


def _one_process(case: Case) -> list[torch.Tensor]:
    """torch's own SDPA over the whole sequence, in the case's dtype."""
    (q, k, v), grad_out = inputs(case)
    leaves = [x.to(case.dtype).requires_grad_() for x in (q, k, v)]
    documents_BS = documents(case)
    padding_BS = documents_BS < 0
    visible = dense_mask(documents_BS, case.mask) | (
        torch.eye(documents_BS.shape[1], dtype=torch.bool) & padding_BS[..., None]
    )
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), attn_mask=visible[:, None], enable_gqa=True
    ).transpose(1, 2)
    out = out.masked_fill(padding_BS[..., None, None], 0.0)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(case.dtype))]


def tolerances_of(case: Case, world_size: int, reference: list[torch.Tensor]) -> list[float]:
    if case.dtype == torch.float64:
        return [1e-12] + 3 * [1e-10]
    if case.dtype == torch.float32:
        return [1e-6] + 3 * [1e-5]
    tolerances = [2 * relative_error(x, y) for x, y in zip(_one_process(case), reference, strict=True)]
    if case.dkv_dtype == "bfloat16":
        # Each transfer rounds what it carries by half a unit in the last of 8 places.
        tolerances[2:] = [tolerance + (world_size - 1) * 2**-9 for tolerance in tolerances[2:]]
    return tolerances


@pytest.mark.parametrize(
    ("world_size", "index"),
    [
        pytest.param(world_size, index, id=f"{world_size}-{case}")
        for world_size in WORLD_SIZES
        for index, case in enumerate(GRIDS[world_size])
    ],
)
def test_output_and_gradients(world_size: int, index: int):
    case = GRIDS[world_size][index]
    actual = gathered(case, _results(world_size)[index])
    alone = {
        "layout": "",
        "strategy": "",
        "backend": "",
        "contiguous": True,
        "ulysses_size": 1,
        "dkv_dtype": "",
        "num_slices": 1,
    }
    reference = _expected(Case(**{**vars(case), **alone}))
    padding_BS = documents(case) < 0
    for name, ours, exact, tolerance in zip(
        NAMES, actual, reference, tolerances_of(case, world_size, reference), strict=True
    ):
        assert ours.dtype == case.dtype, name
        assert torch.equal(ours[padding_BS], torch.zeros_like(ours[padding_BS])), f"{name} of padding"
        assert relative_error(ours, exact) <= tolerance, name


def test_the_gap_case_has_a_gap():
    """Its point is that logsumexps of different hops lie further apart than exp can take."""
    case = next(case for case in GRIDS[2] if case.name == "lse-gap")
    (q, k, _), _ = inputs(case)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) / q.shape[-1] ** 0.5
    lse = torch.stack([scores[..., -1, n : n + 6].logsumexp(-1) for n in range(0, 24, 6)])
    gaps = lse[:, None] - lse[None]
    assert ((gaps.abs() > 89) | torch.eye(4, dtype=torch.bool)[..., None, None]).all()
    assert (gaps.diff(dim=0) > 0).any() and (gaps.diff(dim=0) < 0).any(), "some rise, some fall"


PERTURBED = [
    Case("perturbed", ((9, 1, 20, 18),), layout, mask, num_heads=2, num_kv_heads=1)
    for layout in LAYOUTS
    for mask in (CAUSAL, Mask(causal=False), Mask(window=(7, None), num_sinks=2))
]
PERTURBED_DOCUMENT, PERTURBED_TOKEN = 2, 17


def _perturb(rank: int, world_size: int):
    groups = make_groups(world_size)
    results = []
    for case in PERTURBED:
        (q, k, v), grad_out = inputs(case)
        changed = []
        for x in (q, k, v, grad_out):
            x = x.clone()
            x[:, PERTURBED_TOKEN] += 1.0
            changed.append(x)
        pairs = ((q, k, v), grad_out), (tuple(changed[:3]), changed[3])
        results.append([run_case(case, rank, world_size, groups, given) for given in pairs])
    return results


_perturbed = cache(lambda: run_distributed(_perturb, 4))


@pytest.mark.parametrize("index", range(len(PERTURBED)), ids=lambda index: f"{PERTURBED[index]}")
def test_a_token_changes_what_sees_it_only(index: int):
    """To the bit: other documents, and queries whose window is elsewhere, stay as they were."""
    case, per_rank = PERTURBED[index], [parts[index] for parts in _perturbed()]
    before, after = (gathered(case, [parts[i] for parts in per_rank]) for i in (0, 1))
    own = documents(case)[0] == PERTURBED_DOCUMENT
    for name, x, y in zip(NAMES, before, after, strict=True):
        assert torch.equal(x[:, ~own], y[:, ~own]), name
        assert not torch.equal(x[:, own], y[:, own]), name
    sees = dense_mask(documents(case), case.mask)[0, :, PERTURBED_TOKEN]
    assert torch.equal((before[0] != after[0]).flatten(2).any(-1)[0], sees)


MANY = Case("many", ((1, 2, 3, 2) * 2500,), num_heads=1, num_kv_heads=1)


def test_ten_thousand_short_documents():
    actual = gathered(MANY, run_distributed(_run_many, 2))
    leaves, grad_out = inputs(MANY)
    lengths = torch.tensor(MANY.rows[0])
    starts = lengths.cumsum(0) - lengths
    for length in (1, 2, 3):
        index = (starts[lengths == length][:, None] + torch.arange(length)).flatten()
        shape = (-1, length, 1, MANY.head_dim)
        small = [x[0, index].reshape(shape) for x in (*leaves, grad_out)]
        documents_BS = torch.zeros(len(index) // length, length, dtype=torch.long)
        reference = dense_gradients((small[0], small[1], small[2]), small[3], documents_BS)
        for name, ours, exact in zip(NAMES, actual, reference, strict=True):
            assert relative_error(ours[0, index].reshape(shape), exact) <= 1e-12, name


def _run_many(rank: int, world_size: int):
    return run_case(MANY, rank, world_size, make_groups(world_size))


def _sums(rank: int, world_size: int):
    """The gradient of a sum is an expanded tensor, and the same plan is used twice."""
    groups = make_groups(world_size)
    documents_BS = torch.zeros(1, 16, dtype=torch.long)
    plan = shard_batch(*[documents_BS] * 4, world_size, rank).plan
    torch.manual_seed(0)
    x = torch.randn(1, 16 // world_size, 2, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for grad in (None, torch.ones(1, 16 // world_size, 2, 4, dtype=torch.float64)):
        out = ring_attention(x, x, x, plan, *groups[:2])
        results.append(torch.autograd.grad(out.sum() if grad is None else out, x, grad)[0])
    return results


def test_expanded_output_gradient():
    for expanded, whole in run_distributed(_sums, 2):
        assert torch.equal(expanded, whole)
