"""Transfers between ranks, from their launch to the end of their wait.

All that a schedule overlaps goes through here: KV and its gradients, rows, token counts, heads. So it is
known what is in flight, on which group and for which phase.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.parallel.comm_clock import comm_clock
from cpmoe.parallel.progress import progress


class InFlight:
    """One transfer: this rank's part of a collective, or its send and receive of an exchange.

    place  the phase that launched it
    peers  (from, to) of an exchange, ranks in `group`; None where all of them take part
    """

    __slots__ = ("_received", "_sent", "_works", "group", "num_bytes", "peers", "place")

    def __init__(
        self,
        works: list[dist.Work],
        received: Tensor,
        sent: Tensor,
        group: ProcessGroup,
        peers: tuple[int, int] | None = None,
    ) -> None:
        self.group, self.peers, self.place = group, peers, progress.place()
        self.num_bytes = received.nbytes
        self._works = works
        # Both sides of a transfer must outlive it.
        self._received, self._sent = received, sent

    def wait(self, measured: bool = True) -> Tensor:
        """What was received: there when this returns; on CUDA, for what the current stream does next.

        Call it once. `comm_clock` counts the time, if `measured`.
        """
        transport.waiting = self
        observer = transport.observer
        if observer is not None:
            observer.waits(self)
        received, works = self._received, self._works
        if measured:
            comm_clock.wait(works, received.device, self)
        else:
            for work in works:
                work.wait()
        if observer is not None:
            observer.arrived(self)
        transport.waiting = None
        del transport.in_flight[self], self._received, self._sent, self._works
        progress.beats += 1
        return received

    def __str__(self) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        who = f"ranks {', '.join(map(str, ranks))}"
        if self.peers is not None:
            who = f"from rank {ranks[self.peers[0]]}, to rank {ranks[self.peers[1]]}"
        return f"group {self.group.group_desc} ({who}; {self.num_bytes:,} bytes to receive), {self.place}"


class Wire:
    """What is asked of torch.distributed; ranks count inside the group.

    A benchmark puts one into `transport.wire` that counts bytes, or lets nothing travel.
    """

    def exchange(
        self, received: Tensor, sent: Tensor, from_rank: int, to_rank: int, group: ProcessGroup
    ) -> list[dist.Work]:
        # The receive first: gloo asks for the peer's rows on the connection that our own rows would fill,
        # and a ring of two would then use its link one way at a time.
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, group=group, group_peer=from_rank),
                dist.P2POp(dist.isend, sent, group=group, group_peer=to_rank),
            ]
        )

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        group: ProcessGroup,
        receive_splits: list[int] | None,
        send_splits: list[int] | None,
    ) -> list[dist.Work]:
        return [dist.all_to_all_single(received, sent, receive_splits, send_splits, group, async_op=True)]

    def all_gather(self, received: Tensor, sent: Tensor, group: ProcessGroup) -> list[dist.Work]:
        return [dist.all_gather(list(received.unbind()), sent, group, async_op=True)]


class Observer(Protocol):
    """Told of every transfer, in the thread that launches it and waits for it."""

    def launched(self, flight: InFlight) -> None: ...

    def waits(self, flight: InFlight) -> None: ...

    def arrived(self, flight: InFlight) -> None: ...


class Transport:
    """Launches transfers and keeps those in flight; one for the whole process.

    Tensors are contiguous, `received` and `sent` of one dtype. All ranks of a group launch its transfers in
    the same order, also those without anything to send.
    """

    def __init__(self) -> None:
        self.wire = Wire()
        self.observer: Observer | None = None
        self.in_flight: dict[InFlight, None] = {}  # in the order of their launch
        self.waiting: InFlight | None = None

    def exchange(
        self, received: Tensor, sent: Tensor, from_rank: int, to_rank: int, group: ProcessGroup
    ) -> InFlight:
        """`sent` goes to rank `to_rank` of `group` while `received` comes from `from_rank`."""
        works = self.wire.exchange(received, sent, from_rank, to_rank, group)
        return self._launched(InFlight(works, received, sent, group, (from_rank, to_rank)))

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        group: ProcessGroup,
        receive_splits: list[int] | None = None,
        send_splits: list[int] | None = None,
    ) -> InFlight:
        """Rows of `sent` go to the ranks of `group` in order: `send_splits`, or equally many to each."""
        works = self.wire.all_to_all(received, sent, group, receive_splits, send_splits)
        return self._launched(InFlight(works, received, sent, group))

    def all_gather(self, received: Tensor, sent: Tensor, group: ProcessGroup) -> InFlight:
        """`received` [ranks, *sent.shape] gets what every rank of `group` sends."""
        works = self.wire.all_gather(received, sent, group)
        return self._launched(InFlight(works, received, sent, group))

    def _launched(self, flight: InFlight) -> InFlight:
        self.in_flight[flight] = None
        if self.observer is not None:
            self.observer.launched(flight)
        progress.beats += 1
        return flight


transport = Transport()
"""The transfers of this process; DeepSpeed's reductions do not pass it."""
