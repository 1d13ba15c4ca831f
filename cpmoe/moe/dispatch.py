"""How many rows travel where: the ranks of an expert group tell one another.

Shape letters: E global experts, P ranks of the expert group, n counts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.moe.replay import RoutingReplay
from cpmoe.parallel.transport import InFlight, transport


@dataclass(frozen=True)
class RowSplits:
    """How many rows travel where, on the host. P ranks, each with E / P experts.

    send       rows to each rank of the expert group
    blocks     [P][E / P]: rows from each rank for each expert of this rank, in the order they arrive
    counts     [E / P]: rows for each expert of this rank, over all ranks
    offsets_E  int32 [E / P] on the device of the rows: where each expert's rows end after regrouping
    """

    send: list[int]
    blocks: list[list[int]]
    counts: list[int]
    offsets_E: Tensor

    @property
    def receive(self) -> list[int]:
        """Rows from each rank of the expert group."""
        return [sum(block) for block in self.blocks]


class SharedCounts(NamedTuple):
    """What every rank of an expert group counted: int64 [P, n] on the host and on the device of the tokens.

    The first E counts of a rank are its slots of each global expert. `rank` is this one's place in the group.
    """

    host: np.ndarray
    device: Tensor
    rank: int

    def row_splits(self, num_experts: int) -> RowSplits:
        """How a row for each slot travels."""
        ranks = len(self.host)
        width = num_experts // ranks
        mine = slice(self.rank * width, (self.rank + 1) * width)
        blocks = self.host[:, mine]
        return RowSplits(
            send=self.host[self.rank, :num_experts].reshape(ranks, width).sum(1).tolist(),
            blocks=blocks.tolist(),
            counts=blocks.sum(0).tolist(),
            offsets_E=self.device[:, mine].sum(0).cumsum(0).to(torch.int32),
        )

    def local_splits(self, num_experts: int) -> RowSplits:
        """The rows of this rank's experts, where they are sorted on this rank."""
        splits = self.row_splits(num_experts)
        return replace(splits, send=[sum(splits.counts)], blocks=[splits.counts])


class CountExchange:
    """Tells every rank of `meta` what every rank counted; started early, read by the host late.

    counts_n int64 [n], equally many on all ranks, not modified until `read` returned. On CUDA counts reach
    the host by a copy on a stream of its own, and `read` waits for that copy alone.
    """

    def __init__(self, counts_n: Tensor, meta: ProcessGroup | None) -> None:
        self._rank = 0 if meta is None else meta.rank()
        self._sent_n = counts_n.contiguous()
        self._received_Pn = self._sent_n[None]
        self._flight: InFlight | None = None
        if meta is not None:
            self._received_Pn = self._sent_n.new_empty(meta.size(), len(self._sent_n))
            self._flight = transport.all_gather(self._received_Pn, self._sent_n, meta)
        if counts_n.is_cuda:
            self._start_copy_to_host()

    def read(self) -> SharedCounts:
        """Waits until the counts are on the host."""
        if self._sent_n.is_cuda:
            transport.waiting = self._flight
            self._copied.synchronize()
            transport.waiting = None
            return SharedCounts(self._host_Pn.numpy(), self._received_Pn, self._rank)
        if self._flight is not None:
            self._flight.wait()
        return SharedCounts(self._received_Pn.numpy(), self._received_Pn, self._rank)

    def _start_copy_to_host(self) -> None:
        stream = _copy_stream(self._sent_n.device)
        stream.wait_stream(torch.cuda.current_stream(self._sent_n.device))
        with torch.cuda.stream(stream):
            if self._flight is not None:
                self._flight.wait(measured=False)
            self._host_Pn = torch.empty(self._received_Pn.shape, dtype=torch.int64, pin_memory=True)
            self._host_Pn.copy_(self._received_Pn, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        self._sent_n.record_stream(stream)
        self._received_Pn.record_stream(stream)


class CallCounts:
    """The counts of one call of a layer: exchanged in its first forward, kept in `replay` for later ones."""

    def __init__(
        self, count: Callable[[], Tensor], meta: ProcessGroup | None, replay: RoutingReplay | None
    ) -> None:
        self._replay = replay
        self._counts = None if replay is None else replay.counts
        self.exchange = CountExchange(count(), meta) if self._counts is None else None

    def read(self) -> SharedCounts:
        """Waits until the counts are on the host; the same every time."""
        if self._counts is None:
            assert self.exchange is not None
            self._counts = self.exchange.read()
            if self._replay is not None:
                self._replay.counts = self._counts
        return self._counts


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
