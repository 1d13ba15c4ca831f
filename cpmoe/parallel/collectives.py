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


class _AllToAllStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, pending: PendingAllToAll) -> Tensor:  # type: ignore[override]
        ctx.pending = pending
        pending.launch(rows, transposed=False)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx, _grad_token: Tensor):  # type: ignore[override]
        return ctx.pending.wait(), None


class _AllToAllWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token: Tensor, pending: PendingAllToAll) -> Tensor:  # type: ignore[override]
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
    pending.token = _AllToAllStart.apply(rows, pending)
    return pending


def all_to_all_wait(pending: PendingAllToAll) -> Tensor:
    """Waits for the rows of `all_to_all_start`: [R_out, ...], blocks in the order of the group's ranks."""
    token, pending.token = pending.token, None  # else the handle and its graph would keep each other alive
    return _AllToAllWait.apply(token, pending)
