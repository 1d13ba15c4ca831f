"""Runs the model on its groups, without an engine, for many jobs in one launch of the processes.

Gradients are summed as exactness.md says: dense over the world, experts over their replica group.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cpmoe.attention.sharding import SequenceShard
from cpmoe.attention.slicing import shard_slices
from cpmoe.config.deepspeed import ExpertsConfig
from cpmoe.config.recipe import ModelConfig
from cpmoe.model.masks import attention_masks
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import Groups, create_groups
from tests.numerics import cases
from tests.numerics.reference import SEED, Batch

STEP_SIZE = 0.05


class Layout(NamedTuple):
    """Degrees and rank order; DP is what is left of the world."""

    world: int
    cp: int
    ep: int
    order: tuple[str, ...] = ("ep", "cp", "dp")
    ulysses_size: int = 1

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.world, self.cp, self.ep, self.order, self.ulysses_size)

    def __str__(self) -> str:
        suffix = "" if self.order == ("ep", "cp", "dp") else "-" + "".join(self.order)
        if self.ulysses_size > 1:
            suffix += f"-ulysses{self.ulysses_size}"
        return f"dp{self.world // self.cp}cp{self.cp}ep{self.ep}{suffix}"


class Job(NamedTuple):
    """Steps of `case` on `layout`; more than one are steps of plain SGD. `fault`: see `_faulty`."""

    layout: Layout
    case: str
    num_micro_steps: int = 1
    num_steps: int = 1
    recompute: str = "none"
    strategy: str = "ring"
    sharding: str = "zigzag"
    policy: str = "serial"
    slicing: str = "none"
    attention: str = "reference"
    experts: str = "loop"
    dispatcher: str = "alltoall"
    max_rows: int = 0  # 0: no budget
    dtype: str = "float64"
    loss_chunk_tokens: int = 1024
    fault: str = ""

    def __str__(self) -> str:
        parts = [str(part) for part in self if part]
        return "-".join(parts)


@dataclass
class RankResult:
    """What one rank hands back: its own losses of the last step, and gradients after the sums over ranks."""

    loss: float
    cross_entropy: float
    aux: float
    zloss: float
    counts_GLE: Tensor
    losses: list[float] = field(default_factory=list)  # of all steps
    grads: dict[str, Tensor] = field(default_factory=dict)  # only of ranks whose copy the others repeat
    digests: dict[str, str] = field(default_factory=dict)


def is_expert(name: str) -> bool:
    return ".experts." in name


def local_weights(full: dict[str, Tensor], grid: RankGrid, rank: int) -> dict[str, Tensor]:
    """The part of the whole weights that `rank` holds: all dense ones, and its block of the experts."""
    place, degree = grid.expert_rank(rank), grid.expert_parallel_size
    return {name: value.chunk(degree)[place] if is_expert(name) else value for name, value in full.items()}


def load_weights(model: CausalLM, weights: dict[str, Tensor]) -> None:
    """Every parameter takes its tensor of `weights`; the names must be the same."""
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(weights), set(parameters) ^ set(weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])


def digest(value: Tensor) -> str:
    """Equal digests: equal bits."""
    return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def rank_slices(
    batches: list[Batch], grid: RankGrid, rank: int, sharding: str, slicing: str, config: ModelConfig
) -> list[tuple[SequenceShard, ...]]:
    """The slices of `rank`, for each micro-step, of global micro-batches."""
    return [
        shard_slices(
            *cases.data_rows(batch, grid.data_rank(rank), grid.data_parallel_size),
            grid.context_parallel_size,
            grid.context_rank(rank),
            sharding,
            slicing,
            attention_masks(config),
            grid.ulysses_size,
            cases.sequence_numbers(micro, grid.data_rank(rank), grid.data_parallel_size),
        )
        for micro, batch in enumerate(batches)
    ]


def run_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[RankResult]:
    """A job for `run_distributed`."""
    created: dict[RankGrid, Groups] = {}
    results = []
    for job in jobs:
        grid = replace(job.layout.grid, ranks_per_node=ranks_per_node(job.dispatcher, world_size))
        if grid not in created:
            created[grid] = create_groups(grid)
        results.append(_run(job, rank, created[grid]))
    return results


def ranks_per_node(dispatcher: str, world_size: int) -> int | None:
    """Two nodes for hierarchical dispatch."""
    return max(world_size // 2, 1) if dispatcher == "hierarchical" else None


def _run(job: Job, rank: int, groups: Groups) -> RankResult:
    options = ModelOptions(
        attention_strategy=job.strategy,
        attention_backend=job.attention,
        experts=ExpertsConfig(
            backend=job.experts, dispatcher=job.dispatcher, max_rows_per_rank=job.max_rows or None
        ),
        coschedule_policy=job.policy,
        recompute=job.recompute,
        loss_chunk_tokens=job.loss_chunk_tokens,
        seed=SEED,
    )
    in_model = replace(groups, world=None) if job.fault == "local_counts" else groups
    model = CausalLM(cases.case_config(job.case), in_model, options).to(getattr(torch, job.dtype))
    load_weights(model, local_weights(cases.case_weights(job.case), job.layout.grid, rank))
    losses: list[float] = []
    for step in range(job.num_steps):
        if step:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None, name
                    parameter.sub_(STEP_SIZE * parameter.grad)
            model.zero_grad()
        result = _forward_backward(job, rank, model, step)
        _sum_gradients(job, rank, model, groups, result)
        losses.append(result.loss)
    result.losses = losses
    return result


def _forward_backward(job: Job, rank: int, model: CausalLM, step: int) -> RankResult:
    grid = job.layout.grid
    batches = cases.case_step(job.case, job.num_micro_steps, step)
    config = cases.case_config(job.case)
    micro_batches = rank_slices(batches, grid, rank, job.sharding, job.slicing, config)
    scale = LossScale(cases.num_labels(batches), cases.num_tokens(batches), job.num_micro_steps)
    outputs = []
    for slices in micro_batches:
        outputs.append(model(*_faulty(job, slices, scale, world=grid.world_size)))
        outputs[-1].loss.backward()
    return RankResult(
        loss=sum(output.loss.item() for output in outputs),
        cross_entropy=sum(output.cross_entropy.item() for output in outputs) / scale.num_label_tokens,
        aux=sum(output.aux_loss.item() for output in outputs) / job.num_micro_steps,
        zloss=sum(output.z_loss.item() for output in outputs) / scale.num_tokens,
        counts_GLE=torch.stack([output.counts_LE for output in outputs]),
    )


def _sum_gradients(job: Job, rank: int, model: CausalLM, groups: Groups, result: RankResult) -> None:
    grid = job.layout.grid
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} got no gradient: DeepSpeed would wait for it"
        group = groups.replica if is_expert(name) and job.fault != "experts_over_world" else groups.world
        if group is not None:
            dist.all_reduce(grad, group=group)
        result.digests[name] = digest(grad)
        if grid.replica_ranks()[grid.expert_rank(rank)][0] == rank if is_expert(name) else rank == 0:
            result.grads[name] = grad.detach().clone()


def _faulty(
    job: Job, slices: tuple[SequenceShard, ...], scale: LossScale, world: int
) -> tuple[tuple[SequenceShard, ...], LossScale]:
    """The wrong variants of exactness.md and reported_faults.md that a caller can make.

    mean_of_local_means: each rank divides by its own labels and tokens, the ranks' losses are averaged.
    local_positions: RoPE counts the rank's own tokens. late_shift: labels are shifted after sharding.
    """
    if not job.fault:
        return slices, scale
    (shard,) = slices
    labels_BT = shard.labels_BT
    if job.fault == "mean_of_local_means":
        own_labels, own_tokens = int((labels_BT >= 0).sum()), int((shard.documents_BT >= 0).sum())
        scale = LossScale(own_labels * world, own_tokens * world, 1)
    elif job.fault == "local_positions":
        shard = replace(shard, positions_BT=torch.arange(labels_BT.shape[1]).expand_as(labels_BT))
    elif job.fault == "late_shift":
        shifted_BT = torch.cat([shard.tokens_BT[:, 1:], shard.tokens_BT[:, :1]], dim=1)
        shard = replace(shard, labels_BT=shifted_BT.where(labels_BT >= 0, labels_BT))
    return (shard,), scale
