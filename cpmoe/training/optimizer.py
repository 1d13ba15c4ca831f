"""The optimizer and the learning-rate schedule of a recipe."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from cpmoe.config.recipe import OptimConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms do not; both groups are named, as DeepSpeed's expert split wants."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"name": "matrices", "params": matrices, "weight_decay": weight_decay},
        {"name": "vectors", "params": vectors, "weight_decay": 0.0},
    ]


def build_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), or SGD with momentum, over `parameter_groups`.

    AdamW is torch's fused one, on the CPU too: one pass over weights and moments instead of ten.
    """
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def lr_factor(config: OptimConfig, steps: int, step: int) -> float:
    """What multiplies `optim.lr` at 0-based optimizer step `step` of `steps`.

    Rises linearly over `warmup_steps`, then stays, or falls by a line or half a cosine to
    `min_lr_ratio` at the last step.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    decay_steps = max(steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining


class RecipeSchedule(LambdaLR):
    """The schedule of `lr_factor` on every parameter group.

    Its state is the step alone: a run that continues with other steps or another rate follows its own recipe.
    """

    def __init__(self, config: OptimConfig, steps: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: lr_factor(config, steps, step))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["step"]
        rates = [
            base * factor(self.last_epoch)
            for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates
