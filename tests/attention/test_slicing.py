"""Slices of a micro-batch: every token once, and the plans of causal slices are together the whole mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.attention.layout import LAYOUTS, deal, padded_length, token_indices
from cpmoe.attention.mask import Mask
from cpmoe.attention.plan import RemoteHop, build_plan, deal_batch
from cpmoe.attention.slicing import shard_slices
from tests.attention.dense import dense_mask


@st.composite
def _cases(draw):
    """(documents_BS, cp_size, layout, mask) of padded batches with causal masks."""
    cp_size, layout = draw(st.integers(1, 4)), draw(st.sampled_from(LAYOUTS))
    padded = padded_length(draw(st.integers(2, 40)), cp_size, 2, layout)
    cuts = draw(st.lists(st.integers(1, padded), max_size=6))
    ids_S = torch.bucketize(torch.arange(padded), torch.tensor(sorted(set(cuts))), right=True)
    ids_S = torch.where(
        torch.isin(ids_S, torch.tensor(draw(st.lists(st.integers(0, 6), max_size=2)))), -1, ids_S
    )
    mask = Mask(window=(draw(st.none() | st.integers(0, 12)), None), num_sinks=draw(st.integers(0, 3)))
    return torch.stack([ids_S, torch.zeros_like(ids_S)]), cp_size, layout, mask


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_plans_of_causal_slices_are_the_mask_exactly_once(case):
    documents_BS, cp_size, layout, mask = case
    batch_size, padded = documents_BS.shape
    segments = deal_batch(documents_BS, cp_size, layout, 2, (mask,))
    index_NT = [torch.from_numpy(token_indices(own)) for own in segments]
    seen_BSS = torch.zeros(batch_size, padded, padded, dtype=torch.int64)
    pairs = 0
    for index in range(2):
        plans = [
            build_plan(documents_BS, cp_size, r, layout, 2, mask, slice_index=index) for r in range(cp_size)
        ]
        for rank, plan in enumerate(plans):
            length = padded // cp_size // 2
            assert (plan.num_queries, plan.num_tokens) == (length, (index + 1) * length)
            pairs += plan.num_pairs
            for hop in plan.hops:
                needed = {t for r in hop.rectangles for t in range(r.k_start, r.k_stop)}
                assert all(t < plan.num_tokens for t in needed), "keys of this slice and those before it"
                if isinstance(hop, RemoteHop):
                    arrives = {t for start, stop in hop.fetch.receive.ranges for t in range(start, stop)}
                    assert needed <= arrives
                for r in hop.rectangles:
                    q_index = index_NT[rank][index * length :][r.q_start : r.q_stop]
                    k_index = index_NT[hop.source][r.k_start : r.k_stop]
                    visible = torch.ones(len(q_index), len(k_index), dtype=torch.int64)
                    visible = {"full": visible, "causal": visible.tril(), "edge": visible.triu()}[r.kind]
                    seen_BSS[r.batch_start : r.batch_stop, q_index[:, None], k_index[None]] += visible
    expected = dense_mask(documents_BS, mask).to(torch.int64)
    assert torch.equal(seen_BSS, expected)
    assert pairs == expected.sum()


@pytest.mark.parametrize("slicing", ["none", "batch", "causal"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_every_token_is_in_one_slice_of_one_rank(slicing, batch_size):
    seq_len, cp_size = 21, 2
    tokens_BS = torch.arange(1, batch_size * seq_len + 1).view(batch_size, seq_len)
    fields = tokens_BS, tokens_BS, tokens_BS % seq_len, torch.zeros_like(tokens_BS)
    found, names = [], []
    for rank in range(cp_size):
        slices = shard_slices(
            *fields, cp_size, rank, slicing=slicing, sequences_B=torch.arange(batch_size) + 7
        )
        assert len(slices) == (1 if slicing == "none" or (slicing, batch_size) == ("batch", 1) else 2)
        assert [shard.follows for shard in slices] == [False, slicing == "causal"][: len(slices)]
        for shard in slices:
            real = shard.documents_BT >= 0
            assert torch.equal(shard.tokens_BT[real], shard.labels_BT[real])
            found += shard.tokens_BT[real].tolist()
            named_BT = (shard.sequences_B[:, None] - 7) * seq_len + shard.index_T + 1
            names += named_BT[real].tolist()
    assert found == names, "sequence and place name a token"
    assert sorted(found) == tokens_BS.flatten().tolist()


def test_each_causal_slice_is_dealt_by_itself():
    """So every rank has the same work in every slice; the first slice is a plan of the first half alone."""
    documents_BS = torch.zeros(1, 32, dtype=torch.int64)
    for rank in range(2):
        first, second = (build_plan(documents_BS, 2, rank, num_slices=2, slice_index=i) for i in range(2))
        alone = build_plan(documents_BS[:, :16], 2, rank)
        assert first.pairs_N == alone.pairs_N and first.imbalance == second.imbalance == 1.0
        assert [hop.rectangles for hop in first.hops] == [hop.rectangles for hop in alone.hops]
    assert token_indices(deal(32, 2, "zigzag", 2)[0]).tolist() == [
        0,
        1,
        2,
        3,
        12,
        13,
        14,
        15,
        *range(16, 20),
        *range(28, 32),
    ]
