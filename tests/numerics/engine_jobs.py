"""Runs training through the DeepSpeed engine, for many jobs in one launch of the processes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import deepspeed
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import logger, safe_get_full_fp32_param
from torch import Tensor

from cpmoe.config.resolve import RunConfig, resolve
from cpmoe.config.settings import Settings
from cpmoe.model.transformer import LossScale
from cpmoe.training.engine import TrainingEngine, build_groups, build_model
from tests.numerics import cases
from tests.numerics.model_jobs import (
    Layout,
    digest,
    is_expert,
    load_weights,
    local_weights,
    rank_slices,
    ranks_per_node,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.05, "weight_decay": 0.1},
    "momentum": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "plain": {"name": "sgd", "lr": 0.01, "weight_decay": 0.0},
    "adamw": {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1},
}


class EngineJob(NamedTuple):
    """`num_steps` optimizer steps of `case`; `zero` is a stage, or a stage with "-offload"."""

    layout: Layout
    zero: str
    case: str
    num_micro_steps: int = 1
    clip: float = 0.0
    optimizer: str = "sgd"
    num_steps: int = 3
    recompute: str = "none"
    policy: str = "serial"
    slices: str = "auto"
    dispatcher: str = "alltoall"
    max_rows: int = 0
    dtype: str = "float32"

    def __str__(self) -> str:
        return "-".join(str(part) for part in self)


@dataclass
class EngineResult:
    """What one rank hands back: its own losses and the norms, per step, and its float32 weights.

    `weights` are those at the start, after each step for bfloat16 jobs, and at the end; of each tensor
    only the copy of one rank. `digests` are those of all weights at the end.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def run_config(job: EngineJob) -> RunConfig:
    """The job as a recipe and a JSON that went through the configuration's own checks."""
    grid = job.layout.grid
    stage, _, offload = job.zero.partition("-")
    zero: dict[str, Any] = {"stage": int(stage)}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    seq_len = cases.case_step(job.case, 1)[0].tokens_BS.shape[1]
    recipe = {
        "model": cases.case_config(job.case).model_dump(),
        "data": {"seq_len": max(seq_len, 4 * grid.context_parallel_size)},
        "optim": {**OPTIMIZERS[job.optimizer], "schedule": "constant", "max_grad_norm": job.clip},
        "train": {
            "steps": job.num_steps,
            "micro_batch_size": cases.NUM_ROWS // grid.data_parallel_size,
            "out_dir": "unused",
            "recompute": job.recompute,
        },
    }
    config = {
        "gradient_accumulation_steps": job.num_micro_steps,
        "zero_optimization": zero,
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "steps_per_print": 10**9,
        "cpmoe": {
            "context_parallel_size": grid.context_parallel_size,
            "expert_parallel_size": grid.expert_parallel_size,
            "rank_order": list(grid.rank_order),
            "coschedule": {"policy": job.policy, "slices": job.slices},
            "experts": {
                "dispatcher": job.dispatcher,
                "ranks_per_node": ranks_per_node(job.dispatcher, job.layout.world),
                "max_rows_per_rank": job.max_rows or None,
            },
        },
    }
    return resolve(Settings("recipe", recipe), Settings("json", config), job.layout.world, environ={})


def run_engine_jobs(rank: int, world_size: int, jobs: list[EngineJob]) -> list[EngineResult]:
    """A job for `run_distributed`."""
    logger.setLevel("ERROR")
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that DeepSpeed uses
    try:
        return [_run(job, rank) for job in jobs]
    finally:
        _restart_numbers()


def _restart_numbers() -> None:
    """ZeRO-3 numbers modules and parameters by counters of the process and compares them across ranks.

    A worker that served a larger world before would disagree with one that did not.
    """
    (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counter[0] = 0
    deepspeed.zero.Init.param_id = 0


def _run(job: EngineJob, rank: int) -> EngineResult:
    _restart_numbers()
    run = run_config(job)
    groups = build_groups(run)
    model = build_model(run, groups)
    load_weights(model, local_weights(cases.case_weights(job.case), groups.grid, rank))
    engine = TrainingEngine(run, model, groups)
    result = EngineResult(weights=[_own_copies(engine, rank)])
    for step in range(job.num_steps):
        batches = cases.case_step(job.case, job.num_micro_steps, step)
        scale = LossScale(cases.num_labels(batches), cases.num_tokens(batches), job.num_micro_steps)
        micro_batches = rank_slices(
            batches, groups.grid, rank, run.cpmoe.attention.layout, run.slicing, run.recipe.model
        )
        result.losses.append(sum(engine.micro_step(slices, scale).loss.item() for slices in micro_batches))
        result.norms.append(engine.step())
        if job.dtype == "bfloat16" or step == job.num_steps - 1:
            result.weights.append(_own_copies(engine, rank))
    result.digests = {name: digest(value) for name, value in _masters(engine).items()}
    engine.deepspeed.destroy()
    return result


def _own_copies(engine: TrainingEngine, rank: int) -> dict[str, Tensor]:
    """The weights of which this rank is the first that holds them; collective."""
    grid = engine.groups.grid
    first = grid.replica_ranks()[grid.expert_rank(rank)][0]
    masters = _masters(engine)
    return {name: value for name, value in masters.items() if rank == (first if is_expert(name) else 0)}


def _masters(engine: TrainingEngine) -> dict[str, Tensor]:
    """The whole float32 weights of this rank, partitions gathered; collective."""
    parameters = dict(engine.model.named_parameters())
    if engine.zero_stage > 0:
        return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in parameters.items()}
    masters = {id(parameter): parameter for parameter in parameters.values()}
    if engine.run.dtype == "bfloat16":
        optimizer = engine.optimizer
        for narrow, wide in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters |= {id(p): master for p, master in zip(narrow, wide, strict=True)}
    return {name: masters[id(parameter)].detach().clone() for name, parameter in parameters.items()}
