"""Sorting, permutation and regrouping against indexing written out, over random sizes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.moe.dispatch import CountExchange
from cpmoe.moe.permute import permute, regroup, sort_by_expert, ungroup, unpermute
from tests.distributed import run_distributed

HIDDEN = 3


@st.composite
def routed_tokens(draw):
    """Experts chosen by each token, E for padding, and values for tokens, rows and weights."""
    experts = draw(st.integers(1, 6))
    k = draw(st.integers(1, experts))
    chosen = st.one_of(st.permutations(range(experts)).map(lambda p: p[:k]), st.just([experts] * k))
    rows = draw(st.lists(chosen, max_size=9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def values(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    tokens = len(rows)
    routed = sum(row[0] < experts for row in rows) * k
    indices = torch.tensor(rows, dtype=torch.int64).view(tokens, k)
    return experts, indices, values(tokens, HIDDEN), values(routed, HIDDEN), values(tokens, k)


def slots_by_expert(experts: int, indices: torch.Tensor) -> list[tuple[int, int]]:
    return [
        (token, k)
        for expert in range(experts)
        for token, row in enumerate(indices.tolist())
        for k, chosen in enumerate(row)
        if chosen == expert
    ]


@settings(max_examples=60, deadline=None)
@given(routed_tokens())
def test_permute_and_unpermute(drawn):
    experts, indices, x, rows, weights = drawn
    weights = (weights * (indices < experts)).detach().requires_grad_()
    slots = slots_by_expert(experts, indices)
    permutation = sort_by_expert(indices)

    sorted_rows = permute(x, permutation, len(slots))
    expected_rows = torch.stack([x[t] for t, _ in slots]) if slots else x.new_zeros(0, HIDDEN)
    torch.testing.assert_close(sorted_rows, expected_rows, rtol=0, atol=0)

    y = unpermute(rows, weights, permutation)
    expected_y = torch.zeros_like(x)
    for row, (token, k) in enumerate(slots):
        expected_y = expected_y.index_add(0, torch.tensor([token]), (weights[token, k] * rows[row])[None])
    torch.testing.assert_close(y, expected_y, rtol=1e-13, atol=1e-13)

    cotangents = (torch.randn_like(expected_rows), torch.randn_like(y))
    inputs = (x, rows, weights)
    grads = torch.autograd.grad((sorted_rows, y), inputs, cotangents)
    expected = (
        torch.autograd.grad(
            (expected_rows, expected_y), inputs, cotangents, allow_unused=True, materialize_grads=True
        )
        if slots
        else [torch.zeros_like(value) for value in inputs]
    )
    real = indices < experts
    for grad, value in zip(grads[:2], expected[:2], strict=True):
        torch.testing.assert_close(grad, value, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grads[2] * real, expected[2] * real, rtol=1e-13, atol=1e-13)
    assert torch.count_nonzero(grads[2][~real]) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_regroup_orders_rows_by_expert_and_ungroup_brings_them_back(ranks, experts, data):
    blocks = [
        data.draw(st.lists(st.integers(0, 3), min_size=experts, max_size=experts)) for _ in range(ranks)
    ]
    labels = [(e, r, i) for r in range(ranks) for e in range(experts) for i in range(blocks[r][e])]
    rows = torch.arange(float(len(labels)))[:, None].requires_grad_()
    grouped = regroup(rows, blocks)
    assert [labels[int(i)] for i in grouped[:, 0]] == sorted(labels)
    back = ungroup(grouped, blocks)
    assert torch.equal(back, rows)
    cotangent = torch.rand_like(rows)
    assert torch.equal(torch.autograd.grad(back, rows, cotangent)[0], cotangent)


def test_no_copy_where_rows_are_grouped_already():
    rows = torch.rand(5, 2)
    assert regroup(rows, [[2, 3]]) is rows and ungroup(rows, [[2, 3]]) is rows
    assert regroup(rows, [[2], [3]]) is rows and ungroup(rows, [[2], [3]]) is rows


def test_bfloat16_sums_in_float32():
    """0.25 is lost one by one beside 256 in bfloat16, and counts when summed in float32."""
    k = 8
    rows = torch.full((k, 1), 0.25, dtype=torch.bfloat16)
    rows[0] = 256.0
    permutation = sort_by_expert(torch.arange(k)[None])
    y = unpermute(rows, torch.ones(1, k), permutation)
    assert y.dtype == torch.bfloat16 and float(y) == 258.0
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    permute(x, permutation, k).backward(rows)
    assert x.grad is not None and float(x.grad) == 258.0


def exchange(rank: int, world: int, counts: list[list[int]]):
    splits = CountExchange(torch.tensor(counts[rank]), dist_world(world)).read().row_splits(4)
    return splits.send, splits.receive, splits.blocks, splits.counts, splits.offsets_E.tolist()


def dist_world(world: int):
    return torch.distributed.group.WORLD if world > 1 else None


def test_count_exchange():
    counts = [[3, 0, 1, 2], [0, 0, 5, 0]]
    first, second = run_distributed(exchange, 2, counts)
    assert first == ([3, 3], [3, 0], [[3, 0], [0, 0]], [3, 0], [3, 3])
    assert second == ([0, 5], [3, 5], [[1, 2], [5, 0]], [6, 2], [6, 8])
    assert exchange(0, 1, counts) == ([6], [6], [[3, 0, 1, 2]], [3, 0, 1, 2], [3, 3, 4, 6])
