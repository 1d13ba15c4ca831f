"""Stacks of equal rectangles: the rectangles of a reach, and what they read and write, against plain loops.

Shape letters: B batch, T tokens, P runs, L tokens of a run.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.attention.mask import Mask
from cpmoe.attention.plan import build_plan
from cpmoe.attention.ranges import TokenRanges
from cpmoe.attention.stacks import SMALL, TokenRuns

BATCH, TOKENS = 3, 20


@st.composite
def _runs(draw):
    """Runs anywhere, or evenly spaced, which may overlap."""
    length = draw(st.integers(1, 6))
    if draw(st.booleans()):
        places = st.tuples(st.integers(0, BATCH - 1), st.integers(0, TOKENS - length))
        runs = draw(st.lists(places, min_size=1, max_size=6))
    else:
        step, count = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        runs = [(draw(st.integers(0, BATCH - 1)), step * place) for place in range(count)]
        length = draw(st.integers(1, TOKENS - step * (count - 1)))
    batch, start = np.array(runs).T
    return TokenRuns(batch, start, length)


def _places(runs: TokenRuns) -> list[tuple[int, slice]]:
    pairs = zip(runs.batch_P.tolist(), runs.start_P.tolist(), strict=True)
    return [(row, slice(start, start + runs.length)) for row, start in pairs]


def _tensor(kind: str) -> torch.Tensor:
    if kind == "strided":
        return torch.randn(2, TOKENS, 3, BATCH).permute(3, 1, 0, 2)[..., ::2]
    return torch.randn(BATCH + 1, TOKENS, 2, 2)[1:]


@settings(max_examples=200, deadline=None)
@given(runs=_runs(), kind=st.sampled_from(["whole", "strided"]))
def test_runs_are_read_written_and_added(runs, kind):
    x_BT = _tensor(kind)
    taken = torch.stack([x_BT[place] for place in _places(runs)])
    assert torch.equal(runs.take(x_BT), taken)
    shares = runs.take(x_BT).untyped_storage().data_ptr() == x_BT.untyped_storage().data_ptr()
    assert runs.are_view == shares
    values_PL = torch.randn_like(taken)
    added_BT, exact_BT = x_BT.clone(), x_BT.double()
    runs.add(added_BT, values_PL)
    for place, values_L in zip(_places(runs), values_PL, strict=True):
        exact_BT[place] += values_L
    torch.testing.assert_close(added_BT.double(), exact_BT, rtol=1e-6, atol=1e-6)
    tokens = [(row, token) for row, own in _places(runs) for token in range(own.start, own.stop)]
    assert runs.overlap == (len(set(tokens)) < len(tokens))
    if not runs.overlap:
        written_BT = x_BT.clone()
        runs.put(written_BT, values_PL)
        assert torch.equal(runs.take(written_BT), values_PL)
        assert torch.equal((written_BT != x_BT).flatten(2).any(-1).sum(), torch.tensor(len(tokens)))
    everything = [(row, token) for row in range(BATCH) for token in range(TOKENS)]
    assert runs.covers((BATCH, TOKENS, 7)) == (tokens == everything)


def test_an_expanded_tensor_is_read():
    """The gradient of a sum has strides of 0, so that rows of a batch lie on each other."""
    runs = TokenRuns(np.array([0, 1, 2]), np.array([4, 2, 0]), 5)
    x_BT = torch.arange(float(TOKENS))[None].expand(BATCH, -1)
    assert torch.equal(runs.take(x_BT), torch.stack([x_BT[place] for place in _places(runs)]))


def test_places_in_a_buffer():
    tokens = TokenRanges(((2, 6), (9, 13)))
    runs = TokenRuns(np.array([0, 0, 1]), np.array([2, 9, 11]), 2)
    assert runs.within(tokens).start_P.tolist() == [0, 4, 6] and runs.within(tokens) is runs.within(tokens)
    assert runs.within(TokenRanges(((0, 20),))) is runs
    with pytest.raises(AssertionError):
        TokenRuns(np.array([0]), np.array([5]), 2).within(tokens)


def test_a_window_and_equal_documents_are_few_calls():
    """Pieces of a window are one stack for each kind, and so are documents of one length, without a copy."""
    window = build_plan(torch.zeros(1, 8192, dtype=torch.long), 1, 0, mask=Mask(window=(1023, None)))
    kinds = [stack.kind for stack in window.own.reach.stacks if len(stack.rows.start_P) > 2]
    assert sorted(kinds) == ["causal", "edge", "full"]
    packed = build_plan(torch.arange(8192)[None] // 512, 1, 0).own.reach.stacks
    assert [(stack.kind, len(stack.rows.start_P), stack.rows.are_view) for stack in packed] == [
        ("causal", 16, True)
    ]


def test_large_rectangles_are_not_copied():
    """Two lengths in turn, above and below what is copied: pairs of the large ones are evenly spaced."""
    for length, copied in ((SMALL // 2, True), (SMALL, False)):
        lengths = torch.tensor([length, length, 1, length, 3, length, length])
        documents_BS = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
        stacks = build_plan(documents_BS, 1, 0).own.reach.stacks
        large = [stack for stack in stacks if stack.rows.length == length]
        assert [len(stack.rows.start_P) for stack in large] == ([5] if copied else [2, 2, 1])
        assert all(stack.rows.are_view != copied for stack in large)
