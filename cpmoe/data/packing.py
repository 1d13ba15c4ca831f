"""Documents, concatenated and cut into sequences of `seq_len` tokens: random access, no scan.

Sequence i is the window w = stream[i*S : i*S + S + 1] of the concatenated documents: tokens = w[0:S] and
labels = w[1:S+1], shifted here, on the whole stream, before anything is sharded. A label is IGNORE where
the next token belongs to another document, so the end-of-document token is predicted but predicts
nothing. Positions restart at each document start in the window, and at the window's own start.

Shapes: S sequence, N documents, C documents (or parts of them) in one window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cpmoe.data.store import DocumentSet

IGNORE = -100
PADDING_DOCUMENT = -1
MAX_BLOCK = 1 << 20
# Of the rule by which sequence i follows from the documents and the seed: another rule, another number.
ORDER_VERSION = 1


class PackedSequence(NamedTuple):
    """One sequence, int64 [S] each. `documents_S` counts from 0 within the sequence; padding is -1."""

    tokens_S: np.ndarray
    labels_S: np.ndarray
    positions_S: np.ndarray
    documents_S: np.ndarray


class _Stream:
    """The documents of one epoch in one order: where each begins in the stream and in the token file."""

    def __init__(self, starts_N: np.ndarray, lengths_N: np.ndarray) -> None:
        self.starts_N = starts_N
        self.bounds_N1 = np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int64)))

    def segments(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Stream range [start, stop) as (places in the token file, lengths), one per document touched."""
        first = int(np.searchsorted(self.bounds_N1, start, side="right")) - 1
        last = int(np.searchsorted(self.bounds_N1, stop, side="left"))
        bounds_C = self.bounds_N1[first:last]
        begin_C = np.maximum(bounds_C, start)
        end_C = np.minimum(self.bounds_N1[first + 1 : last + 1], stop)
        return self.starts_N[first:last] + (begin_C - bounds_C), end_C - begin_C


class PackedDataset:
    """The endless training sequences: windows of a stream that is epoch after epoch of all documents.

    The order of the documents depends on (seed, epoch) alone. The last, incomplete window of an epoch is
    filled from the next one: no token is dropped, and a data set shorter than one sequence works. Windows
    are shuffled once more, in blocks of an epoch or at most MAX_BLOCK of them; else a batch would be a few
    long documents, read from one end to the other. Sequence i is defined for every i >= 0.
    """

    def __init__(self, documents: DocumentSet, seq_len: int, seed: int) -> None:
        assert seq_len > 0
        self.documents = documents
        self.seq_len = seq_len
        self.seed = seed
        self.tokens_per_epoch = documents.num_tokens
        self.windows_per_block = min(max(self.tokens_per_epoch // seq_len, 1), MAX_BLOCK)
        self._streams: dict[int, _Stream] = {}
        self._block: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def identity(self) -> dict[str, Any]:
        """Everything that decides which tokens sequence i holds, as JSON values."""
        return {
            "data.seq_len": self.seq_len,
            "data.seed": self.seed,
            "data.heldout_fraction": self.documents.heldout_fraction,
            "checksum of the training documents": self.documents.checksum,
            "windows shuffled together": self.windows_per_block,
            "version of the order": ORDER_VERSION,
        }

    def epoch(self, sequences: int) -> float:
        """Epochs completed after so many sequences."""
        return sequences * self.seq_len / self.tokens_per_epoch

    def __getitem__(self, index: int) -> PackedSequence:
        block, place = divmod(index, self.windows_per_block)
        if self._block[0] != block:
            self._block = block, window_order(self.windows_per_block, self.seed, block)
        return self.window(block * self.windows_per_block + int(self._block[1][place]))

    def window(self, index: int) -> PackedSequence:
        """The window of the unshuffled stream that begins at token `index` * seq_len."""
        epoch, start = divmod(index * self.seq_len, self.tokens_per_epoch)
        needed = self.seq_len + 1
        parts = []
        while needed:
            stop = min(start + needed, self.tokens_per_epoch)
            parts.append(self._stream(epoch).segments(start, stop))
            needed -= stop - start
            epoch, start = epoch + 1, 0
        places_C, lengths_C = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _assemble(self.documents.tokens, places_C, lengths_C, self.seq_len)

    def _stream(self, epoch: int) -> _Stream:
        if epoch not in self._streams:
            # A block of windows reads three neighbouring epochs at most, unless epochs are very short.
            for old in sorted(self._streams)[:-2]:
                del self._streams[old]
            order_N = document_order(len(self.documents), self.seed, epoch)
            self._streams[epoch] = _Stream(
                self.documents.starts_N[order_N], self.documents.lengths_N[order_N]
            )
        return self._streams[epoch]


class HeldoutDataset:
    """`num_sequences` fixed sequences of the held-out documents in their stored order, not shuffled.

    Fewer sequences than there are windows: evenly spaced ones, so that a small evaluation samples the
    whole text. More: the end of the last window and all further sequences are padding (token 0, label
    IGNORE, position 0, document -1).
    """

    def __init__(self, documents: DocumentSet, seq_len: int, num_sequences: int) -> None:
        assert seq_len > 0 and num_sequences > 0
        self.documents = documents
        self.seq_len = seq_len
        self._num_sequences = num_sequences
        self._stream = _Stream(documents.starts_N, documents.lengths_N)
        self._num_windows = -(-documents.num_tokens // seq_len)

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[PackedSequence]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> PackedSequence:
        if not 0 <= index < self._num_sequences:
            raise IndexError(index)
        window = index
        if self._num_sequences < self._num_windows:
            window = index * self._num_windows // self._num_sequences
        start = min(window * self.seq_len, self.documents.num_tokens)
        stop = min(start + self.seq_len + 1, self.documents.num_tokens)
        return _assemble(self.documents.tokens, *self._stream.segments(start, stop), self.seq_len)


def document_order(num_documents: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [N]: the permutation of the documents in an epoch.

    Sorted raw output of the bit generator: numpy keeps that stream the same in all versions and on all
    machines, which it does not promise for `Generator.permutation`.
    """
    return _permutation(num_documents, [seed, epoch])


def window_order(num_windows: int, seed: int, block: int) -> np.ndarray:
    """int64 [N]: the permutation of the windows of one block; as stable as `document_order`."""
    return _permutation(num_windows, [seed, block, 1])


def _permutation(count: int, entropy: list[int]) -> np.ndarray:
    keys_N = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(keys_N, kind="stable")


def padding_sequence(seq_len: int) -> PackedSequence:
    """A sequence without a document: no token is real and none is predicted."""
    nothing = np.empty(0, dtype=np.int64)
    return _assemble(nothing, nothing, nothing, seq_len)


def _assemble(
    tokens: np.ndarray, places_C: np.ndarray, lengths_C: np.ndarray, seq_len: int
) -> PackedSequence:
    """Segments of at most seq_len + 1 tokens in total, the rest is padding."""
    count = int(lengths_C.sum())
    begin_C = np.cumsum(lengths_C) - lengths_C
    local = np.arange(count)
    window = np.zeros(seq_len + 1, dtype=np.int64)
    window[:count] = tokens[np.repeat(places_C - begin_C, lengths_C) + local]
    documents = np.full(seq_len + 1, PADDING_DOCUMENT, dtype=np.int64)
    documents[:count] = np.repeat(np.arange(len(lengths_C)), lengths_C)
    positions = np.zeros(seq_len + 1, dtype=np.int64)
    positions[:count] = local - np.repeat(begin_C, lengths_C)
    # Between two paddings the numbers agree as well, hence the second condition.
    continues_S = (documents[1:] == documents[:-1]) & (documents[1:] != PADDING_DOCUMENT)
    labels_S = np.where(continues_S, window[1:], IGNORE)
    return PackedSequence(window[:-1], labels_S, positions[:-1], documents[:-1])
