"""Builds a MoE layer on each rank, runs it, and brings its results together for comparison with the twin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpmoe.config.deepspeed import ExpertsConfig
from cpmoe.config.recipe import ModelConfig
from cpmoe.moe.balance import router_z_loss, switch_aux_loss
from cpmoe.moe.experts import init_experts
from cpmoe.moe.layer import MoELayer
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import Groups, create_groups
from tests.moe import reference

HIDDEN, WIDTH = 8, 12
AUX, Z = 0.7, 0.3
NAMES = {
    "router": "router.weight",
    "gate_up": "experts.gate_up_proj",
    "down": "experts.down_proj",
    "shared_gate": "shared_expert.gate_proj.weight",
    "shared_up": "shared_expert.up_proj.weight",
    "shared_down": "shared_expert.down_proj.weight",
}


@dataclass(frozen=True)
class Case:
    """One layer on `world` ranks; tokens[r] tokens on rank r, of which every `pad_every`-th is padding."""

    ep: int
    tokens: tuple[int, ...]
    experts: int = 4
    k: int = 2
    pad_every: int = 0
    favourites: tuple[int, ...] = ()
    ties: bool = False
    shared: int = 0
    normalize: bool = True
    rank_order: tuple[str, ...] = ("ep", "cp", "dp")
    dtype: torch.dtype = torch.float64
    backend: str = "loop"
    dispatch: dict[str, Any] = field(default_factory=dict)
    config: ModelConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        config = model_config(
            num_experts=self.experts,
            num_experts_per_tok=self.k,
            n_shared_experts=self.shared,
            norm_topk_prob=self.normalize,
        )
        object.__setattr__(self, "config", config)

    @property
    def world(self) -> int:
        return len(self.tokens)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [1, T, M], mask [1, T], and the gradient of the output, 0 at padding."""
        generator = torch.Generator().manual_seed(100 + rank)
        count = self.tokens[rank]
        x, cotangent = torch.randn(2, 1, count, HIDDEN, generator=generator, dtype=torch.float64)
        x[..., 0] = 1.0
        places = torch.arange(count)[None]
        mask = places % self.pad_every != 0 if self.pad_every else places >= 0
        return x.to(self.dtype), mask, (cotangent * mask[..., None]).to(self.dtype)


def model_config(**fields: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
        "initializer_range": 0.5,
    }
    return ModelConfig(**{**base, **fields})


def build_layer(case: Case, groups: Groups) -> MoELayer:
    """The same weights for every layout; `favourites` get a score that no other expert can reach.

    With `ties` all others have the same scores.
    """
    layer = MoELayer(case.config, groups, ExpertsConfig(backend=case.backend, **case.dispatch))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("experts."):
                parameter.normal_(0, 0.5, generator=generator)
        if case.ties:
            layer.router.weight.zero_()
        layer.router.weight[list(case.favourites), 0] += 40.0
    init_experts(layer.experts, seed=3, name="layer.experts")
    return layer.to(case.dtype)


def groups_for(case: Case) -> Groups:
    nodes = case.dispatch.get("ranks_per_node")
    grid = RankGrid(case.world, 1, case.ep, case.rank_order, ranks_per_node=nodes)
    return create_groups(grid) if case.world > 1 else Groups(grid, 0)


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grads[name] = parameter.grad
    return grads


def run_cases(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    """`run_case` of each; cases of one layout share their groups."""
    created: dict[tuple[Any, ...], Groups] = {}
    results = []
    for case in cases:
        key = case.ep, case.rank_order, case.dispatch.get("ranks_per_node")
        if key not in created:
            created[key] = groups_for(case)
        results.append(run_case(rank, world, case, created[key]))
    return results


def run_case(rank: int, world: int, case: Case, groups: Groups | None = None) -> dict[str, Any]:
    """Output, gradients, losses and counts of this rank."""
    groups = groups or groups_for(case)
    layer = build_layer(case, groups)
    x, mask, cotangent = case.inputs(rank)
    x.requires_grad_()
    y, stats = layer(x, mask)
    counts = stats.counts_E.clone()
    if groups.world is not None:
        dist.all_reduce(counts, group=groups.world)
    aux = switch_aux_loss(stats.probs_sum_E, counts, case.k)
    z = router_z_loss(stats.zsum, int(counts.sum()) // case.k)
    ((y * cotangent).sum() + AUX * aux + Z * z).backward()
    assert x.grad is not None
    return {
        "y": (y * mask[..., None]).detach(),
        "x": x.grad,
        "aux": aux.detach(),
        "z": z.detach(),
        "counts": stats.counts_E,
        "grads": gradients(layer),
        "weights": {name: p.detach() for name, p in layer.named_parameters()},
        "expert_rank": groups.grid.expert_rank(rank),
    }


def join_weights(results: list[dict[str, Any]], kind: str, case: Case) -> dict[str, Tensor]:
    """Whole tensors from the ranks' parts: `grads` are summed over ranks that hold the same part."""
    joined = {}
    for short, name in NAMES.items():
        if name not in results[0][kind]:
            continue
        parts: list[Tensor] = []
        for place in range(case.ep if name.startswith("experts.") else 1):
            owners = [r for r in results if not name.startswith("experts.") or r["expert_rank"] == place]
            values = [r[kind][name].double() for r in owners]
            parts.append(sum(values[1:], start=values[0]) if kind == "grads" else values[0])
        joined[short] = torch.cat(parts)
    return joined


def reference_of(case: Case, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The twin on one process with all tokens, float64; results in the layout of `run_case`, by rank."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    gate, up = weights["gate_up"].chunk(2, dim=1)
    inputs = [
        tuple(t[0].double() if t.is_floating_point() else t[0] for t in case.inputs(r))
        for r in range(case.world)
    ]
    xs = [x.requires_grad_() for x, _, _ in inputs]
    tokens = torch.cat([x[mask] for x, mask, _ in inputs])
    cotangent = torch.cat([c[mask] for _, mask, c in inputs])
    y, probs, logsumexp, counts = reference.moe(
        tokens, {**weights, "gate": gate, "up": up}, case.k, case.normalize
    )
    aux = reference.aux_loss(probs, counts, case.k)
    z = logsumexp.square().sum() / max(len(tokens), 1)
    ((y * cotangent).sum() + AUX * aux + Z * z).backward()
    padded, start = [], 0
    for x, mask, _ in inputs:
        output = torch.zeros_like(x)
        output[mask] = y[start : start + int(mask.sum())]
        start += int(mask.sum())
        padded.append(output.detach())
    return {
        "y": padded,
        "x": [_gradient(x) for x in xs],
        "aux": aux.detach(),
        "z": z.detach(),
        "counts": counts,
        "grads": {name: _gradient(value) for name, value in weights.items()},
    }


def _gradient(leaf: Tensor) -> Tensor:
    """0 for what the twin did not use."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def relative_error(value: Tensor, expected: Tensor) -> float:
    """‖a - b‖ / ‖b‖, and plain ‖a - b‖ where b is 0."""
    value, expected = value.detach().double(), expected.detach().double()
    norm = expected.norm()
    return float((value - expected).norm() / (norm if norm > 0 else 1.0))
