"""How many rows travel where: the ranks of an expert group tell one another.

Shape letters: E global experts, P ranks of the expert group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

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


class CountExchange:
    """Tells every rank of `meta` how many rows it will get; started early, read by the host late.

    counts_E int64 [E]: this rank's rows per global expert, not modified until `splits` returned. On CUDA
    counts reach the host by a copy on a stream of its own, and `splits` waits for that copy alone.
    """

    def __init__(self, counts_E: Tensor, meta: ProcessGroup | None) -> None:
        self._ranks = 1 if meta is None else meta.size()
        self._sent_E = counts_E.contiguous()
        self._received_E = self._sent_E
        self._flight: InFlight | None = None
        if meta is not None:
            self._received_E = torch.empty_like(self._sent_E)
            self._flight = transport.all_to_all(self._received_E, self._sent_E, meta)
        if counts_E.is_cuda:
            self._start_copy_to_host()

    def splits(self) -> RowSplits:
        """Waits until the counts are on the host."""
        if self._sent_E.is_cuda:
            transport.waiting = self._flight
            self._copied.synchronize()
            transport.waiting = None
            sent, received = self._host.tolist()
        else:
            if self._flight is not None:
                self._flight.wait()
            sent, received = self._sent_E.tolist(), self._received_E.tolist()
        width = len(sent) // self._ranks
        blocks = [received[start : start + width] for start in range(0, len(received), width)]
        return RowSplits(
            send=[sum(sent[start : start + width]) for start in range(0, len(sent), width)],
            blocks=blocks,
            counts=[sum(block[expert] for block in blocks) for expert in range(width)],
            offsets_E=self._received_E.view(self._ranks, width).sum(0).cumsum(0).to(torch.int32),
        )

    def _start_copy_to_host(self) -> None:
        stream = _copy_stream(self._sent_E.device)
        stream.wait_stream(torch.cuda.current_stream(self._sent_E.device))
        with torch.cuda.stream(stream):
            if self._flight is not None:
                self._flight.wait(measured=False)
            self._host = torch.empty((2, self._sent_E.numel()), dtype=torch.int64, pin_memory=True)
            self._host[0].copy_(self._sent_E, non_blocking=True)
            self._host[1].copy_(self._received_E, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        self._sent_E.record_stream(stream)
        self._received_E.record_stream(stream)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
