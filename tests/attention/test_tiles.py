"""Lists of tiles against the dense mask: each tile that has a visible pair is visited once, no other is.

Shape letters: B batch, T queries, U keys.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.attention.blocks.triton.tiles import TileLists, tile_lists
from cpmoe.attention.mask import Mask
from cpmoe.attention.plan import build_plan
from cpmoe.attention.spans import KeySpans, spans_of_reach

CPU = torch.device("cpu")


@st.composite
def _spans(draw) -> KeySpans:
    batch_size, num_queries, num_keys = (draw(st.integers(1, high)) for high in (3, 40, 50))
    bounds = draw(
        st.lists(
            st.lists(st.integers(0, num_keys), min_size=4, max_size=4),
            min_size=batch_size * num_queries,
            max_size=batch_size * num_queries,
        )
    )
    ordered = torch.tensor(bounds, dtype=torch.int32).sort(-1)[0].reshape(batch_size, num_queries, 4)
    sink_start, sink_stop, start, stop = ordered.unbind(-1)
    if draw(st.booleans()):
        return KeySpans(start, stop, num_keys, sink_start, sink_stop)
    return KeySpans(start, stop, num_keys)


def _visible(spans: KeySpans) -> np.ndarray:
    key_U = torch.arange(spans.num_keys)
    bounds = [bound_BT[..., None] for bound_BT in spans.bounds()]
    visible_BTU = (key_U >= bounds[0]) & (key_U < bounds[1])
    if len(bounds) == 4:
        visible_BTU |= (key_U >= bounds[2]) & (key_U < bounds[3])
    return visible_BTU.numpy()


def _listed(lists: TileLists, width: int) -> np.ndarray:
    """[own tiles, other tiles]: 0 not visited, 1 as full, 2 as masked; each at most once."""
    kinds = np.zeros((len(lists.order), width), dtype=int)
    for tile in range(len(kinds)):
        for kind in (1, 2):
            first, last = lists.offsets[2 * tile + kind - 1 : 2 * tile + kind + 1].tolist()
            for start, stop in lists.runs[first:last].tolist():
                assert start < stop and (kinds[tile, start:stop] == 0).all()
                kinds[tile, start:stop] = kind
    return kinds


@given(_spans(), st.sampled_from([1, 4, 8, 16]), st.sampled_from([4, 8, 16]))
@settings(max_examples=150, deadline=None)
def test_tiles_with_a_visible_pair_are_visited_once(spans, query_tile, key_tile):
    visible_BTU = _visible(spans)
    for b, visible_TU in enumerate(visible_BTU):
        rows, columns = range(0, len(visible_TU), query_tile), range(0, spans.num_keys, key_tile)
        by_query = tile_lists(spans, query_tile, key_tile, False, CPU)
        by_key = tile_lists(spans, query_tile, key_tile, True, CPU)
        kinds = _listed(by_query, len(columns))[b * len(rows) : (b + 1) * len(rows)]
        kinds_by_key = _listed(by_key, len(rows))[b * len(columns) : (b + 1) * len(columns)].T
        for m, row in enumerate(rows):
            for n, column in enumerate(columns):
                tile = visible_TU[row : row + query_tile, column : column + key_tile]
                kind, kind_by_key = kinds[m, n], kinds_by_key[m, n]
                assert (kind > 0) == (kind_by_key > 0) == tile.any()
                if kind == 1:
                    assert tile.all() and tile.shape[1] == key_tile
                if kind_by_key == 1:
                    assert tile.all() and tile.shape == (query_tile, key_tile)


@pytest.mark.parametrize("by_key", [False, True])
def test_causal_tiles_are_full_below_the_diagonal(by_key):
    """And the longest lists come first, row by row; rows that have nothing to do come last."""
    stop = torch.arange(1, 65, dtype=torch.int32).repeat(2, 1)
    stop[1, :16] = 0
    lists = tile_lists(KeySpans(torch.zeros_like(stop), stop, 64), 16, 16, by_key, CPU)
    kinds = _listed(lists, 4)
    causal = 1 * np.tri(4, k=-1, dtype=int) + 2 * np.eye(4, dtype=int)
    blind = causal * (np.arange(4) > 0)[:, None]
    expected = np.concatenate([x.T if by_key else x for x in (causal, blind)])
    assert kinds.tolist() == expected.tolist()
    assert lists.order.tolist() == ([0, 1, 2, 3, 4, 5, 6, 7] if by_key else [3, 2, 1, 0, 7, 6, 5, 4])
    assert lists.num_active == (8 if by_key else 7)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_spans_of_a_plan_are_its_rectangles(layout):
    documents_BS = torch.arange(48)[None] // torch.tensor([[48], [11], [20]])
    for rank in range(3):
        plan = build_plan(documents_BS, 3, rank, layout, mask=Mask(window=(15, None), num_sinks=2))
        for hop in plan.hops:
            tokens = plan.all_tokens if hop.distance == 0 else hop.fetch.receive
            local = [t for start, stop in tokens.ranges for t in range(start, stop)]
            spans = spans_of_reach(hop.reach, tokens)
            assert spans is spans_of_reach(hop.reach, tokens)
            expected = np.zeros((3, plan.num_tokens, spans.num_keys), dtype=bool)
            for r in hop.rectangles:
                for q in range(r.q_start, r.q_stop):
                    i = q - r.q_start
                    keys = {
                        "full": range(r.k_start, r.k_stop),
                        "causal": range(r.k_start, r.k_start + i + 1),
                        "edge": range(r.k_start + i, r.k_stop),
                    }[r.kind]
                    expected[r.batch_start : r.batch_stop, q, [local.index(k) for k in keys]] = True
            assert np.array_equal(_visible(spans), expected)
