"""The groups of real processes hold the ranks that the grid names."""

import itertools

import torch
import torch.distributed as dist

from cpmoe.parallel.grid import AXES, RankGrid, divisors
from cpmoe.parallel.groups import KINDS, create_groups
from tests.distributed import run_distributed


def _members(rank: int, world_size: int, grids: list[RankGrid]):
    seen = []
    for grid in grids:
        groups = create_groups(grid)
        for kind in KINDS:
            group = getattr(groups, kind)
            if group is None:
                seen.append([rank])
                continue
            numbers = torch.zeros(world_size, dtype=torch.int64)
            numbers[rank] = 1
            dist.all_reduce(numbers, group=group)
            assert dist.get_process_group_ranks(group) == numbers.nonzero().flatten().tolist()
            seen.append(dist.get_process_group_ranks(group))
        held = [g for g in (groups.ring, groups.ring_grad, groups.expert, groups.meta) if g is not None]
        assert len({id(g) for g in held}) == len(held)
    return seen


def test_members():
    for world_size in (1, 2, 4):
        grids = [
            RankGrid(world_size, cp, ep, order)
            for cp, ep in itertools.product(divisors(world_size), divisors(world_size))
            for order in (AXES, ("cp", "dp", "ep"))
        ]
        grids += [RankGrid(world_size, cp, 1, ulysses_size=cp) for cp in divisors(world_size)]
        grids += [RankGrid(world_size, world_size, 1, ulysses_size=2) for _ in range(world_size == 4)]
        nodes = max(world_size // 2, 1)
        grids += [RankGrid(world_size, 1, world_size, ranks_per_node=nodes)]
        for rank, seen in enumerate(run_distributed(_members, world_size, grids)):
            expected = []
            for grid in grids:
                for lists in (
                    grid.ring_ranks(),
                    grid.ring_ranks(),
                    grid.expert_ranks(),
                    grid.expert_ranks(),
                    grid.replica_ranks(),
                    [list(range(world_size))],
                    grid.ulysses_ranks(),
                    grid.expert_across_ranks(),
                    grid.expert_within_ranks(),
                ):
                    expected.append(next((ranks for ranks in lists if rank in ranks), [rank]))
            assert seen == expected
