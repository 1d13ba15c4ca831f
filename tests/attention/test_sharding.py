"""Layouts as rank arithmetic, and a batch cut to a shard."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.attention.layout import deal, token_indices
from cpmoe.attention.sharding import LAYOUTS, padded_length, shard_batch, shard_indices


@settings(deadline=None)
@given(
    seq_len=st.integers(1, 300),
    cp_size=st.integers(1, 9),
    num_slices=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
)
def test_shards_partition_the_padded_sequence(seq_len, cp_size, num_slices, layout):
    padded = padded_length(seq_len, cp_size, num_slices, layout)
    per_rank = {"contiguous": 1, "zigzag": 2, "striped": 1, "balanced": 8}[layout]
    chunks = num_slices * (1 if cp_size == 1 else cp_size * per_rank)
    assert padded == min(n for n in range(seq_len, seq_len + chunks) if n % chunks == 0)
    work_S = np.arange(padded) % 7
    shards = [
        torch.from_numpy(token_indices(own)) for own in deal(padded, cp_size, layout, num_slices, work_S)
    ]
    for shard in shards:
        assert len(shard) == padded // cp_size and (shard.diff() > 0).all()
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(padded))


@settings(deadline=None)
@given(cp_size=st.integers(2, 9), num_slices=st.integers(1, 2), chunk=st.integers(1, 5))
def test_zigzag_gives_every_rank_equal_causal_work_in_every_slice(cp_size, num_slices, chunk):
    slice_len = 2 * cp_size * chunk
    work = []
    for rank in range(cp_size):
        index_T = shard_indices(num_slices * slice_len, cp_size, rank, "zigzag", num_slices)
        work.append([(part + 1).sum().item() for part in index_T.split(2 * chunk)])
    assert all(row == work[0] for row in work)


def test_zigzag_deals_mirrored_chunks():
    assert shard_indices(16, 4, 1).tolist() == [2, 3, 12, 13]
    assert shard_indices(16, 2, 1, num_slices=2).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert shard_indices(16, 4, 1, "contiguous").tolist() == [4, 5, 6, 7]
    assert shard_indices(16, 4, 1, "striped").tolist() == [1, 5, 9, 13]


@settings(deadline=None)
@given(data=st.data(), cp_size=st.integers(2, 9), num_slices=st.integers(1, 2))
def test_balanced_deals_equal_counts_and_near_equal_work(data, cp_size, num_slices):
    """Greedy never leaves the heaviest rank more than one chunk above the lightest that could take it."""
    work_W = data.draw(st.lists(st.integers(0, 100), min_size=8 * cp_size, max_size=8 * cp_size))
    work_S = np.tile(np.array(work_W), num_slices)
    segments = deal(8 * cp_size * num_slices, cp_size, "balanced", num_slices, work_S)
    for index in range(num_slices):
        span = range(index * 8 * cp_size, (index + 1) * 8 * cp_size)
        owned = [[i for i in token_indices(own).tolist() if i in span] for own in segments]
        assert all(len(tokens) == 8 for tokens in owned)
        loads = [sum(work_S[tokens]) for tokens in owned]
        assert max(loads) - sum(loads) / cp_size <= max(work_W)


def test_a_shard_carries_what_cannot_be_computed_from_it():
    tokens_BS = torch.arange(100, 107)[None]
    labels_BS = torch.cat((tokens_BS[:, 1:], torch.tensor([[-100]])), dim=1)
    positions_BS = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    documents_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    first, second = (
        shard_batch(tokens_BS, labels_BS, positions_BS, documents_BS, 2, rank) for rank in range(2)
    )
    assert first.tokens_BT.tolist() == [[100, 101, 106, 0]]
    assert first.labels_BT.tolist() == [[101, 102, -100, -100]]
    assert first.positions_BT.tolist() == [[0, 1, 3, 0]]
    assert first.documents_BT.tolist() == [[0, 0, 1, -1]]
    assert second.tokens_BT.tolist() == [[102, 103, 104, 105]]
    assert second.labels_BT.tolist() == [[103, 104, 105, 106]]
    assert second.positions_BT.tolist() == [[2, 0, 1, 2]]
    assert first.index_T.tolist() == [0, 1, 6, 7] and second.index_T.tolist() == [2, 3, 4, 5]


def test_errors_name_the_value_and_the_choices():
    choices = "zigzag, contiguous, striped, balanced"
    with pytest.raises(ValueError, match=rf"attention\.layout = 'stripes': must be one of {choices}"):
        padded_length(8, 2, layout="stripes")
    with pytest.raises(ValueError, match="padded length 9: must be a positive multiple of 4"):
        shard_indices(9, 2, 0)
    x = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"must all be one \[B, S\]"):
        shard_batch(x, x[:, :3], x, x, 2, 0)
    with pytest.raises(ValueError, match=r"documents\[0\] has id 5 on 2 separate runs"):
        shard_batch(x, x, x, torch.tensor([[5, 6, 5, 5]]), 2, 0)
    with pytest.raises(ValueError, match=r"documents\[0\] has id -2: must be ≥ 0, or -1 for padding"):
        shard_batch(x, x, x, torch.tensor([[0, 0, -2, -2]]), 2, 0)
    with pytest.raises(ValueError, match=r"cp_rank = 2: must be in \[0, 2\)"):
        shard_batch(x, x, x, x, 2, 2)
