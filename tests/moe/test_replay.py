"""Recomputation keeps the first forward's routing, counts once, and gives bit-equal gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cpmoe.moe.layer import MoELayer
from cpmoe.moe.replay import RoutingReplay
from tests.distributed import run_distributed
from tests.moe.runs import Case, build_layer, gradients, groups_for, relative_error


def recomputed(rank: int, world: int, case: Case, mode: str) -> dict[str, Any]:
    layer = build_layer(case, groups_for(case))
    x, mask, cotangent = case.inputs(rank)
    x.requires_grad_()
    if mode == "plain":
        y, stats = layer(x, mask)
    else:
        y, stats = checkpoint(
            layer, x, mask, RoutingReplay(), use_reentrant=False, early_stop=mode == "early stop"
        )
    ((y * cotangent).sum() + stats.probs_sum_E.square().sum() + stats.zsum).backward()
    return {"y": y.detach(), "x": x.grad, "counts": stats.counts_E, **gradients(layer)}


@pytest.mark.parametrize("mode", ["full", "early stop"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, (9,), pad_every=4, shared=1, dtype=torch.float32),
        Case(2, (9, 5), pad_every=4, shared=1, dtype=torch.float32),
        Case(2, (7, 0), experts=2, k=1),
        Case(2, (9, 5), pad_every=4, dtype=torch.float32, dispatch={"dispatcher": "allgather"}),
        Case(2, (9, 5), dtype=torch.float32, dispatch={"dispatcher": "dedup", "max_rows_per_rank": 5}),
    ],
    ids=["one process", "two ranks", "a rank without tokens", "all-gather", "deduplicated, in rounds"],
)
def test_checkpointing_is_bit_equal_and_counts_once(case, mode):
    def run(which: str) -> list[dict[str, Any]]:
        if case.world == 1:
            return [recomputed(0, 1, case, which)]
        return run_distributed(recomputed, case.world, case, which)

    for plain, again in zip(run("plain"), run(mode), strict=True):
        for name, value in plain.items():
            assert torch.equal(value, again[name]), name


class Nudged(torch.nn.Module):
    """A layer whose scores move by a rounding error from one forward to the next, as on a GPU."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer
        self.calls = 0

    def forward(self, x: torch.Tensor, replay: RoutingReplay | None) -> torch.Tensor:
        nudge = torch.zeros_like(x)
        nudge[..., 1] = 1e-9 * self.calls
        self.calls += 1
        y, stats = self.layer(x + nudge, None, replay)
        self.counts = stats.counts_E
        return y


def near_tie(rank: int, world: int, case: Case, with_replay: bool) -> dict[str, Any]:
    """Experts 0 and 1 tie exactly until the nudge favours 1, which lives on another rank where EP is 2."""
    layer = build_layer(case, groups_for(case))
    with torch.no_grad():
        layer.router.weight[1] = layer.router.weight[0]
        layer.router.weight[:2, 0] += 40.0
        layer.router.weight[1, 1] += 1.0
    x, _, cotangent = case.inputs(rank)
    x[..., 1] = 0.0
    x.requires_grad_()
    nudged = Nudged(layer)
    y = checkpoint(nudged, x, RoutingReplay() if with_replay else None, use_reentrant=False, early_stop=False)
    first_counts = nudged.counts
    (y * cotangent).sum().backward()
    assert nudged.calls == 2
    return {"first": first_counts, "second": nudged.counts, **gradients(layer), "x": x.grad}


@pytest.mark.parametrize(
    "case", [Case(1, (6,), k=1, experts=2), Case(2, (6, 4), k=1, experts=2)], ids=["EP 1", "EP 2"]
)
def test_a_near_tie_does_not_flip(case):
    def run(with_replay: bool) -> list[dict[str, Any]]:
        if case.world == 1:
            return [near_tie(0, 1, case, with_replay)]
        return run_distributed(near_tie, case.world, case, with_replay)

    kept = run(True)
    for rank, result in enumerate(kept):
        assert result["first"].tolist() == result["second"].tolist() == [case.tokens[rank], 0]
        gate = result["experts.gate_up_proj"]
        idle = gate[1] if case.world == 1 else gate[0] if rank == 1 else None
        assert idle is None or torch.count_nonzero(idle) == 0
    if case.world == 1:
        (flipped,) = run(False)
        assert flipped["second"].tolist() == [0, case.tokens[0]], "the nudge must flip what is not replayed"
        assert relative_error(flipped["experts.gate_up_proj"], kept[0]["experts.gate_up_proj"]) > 0.1


def test_a_replayed_call_exchanges_no_counts_and_recomputes_probabilities():
    case = Case(1, (6,))
    layer = build_layer(case, groups_for(case))
    x, mask, _ = case.inputs(0)
    replay = RoutingReplay()
    first, stats = layer(x, mask, replay)
    indices, counts = replay.indices_TK, replay.counts
    moved = x * 1.5
    state = layer.route(moved, mask, replay)
    assert state.transit.counts.exchange is None and state.transit.counts.read() is counts
    second, again = layer(moved, mask, replay)
    assert replay.indices_TK is indices and replay.counts is counts
    assert torch.equal(again.counts_E, stats.counts_E)
    assert relative_error(again.probs_sum_E, stats.probs_sum_E) > 1e-3
    assert relative_error(second, first) > 1e-3
