"""Slices of a micro-batch: every token once, and the plans of causal slices are together the whole mask."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.attention.layout import LAYOUTS, deal, padded_length, token_indices
from cpmoe.attention.mask import Mask
from cpmoe.attention.plan import RemoteHop, TokenRanges, build_plan, deal_batch
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


def tokens_of(ranges: TokenRanges) -> set[int]:
    return {token for start, stop in ranges.ranges for token in range(start, stop)}


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_plans_of_causal_slices_are_the_mask_exactly_once(case):
    documents_BS, cp_size, layout, mask = case
    batch_size, padded = documents_BS.shape
    segments = deal_batch(documents_BS, cp_size, layout, 2, (mask,))
    index_NT = [torch.from_numpy(token_indices(own)) for own in segments]
    seen_BSS = torch.zeros(batch_size, padded, padded, dtype=torch.int64)
    pairs = 0
    first = None
    for index in range(2):
        plans = [
            build_plan(documents_BS, cp_size, r, layout, 2, mask, slice_index=index) for r in range(cp_size)
        ]
        first = first or plans
        for rank, plan in enumerate(plans):
            length = padded // cp_size // 2
            assert (plan.num_queries, plan.num_tokens) == (length, (index + 1) * length)
            pairs += plan.num_pairs
            for hop in plan.hops:
                needed = {t for r in hop.rectangles for t in range(r.k_start, r.k_stop)}
                assert all(t < plan.num_tokens for t in needed), "keys of this slice and those before it"
                if isinstance(hop, RemoteHop):
                    arrives, summed = (tokens_of(x) for x in (hop.fetch.receive, hop.deliver.send))
                    if hop.by_slice and index:
                        earlier = first[rank].remote[0]
                        assert earlier.distance == hop.distance
                        assert not arrives or min(arrives) >= length, (
                            "tokens that are there do not come again"
                        )
                        arrives |= tokens_of(earlier.fetch.receive)
                        summed |= tokens_of(earlier.deliver.send)
                    assert needed <= arrives and needed <= summed
                assert hop.reach.num_pairs == sum(part.num_pairs for part in hop.parts)
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


@settings(max_examples=100, deadline=None)
@given(_cases())
def test_transfers_of_causal_slices_match(case):
    """What one rank sends another expects, is held by the sender, and dKV is handed on until it is home."""
    documents_BS, cp_size, layout, mask = case
    length = documents_BS.shape[1] // cp_size // 2
    slices = [
        [build_plan(documents_BS, cp_size, r, layout, 2, mask, slice_index=index) for r in range(cp_size)]
        for index in range(2)
    ]
    for index, plans in enumerate(slices):
        for plan, at in itertools.product(plans, range(len(plans[0].remote))):
            hop = plan.remote[at]
            for kind in ("fetch", "deliver"):
                transfer = getattr(hop, kind)
                other = getattr(plans[transfer.to_rank].remote[at], kind)
                assert other.from_rank == plan.cp_rank and other.receive == transfer.send
            held = tokens_of(plan.all_tokens)
            if plan.is_relayed and at:
                before = plan.remote[at - 1]
                held = tokens_of(before.fetch.receive)
                if before.by_slice and index:
                    held |= tokens_of(slices[0][plan.cp_rank].remote[0].fetch.receive)
            assert tokens_of(hop.fetch.send) <= held, "a rank sends what it has"
            if plan.is_relayed and at + 1 < len(plan.remote):
                assert tokens_of(hop.deliver.receive) <= tokens_of(plan.remote[at + 1].deliver.send)
            else:
                assert all(token < (index + 1) * length for token in tokens_of(hop.deliver.receive))


@pytest.mark.parametrize("seq_len", [64, 8192])
def test_causal_slices_send_no_more_than_none_over_the_busiest_link(seq_len):
    """Forward and backward of one document on two ranks; dealt in slices, one rank needs more."""
    documents_BS = torch.zeros(1, seq_len, dtype=torch.int64)

    def sent(num_slices: int) -> list[list[int]]:
        """Tokens of KV and of dKV that each rank sends."""
        indices = range(2) if num_slices == 2 else (None,)
        plans = [
            [build_plan(documents_BS, 2, r, num_slices=num_slices, slice_index=index) for index in indices]
            for r in range(2)
        ]
        hops = [[sum(plan.sent_bytes(1, 1, 1, 1), ()) for plan in own] for own in plans]
        return [[sum(kind) // 2 for kind in zip(*own, strict=True)] for own in hops]

    serial, sliced = sent(1), sent(2)
    for kind in range(2):
        assert max(rank[kind] for rank in sliced) == max(rank[kind] for rank in serial) == seq_len // 2
    assert sliced == [[3 * seq_len // 8, seq_len // 2], [seq_len // 2, 3 * seq_len // 8]]
