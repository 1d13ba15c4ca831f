"""Asynchronous collectives as pairs of autograd Functions.

A collective is split in two: Start launches it in forward and waits for the transposed one in backward;
Wait waits in forward and launches the transposed one in backward. Autograd runs ready nodes in the
reverse of their forward order, so whatever forward places between Start and Wait overlaps in forward,
and its backward overlaps in backward.

Shape letters: R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.parallel.transport import InFlight, transport


class PendingAllToAll:
    """One all-to-all in flight, forward or backward; shared by the two Functions of its pair."""

    # Joins Start and Wait in the autograd graph. Empty, since the rows in flight have one shape in
    # forward and another in backward.
    token: Tensor | None

    def __init__(self, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> None:
        self.input_splits = input_splits
        self.output_splits = output_splits
        self.group = group
        self._flight: InFlight | None = None

    def launch(self, rows: Tensor, *, transposed: bool) -> None:
        send, receive = self.input_splits, self.output_splits
        if transposed:
            send, receive = receive, send
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        self._flight = transport.all_to_all(received, rows.contiguous(), self.group, receive, send)

    def wait(self) -> Tensor:
        flight, self._flight = self._flight, None
        assert flight is not None, "waited for twice, or never launched"
        return flight.wait()


class PendingGather:
    """One all-gather in flight, whose transpose is a reduce-scatter, or that one, whose transpose it is.

    A reduce-scatter is an all-to-all whose blocks are summed on arrival, in the order of the ranks and in
    float32 at least: as many bytes on the wire as one that sums on the way, without its rounding at each hop.
    """

    token: Tensor | None

    def __init__(self, group: ProcessGroup, *, reduces: bool) -> None:
        self.group = group
        self.reduces = reduces
        self._reducing = False
        self._flight: InFlight | None = None

    def launch(self, rows: Tensor, *, transposed: bool) -> None:
        self._reducing = self.reduces != transposed
        rows = rows.contiguous()
        if self._reducing:
            self._flight = transport.all_to_all(torch.empty_like(rows), rows, self.group)
        else:
            received = rows.new_empty(self.group.size(), *rows.shape)
            self._flight = transport.all_gather(received, rows, self.group)

    def wait(self) -> Tensor:
        flight, self._flight = self._flight, None
        assert flight is not None, "waited for twice, or never launched"
        received = flight.wait()
        if not self._reducing:
            return received.flatten(0, 1)
        wide = torch.promote_types(received.dtype, torch.float32)
        blocks = received.unflatten(0, (self.group.size(), len(received) // self.group.size()))
        return blocks.sum(0, dtype=wide).to(received.dtype)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, pending: PendingAllToAll | PendingGather) -> Tensor:  # type: ignore[override]
        ctx.pending = pending
        pending.launch(rows, transposed=False)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx, _grad_token: Tensor):  # type: ignore[override]
        return ctx.pending.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token: Tensor, pending: PendingAllToAll | PendingGather) -> Tensor:  # type: ignore[override]
        ctx.pending = pending
        return pending.wait()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        ctx.pending.launch(grad, transposed=True)
        return grad.new_empty(0), None


def all_to_all_start(
    rows: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup
) -> PendingAllToAll:
    """Launches an all-to-all of uneven splits on `group`; `all_to_all_wait` returns its rows.

    rows [R_in, ...] of any dtype: `input_splits[i]` rows go to the i-th rank of `group`, in order, and
    `output_splits[i]` rows come from it. Every rank of the group takes part, also with zero rows. In
    backward the gradient of the received rows travels back: launched where `all_to_all_wait` stood and
    waited for where this call stood.
    """
    assert sum(input_splits) == rows.shape[0], (input_splits, rows.shape)
    pending = PendingAllToAll(input_splits, output_splits, group)
    pending.token = _Start.apply(rows, pending)
    return pending


def all_to_all_wait(pending: PendingAllToAll) -> Tensor:
    """Waits for the rows of `all_to_all_start`: [R_out, ...], blocks in the order of the group's ranks."""
    token, pending.token = pending.token, None  # else the handle and its graph would keep each other alive
    return _Wait.apply(token, pending)


def all_gather_start(rows: Tensor, group: ProcessGroup) -> PendingGather:
    """Launches an all-gather of rows [R, ...], equally many on each rank of `group`.

    `gather_wait` returns [P · R, ...], blocks in the order of the ranks; in backward their gradients are
    summed over the ranks, in flight between the same two calls.
    """
    return _start_gather(rows, group, reduces=False)


def reduce_scatter_start(rows: Tensor, group: ProcessGroup) -> PendingGather:
    """Launches a reduce-scatter of rows [P · R, ...] over the P ranks of `group`.

    `gather_wait` returns the sum of the ranks' blocks for this one, [R, ...]; its gradient is gathered.
    """
    return _start_gather(rows, group, reduces=True)


def gather_wait(pending: PendingGather) -> Tensor:
    """Waits for what `all_gather_start` or `reduce_scatter_start` launched."""
    token, pending.token = pending.token, None
    return _Wait.apply(token, pending)


def _start_gather(rows: Tensor, group: ProcessGroup, *, reduces: bool) -> PendingGather:
    pending = PendingGather(group, reduces=reduces)
    pending.token = _Start.apply(rows, pending)
    return pending
