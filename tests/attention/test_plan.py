"""The plan without processes: its rectangles are the mask, its transfers carry what is needed and no more.

Shape letters: B batch, S full sequence, N ranks.
"""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.attention.layout import CHUNKS_PER_RANK, LAYOUTS, padded_length, token_indices
from cpmoe.attention.mask import CAUSAL, Mask
from cpmoe.attention.plan import (
    AttentionPlan,
    Hop,
    Rectangle,
    RemoteHop,
    TokenRanges,
    build_plan,
    deal_batch,
)
from cpmoe.attention.spans import spans_of_reach
from tests.attention.dense import dense_mask


class Sequences(NamedTuple):
    """A padded batch on a ring."""

    documents_BS: torch.Tensor
    cp_size: int
    layout: str
    num_slices: int
    mask: Mask


_SIDES = st.none() | st.integers(0, 12)


@st.composite
def _masks(draw):
    causal = draw(st.booleans())
    window = (draw(_SIDES), draw(st.sampled_from((None, 0))) if causal else draw(_SIDES))
    return Mask(causal, window, draw(st.integers(0, 4)))


@st.composite
def _sequences(draw):
    """Equal and different rows, inner padding, every layout and mask."""
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
    documents_BS = torch.stack([structures[row] for row in rows])
    return Sequences(documents_BS, cp_size, layout, num_slices, draw(_masks()))


def _plans(documents_BS, cp_size, layout="zigzag", num_slices=1, mask=CAUSAL) -> list[AttentionPlan]:
    return [build_plan(documents_BS, cp_size, rank, layout, num_slices, mask) for rank in range(cp_size)]


def _indices(sequences: Sequences) -> list[torch.Tensor]:
    """Global place of every rank's tokens."""
    *batch, mask = sequences
    return [torch.from_numpy(token_indices(own)) for own in deal_batch(*batch, (mask,))]


def _tokens(ranges: TokenRanges) -> set[int]:
    return {token for start, stop in ranges.ranges for token in range(start, stop)}


@settings(max_examples=150, deadline=None)
@given(_sequences())
def test_rectangles_cover_the_mask_exactly_once(sequences):
    documents_BS, index_NT = sequences.documents_BS, _indices(sequences)
    batch_size, padded = documents_BS.shape
    seen_BSS = torch.zeros(batch_size, padded, padded, dtype=torch.int64)
    plans = _plans(*sequences)
    for rank, plan in enumerate(plans):
        touched_BT = torch.zeros(batch_size, plan.num_tokens, dtype=torch.bool)
        for hop in plan.hops:
            assert hop.source == (rank - hop.distance) % sequences.cp_size
            assert hop.reach.num_pairs == sum(rectangle.num_pairs for rectangle in hop.rectangles)
            assert _stacked(hop) == _single_rows(hop)
            for rectangle in hop.rectangles:
                b, q, k = slice(*rectangle[0:2]), slice(*rectangle[2:4]), slice(*rectangle[4:6])
                q_index, k_index = index_NT[rank][q], index_NT[hop.source][k]
                visible = torch.ones(len(q_index), len(k_index), dtype=torch.int64)
                assert visible.numel() > 0
                if rectangle.kind != "full":
                    assert len(q_index) == len(k_index)
                    visible = visible.tril() if rectangle.kind == "causal" else visible.triu()
                assert rectangle.num_pairs == len(documents_BS[b]) * visible.sum()
                seen_BSS[b, q_index[:, None], k_index[None]] += visible
                if rectangle.opens:
                    assert not touched_BT[b, q].any()
                touched_BT[b, q] = True
    visible_BSS = dense_mask(documents_BS, sequences.mask)
    assert torch.equal(seen_BSS, visible_BSS.to(torch.int64))
    by_rank = tuple(visible_BSS[:, index_T].sum().item() for index_T in index_NT)
    assert all(plan.pairs_N == by_rank for plan in plans)


def _single_rows(hop: Hop) -> list[Rectangle]:
    return sorted(
        rectangle._replace(batch_start=row, batch_stop=row + 1)
        for rectangle in hop.rectangles
        for row in range(rectangle.batch_start, rectangle.batch_stop)
    )


def _stacked(hop: Hop) -> list[Rectangle]:
    """The rectangles of the stacks; those of one stack share no query, and those that open come first."""
    single = []
    opens = [stack.opens for stack in hop.reach.stacks]
    assert opens == sorted(opens, reverse=True)
    for stack in hop.reach.stacks:
        assert not stack.rows.overlap
        places = (stack.rows.batch_P, stack.rows.start_P, stack.keys.start_P)
        for row, q, k in zip(*(x.tolist() for x in places), strict=True):
            stops = q + stack.rows.length, k + stack.keys.length
            single.append(Rectangle(row, row + 1, q, stops[0], k, stops[1], stack.kind, stack.opens))
        assert (stack.keys.batch_P == stack.rows.batch_P).all()
    assert sum(stack.num_pairs for stack in hop.reach.stacks) == hop.reach.num_pairs
    return sorted(single)


@settings(max_examples=150, deadline=None)
@given(_sequences())
def test_reach_is_the_mask(sequences):
    """Query by query the same as the rectangles say: what kernels that take spans are given."""
    visible_BSS = dense_mask(sequences.documents_BS, sequences.mask)
    index_NT = _indices(sequences)
    for rank, plan in enumerate(_plans(*sequences)):
        visible_BTS = visible_BSS[:, index_NT[rank]]
        for hop in plan.hops:
            place = torch.arange(plan.num_tokens)
            for b, row in enumerate(hop.reach.rows_C[place] for place in hop.reach.place_B):
                start, stop, sink_start, sink_stop = (torch.from_numpy(x)[:, None] for x in row[1:])
                window, sinks = (start <= place) & (place < stop), (sink_start <= place) & (place < sink_stop)
                assert not (window & sinks).any()
                assert torch.equal(window | sinks, visible_BTS[b, :, index_NT[hop.source]])
            visible_BTS[:, :, index_NT[hop.source]] = False
            tokens = hop.fetch.receive if isinstance(hop, RemoteHop) else plan.all_tokens
            assert torch.equal(_in_buffer(hop, tokens), _by_rectangles(hop, tokens, visible_BTS.shape[:2]))
        assert not visible_BTS.any(), "a hop is missing"


def _in_buffer(hop: Hop, tokens: TokenRanges) -> torch.Tensor:
    """What the spans say: [B, T, keys of the buffer]."""
    spans = spans_of_reach(hop.reach, tokens)
    place = torch.arange(tokens.wire_tokens)
    bounds = [bound_BT[..., None] for bound_BT in spans.bounds()]
    seen = torch.zeros(*spans.start_BT.shape, tokens.wire_tokens, dtype=torch.bool)
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        seen |= (start <= place) & (place < stop)
    return seen


def _by_rectangles(hop: Hop, tokens: TokenRanges, shape) -> torch.Tensor:
    seen = torch.zeros(*shape, tokens.wire_tokens, dtype=torch.bool)
    for r in hop.rectangles:
        visible = torch.ones(r.q_stop - r.q_start, r.k_stop - r.k_start, dtype=torch.bool)
        visible = {"full": visible, "causal": visible.tril(), "edge": visible.triu()}[r.kind]
        place = tokens.place(r.k_start, r.k_stop)
        keys = slice(place, place + visible.shape[1])
        seen[r.batch_start : r.batch_stop, r.q_start : r.q_stop, keys] |= visible
    return seen


@settings(max_examples=150, deadline=None)
@given(_sequences())
def test_transfers_match_and_carry_what_is_needed(sequences):
    cp_size = sequences.cp_size
    plans = _plans(*sequences)
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
            before = index if plans[0].is_relayed else 0
            held_by = plans[(hop.source + (distances[before - 1] if before else 0)) % cp_size]
            assert hop.fetch.from_rank == held_by.cp_rank
            held = _tokens(held_by.remote[before - 1].fetch.receive if before else held_by.all_tokens)
            assert _tokens(hop.fetch.receive) <= held, "a rank sends what it has"
            assert len(_tokens(hop.deliver.receive)) <= plans[0].num_tokens
    for plan in plans:
        home = plan.remote[-1:] if plan.is_relayed else plan.remote
        for hop, following in pairwise(plan.remote):
            if hop not in home:
                assert _tokens(hop.deliver.receive) <= _tokens(following.deliver.send), "dKV is handed on"
        for hop in home:
            bringer = plans[(plan.cp_rank + hop.distance) % cp_size]
            assert hop.deliver.from_rank == bringer.cp_rank, "dKV comes home"
            assert hop.source == hop.deliver.to_rank


@settings(max_examples=100, deadline=None)
@given(_sequences())
def test_transfers_carry_nothing_for_nobody(sequences):
    """Each range begins and ends at a token that a later rank attends to (dKV: that an earlier one did)."""
    cp_size = sequences.cp_size
    plans = _plans(*sequences)
    for plan in plans:
        for index, hop in enumerate(plan.remote):
            later, sooner = range(index, len(plan.remote)), range(index + 1)
            if not plan.is_relayed:
                later = sooner = range(index, index + 1)
            for ranges, others in ((hop.fetch.receive, later), (hop.deliver.send, sooner)):
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
        [Rectangle(0, 3, 0, 8, 0, 8, kind="causal", opens=True)],
        [Rectangle(0, 3, 0, 8, 0, 4, kind="full")],
        [Rectangle(0, 3, 0, 8, 0, 4, kind="full")],
        [Rectangle(0, 3, 4, 8, 0, 8, kind="full")],
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
    # None of them would pass on what the others need.
    assert plans[0].remote[1].fetch.to_rank == 7 and plans[0].remote[1].fetch.from_rank == 1
    # Two short tails of chunks that lie apart travel without what is between them.
    plans = _plans(torch.arange(64)[None] // 7, 4, "zigzag", 2)
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


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_documents_inside_a_chunk_give_no_remote_rectangle(layout):
    """87,000 documents at CP 64: only those over a chunk's edge concern another rank."""
    documents_BS = torch.arange(64 * 2 * 2048)[None] // 3
    plan = build_plan(documents_BS, 64, 5, layout)
    assert len(plan.own.rectangles) >= 2 * 2048 // 3
    assert sum(len(hop.rectangles) for hop in plan.remote) <= 2 * CHUNKS_PER_RANK[layout]


def test_a_window_reaches_the_neighbours_only():
    """Of a rank's chunk only the last tokens travel, and only to the next rank."""
    mask = Mask(window=(3, None))
    whole = torch.zeros(1, 64, dtype=torch.long)
    for rank, plan in enumerate(_plans(whole, 4, "contiguous", mask=mask)):
        (hop,) = plan.remote
        assert hop.distance == 1
        assert hop.fetch.receive.ranges == (((13, 16),) if rank else ())
        assert [r[2:7] for r in hop.rectangles] == ([(0, 3, 13, 16, "edge")] if rank else [])
    # Neighbouring chunks of zigzag are at distance 1 and N − 1, and each sends to the other.
    plans = _plans(whole, 4, "zigzag", mask=mask)
    assert [hop.distance for hop in plans[0].remote] == [1, 3]
    assert [plan.remote[0].fetch.send.ranges for plan in plans] == [*3 * [((5, 8),)], ()]
    assert [plan.remote[1].fetch.send.ranges for plan in plans] == [(), *3 * [((13, 16),)]]
    assert [plan.remote[1].fetch.to_rank for plan in plans] == [3, 0, 1, 2]
    # Sinks make the first rank's first tokens travel to all.
    plans = _plans(whole, 4, "contiguous", mask=Mask(window=(3, None), num_sinks=2))
    assert [hop.distance for hop in plans[0].remote] == [1, 2, 3]
    assert [hop.fetch.receive.ranges for hop in plans[3].remote] == [((13, 16),), (), ((0, 2),)]


def test_striped_ranks_pass_on_what_is_near():
    """Of 3-token documents a token needs the two before it, of a window of 1 the one before it."""
    documents_BS = torch.arange(64)[None] // 3
    assert [hop.distance for hop in _plans(documents_BS, 8, "striped")[0].remote] == [1, 2]
    near = Mask(causal=False, window=(1, 1))
    assert [hop.distance for hop in _plans(documents_BS, 8, "striped", mask=near)[0].remote] == [1, 7]


def test_balanced_deals_by_work():
    """Half the sequence is one document, the rest short ones: zigzag gives ranks unequal work."""
    documents_BS = torch.cat((torch.zeros(2048, dtype=torch.long), 1 + torch.arange(2048) // 16))[None]
    assert build_plan(documents_BS, 8, 0, "zigzag").imbalance > 1.5
    assert build_plan(documents_BS, 8, 0, "balanced").imbalance < 1.05


def test_flops_and_bytes_by_hand():
    """16 tokens on 2 ranks: rank 0 has chunks 0 and 3, rank 1 the two between."""
    first, second = _plans(torch.zeros(2, 16, dtype=torch.long), 2)
    assert first.pairs_N == (2 * (10 + 58), 2 * (26 + 42)) and first.imbalance == 1.0
    assert first.flops(num_heads=3, head_dim=5) == [4 * 3 * 5 * 136] * 2
    # KV of one head of 5 in bfloat16 for 2 rows, dKV in float32: rank 1 needs chunk 0 only.
    assert first.sent_bytes(1, 5, 2, 4) == [(4 * 2 * 2 * 5 * 2, 8 * 2 * 2 * 5 * 4)]
    assert second.sent_bytes(1, 5, 2, 4) == [(8 * 2 * 2 * 5 * 2, 4 * 2 * 2 * 5 * 4)]
