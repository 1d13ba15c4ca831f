"""The DeepSpeed JSON: how a recipe runs. Its legal keys, and the "cpmoe" block that chooses CP and EP.

DeepSpeed ignores unknown top-level keys in silence and finds other faults only after the process groups
exist, so the keys it reads are listed here as data (deepspeed 0.19.8, runtime/config.py and the config
modules it imports; a test compares). Keys that DeepSpeed reads and cpmoe refuses are in `refused`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from cpmoe.config.errors import ConfigError, Problem
from cpmoe.config.types import (
    Block,
    Count,
    Decay,
    NonNegative,
    Positive,
    PositiveSize,
    Size,
    tuple_from_list,
)

AXES = ("ep", "cp", "dp")


AttentionBackend = Literal["auto", "reference", "sdpa", "triton", "triton_tf32", "flash"]
ATTENTION_BACKENDS: tuple[str, ...] = get_args(AttentionBackend)


class AttentionConfig(Block):
    """How attention over the sharded sequence is computed."""

    backend: AttentionBackend = "auto"
    layout: Literal["zigzag", "contiguous", "striped", "balanced"] = "zigzag"
    strategy: Literal["ring", "allgather"] = "ring"
    dkv_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients of keys and values are sent in; bfloat16 halves the bytes and rounds at each hop."""
    ulysses_size: Count = 1
    """Neighbouring ranks of a sequence that exchange heads for tokens (Ulysses); rings join the
    context_parallel_size / ulysses_size groups of them."""


class ExpertsConfig(Block):
    """How tokens reach their experts, and how those multiply.

    dispatcher  alltoall: a row for each token and expert; dedup: one for each token and rank of its experts;
                hierarchical: the same in two steps, first one for each token and node; allgather: every
                token to every rank, for few ranks
    """

    backend: Literal["auto", "grouped_mm", "triton", "loop"] = "auto"
    dispatcher: Literal["alltoall", "dedup", "hierarchical", "allgather"] = "alltoall"
    ranks_per_node: Count | None = None
    """Consecutive ranks on one node: where hierarchical dispatch parts."""
    max_rows_per_rank: Count | None = None
    """Where more rows (a row is one token for one expert) of a layer would come to a rank, all its ranks send
    them in rounds that are recomputed in backward: memory stays bounded, and no row is dropped."""


class CoscheduleConfig(Block):
    """How a micro-batch is sliced and its phases ordered.

    policy       serial: one phase after the other; overlap: the phases of two slices interleave; auto: the
                 first steps are measured, unsliced in serial and sliced in overlap, and the faster one stays
    slices       batch: two halves of a rank's sequences; causal: two halves of every sequence, the second of
                 which attends to both; none: one slice, which has nothing to overlap with; auto: unless the
                 policy is serial, batch if a micro-batch has two or more sequences, else causal
    measurement  the coschedule.json of another run, whose choice "auto" takes
    """

    policy: Literal["auto", "serial", "overlap"] = "auto"
    slices: Literal["auto", "batch", "causal", "none"] = "auto"
    measurement: str | None = None


class GroupOptions(Block):
    """NCCL options of one process group; they have no effect on gloo."""

    is_high_priority_stream: bool = False
    min_ctas: Count | None = None
    max_ctas: Count | None = None


class OverlappedOptions(GroupOptions):
    """Of a group whose transfers run beside computation: they start at once, and take few multiprocessors.

    The limits were not measured.
    """

    is_high_priority_stream: bool = True
    max_ctas: Count | None = 16


class RingOptions(OverlappedOptions):
    """One neighbour to send to, and attention to hide behind."""

    max_ctas: Count | None = 8


class CountOptions(OverlappedOptions):
    """A few numbers."""

    max_ctas: Count | None = 1


class CommunicationConfig(Block):
    """NCCL options per process group."""

    ring: RingOptions = RingOptions()
    ring_grad: RingOptions = RingOptions()
    expert: OverlappedOptions = OverlappedOptions()
    meta: CountOptions = CountOptions()
    replica: GroupOptions = GroupOptions()
    world: GroupOptions = GroupOptions()
    ulysses: OverlappedOptions = OverlappedOptions()
    expert_across: OverlappedOptions = OverlappedOptions()
    expert_within: OverlappedOptions = OverlappedOptions()

    def options(self) -> dict[str, dict[str, Any]]:
        """Options per group kind, as `create_groups` takes them."""
        return self.model_dump(exclude_none=True)


class CpmoeConfig(Block):
    """The "cpmoe" block: degrees, their placement, and the implementation of each part."""

    context_parallel_size: Count = 1
    """Ranks over which every sequence is split."""
    expert_parallel_size: Count = 1
    """Ranks over which the experts are split; folded over CP x DP."""
    rank_order: Annotated[tuple[str, ...], BeforeValidator(tuple_from_list)] = AXES
    """Axes from consecutive ranks outwards, a permutation of ep, cp, dp."""
    attention: AttentionConfig = AttentionConfig()
    experts: ExpertsConfig = ExpertsConfig()
    coschedule: CoscheduleConfig = CoscheduleConfig()
    communication: CommunicationConfig = CommunicationConfig()

    @field_validator("rank_order")
    @classmethod
    def _permutation(cls, order: tuple[str, ...]) -> tuple[str, ...]:
        if sorted(order) != sorted(AXES):
            legal = 'orders of "ep", "cp", "dp", innermost first, such as ["ep", "cp", "dp"]'
            raise ConfigError([Problem("", "must name each axis once", order, legal)])
        return order


class OffloadOptimizer(Block):
    device: Literal["none", "cpu"] = "none"
    pin_memory: bool = True
    buffer_count: Size = 4


class OffloadParam(Block):
    device: Literal["none", "cpu"] = "none"
    pin_memory: bool = True
    buffer_count: Size = 5
    buffer_size: Size = 10**8
    max_in_cpu: Size = 10**9


class LeafModule(Block):
    classes: list[str] = Field(default_factory=list)
    names: list[str] = Field(default_factory=list)
    name_suffixes: list[str] = Field(default_factory=list)


class ZeroOptimization(Block):
    """Defaults are DeepSpeed's; only what a file gives is handed to it."""

    stage: Annotated[int, Field(ge=0, le=3)] = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: PositiveSize = 5 * 10**8
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Size = 5 * 10**8
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool = True
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    sub_group_size: Size = 10**9
    stage3_prefetch_bucket_size: Size = 5 * 10**7
    stage3_param_persistence_threshold: Size = 10**5
    stage3_model_persistence_threshold: Size = 2**63 - 1
    stage3_max_live_parameters: Size = 10**9
    stage3_max_reuse_distance: Size = 10**9
    stage3_module_granularity_threshold: Size = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    parameter_alignment: bool = False
    memory_efficient_linear: bool = True
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    leaf_module: LeafModule = LeafModule()


class Bf16(Block):
    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True


class DataTypes(Block):
    grad_accum_dtype: Literal["fp32", "bf16"] | None = None
    keep_in_fp32_modules: list[str] = Field(default_factory=list)


class OptimizerParams(Block):
    """Only what cpmoe hands to the optimizer it builds."""

    lr: Positive | None = None
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(tuple_from_list)] | None = None
    eps: Positive | None = None
    weight_decay: NonNegative | None = None
    momentum: Decay | None = None


class Optimizer(Block):
    type: Literal["AdamW", "Adam", "SGD"] | None = None
    params: OptimizerParams = OptimizerParams()


class SchedulerParams(Block):
    """Parameters of DeepSpeed's warm-up schedules (runtime/lr_schedules.py)."""

    total_num_steps: Count | None = None
    warmup_min_lr: NonNegative | None = None
    warmup_max_lr: Positive | None = None
    warmup_num_steps: Count | None = None
    warmup_type: Literal["log", "linear"] | None = None
    warmup_min_ratio: NonNegative | None = None
    cos_min_ratio: NonNegative | None = None


class Scheduler(Block):
    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    params: SchedulerParams = SchedulerParams()


class TensorBoard(Block):
    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CsvMonitor(TensorBoard):
    pass


class Wandb(Block):
    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class Comet(Block):
    enabled: bool = False
    samples_log_interval: Count = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class FlopsProfiler(Block):
    enabled: bool = False
    recompute_fwd_factor: NonNegative = 0.0
    profile_step: Count = 1
    module_depth: int = -1
    top_modules: Count = 1
    detailed: bool = True
    output_file: str | None = None


class ThroughputTimer(Block):
    enabled: bool = True
    synchronized: bool = True


class Timers(Block):
    throughput: ThroughputTimer = ThroughputTimer()


class DeepSpeedConfig(Block):
    """Every legal top-level key of the JSON."""

    cpmoe: CpmoeConfig = CpmoeConfig()
    train_batch_size: Count | None = None
    """Sequences per optimizer step. DeepSpeed itself, which counts a sequence once per CP rank, is told
    micro-batch x accumulation x world."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Sequences per ring and micro-step."""
    gradient_accumulation_steps: Count | None = None
    gradient_clipping: NonNegative | None = None
    zero_optimization: ZeroOptimization = ZeroOptimization()
    bf16: Bf16 = Bf16()
    data_types: DataTypes = DataTypes()
    communication_data_type: Literal["fp32", "bf16"] | None = None
    """Of gradient sums over ranks: float32 unless "bf16" is asked for, which halves their traffic."""
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    tensorboard: TensorBoard = TensorBoard()
    csv_monitor: CsvMonitor = CsvMonitor()
    wandb: Wandb = Wandb()
    comet: Comet = Comet()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    steps_per_print: Count | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    timers: Timers = Timers()
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
