"""One leg of a deduplicated journey: a token goes once to each place that any of its experts lies in.

What travels with a row are the experts that it is bound for there, and their weights, so that the place can
sum what its experts computed and send back one row. A journey of one leg goes to ranks; one of two goes to
nodes first, and inside the node to ranks.

Shape letters: T tokens here, K slots of a token, M model dim, P places of the leg, U rows on the way (one
row is one token for one place), W slots of such a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.moe.permute import Permutation, collect, permute, sort_by_expert
from cpmoe.moe.router import count_rows
from cpmoe.parallel.collectives import PendingAllToAll, all_to_all_start, all_to_all_wait


class Parcel(NamedTuple):
    """Tokens at a place and what they are bound for.

    x_TM        rows in the type of the model
    experts_TK  int64, experts of this place by their number here; one past the last where a slot is empty
    weights_TK  float32 (float64 in a float64 model), with gradient; 0 where a slot is empty
    """

    x_TM: Tensor
    experts_TK: Tensor
    weights_TK: Tensor


class Fork(NamedTuple):
    """How the tokens of a parcel part for the places of a leg.

    permutation  of the slots that lead a row: the first of each token and place
    column_TK    where a slot lies in its token's [K · W] table of slots; K · W where it is empty
    counts_P     int64, rows for each place
    """

    permutation: Permutation
    column_TK: Tensor
    counts_P: Tensor


def fork(experts_TK: Tensor, num_places: int, width: int) -> Fork:
    """For `num_places` places with `width` experts each; experts_TK as in `Parcel`."""
    top_k = experts_TK.shape[1]
    place_TK = experts_TK // width  # num_places where a slot is empty
    same_TKK = place_TK[:, :, None] == place_TK[:, None, :]
    before_TK = same_TKK.tril(-1).sum(-1)
    leader_TK = same_TKK.to(torch.uint8).argmax(-1)
    slots = min(top_k, width)
    column_TK = (leader_TK * slots + before_TK).masked_fill(place_TK == num_places, top_k * slots)
    leading_TK = place_TK.masked_fill(before_TK > 0, num_places)
    return Fork(sort_by_expert(leading_TK), column_TK, count_rows(leading_TK, num_places))


class Leg:
    """One call's journey from here to the places of a leg and back, in two Start/Wait pairs.

    send, receive  rows to and from each rank of `group`, in order; the places are its ranks
    width          experts of a place
    """

    def __init__(
        self, group: ProcessGroup, way: Fork, send: list[int], receive: list[int], width: int
    ) -> None:
        self.group, self.way, self.send, self.receive, self.width = group, way, send, receive, width
        self._rows: PendingAllToAll | None = None
        self._slots: PendingAllToAll | None = None

    def start(self, parcel: Parcel) -> None:
        """Launches the rows, and then what they are bound for."""
        num_rows = sum(self.send)
        rows_UM = permute(parcel.x_TM, self.way.permutation, num_rows)
        self._rows = all_to_all_start(rows_UM, self.send, self.receive, self.group)
        slots_U2W = self._pack(parcel, num_rows)
        self._slots = all_to_all_start(slots_U2W, self.send, self.receive, self.group)

    def wait(self) -> Parcel:
        """What arrived."""
        assert self._rows is not None and self._slots is not None
        rows_UM = all_to_all_wait(self._rows)
        weights_UW, experts_UW = all_to_all_wait(self._slots).chunk(2, dim=1)
        self._rows = self._slots = None
        return Parcel(rows_UM, experts_UW.detach().to(torch.int64), weights_UW)

    def start_back(self, sums_UM: Tensor) -> None:
        """Launches one row for each that arrived."""
        self._rows = all_to_all_start(sums_UM, self.receive, self.send, self.group)

    def wait_back(self) -> Tensor:
        """The sum of each token's rows, [T, M]; 0 for a token that went nowhere."""
        assert self._rows is not None
        rows_UM, self._rows = all_to_all_wait(self._rows), None
        return collect(rows_UM, self.way.permutation)

    def _pack(self, parcel: Parcel, num_rows: int) -> Tensor:
        """Weights and experts of each row in one tensor [U, 2 W] of the weights' type, which holds both."""
        num_tokens, top_k = parcel.experts_TK.shape
        slots = min(top_k, self.width)
        shape = num_tokens, top_k * slots + 1
        column_TK = self.way.column_TK
        experts = column_TK.new_full(shape, self.width).scatter_(1, column_TK, parcel.experts_TK % self.width)
        weights = parcel.weights_TK.new_zeros(shape).scatter(1, column_TK, parcel.weights_TK)
        tables = (table[:, :-1].reshape(num_tokens * top_k, slots) for table in (weights, experts))
        rows = self.way.permutation.order_R[:num_rows]
        weights_UW, experts_UW = (table.index_select(0, rows) for table in tables)
        return torch.cat([weights_UW, experts_UW.to(weights_UW.dtype)], dim=1)
