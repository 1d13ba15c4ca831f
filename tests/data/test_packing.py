"""Packing against the definition, token by token, on documents whose tokens tell where they belong."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.data.packing import (
    IGNORE,
    PADDING_DOCUMENT,
    HeldoutDataset,
    PackedDataset,
    PackedSequence,
    document_order,
    padding_sequence,
    window_order,
)
from tests.data.helpers import places, unique_documents

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def check_sequence(sequence: PackedSequence, lengths, seq_len: int) -> None:
    """Labels, positions and document numbers of one sequence, from the definition."""
    where = places(lengths)
    tokens, labels, positions, documents = (field.tolist() for field in sequence)
    assert all(field.shape == (seq_len,) and field.dtype == np.int64 for field in sequence)
    document, position = 0, -1
    for s, token in enumerate(tokens):
        if documents[s] == PADDING_DOCUMENT:
            assert (token, labels[s], positions[s]) == (0, IGNORE, 0)
            assert documents[s:] == [PADDING_DOCUMENT] * (seq_len - s)
            return
        index, tokens_after = where[token]
        starts_here = index == 0 and s > 0
        document, position = (document + 1, 0) if starts_here else (document, position + 1)
        assert documents[s] == document
        assert positions[s] == position
        assert labels[s] == (token + 1 if tokens_after else IGNORE)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 64), st.integers(0, 5))
def test_every_token_of_every_epoch_once_with_its_label_position_and_document(lengths, seq_len, seed):
    dataset = PackedDataset(unique_documents(lengths, seed), seq_len, seed)
    total = sum(lengths)
    epochs = 3
    sequences = [dataset.window(i) for i in range(-(-epochs * total // seq_len))]
    for sequence in sequences:
        check_sequence(sequence, lengths, seq_len)
    stream = np.concatenate([sequence.tokens_S for sequence in sequences])
    for epoch in range(epochs):
        tokens = stream[epoch * total : (epoch + 1) * total]
        assert sorted(tokens.tolist()) == list(range(total))


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 64), st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_random_access_needs_no_history(lengths, seq_len, indices):
    documents = unique_documents(lengths)
    jumping = PackedDataset(documents, seq_len, seed=3)
    for index in indices:
        for ours, fresh in zip(jumping[index], PackedDataset(documents, seq_len, seed=3)[index], strict=True):
            np.testing.assert_array_equal(ours, fresh)


def test_epochs_and_seeds_shuffle_differently_and_deterministically():
    lengths = [3] * 50
    documents = unique_documents(lengths)

    def epoch(seed, number):
        dataset = PackedDataset(documents, 150, seed)
        return dataset[number].tokens_S.tolist()

    orders = [epoch(seed, number) for seed in (0, 1) for number in (0, 1)]
    assert orders == [epoch(seed, number) for seed in (0, 1) for number in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(150)) not in orders


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 64), st.integers(0, 5))
def test_sequences_are_the_windows_of_each_block_once(lengths, seq_len, seed):
    dataset = PackedDataset(unique_documents(lengths), seq_len, seed)
    size = max(sum(lengths) // seq_len, 1)
    for block in range(3):
        indices = range(block * size, (block + 1) * size)
        shuffled = sorted(str(dataset[i]) for i in indices)
        assert shuffled == sorted(str(dataset.window(i)) for i in indices)


def test_windows_of_one_long_document_are_spread_over_the_epoch():
    dataset = PackedDataset(unique_documents([64 * 100]), 64, seed=0)
    orders = [[int(dataset[block * 100 + i].tokens_S[0]) for i in range(100)] for block in range(2)]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(order) == list(range(0, 6400, 64))
        neighbours = sum(after - before == 64 for before, after in itertools.pairwise(order))
        assert neighbours < 10


def test_document_order_is_the_same_on_every_machine_and_numpy():
    assert document_order(10, seed=0, epoch=0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert document_order(10, seed=7, epoch=3).tolist() == [2, 4, 7, 3, 5, 1, 8, 9, 0, 6]
    assert window_order(10, seed=7, block=3).tolist() == [1, 9, 6, 5, 0, 7, 2, 8, 3, 4]


def test_one_token_documents():
    lengths = [1] * 20
    sequence = PackedDataset(unique_documents(lengths), 8, seed=0)[1]
    assert sequence.labels_S.tolist() == [IGNORE] * 8
    assert sequence.positions_S.tolist() == [0] * 8
    assert sequence.documents_S.tolist() == list(range(8))


def test_document_longer_than_the_sequence_continues_in_the_next():
    lengths = [1000, 1]
    dataset = PackedDataset(unique_documents(lengths), 64, seed=0)
    for i in range(16):
        check_sequence(dataset[i], lengths, 64)
    inside = next(dataset[i] for i in range(16) if not (dataset[i].labels_S == IGNORE).any())
    assert inside.positions_S.tolist() == list(range(64))
    assert inside.labels_S[-1] == inside.tokens_S[-1] + 1


def test_ten_thousand_short_documents():
    lengths = (np.arange(10_000) % 5 + 1).tolist()
    dataset = PackedDataset(unique_documents(lengths), 4096, seed=1)
    sequences = [dataset.window(i) for i in range(8)]
    for sequence in sequences:
        check_sequence(sequence, lengths, 4096)
    stream = np.concatenate([sequence.tokens_S for sequence in sequences])[: sum(lengths)]
    assert sorted(stream.tolist()) == list(range(sum(lengths)))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 64), st.integers(1, 40))
def test_heldout_sequences(lengths, seq_len, num_sequences):
    heldout = HeldoutDataset(unique_documents(lengths), seq_len, num_sequences)
    sequences = list(heldout)
    assert len(sequences) == len(heldout) == num_sequences
    for sequence in sequences:
        check_sequence(sequence, lengths, seq_len)
    tokens = [t for s in sequences for t in s.tokens_S[s.documents_S != PADDING_DOCUMENT].tolist()]
    total = sum(lengths)
    windows = -(-total // seq_len)
    if num_sequences >= windows:
        assert tokens == list(range(total)), "all tokens, in their stored order"
        padded = sum(int((s.documents_S == PADDING_DOCUMENT).sum()) for s in sequences[:windows])
        assert padded == -total % seq_len
    else:
        assert len(set(tokens)) == len(tokens) >= (num_sequences - 1) * seq_len + 1
        firsts = [int(s.tokens_S[0]) // seq_len for s in sequences]
        steps = {after - before for before, after in itertools.pairwise([*firsts, windows])}
        assert firsts[0] == 0
        assert steps <= {windows // num_sequences, windows // num_sequences + 1}, "evenly spaced"


def test_heldout_is_not_shuffled_and_ends_at_its_length():
    heldout = HeldoutDataset(unique_documents([5, 7, 4]), 8, 3)
    assert heldout[1].tokens_S.tolist() == list(range(8, 16))
    for index in (-1, 3):
        try:
            heldout[index]
        except IndexError:
            continue
        raise AssertionError(f"index {index} is outside")


def test_padding_sequence_has_nothing():
    tokens, labels, positions, documents = (field.tolist() for field in padding_sequence(3))
    assert (tokens, labels, positions, documents) == ([0] * 3, [-100] * 3, [0] * 3, [-1] * 3)
