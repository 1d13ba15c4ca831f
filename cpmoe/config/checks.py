"""Combinations that no single field can refuse, found before any process group exists."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from cpmoe.config.deepspeed import ATTENTION_BACKENDS, CpmoeConfig, DeepSpeedConfig
from cpmoe.config.errors import Problem, divisors, join_numbers, unknown_key
from cpmoe.config.recipe import Recipe

SCHEDULERS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupCosineLR": (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
    ),
}
OPTIMIZER_PARAMS = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay"),
}
# What attention backends lack that do not compute every model.
LACKING = {
    "sdpa": ("attn_logit_softcapping", "attention_dropout", "v_head_dim"),
    "flash": ("attention_dropout", "v_head_dim"),
}
MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def check_grid(cpmoe: CpmoeConfig, recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """CP, EP and the order of the axes against the world, and EP against the experts."""
    cp, ep, experts = cpmoe.context_parallel_size, cpmoe.expert_parallel_size, recipe.model.num_experts
    if world_size % cp:
        legal = join_numbers(divisors(world_size))
        constraint = f"must divide the world size {world_size}"
        yield Problem("cpmoe.context_parallel_size", constraint, cp, legal)
    if world_size % ep or experts % ep:
        legal = join_numbers(divisors(math.gcd(world_size, experts)))
        constraint = f"must divide the world size {world_size} and model.num_experts {experts}"
        yield Problem("cpmoe.expert_parallel_size", constraint, ep, legal)
    if world_size % cp == 0 and world_size % ep == 0 and cpmoe.rank_order[1] == "ep":
        inner = cpmoe.rank_order[0]
        stride = cp if inner == "cp" else world_size // cp
        if world_size % (stride * ep):
            constraint = (
                f"expert groups of {ep} ranks, one in {stride} ({inner.upper()} lies inside), do not tile "
                f"{world_size} ranks"
            )
            degrees = join_numbers(divisors(world_size // stride))
            legal = f'"ep" first or last, or an expert_parallel_size of {degrees}'
            yield Problem("cpmoe.rank_order", constraint, cpmoe.rank_order, legal)


def check_ulysses(cpmoe: CpmoeConfig, recipe: Recipe) -> Iterator[Problem]:
    """Ranks that exchange heads are a part of CP and share the query heads evenly."""
    size, cp = cpmoe.attention.ulysses_size, cpmoe.context_parallel_size
    heads = recipe.model.num_attention_heads
    if cp % size or heads % size:
        legal = join_numbers(divisors(math.gcd(cp, heads)))
        constraint = f"must divide context_parallel_size {cp} and model.num_attention_heads {heads}"
        yield Problem("cpmoe.attention.ulysses_size", constraint, size, legal)


def check_scores(cpmoe: CpmoeConfig, recipe: Recipe) -> Iterator[Problem]:
    """A backend chosen by name computes the scores of this model."""
    model, backend = recipe.model, cpmoe.attention.backend
    wanted = {
        "attn_logit_softcapping": model.attn_logit_softcapping is not None,
        "attention_dropout": model.attention_dropout > 0,
        "v_head_dim": model.v_head_dim != model.head_dim,
    }
    for name, is_wanted in wanted.items():
        able = [other for other in ATTENTION_BACKENDS if name not in LACKING.get(other, ())]
        if is_wanted and backend not in able:
            constraint = f"does not compute model.{name} {getattr(model, name)}"
            yield Problem("cpmoe.attention.backend", constraint, backend, ", ".join(able))


def check_sequence(cpmoe: CpmoeConfig, recipe: Recipe) -> Iterator[Problem]:
    """Every rank owns at least one token of each of its chunks."""
    chunks = shard_chunks(cpmoe)
    if recipe.data.seq_len < chunks:
        layout, cp = cpmoe.attention.layout, cpmoe.context_parallel_size
        constraint = (
            f"is shorter than the shard grid: {layout} cuts a sequence into {chunks} chunks at CP {cp}"
        )
        yield Problem("data.seq_len", constraint, recipe.data.seq_len, f"integers >= {chunks}")


def shard_chunks(cpmoe: CpmoeConfig) -> int:
    """Chunks of a sequence; its length is padded to a multiple of them."""
    cp, ring = cpmoe.context_parallel_size, cpmoe.context_parallel_size // cpmoe.attention.ulysses_size
    per_rank = {"zigzag": 2, "balanced": 8}.get(cpmoe.attention.layout, 1)
    return math.lcm(per_rank * ring if ring > 1 else 1, cp)


def check_nodes(cpmoe: CpmoeConfig, world_size: int) -> Iterator[Problem]:
    """Hierarchical dispatch: every expert group has equally many ranks on each node that it touches."""
    dispatcher, size = cpmoe.experts.dispatcher, cpmoe.experts.ranks_per_node
    path = "cpmoe.experts.ranks_per_node"
    if size is None and dispatcher == "hierarchical":
        yield Problem(
            "cpmoe.experts.dispatcher", f"needs {path}", dispatcher, "alltoall, dedup, allgather, or give it"
        )
    elif size is not None and dispatcher != "hierarchical":
        yield Problem(path, "is for dispatcher hierarchical alone", size, "none, or that dispatcher")
    elif size is not None and world_size % cpmoe.expert_parallel_size == 0:
        legal_sizes = [n for n in range(1, world_size + 1) if _fit_nodes(cpmoe, world_size, n)]
        if size not in legal_sizes:
            constraint = (
                f"nodes must divide the world size {world_size} and have equal parts of every expert group "
                f"(expert_parallel_size {cpmoe.expert_parallel_size})"
            )
            yield Problem(path, constraint, size, join_numbers(legal_sizes))


def check_budget(cpmoe: CpmoeConfig) -> Iterator[Problem]:
    """A round brings at least one row from each rank."""
    rows, ep = cpmoe.experts.max_rows_per_rank, cpmoe.expert_parallel_size
    if rows is not None and rows < ep:
        constraint = f"must be at least expert_parallel_size {ep}: a row from each rank"
        yield Problem("cpmoe.experts.max_rows_per_rank", constraint, rows, f"integers >= {ep}")


def _fit_nodes(cpmoe: CpmoeConfig, world_size: int, ranks_per_node: int) -> bool:
    ep, cp = cpmoe.expert_parallel_size, cpmoe.context_parallel_size
    inner = {"ep": 1, "cp": cp, "dp": world_size // cp}[cpmoe.rank_order[0]]
    stride = world_size // ep if cpmoe.rank_order[2] == "ep" else inner
    if world_size % ranks_per_node:
        return False
    parts = Counter(
        (rank // (stride * ep), rank % stride, rank // ranks_per_node) for rank in range(world_size)
    )
    return len(set(parts.values())) == 1


def check_experts(config: DeepSpeedConfig, recipe: Recipe) -> Iterator[Problem]:
    """`grouped_mm` takes rows whose stride is a multiple of 16 bytes."""
    if config.cpmoe.experts.backend != "grouped_mm":
        return
    multiple = 8 if config.bf16.enabled else 4
    for name in ("hidden_size", "moe_intermediate_size"):
        value = getattr(recipe.model, name)
        if value % multiple:
            constraint = f'must be a multiple of {multiple} for cpmoe.experts.backend "grouped_mm"'
            yield Problem(
                f"model.{name}", constraint, value, f"multiples of {multiple}, or backend auto, triton, loop"
            )


def check_zero(config: DeepSpeedConfig) -> Iterator[Problem]:
    """ZeRO options that are wrong, or were never measured, with experts on groups of their own."""
    zero, stage = config.zero_optimization, config.zero_optimization.stage
    bf16 = config.bf16.enabled
    if stage in (1, 2) and not zero.reduce_scatter:
        yield Problem(
            "zero_optimization.reduce_scatter", f"stage {stage} with experts needs it", False, "true"
        )
    if stage == 2 and not zero.contiguous_gradients:
        yield Problem(
            "zero_optimization.contiguous_gradients", "stage 2 with experts needs it", False, "true"
        )
    if stage in (1, 2) and zero.overlap_comm and not zero.use_multi_rank_bucket_allreduce:
        constraint = "with overlap_comm it waits for the whole device once per bucket"
        path = "zero_optimization.use_multi_rank_bucket_allreduce"
        yield Problem(path, constraint, False, "true, or overlap_comm false")
    if zero.offload_optimizer and zero.offload_optimizer.device != "none" and stage not in (2, 3):
        path = "zero_optimization.offload_optimizer.device"
        constraint = f"is measured at stages 2 and 3, not at stage {stage}"
        yield Problem(path, constraint, zero.offload_optimizer.device, '"none", or stage 2 or 3')
    if zero.offload_param and zero.offload_param.device != "none" and stage != 3:
        path = "zero_optimization.offload_param.device"
        constraint = f"parameters are partitioned at stage 3 only, not at stage {stage}"
        yield Problem(path, constraint, zero.offload_param.device, '"none", or stage 3')
    if bf16 and stage < 2 and config.data_types.grad_accum_dtype == "fp32":
        constraint = "with bf16 at stage 1 it selects an optimizer not measured with expert groups"
        if stage == 0:
            constraint = "DeepSpeed has no optimizer for it with bf16 at stage 0"
        yield Problem("data_types.grad_accum_dtype", constraint, "fp32", "leave it out, or stage 2 or 3")
    for path, value in _half_types(config):
        if not bf16 and value == "bf16":
            yield Problem(path, "the run is in float32", value, '"fp32", or bf16.enabled true')


def check_optimizer(config: DeepSpeedConfig, recipe: Recipe) -> Iterator[Problem]:
    """Parameters that the optimizer or the scheduler does not take, or lacks."""
    if config.optimizer:
        legal = OPTIMIZER_PARAMS[recipe.optim.name]
        for name, value in config.optimizer.params.model_dump(exclude_unset=True).items():
            if name not in legal:
                yield unknown_key(f"optimizer.params.{name}", legal, value)
    scheduler = config.scheduler
    if scheduler:
        given = scheduler.params.model_dump(exclude_unset=True)
        for name in given:
            if name not in SCHEDULERS[scheduler.type]:
                yield unknown_key(f"scheduler.params.{name}", SCHEDULERS[scheduler.type], given[name])
        if "total_num_steps" in SCHEDULERS[scheduler.type] and "total_num_steps" not in given:
            path, constraint = "scheduler.params.total_num_steps", f"{scheduler.type} needs it"
            yield Problem(path, constraint, legal='integers >= 1, or "auto" for train.steps')


def check_packages(config: DeepSpeedConfig) -> Iterator[Problem]:
    """Packages that a monitor needs and this Python lacks."""
    for block, package in MONITOR_PACKAGES.items():
        if getattr(config, block).enabled and importlib.util.find_spec(package) is None:
            constraint = f"needs the package {package}, which is not installed"
            yield Problem(f"{block}.enabled", constraint, True, f"false, or pip install {package}")


def check_environment(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Variables that undo the overlap of communication and computation."""
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        constraint = "one hardware queue serialises the ring and the expert traffic with computation"
        legal = "unset, or 8 and more"
        yield Problem("CUDA_DEVICE_MAX_CONNECTIONS", constraint, 1, legal, "environment")


def _half_types(config: DeepSpeedConfig) -> Iterator[tuple[str, str | None]]:
    yield "communication_data_type", config.communication_data_type
    yield "data_types.grad_accum_dtype", config.data_types.grad_accum_dtype
