"""Memory under skew with and without a budget of rows, and bytes on the wire by dispatcher; for `bench moe`.

Two processes, EP = 2, one layer, forward and backward; memory as in `bench memory`, bytes as those that leave
a rank, token counts included. In balance tokens choose at random; the skews are "one expert", which every
token chooses first, and "one rank", whose experts are all that any token chooses. The budget is the rows of a
rank in balance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpmoe.cli.bench.coschedule_host import CountingWire, over
from cpmoe.cli.bench.memory import MIB, PeakBytes
from cpmoe.cli.bench.teams import Team, Work

WORLD = 2
MODEL: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
TOKENS = 4096
# Experts that every token prefers.
SKEWS: dict[str, tuple[int, ...]] = {"one expert": (0,), "one rank": (0, 1)}
DISPATCHERS = ("alltoall", "dedup", "allgather")

Row = tuple[str, ...]


def measure() -> tuple[dict[str, float], list[Row]]:
    """Figures, and rows of (what, peak MiB or MB sent, ratio).

    moe.skew_memory_ratio             peak of the worse skew, within the budget, over that in balance
    moe.unbudgeted_skew_memory_ratio  the same without the budget
    moe.dedup_bytes_ratio             bytes sent by dedup over those sent by alltoall, in balance
    moe.allgather_bytes_ratio         likewise by allgather
    """
    with Team(layers, WORLD, 1) as team:
        _, ranks = team.turn()
    return figures_of(ranks)


def figures_of(ranks: list[dict[str, dict[str, int]]]) -> tuple[dict[str, float], list[Row]]:
    """What `measure` returns, of the results of `layers` on each rank."""
    peaks, sent = (
        {name: max(rank[kind][name] for rank in ranks) for name in ranks[0][kind]}
        for kind in ("peak", "sent")
    )
    ratios = {name: peak / peaks["balance"] for name, peak in peaks.items()}
    figures = {
        "moe.skew_memory_ratio": max(ratios[f"{skew}, budget"] for skew in SKEWS),
        "moe.unbudgeted_skew_memory_ratio": max(ratios[skew] for skew in SKEWS),
        "moe.dedup_bytes_ratio": sent["dedup"] / sent["alltoall"],
        "moe.allgather_bytes_ratio": sent["allgather"] / sent["alltoall"],
    }
    rows: list[Row] = [
        (f"peak, {name}", f"{peak / MIB:.1f} MiB", f"{ratios[name]:.3f}") for name, peak in peaks.items()
    ]
    rows += [
        (f"sent, {name}", f"{count / 1e6:.2f} MB", f"{count / sent['alltoall']:.3f}")
        for name, count in sent.items()
    ]
    return figures, rows


def layers(rank: int, size: int, tokens: int = TOKENS, model: dict[str, Any] = MODEL) -> Work:
    """What each process does: peak bytes and bytes sent of every case, {"peak": ..., "sent": ...}."""
    from cpmoe.config.deepspeed import ExpertsConfig
    from cpmoe.config.recipe import ModelConfig
    from cpmoe.moe.experts import init_experts
    from cpmoe.moe.layer import MoELayer
    from cpmoe.parallel.grid import RankGrid
    from cpmoe.parallel.groups import create_groups

    groups = create_groups(RankGrid(size, expert_parallel_size=size))
    config = ModelConfig.model_validate(model)
    x = torch.randn(1, tokens, config.hidden_size, generator=torch.Generator().manual_seed(rank))
    x[..., 0] = 1.0

    def layer(favourites: tuple[int, ...] = (), **options: Any) -> MoELayer:
        made = MoELayer(config, groups, ExpertsConfig(**options))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if not name.startswith("experts."):
                    parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
            made.router.weight[list(favourites), 0] += 10.0
        init_experts(made.experts, 0, "experts")
        return made

    def work() -> dict[str, dict[str, int]]:
        budget = tokens * config.num_experts_per_tok
        peak = {"balance": _peak(layer(), x)}
        for name, favourites in SKEWS.items():
            peak[name] = _peak(layer(favourites), x)
            peak[f"{name}, budget"] = _peak(layer(favourites, max_rows_per_rank=budget), x)
        sent = {name: _sent(layer(dispatcher=name), x) for name in DISPATCHERS}
        return {"peak": peak, "sent": sent}

    return work


def _peak(layer: torch.nn.Module, x: Tensor) -> int:
    known = [x]
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
        known += [parameter.data, parameter.grad]
    with PeakBytes(known) as memory:
        _step(layer, x)
    return memory.peak


def _sent(layer: torch.nn.Module, x: Tensor) -> int:
    wire = CountingWire()
    with over(wire):
        _step(layer, x)
    return wire.sent


def _step(layer: torch.nn.Module, x: Tensor) -> None:
    y, _ = layer(x.detach().requires_grad_())
    y.square().mean().backward()
