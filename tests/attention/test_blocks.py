"""Backends and the running softmax on one process: merging, limits, dtypes, strides, errors.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cpmoe.attention.blocks import (
    KeyValueBlock,
    KeyValueGradient,
    KeyValueSizes,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    _say_once,
    select_backend,
)
from cpmoe.attention.blocks.kernels_cpu import even_pieces
from cpmoe.attention.blocks.sdpa import CUDA_EFFICIENT, CUDA_FLASH, Kernel
from cpmoe.attention.plan import build_plan
from cpmoe.attention.ranges import TokenRanges
from cpmoe.attention.reach import Reach, RowReach
from cpmoe.attention.rectangles import Kind
from cpmoe.attention.ring import ring_attention
from cpmoe.attention.scores import Scores
from cpmoe.attention.stacks import Stack, TokenRuns
from tests.attention.cases import relative_error
from tests.attention.dense import dense_gradients

SCORES = Scores(0.25)
# Those with float64; for Triton's see test_triton.py.
NAMED = ["reference", "sdpa"]


def _tensors(num_queries: int, num_keys: int, dtype=torch.float64, seed: int = 0, batch_size: int = 1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_queries, 4), (num_keys, 2), (num_keys, 2), (num_queries, 4)]
    return [torch.randn(batch_size, t, h, 16, generator=generator, dtype=dtype) for t, h in shapes]


def _reach(batch_size: int, *bounds: tuple[list[int], list[int]]) -> Reach:
    """Per query the keys [start, stop), and as second bounds the sinks before them."""
    rows = [np.array(x) for starts_stops in bounds for x in starts_stops]
    nothing = 4 * [np.zeros_like(rows[0])]
    row = RowReach(nothing[0], *(rows + nothing)[:4])
    return Reach([row], np.zeros(batch_size, dtype=np.int64), is_own=False)


def _full(q: Tensor, num_keys: int) -> Reach:
    num_queries = q.shape[1]
    return _reach(q.shape[0], (num_queries * [0], num_queries * [num_keys]))


def _softmax_of_parts(q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys of a row at once, in float64."""
    k, v = (torch.cat(x, dim=1).double().repeat_interleave(2, dim=2) for x in zip(*parts, strict=True))
    scores = torch.einsum("bthd,buhd->bhtu", q.double(), k) / q.shape[-1] ** 0.5
    out = torch.einsum("bhtu,buhd->bthd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).transpose(1, 2)


def _run(backend: str, q: Tensor, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    state = RunningSoftmax(q, q.shape[3])
    for k, v in parts:
        block = KeyValueBlock(k, v, TokenRanges(((0, k.shape[1]),)))
        select_backend(backend, q, k, v, SCORES).forward(q, block, _full(q, k.shape[1]), state, SCORES)
    return state.result()


@pytest.mark.parametrize("backend", NAMED)
@pytest.mark.parametrize("lifts", [(0, 95, -300), (0, -95, 2000), (95, 0, 95), (-2000, -1000, 0)])
def test_merging_survives_any_gap(backend, lifts):
    """A hop whose logsumexp is 89 or more above or below the running one: exp alone would overflow."""
    q, *_ = _tensors(5, 1)
    q[..., 0] = q.shape[-1] ** 0.5
    parts = []
    for seed, lift in enumerate(lifts):
        _, k, v, _ = _tensors(5, 3, seed=seed)
        k[..., 0] = lift
        parts.append((k, v))
    for dtype in (torch.float64, torch.float32):
        # A score of size s is rounded by s · eps, and that much its probability changes.
        tolerance = 2 * torch.finfo(dtype).eps * (1 + max(map(abs, lifts)))
        cast = [(k.to(dtype), v.to(dtype)) for k, v in parts]
        out, lse = _run(backend, q.to(dtype), cast)
        exact_out, exact_lse = _softmax_of_parts(q, parts)
        assert relative_error(out, exact_out) <= tolerance
        assert relative_error(lse, exact_lse) <= tolerance


def test_merging_when_neither_or_one_side_saw_a_key():
    q, *_ = _tensors(3, 1)
    (stack,) = _reach(1, ([0, 0, 0], [1, 1, 0])).stacks
    nothing = torch.zeros(1, 2, 4, 16), torch.full((1, 2, 4), -torch.inf)
    something = torch.ones(1, 2, 4, 16), torch.full((1, 2, 4), -500.0)
    state = RunningSoftmax(q, q.shape[3])
    state.merge(stack, *nothing)
    out, lse = state.result()
    assert (out == 0).all() and (lse == -torch.inf).all()
    state.merge(stack, *something)
    state.merge(stack, *nothing)
    out, lse = state.result()
    assert (out[:, :2] == 1).all() and (lse[:, :2] == -500).all()
    assert (out[:, 2] == 0).all() and (lse[:, 2] == -torch.inf).all()


@pytest.mark.parametrize("num_hops", [4, 8, 32])
def test_error_does_not_grow_with_the_ring(num_hops):
    """bfloat16 inputs over many hops round like one block does: the sums between hops are float32."""
    q, *_ = _tensors(64, 1, torch.bfloat16)
    parts = [tuple(_tensors(1, 16, torch.bfloat16, seed)[1:3]) for seed in range(num_hops)]
    exact, _ = _softmax_of_parts(q, parts)
    rounding = relative_error(exact.to(torch.bfloat16), exact)
    for backend in NAMED:
        out, _ = _run(backend, q, parts)
        assert relative_error(out.to(torch.bfloat16), exact) <= 1.05 * rounding, backend


@pytest.mark.parametrize("backend", NAMED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_backward_adds_each_block_to_float32_sums(backend, dtype):
    """Two KV blocks, the second also seen by part of the rows only; the buffer holds two ranges of tokens."""
    q, k, v, grad_out = (x.to(dtype) for x in _tensors(6, 8, batch_size=2))
    tokens = TokenRanges(((2, 6), (9, 13)))
    reach = _reach(2, (3 * [2] + 3 * [9], 3 * [6] + 3 * [13]), (3 * [0] + 3 * [2], 3 * [0] + 3 * [6]))
    scores = Scores(0.3)
    blocks = select_backend(backend, q, k, v, scores)
    block, state = KeyValueBlock(k, v, tokens), RunningSoftmax(q, q.shape[3])
    blocks.forward(q, block, reach, state, scores)
    out, lse = state.result()
    dq, dkv = QueryGradient(q), KeyValueGradient(tokens, k, v)
    blocks.backward(SavedForward(q, grad_out, out.to(dtype), lse, scores), block, reach, dq, dkv)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in (out, lse, dq.result(), *dkv.result())} == {sums}

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, dim=2) for x in leaves[1:])
    scores = torch.einsum("bthd,buhd->bhtu", leaves[0], keys) * scores.scale
    hidden = torch.zeros(6, 8, dtype=torch.bool)
    hidden[:3, 4:] = True
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    exact = torch.einsum("bhtu,buhd->bthd", probs, values)
    exact_grads = torch.autograd.grad(exact, leaves, grad_out.double())
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    assert relative_error(out, exact.detach()) <= tolerance
    for ours, theirs in zip((dq.result(), *dkv.result()), exact_grads, strict=True):
        assert relative_error(ours, theirs) <= tolerance


def test_packed_gradients_add_up_by_token():
    """dKV that arrives covers other tokens than the block's own: sums go by token, untouched ones stay 0."""
    k = torch.zeros(1, 4, 1, 2)
    dkv = KeyValueGradient(TokenRanges(((0, 3), (5, 8))), k, k)
    keys = TokenRuns(np.array([0]), np.array([5]), 2)
    dkv.add(keys, torch.ones(1, 2, 1, 2), torch.full((1, 2, 1, 2), 2.0))
    arrived = torch.arange(1.0, 5.0)[None, None, :, None, None].expand(2, 1, 4, 1, 2)
    dkv.add_packed(TokenRanges(((1, 3), (6, 8))), arrived.flatten())
    dk, dv = KeyValueSizes.of(k, k).views(dkv.packed())
    assert dk[0, :, 0, 0].tolist() == [0, 1, 2, 1, 4, 4]
    assert dv[0, :, 0, 0].tolist() == [0, 1, 2, 2, 5, 4]


@pytest.mark.parametrize("backend", NAMED)
def test_scale_and_one_rank_without_groups(backend):
    documents_BS = torch.zeros(2, 9, dtype=torch.long)
    leaves = [x.requires_grad_() for x in _tensors(9, 9, batch_size=2)]
    plan = build_plan(documents_BS, 1, 0)
    out = ring_attention(*leaves[:3], plan, None, None, backend, Scores(0.5))
    grads = torch.autograd.grad(out, leaves[:3], leaves[3].detach())
    scaled = (leaves[0].detach() * 0.5 * 4, leaves[1].detach(), leaves[2].detach())
    exact = list(dense_gradients(scaled, leaves[3].detach(), documents_BS))
    exact[1] = exact[1] * 0.5 * 4
    for ours, theirs in zip((out.detach(), *grads), exact, strict=True):
        assert relative_error(ours, theirs) <= 1e-12


@pytest.mark.parametrize("length", [255, 256, 257, 515, 1037])
def test_long_causal_blocks(length):
    """The CPU kernel's causal blocks are cut in halves and a rest; the second document is off their grid."""
    documents_BS = torch.stack((torch.zeros(length, dtype=torch.long), (torch.arange(length) > 77).long()))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        exact_inputs = [x[:, :, :, :4].to(dtype).double() for x in _tensors(length, length, batch_size=2)]
        leaves = [x.to(dtype).requires_grad_() for x in exact_inputs[:3]]
        out = ring_attention(*leaves, build_plan(documents_BS, 1, 0), None, None, "sdpa")
        grads = torch.autograd.grad(out, leaves, exact_inputs[3].to(dtype))
        q, k, v, grad_out = exact_inputs
        exact = dense_gradients((q, k, v), grad_out, documents_BS)
        for ours, theirs in zip((out.detach(), *grads), exact, strict=True):
            assert relative_error(ours, theirs) <= tolerance


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 50), length=st.integers(1, 2000), kind=st.sampled_from(get_args(Kind)))
def test_even_pieces_cover_a_rectangle_once(start, length, kind):
    rows, keys = (TokenRuns(np.array([0, 2]), np.array([place, place]), length) for place in (start, 9))
    whole = Stack(kind, True, rows, keys)
    pieces = even_pieces(whole)
    assert sum(stack.num_pairs for stack in pieces) == whole.num_pairs
    for place, row in enumerate((0, 2)):
        bounds = []
        for piece in pieces:
            assert piece.rows.batch_P[place] == piece.keys.batch_P[place] == row
            q_start, k_start = int(piece.rows.start_P[place]), int(piece.keys.start_P[place])
            bounds.append(((q_start, q_start + piece.rows.length), (k_start, k_start + piece.keys.length)))
        opened = [q for b, piece in zip(bounds, pieces, strict=True) if piece.opens for q in range(*b[0])]
        assert sorted(opened) == list(range(start, start + length)), "each query is opened once"
        if len(pieces) > 1:
            main, beside, corner = bounds
            assert pieces[0].opens and pieces[0].kind == pieces[2].kind == kind and pieces[1].kind == "full"
            assert (main[0][0], main[1][0]) == (start, 9)
            assert (corner[0][0], corner[1][0]) == (main[0][1], main[1][1])
            assert (corner[0][1], corner[1][1]) == (start + length, 9 + length)
            late, early = (corner, main) if kind == "causal" else (main, corner)
            assert beside == (late[0], early[1])
            assert 0 < corner[0][1] - corner[0][0] < 32


def test_auto_says_once_what_it_chose(caplog):
    q = torch.zeros(1, 4, 2, 16)
    _say_once.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert select_backend("auto", q, q, q, SCORES) is select_backend("sdpa", q, q, q, SCORES)
    assert [record.message for record in caplog.records] == [
        "attention.backend auto is sdpa (the first choice on cpu)"
    ]


def test_errors_name_what_can():
    q, k, v, _ = _tensors(4, 4)
    plan = build_plan(torch.zeros(1, 4, dtype=torch.long), 1, 0)
    with pytest.raises(
        ValueError, match=r"attention\.backend = 'fast': must be one of auto, reference, sdpa"
    ):
        ring_attention(q, k, v, plan, None, None, "fast")
    meta = [x.to("meta") for x in (q, k, v)]
    with pytest.raises(
        ValueError, match=r"'sdpa': device meta has no kernel .* backends that can: reference"
    ):
        ring_attention(*meta, plan, None, None, "sdpa")
    with pytest.raises(ValueError, match=r"int64 is not one of float64, .* backends that can: none"):
        ring_attention(q.long(), k.long(), v.long(), plan, None, None, "sdpa")
    with pytest.raises(ValueError, match=r"'sdpa': torch's kernels have no softcap; .* can: reference"):
        ring_attention(q, k, v, plan, None, None, "sdpa", Scores(0.25, softcap=30.0))
    with pytest.raises(ValueError, match=r"'sdpa': head size 8 of V must be 16, .* can: reference"):
        ring_attention(q, k, v[..., :8], plan, None, None, "sdpa")
    with pytest.raises(ValueError, match=r"softcap = -1\.0: must be above 0, or 0 for none"):
        Scores(0.25, softcap=-1.0)
    with pytest.raises(ValueError, match=r"q \(1, 4, 4, 16\): the plan is for 1 rows of 8 tokens"):
        ring_attention(q, k, v, build_plan(torch.zeros(1, 8, dtype=torch.long), 1, 0), None, None)
    with pytest.raises(ValueError, match="3 query heads of size 16 and 2 KV heads"):
        ring_attention(q[:, :, :3], k, v, plan, None, None)
    with pytest.raises(ValueError, match="must have one dtype"):
        ring_attention(q, k.float(), v, plan, None, None)
    with pytest.raises(ValueError, match=r"twice \[B, T, G, D\], alike but for"):
        ring_attention(q, k, v[:, :3], plan, None, None)
    with pytest.raises(ValueError, match=r"attention\.dkv_dtype = 'half': must be one of float32, bfloat16"):
        ring_attention(q, k, v, plan, None, None, dkv_dtype="half")
    with pytest.raises(ValueError, match="group ring has 1 ranks and the plan is for 2"):
        ring_attention(q, k, v, build_plan(torch.zeros(1, 8, dtype=torch.long), 2, 0), None, None)


class _Signatures(TorchDispatchMode):
    """Checks calls against the operator's schema, which needs no GPU, and answers with shapes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._efficient_attention_backward.default:
            # Its registration for meta tensors is behind its schema in torch 2.13.
            _, q, k, v, _, out, _, _, num_queries, num_keys, lse = args[:11]
            assert out.is_contiguous() and lse.is_contiguous() and lse.shape[-1] % 32 == 0
            assert (num_queries, num_keys) == (q.shape[1], k.shape[1]) and q.shape[2] == k.shape[2]
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), q.new_empty(0)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kernel", "dtype"), [(CUDA_FLASH, torch.bfloat16), (CUDA_EFFICIENT, torch.float32)])
def test_cuda_kernels_are_called_by_their_schema(kernel: Kernel, dtype: torch.dtype):
    q, k, v, grad_out = (x.to("meta", dtype) for x in _tensors(37, 37))
    for kind in get_args(Kind):
        with _Signatures():
            out, lse = kernel.forward(q, k, v, kind, 0.25)
            grads = kernel.backward(grad_out, q, k, v, out, lse, kind, 0.25)
        assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cuda_against_the_definition(dtype, head_dim):
    documents_BS = torch.arange(300)[None].expand(2, -1) // 170
    torch.manual_seed(0)
    tensors = [torch.randn(2, 300, h, head_dim).to(dtype).double() for h in (4, 2, 2, 4)]
    leaves = [x.to("cuda", dtype).requires_grad_() for x in tensors[:3]]
    out = ring_attention(*leaves, build_plan(documents_BS, 1, 0), None, None)
    grads = torch.autograd.grad(out, leaves, tensors[3].to("cuda", dtype))
    exact = dense_gradients((tensors[0], tensors[1], tensors[2]), tensors[3], documents_BS)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[
        dtype
    ]
    for ours, theirs in zip((out.detach(), *grads), exact, strict=True):
        assert ours.dtype == dtype and relative_error(ours.cpu(), theirs) <= tolerance
