"""The private parts of DeepSpeed that exact expert parallelism stands on, in one place.

Nothing public tells DeepSpeed 0.19.8 that a parameter is split over our expert groups. Each hook used
here was measured to be exact (tests/numerics holds it so) and is checked at start-up: another version
that changes one fails with a sentence, not with a wrong gradient.
"""

from __future__ import annotations

import inspect

import deepspeed
import torch.distributed as dist
from deepspeed.moe import utils as moe_utils
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.utils import groups as deepspeed_groups
from torch import nn
from torch.distributed import ProcessGroup

from cpmoe.model.transformer import is_expert
from cpmoe.parallel.grid import RankGrid

MEASURED_VERSION = "0.19.8"


def check_private_hooks() -> None:
    """Raises RuntimeError naming the first private part of DeepSpeed that is not as it was measured."""
    _need(deepspeed.__version__.startswith(MEASURED_VERSION), f"its version is {deepspeed.__version__}")
    for name in (
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    ):
        _need(isinstance(getattr(deepspeed_groups, name, None), dict), f"utils.groups.{name} is no dict")
    probe = nn.Parameter()
    probe.allreduce = False  # type: ignore[attr-defined]
    _need(moe_utils.is_moe_param(probe), "`allreduce = False` no longer marks an expert parameter")
    _need(
        hasattr(moe_utils, "split_params_into_different_moe_groups_for_optimizer"),
        "moe.utils.split_params_into_different_moe_groups_for_optimizer is gone",
    )
    _need(
        '"ds_zero_partition_process_group"' in inspect.getsource(partition_parameters),
        "ZeRO-3 no longer reads ds_zero_partition_process_group",
    )
    source = inspect.getsource(stage3)
    for name in ("ds_zero_placement_family", "ds_zero_partition_group_name", "autoep_expert"):
        _need(name in source, f"ZeRO-3 no longer reads {name}")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(
            f"DeepSpeed {MEASURED_VERSION} was measured to be exact with expert parallelism, but {what}. "
            f"Install deepspeed=={MEASURED_VERSION} (constraints.txt)."
        )


def skip_shared_memory_op() -> None:
    """Keeps DeepSpeed from compiling its CPU all-reduce for inference, which training never calls."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class _ExpertMarker(MoE):
    """Tells the engine that expert parameters exist: it looks for an instance of its own MoE layer."""

    def __init__(self, num_experts: int, expert_parallel_size: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = num_experts
        self.ep_size = expert_parallel_size
        self.num_local_experts = num_experts // expert_parallel_size
        self.expert_group_name = group_name(expert_parallel_size)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """The groups are there already; the engine's own would not follow our rank order."""


def group_name(expert_parallel_size: int) -> str:
    """DeepSpeed parses the degree out of this form."""
    return f"ep_size_{expert_parallel_size}"


def tag_experts(model: nn.Module, grid: RankGrid, num_experts: int, zero_stage: int) -> None:
    """Registers our expert groups with DeepSpeed and marks the parameters that are split over them.

    Collective: creates groups of its own over the default group, so that gradient reductions never wait
    behind an all-to-all. Call before `deepspeed.initialize`, with EP above 1.
    """
    name = group_name(grid.expert_parallel_size)
    expert, expert_ranks = _create(grid.expert_ranks())
    replica, replica_ranks = _create(grid.replica_ranks())
    deepspeed_groups._EXPERT_PARALLEL_GROUP[name] = expert
    deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS[name] = expert_ranks
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[name] = replica
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = replica_ranks
    for parameter_name, parameter in model.named_parameters():
        if is_expert(parameter_name):
            # ZeRO-3 reduces by the tags of `_tag_partitions`; but the engine's first broadcast goes by
            # these in every stage, and would give every rank the experts of rank 0.
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = name  # type: ignore[attr-defined]
    if zero_stage == 3:
        # A clone: ZeRO-3 treats the world group itself as "no group given".
        world, _ = _create([list(range(grid.world_size))])
        _tag_partitions(model, world, replica, name)
        return
    model.expert_marker = _ExpertMarker(num_experts, grid.expert_parallel_size)


def _tag_partitions(model: nn.Module, world: ProcessGroup, replica: ProcessGroup, name: str) -> None:
    for parameter_name, parameter in model.named_parameters():
        expert = is_expert(parameter_name)
        parameter.ds_zero_partition_process_group = replica if expert else world  # type: ignore[attr-defined]
        parameter.ds_zero_placement_family = "autoep_expert" if expert else "replicated"  # type: ignore[attr-defined]
        if expert:
            parameter.ds_zero_partition_group_name = name  # type: ignore[attr-defined]


def _create(rank_lists: list[list[int]]) -> tuple[ProcessGroup, list[int]]:
    mine = None
    for ranks in rank_lists:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = (group, ranks)
    assert mine is not None, "the lists tile the world"
    return mine
