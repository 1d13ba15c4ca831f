"""Which keys of a hop's buffer each query sees, as one or two intervals per query.

Causality, documents, sliding windows and attention sinks all have this form in every layout, since the
local tokens of a rank stand in ascending global order. Pure arithmetic; no process group, no GPU.

Shape letters: B batch, T local queries, U tokens of the KV buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from cpmoe.attention.ranges import TokenRanges
from cpmoe.attention.reach import Reach


@dataclass(frozen=True, eq=False)
class KeySpans:
    """Query t of batch row b sees the keys [start[b, t], stop[b, t]) of the hop's KV buffer, and the sinks.

    start_BT, stop_BT            int32 [B, T] on CPU, 0 ≤ start ≤ stop ≤ num_keys; equal where it sees nothing
    sink_start_BT, sink_stop_BT  a second interval of the same form that ends where the first starts or
                                 before, or None where no query has one
    num_keys                     U, tokens of the buffer that travelled

    Backends keep what they derive from it in `derived`, so that all layers share it.
    """

    start_BT: Tensor
    stop_BT: Tensor
    num_keys: int
    sink_start_BT: Tensor | None = None
    sink_stop_BT: Tensor | None = None
    derived: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        assert (self.sink_start_BT is None) == (self.sink_stop_BT is None)
        for bound_BT in self.bounds():
            assert bound_BT.dtype == torch.int32 and bound_BT.shape == self.start_BT.shape

    def bounds(self) -> tuple[Tensor, ...]:
        """(start, stop), or (start, stop, sink_start, sink_stop)."""
        if self.sink_start_BT is None or self.sink_stop_BT is None:
            return self.start_BT, self.stop_BT
        return self.start_BT, self.stop_BT, self.sink_start_BT, self.sink_stop_BT


_spans_of_reach: WeakKeyDictionary[Reach, dict[TokenRanges, KeySpans]] = WeakKeyDictionary()


def spans_of_reach(reach: Reach, tokens: TokenRanges) -> KeySpans:
    """What the queries see in a buffer that holds the source's tokens `tokens`, which are all they see.

    One object per reach and buffer, so that the layers of a plan share what backends derive from it.
    """
    known = _spans_of_reach.setdefault(reach, {})
    if tokens not in known:
        rows = [(row.start, row.stop, row.sink_start, row.sink_stop) for row in reach.rows_C]
        bounds_C4T = _places(np.array(rows), tokens)
        start_BT, stop_BT, sink_start_BT, sink_stop_BT = torch.from_numpy(
            bounds_C4T[reach.place_B].astype(np.int32)
        ).unbind(1)
        sinks = (sink_start_BT, sink_stop_BT) if (sink_start_BT < sink_stop_BT).any() else (None, None)
        known[tokens] = KeySpans(start_BT, stop_BT, tokens.wire_tokens, *sinks)
    return known[tokens]


def _places(index: np.ndarray, tokens: TokenRanges) -> np.ndarray:
    """How many tokens of the buffer stand before each local token of the source."""
    place = np.zeros_like(index)
    for start, stop in tokens.ranges:
        place += np.clip(index, start, stop) - start
    return place
