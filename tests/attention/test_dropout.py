"""Masks of dropout: those of the twin on any layout, at their rate, independent; who does not draw them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cpmoe.attention.blocks import select_backend
from cpmoe.attention.dropout import Dropout, head_names, kept, key_names, query_names
from cpmoe.attention.layout import LAYOUTS, padded_length, token_indices
from cpmoe.attention.mask import Mask
from cpmoe.attention.plan import build_plan
from cpmoe.attention.scores import Scores
from tests.attention.dropout_twin import twin_mask

SEED, LAYER, NUM_HEADS, SEQUENCES = -11, 2, 3, (4, 9_000_000_000)
CPU = torch.device("cpu")


def _mask_of_ranks(rate: float, seq_len: int, cp_size: int, layout: str, num_slices: int) -> Tensor:
    """bool [B, H, S, S] put together from what every rank draws at every hop."""
    padded_len = padded_length(seq_len, cp_size, num_slices, layout)
    documents_BS = torch.zeros(2, padded_len, dtype=torch.long)
    mask, slices = Mask(causal=num_slices > 1), range(num_slices) if num_slices > 1 else [None]
    drawn = torch.full((2, NUM_HEADS, padded_len, padded_len), 2, dtype=torch.int8)
    for rank in range(cp_size):
        for index in slices:
            plan = build_plan(documents_BS, cp_size, rank, layout, num_slices, mask, slice_index=index)
            names = query_names(SEED, torch.tensor(SEQUENCES), plan)
            dropout = Dropout(rate, names, head_names(LAYER, NUM_HEADS, CPU))
            first = plan.num_tokens - plan.num_queries
            queries = torch.from_numpy(token_indices(plan.segments[rank])[first : plan.num_tokens])
            for hop in plan.hops:
                travelled = [hop.fetch.receive] if hop.distance else []
                for tokens in (plan.all_tokens, *travelled):
                    if tokens.num_tokens:
                        local = torch.cat([torch.arange(*bounds) for bounds in tokens.ranges])
                        keys = torch.from_numpy(token_indices(plan.segments[hop.source]))[local]
                        for reach in hop.parts:
                            part = kept(dropout, names, key_names(reach, tokens, CPU)[None])
                            drawn[:, :, queries[:, None], keys] = part.to(torch.int8)
    return drawn[..., :seq_len, :seq_len]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_are_those_of_the_twin_on_any_layout(layout):
    seq_len, rate = 37, 0.4
    whole = twin_mask(rate, SEED, LAYER, SEQUENCES, NUM_HEADS, seq_len).to(torch.int8)
    for cp_size in (1, 2, 3, 4):
        assert torch.equal(_mask_of_ranks(rate, seq_len, cp_size, layout, 1), whole)
        causal = _mask_of_ranks(rate, seq_len, cp_size, layout, 2)
        seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        assert torch.equal(causal[..., seen], whole[..., seen])


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.5, 0.9])
def test_rate_and_independence(rate):
    """Five standard deviations of the binomial: in all, by row, by column, and for pairs of any two."""
    shape = (2, 4, 256, 256)
    plan = build_plan(torch.zeros(2, 256, dtype=torch.long), 1, 0)
    names = query_names(1, torch.tensor([0, 1]), plan)
    keys = key_names(plan.own.reach, plan.all_tokens, CPU)[None]
    layers = [kept(Dropout(rate, names, head_names(layer, 4, CPU)), names, keys).double() for layer in (0, 1)]
    deviation = (rate * (1 - rate)) ** 0.5
    first, second = ((layer - (1 - rate)) / deviation for layer in layers)
    assert first.shape == shape
    bound = 5 / first.numel() ** 0.5
    assert abs(first.mean()) < bound and abs(second.mean()) < bound
    others = [second, first.roll(1, 0), first.roll(1, 1), first.roll(1, 2), first.roll(1, 3)]
    others += [first.roll(16, 2), first.roll(16, 3), first.transpose(2, 3), first.roll((1, -1), (2, 3))]
    for other in others:
        assert abs((first * other).mean()) < bound
    # The same of four at the corners of a rectangle, which masks that are a product of two would fail.
    corners = first * first.roll(1, 2) * first.roll(1, 3) * first.roll((1, 1), (2, 3))
    assert abs(corners.mean()) < bound
    for axis in (2, 3):
        spread = (first.mean(axis) * 16).square().mean()
        assert abs(spread - 1) < 0.15


def test_who_cannot_is_told_who_can():
    q = torch.zeros(1, 4, 2, 16)
    names = query_names(0, torch.tensor([0]), build_plan(torch.zeros(1, 4, dtype=torch.long), 1, 0))
    scores = Scores(0.25, dropout=Dropout(0.1, names, head_names(0, 2, CPU)))
    with pytest.raises(ValueError, match=r"'sdpa': torch's kernels draw dropout by .* can: reference"):
        select_backend("sdpa", q, q, q, scores)
    assert select_backend("auto", q, q, q, scores) is select_backend("reference", q, q, q, scores)
    for rate in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"dropout rate = {rate}: must be between 0 and 1"):
            Dropout(rate, names, head_names(0, 2, CPU))
