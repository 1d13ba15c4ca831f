"""The process groups of a run: one communicator per kind of traffic, even where the ranks coincide.

Two collectives on one communicator run one after the other, so a ring and an all-to-all can overlap
only on groups of their own.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from cpmoe.parallel.grid import RankGrid

KINDS = (
    "ring",
    "ring_grad",
    "expert",
    "meta",
    "replica",
    "world",
    "ulysses",
    "expert_across",
    "expert_within",
)


@dataclass(frozen=True)
class Groups:
    """The groups that `rank` belongs to; None where a group would hold this rank alone.

    ring        CP / u ranks: KV blocks, forward and backward
    ring_grad   the same ranks: dK/dV accumulators in backward
    expert      EP ranks: rows of dispatch and combine
    meta        the same ranks as expert: token counts
    replica     EDP ranks that hold the same experts: expert gradients
    world       all ranks: loss, counts and other scalars
    ulysses     u ranks at one place of a ring: heads for tokens, around attention

    Where the grid names nodes, and an expert group spans several:

    expert_across  the ranks of an expert group at one place of each node: rows between nodes
    expert_within  those on one node: rows inside it
    """

    grid: RankGrid
    rank: int
    ring: ProcessGroup | None = None
    ring_grad: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    meta: ProcessGroup | None = None
    replica: ProcessGroup | None = None
    world: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    expert_across: ProcessGroup | None = None
    expert_within: ProcessGroup | None = None


def create_groups(
    grid: RankGrid,
    options: dict[str, dict[str, Any]] | None = None,
    timeout: datetime.timedelta | None = None,
) -> Groups:
    """Creates every group. All ranks of the default group call it, with the same arguments.

    `options` maps a kind to {"is_high_priority_stream": bool, "max_ctas": int, "min_ctas": int}; they
    apply to NCCL and are ignored on gloo. A collective fails after `timeout` (by default torch's). Raises
    ValueError where the grid does not fit the world.
    """
    if dist.get_world_size() != grid.world_size:
        raise ValueError(
            f"the grid has {grid.world_size} ranks and the default process group {dist.get_world_size()}"
        )
    rank_lists = {
        "ring": grid.ring_ranks(),
        "ring_grad": grid.ring_ranks(),
        "expert": grid.expert_ranks(),
        "meta": grid.expert_ranks(),
        "replica": grid.replica_ranks(),
        "world": [list(range(grid.world_size))],
        "ulysses": grid.ulysses_ranks(),
        "expert_across": grid.expert_across_ranks(),
        "expert_within": grid.expert_within_ranks(),
    }
    rank = dist.get_rank()
    mine: dict[str, ProcessGroup] = {}
    for kind in KINDS:
        for ranks in rank_lists[kind]:
            if len(ranks) == 1:
                continue
            # Every rank calls new_group for every list, its own or not: the calls are collective.
            pg_options = _nccl_options((options or {}).get(kind))
            group = dist.new_group(ranks, timeout, pg_options=pg_options, group_desc=kind)
            if rank in ranks:
                mine[kind] = group
    return Groups(grid=grid, rank=rank, **mine)


def _nccl_options(settings: dict[str, Any] | None) -> Any:
    if not settings or dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    for name, value in settings.items():
        if name == "is_high_priority_stream":
            options.is_high_priority_stream = value
        elif value is not None:
            setattr(options.config, name, value)
    return options
