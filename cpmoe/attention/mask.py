"""Which keys a query sees: causality, sliding window and attention sinks, inside documents.

Pure arithmetic in numpy on global token indices, before any layout.

Shape letters: S full sequence, C documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Mask:
    """What a query sees of its own document, itself always included.

    causal      no key after the query
    window      (left, right): at most this many keys before and after the query; None sets no limit
    num_sinks   the first tokens of the document, which a window does not hide (Xiao et al., "Efficient
                Streaming Language Models with Attention Sinks", arXiv 2309.17453)

    Hugging Face's `sliding_window` w counts the query itself: it is window (w − 1, None), causal.
    """

    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    num_sinks: int = 0

    def __post_init__(self) -> None:
        left, right = self.window
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise ValueError(f"window = {self.window}: each side must be at least 0, or None for no limit")
        if self.causal and right:
            raise ValueError(f"window = {self.window}: a causal mask shows no key after the query")
        if self.num_sinks < 0:
            raise ValueError(f"num_sinks = {self.num_sinks}: must be at least 0")


CAUSAL = Mask()


class Visible(NamedTuple):
    """What each token of a sequence sees, global indices, int64 [S] each.

    Keys [start, stop), and where they lie apart also the sinks [sink_start, sink_stop) before them. start
    and stop never fall. Padding sees nothing: start = stop = its own index. `document_start` is the first
    token of the query's document, its own index for padding.
    """

    document_start: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    sink_start: np.ndarray
    sink_stop: np.ndarray

    @property
    def num_keys(self) -> np.ndarray:
        """[S] keys that each query sees."""
        return self.stop - self.start + self.sink_stop - self.sink_start

    def of_queries(self, first: int, last: int) -> Visible:
        """The same where only the tokens [first, last) are queries: all others see nothing."""
        start_S, stop_S = self.start.copy(), self.stop.copy()
        # Empty ranges that leave both bounds ascending.
        stop_S[:first] = start_S[:first]
        start_S[last:] = stop_S[last:] = np.arange(last, len(start_S))
        sink_stop_S = self.sink_start.copy()
        sink_stop_S[first:last] = self.sink_stop[first:last]
        return self._replace(start=start_S, stop=stop_S, sink_stop=sink_stop_S)


def visible_keys(documents_C2: np.ndarray, seq_len: int, mask: Mask) -> Visible:
    """Bounds for the documents [start, stop) of one sequence of `seq_len` tokens, ascending."""
    index_S = np.arange(seq_len)
    first_S, last_S = index_S.copy(), index_S.copy()
    start_C, stop_C = documents_C2.T
    edges = np.zeros(seq_len + 1, dtype=np.int8)
    edges[start_C] += 1
    edges[stop_C] -= 1
    real_S = edges[:-1].cumsum(dtype=np.int8) > 0
    first_S[real_S] = np.repeat(start_C, stop_C - start_C)
    last_S[real_S] = np.repeat(stop_C, stop_C - start_C)
    left, right = mask.window
    right = 0 if mask.causal else right
    start_S = first_S if left is None else np.maximum(first_S, index_S - left)
    stop_S = last_S if right is None else np.minimum(last_S, index_S + right + 1)
    nothing_S = np.zeros_like(index_S)
    if mask.num_sinks == 0:
        return Visible(first_S, start_S, stop_S, nothing_S, nothing_S)
    sink_stop_S = np.minimum(first_S + mask.num_sinks, last_S)
    if mask.causal:
        sink_stop_S = np.minimum(sink_stop_S, np.where(real_S, index_S + 1, last_S))
    apart_S = sink_stop_S < start_S
    return Visible(
        first_S,
        np.where(apart_S, start_S, first_S),
        np.where(apart_S, stop_S, np.maximum(stop_S, sink_stop_S)),
        np.where(apart_S, first_S, 0),
        np.where(apart_S, sink_stop_S, 0),
    )
