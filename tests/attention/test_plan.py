"""The plan without processes: its rectangles are the mask, its transfers carry what is needed and no more.

Shape letters: B batch, S full sequence, N ranks.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.attention.plan import AttentionPlan, Rectangle, TokenRanges, build_plan
from cpmoe.attention.sharding import LAYOUTS, padded_length, shard_indices
from tests.attention.dense import dense_mask


@st.composite
def _sequences(draw):
    """(documents_BS padded, cp_size, layout, num_slices), with equal and different rows and inner padding."""
    cp_size = draw(st.integers(1, 5))
    layout = draw(st.sampled_from(LAYOUTS))
    num_slices = draw(st.integers(1, 2))
    padded = padded_length(draw(st.integers(1, 40)), cp_size, num_slices, layout)
    structures = []
    for _ in range(draw(st.integers(1, 2))):
        cuts = draw(st.lists(st.integers(1, padded), max_size=8))
        ids_S = torch.bucketize(torch.arange(padded), torch.tensor(sorted(set(cuts))), right=True)
        hidden = draw(st.sets(st.integers(0, 8), max_size=2))
        structures.append(torch.where(torch.isin(ids_S, torch.tensor(sorted(hidden))), -1, ids_S))
    rows = draw(st.lists(st.sampled_from(range(len(structures))), min_size=1, max_size=4))
    return torch.stack([structures[row] for row in rows]), cp_size, layout, num_slices


def _plans(documents_BS, cp_size, layout, num_slices) -> list[AttentionPlan]:
    return [build_plan(documents_BS, cp_size, rank, layout, num_slices) for rank in range(cp_size)]


def _tokens(ranges: TokenRanges) -> set[int]:
    return {token for start, stop in ranges.ranges for token in range(start, stop)}


@settings(max_examples=150, deadline=None)
@given(_sequences())
def test_rectangles_cover_the_mask_exactly_once(sequence):
    documents_BS, cp_size, layout, num_slices = sequence
    batch_size, padded = documents_BS.shape
    index_NT = [shard_indices(padded, cp_size, rank, layout, num_slices) for rank in range(cp_size)]
    seen_BSS = torch.zeros(batch_size, padded, padded, dtype=torch.int64)
    num_pairs = 0
    for rank, plan in enumerate(_plans(*sequence)):
        touched_BT = torch.zeros(batch_size, plan.num_tokens, dtype=torch.bool)
        for hop in plan.hops:
            assert hop.source == (rank - hop.distance) % cp_size
            for rectangle in hop.rectangles:
                b, q, k = slice(*rectangle[0:2]), slice(*rectangle[2:4]), slice(*rectangle[4:6])
                q_index, k_index = index_NT[rank][q], index_NT[hop.source][k]
                visible = torch.ones(len(q_index), len(k_index), dtype=torch.int64)
                if rectangle.causal:
                    assert hop.distance == 0 and rectangle[2:4] == rectangle[4:6]
                    visible = visible.tril()
                seen_BSS[b, q_index[:, None], k_index[None]] += visible
                if rectangle.opens:
                    assert not touched_BT[b, q].any()
                touched_BT[b, q] = True
        num_pairs += plan.num_pairs
    assert torch.equal(seen_BSS, dense_mask(documents_BS).to(torch.int64))
    assert num_pairs == seen_BSS.sum()


@settings(max_examples=150, deadline=None)
@given(_sequences())
def test_transfers_match_and_carry_what_is_needed(sequence):
    _, cp_size, _, _ = sequence
    plans = _plans(*sequence)
    distances = [hop.distance for hop in plans[0].remote]
    for plan in plans:
        assert [hop.distance for hop in plan.remote] == distances
    for index in range(len(distances)):
        hops = [plan.remote[index] for plan in plans]
        assert any(hop.rectangles for hop in hops), "a hop that no rank needs"
        for rank, hop in enumerate(hops):
            for kind in ("fetch", "deliver"):
                transfer = getattr(hop, kind)
                receiver = getattr(hops[transfer.to_rank], kind)
                assert receiver.from_rank == rank and receiver.receive == transfer.send
            needed = {t for r in hop.rectangles for t in range(r.k_start, r.k_stop)}
            assert needed <= _tokens(hop.fetch.receive), "KV that is needed arrives"
            assert needed <= _tokens(hop.deliver.send), "dKV that is computed is sent"
            held_by = plans[(hop.source + (distances[index - 1] if index else 0)) % cp_size]
            held = _tokens(held_by.remote[index - 1].fetch.receive if index else held_by.all_tokens)
            assert _tokens(hop.fetch.receive) <= held, "a rank sends what it has"
            assert len(_tokens(hop.deliver.receive)) <= plans[0].num_tokens
    for plan in plans:
        for hop, following in pairwise(plan.remote):
            assert _tokens(hop.deliver.receive) <= _tokens(following.deliver.send), "dKV is handed on"
        if plan.remote:
            assert (
                plan.remote[-1].deliver.receive
                == plans[(plan.cp_rank + distances[-1]) % cp_size].remote[-1].deliver.send
            )


@settings(max_examples=100, deadline=None)
@given(_sequences())
def test_transfers_carry_nothing_for_nobody(sequence):
    """Each range begins and ends at a token that a later rank attends to (dKV: that an earlier one did)."""
    _, cp_size, _, _ = sequence
    plans = _plans(*sequence)
    for plan in plans:
        for index, hop in enumerate(plan.remote):
            for ranges, others in (
                (hop.fetch.receive, range(index, len(plan.remote))),
                (hop.deliver.send, range(index + 1)),
            ):
                attended = set()
                for other in others:
                    remote = plans[(hop.source + plan.remote[other].distance) % cp_size].remote[other]
                    assert remote.source == hop.source
                    attended |= {t for r in remote.rectangles for t in range(r.k_start, r.k_stop)}
                for start, stop in ranges.ranges:
                    assert {start, stop - 1} <= attended
                assert bool(ranges.ranges) == bool(attended)


def _kinds(plan: AttentionPlan) -> list[list[Rectangle]]:
    return [list(hop.rectangles) for hop in plan.hops]


def test_one_causal_document_costs_one_call_per_hop():
    """Own block causal; earlier ranks: all queries × first half; later: second half of queries × all."""
    plan = build_plan(torch.zeros(3, 32, dtype=torch.long), 4, 2)
    assert _kinds(plan) == [
        [Rectangle(0, 3, 0, 8, 0, 8, causal=True, opens=True)],
        [Rectangle(0, 3, 0, 8, 0, 4, causal=False)],
        [Rectangle(0, 3, 0, 8, 0, 4, causal=False)],
        [Rectangle(0, 3, 4, 8, 0, 8, causal=False)],
    ]
    assert [hop.source for hop in plan.hops] == [2, 1, 0, 3]


def test_first_rank_sends_its_late_chunk_to_nobody():
    documents_BS = torch.zeros(1, 32, dtype=torch.long)
    for rank, plan in enumerate(_plans(documents_BS, 4, "zigzag", 1)):
        for hop in plan.remote:
            expected = ((0, 4),) if hop.source == 0 else ((0, 8),)
            assert hop.fetch.receive.ranges == expected, rank


def test_dkv_carries_only_what_ranks_so_far_have_touched():
    documents_BS = torch.zeros(1, 32, dtype=torch.long)
    # Source 1: ranks 2 and 3 attend to its first chunk, then rank 0 to both.
    sent = [_plans(documents_BS, 4, "zigzag", 1)[(1 + d) % 4].remote[d - 1].deliver.send for d in (1, 2, 3)]
    assert [ranges.ranges for ranges in sent] == [((0, 4),), ((0, 4),), ((0, 8),)]


def test_contiguous_kv_stops_where_the_sequence_ends():
    documents_BS = torch.zeros(1, 16, dtype=torch.long)
    plans = _plans(documents_BS, 4, "contiguous", 1)
    # Rank 3's KV is needed by nobody, yet each transfer keeps one send: one token.
    assert plans[3].remote[0].fetch.send.ranges == () and plans[3].remote[0].fetch.send.wire_tokens == 1
    assert plans[0].remote[0].fetch.send.ranges == ((0, 4),)
    assert plans[0].remote[0].rectangles == ()


def test_hops_that_no_rank_needs_are_jumped_over():
    # Documents inside chunks: no rank needs another.
    assert _plans(torch.arange(32)[None] // 4, 4, "zigzag", 1)[0].remote == ()
    # Documents over neighbouring chunks only: zigzag neighbours are at ring distance 1 and N − 1.
    plans = _plans(torch.arange(64)[None] // 3, 8, "zigzag", 1)
    assert [hop.distance for hop in plans[0].remote] == [1, 7]
    assert plans[0].remote[1].fetch.to_rank == 6 and plans[0].remote[1].fetch.from_rank == 2
    # Two short tails of chunks that lie apart travel without what is between them.
    plans = _plans(torch.arange(64)[None] // 7, 4, "zigzag", 1)
    assert any(len(hop.fetch.receive.ranges) == 2 for plan in plans for hop in plan.remote)


def test_rows_of_equal_structure_share_rectangles():
    one, two = torch.zeros(16, dtype=torch.long), torch.arange(16) // 10
    plan = build_plan(torch.stack([one, one, two, one]), 2, 0)
    assert [(r.batch_start, r.batch_stop) for r in plan.remote[0].rectangles] == [(0, 2), (2, 3), (3, 4)]
    causal = [r[:6] for r in plan.own.rectangles]
    assert (0, 2, 0, 8, 0, 8) in causal and (3, 4, 0, 8, 0, 8) in causal and (2, 3, 0, 4, 0, 4) in causal


def test_padding_is_in_no_rectangle():
    documents_BS = torch.full((1, 16), -1)
    for plan in _plans(documents_BS, 4, "zigzag", 1):
        assert plan.own.rectangles == () and plan.remote == () and plan.num_pairs == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_inside_a_chunk_give_no_remote_rectangle(layout):
    """87,000 documents at CP 64: only those over a chunk's edge concern another rank."""
    documents_BS = torch.arange(64 * 2 * 2048)[None] // 3
    plan = build_plan(documents_BS, 64, 5, layout)
    assert len(plan.own.rectangles) >= 2 * 2048 // 3
    assert sum(len(hop.rectangles) for hop in plan.remote) <= 4
