"""The bar for a small run: what a bigram model of the same text reaches on the same predictions.

Shapes: V vocabulary, P predicted pairs.
"""

from __future__ import annotations

import numpy as np

from cpmoe.data.packing import IGNORE, HeldoutDataset
from cpmoe.data.store import DocumentSet

MAX_VOCABULARY = 512
ADDED_COUNTS = (0.001, 0.01, 0.1, 1.0)
PRIOR_STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS_PER_READ = 1 << 22


def bigram_loss(train: DocumentSet, heldout: HeldoutDataset) -> float:
    """Held-out cross entropy, nats per token, of a bigram model of all training documents.

    The mean is over exactly the (token, label) pairs of `heldout` that a model is evaluated on (label not
    ignored). Of the smoothings tried, the best on the held-out pairs counts, which can only lower the bar's
    value and so favours the bigram: p(b|a) = (c_ab + x) / (c_a + x V) with the added count x, and
    p(b|a) = (c_ab + k p_b) / (c_a + k), a Dirichlet prior of strength k around the unigram distribution p_b.

    Raises ValueError for a vocabulary above 512 (the table of counts has V^2 entries).
    """
    vocab = train.vocab_size
    if vocab > MAX_VOCABULARY:
        raise ValueError(
            f"data.tokenizer: vocabulary {vocab}: the bigram baseline needs at most {MAX_VOCABULARY}"
        )
    counts_VV = _training_pairs(train)
    heldout_VV = _heldout_pairs(heldout, vocab)
    total_V1 = counts_VV.sum(axis=1, keepdims=True)
    # One added count per token keeps the prior above 0 where a token never follows another in training.
    prior_V = (counts_VV.sum(axis=0) + 1) / (counts_VV.sum() + vocab)
    models = [(counts_VV + x) / (total_V1 + x * vocab) for x in ADDED_COUNTS]
    models += [(counts_VV + k * prior_V) / (total_V1 + k) for k in PRIOR_STRENGTHS]
    return min(float(-(heldout_VV * np.log(model_VV)).sum() / heldout_VV.sum()) for model_VV in models)


def _training_pairs(train: DocumentSet) -> np.ndarray:
    """float64 [V, V]: how often b follows a in one document."""
    vocab = train.vocab_size
    counts = np.zeros(vocab * vocab, dtype=np.int64)
    # Whole runs of documents that lie one after another in the token file are read at once.
    stops_N = train.starts_N + train.lengths_N
    for start, stop in zip(*_runs(train.starts_N, stops_N), strict=True):
        for begin in range(start, stop, TOKENS_PER_READ):
            tokens = train.tokens[begin : min(begin + TOKENS_PER_READ + 1, stop)].astype(np.int64)
            counts += np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab * vocab)
    # Pairs across two documents of a run were counted as well: the last token of one, the first of the next.
    inner_N = np.flatnonzero(train.starts_N[1:] == stops_N[:-1])
    across = train.tokens[stops_N[inner_N] - 1].astype(np.int64) * vocab + train.tokens[stops_N[inner_N]]
    counts -= np.bincount(across, minlength=vocab * vocab)
    return counts.reshape(vocab, vocab).astype(np.float64)


def _runs(starts_N: np.ndarray, stops_N: np.ndarray) -> tuple[list[int], list[int]]:
    gaps = np.flatnonzero(starts_N[1:] != stops_N[:-1])
    return (
        [int(starts_N[0]), *starts_N[gaps + 1].tolist()],
        [*stops_N[gaps].tolist(), int(stops_N[-1])],
    )


def _heldout_pairs(heldout: HeldoutDataset, vocab: int) -> np.ndarray:
    """int64 [V, V]: how often a model is asked for b after a."""
    counts = np.zeros(vocab * vocab, dtype=np.int64)
    for sequence in heldout:
        predicted_S = sequence.labels_S != IGNORE
        pairs_P = sequence.tokens_S[predicted_S] * vocab + sequence.labels_S[predicted_S]
        counts += np.bincount(pairs_P, minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)
