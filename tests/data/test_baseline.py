"""The bigram bar against counting by hand."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

import cpmoe.data.baseline as baseline
from cpmoe.data.baseline import ADDED_COUNTS, PRIOR_STRENGTHS, bigram_loss
from cpmoe.data.packing import HeldoutDataset
from cpmoe.data.store import DocumentSet

VOCAB = 7


def skewed_documents(seed: int, count: int) -> DocumentSet:
    """Documents of a strongly correlated source, some of them neighbours in the file and some not."""
    random = np.random.default_rng(seed)
    pieces, starts, lengths, place = [], [], [], 0
    for i in range(count):
        length = int(random.integers(1, 12))
        document = np.cumsum(random.choice([1, 2, 3], size=length, p=[0.8, 0.15, 0.05])) % VOCAB
        gap = 2 * (i % 3 == 0)
        pieces += [np.zeros(gap, dtype=np.int64), document]
        starts.append(place + gap)
        lengths.append(length)
        place += gap + length
    return DocumentSet(
        np.concatenate(pieces).astype(np.uint16),
        np.array(starts, dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        vocab_size=VOCAB,
    )


def naive_loss(train: DocumentSet, heldout: HeldoutDataset) -> float:
    pairs: Counter = Counter()
    for i in range(len(train)):
        document = train[i].tolist()
        pairs.update(itertools.pairwise(document))
    first, second = Counter(), Counter()
    for (a, b), count in pairs.items():
        first[a] += count
        second[b] += count
    total = sum(pairs.values())
    asked = [
        (a, b)
        for sequence in heldout
        for a, b in zip(sequence.tokens_S.tolist(), sequence.labels_S.tolist(), strict=True)
        if b != -100
    ]

    def loss(probability) -> float:
        return -math.fsum(math.log(probability(a, b)) for a, b in asked) / len(asked)

    def with_added(x):
        return loss(lambda a, b: (pairs[a, b] + x) / (first[a] + x * VOCAB))

    def with_prior(k):
        return loss(lambda a, b: (pairs[a, b] + k * (second[b] + 1) / (total + VOCAB)) / (first[a] + k))

    return min([with_added(x) for x in ADDED_COUNTS] + [with_prior(k) for k in PRIOR_STRENGTHS])


@pytest.mark.parametrize("tokens_per_read", [1, 5, 1 << 22])
@pytest.mark.parametrize("num_sequences", [2, 30])
def test_bigram_loss_is_the_one_counted_by_hand(monkeypatch, tokens_per_read, num_sequences):
    monkeypatch.setattr(baseline, "TOKENS_PER_READ", tokens_per_read)
    train = skewed_documents(0, 60)
    heldout = HeldoutDataset(skewed_documents(1, 20), 8, num_sequences)
    expected = naive_loss(train, heldout)
    assert abs(bigram_loss(train, heldout) - expected) < 1e-12 * expected
    assert expected < math.log(VOCAB), "the source is predictable, so the bar is below a uniform guess"


def test_large_vocabularies_are_refused():
    tokens = np.zeros(4, dtype=np.uint16)
    one = np.array([4], dtype=np.int64)
    documents = DocumentSet(tokens, np.zeros(1, dtype=np.int64), one, vocab_size=513)
    with pytest.raises(ValueError, match=r"data\.tokenizer: vocabulary 513: .* at most 512"):
        bigram_loss(documents, HeldoutDataset(documents, 4, 1))
