"""Every grid for worlds up to 64: the groups tile the world and agree with the rank arithmetic."""

import itertools
from dataclasses import replace

import pytest

from cpmoe.parallel.grid import AXES, RankGrid, divisors

ORDERS = list(itertools.permutations(AXES))
# All worlds up to 16, then those with many or few divisors.
WORLDS = [*range(1, 17), 24, 27, 31, 32, 36, 48, 60, 64]


def legal_grids():
    for world in WORLDS:
        for cp, ep, order in itertools.product(divisors(world), divisors(world), ORDERS):
            try:
                for ulysses in divisors(cp) if world <= 16 else (1,):
                    yield RankGrid(world, cp, ep, order, ulysses)
            except ValueError as error:
                # Only an "ep" between the other two axes can fail to tile the world.
                assert order[1] == "ep" and "do not tile" in str(error)


def test_every_kind_of_group_tiles_the_world():
    for grid in legal_grids():
        for lists, size, place in (
            (grid.ring_ranks(), grid.ring_size, grid.ring_rank),
            (grid.ulysses_ranks(), grid.ulysses_size, grid.ulysses_rank),
            (grid.data_ranks(), grid.data_parallel_size, grid.data_rank),
            (grid.expert_ranks(), grid.expert_parallel_size, grid.expert_rank),
            (grid.replica_ranks(), grid.expert_replicas, grid.replica_rank),
        ):
            assert sorted(itertools.chain(*lists)) == list(range(grid.world_size)), grid
            for ranks in lists:
                assert len(ranks) == size, grid
                assert [place(rank) for rank in ranks] == list(range(size)), grid


def test_dense_and_expert_groups_cross_in_one_rank():
    for grid in legal_grids():
        for one, other in (
            ([] if grid.ulysses_size > 1 else grid.ring_ranks(), grid.data_ranks()),
            (grid.expert_ranks(), grid.replica_ranks()),
        ):
            assert all(len(set(a) & set(b)) == 1 for a in one for b in other), grid


def test_rings_and_ulysses_groups_cross_inside_a_sequence():
    for grid in legal_grids():
        for ring, ulysses in itertools.product(grid.ring_ranks(), grid.ulysses_ranks()):
            share_sequence = grid.data_rank(ring[0]) == grid.data_rank(ulysses[0])
            assert len(set(ring) & set(ulysses)) == share_sequence, grid
    # Ulysses neighbours are the nearest ranks of a sequence.
    assert RankGrid(8, 8, ulysses_size=2).ring_ranks() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert RankGrid(8, 8, ulysses_size=2).ulysses_ranks() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_expert_groups_part_by_node():
    for grid in legal_grids():
        for size in divisors(grid.world_size) if grid.ulysses_size == 1 and grid.world_size <= 16 else ():
            try:
                nodes = replace(grid, ranks_per_node=size)
            except ValueError as error:
                assert f"ranks_per_node = {size}: nodes must divide" in str(error)
                continue
            within, across = nodes.expert_within_ranks(), nodes.expert_across_ranks()
            assert bool(within) == bool(across) == (nodes.expert_nodes > 1), nodes
            for part in within:
                assert len({rank // size for rank in part}) == 1, nodes
            for part in across:
                assert len({rank // size for rank in part}) == len(part) == nodes.expert_nodes, nodes
            for parts in (within, across) if within else ():
                assert sorted(itertools.chain(*parts)) == list(range(grid.world_size)), nodes
                for ranks in nodes.expert_ranks():
                    assert all(set(part) <= set(ranks) or not set(part) & set(ranks) for part in parts), nodes
    assert RankGrid(8, 1, 8, ranks_per_node=4).expert_within_ranks() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert RankGrid(8, 1, 8, ranks_per_node=4).expert_across_ranks() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("grid", "rings", "experts"),
    [
        (RankGrid(4, 2, 2), [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        (RankGrid(4, 2, 2, ("cp", "dp", "ep")), [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (RankGrid(4, 2, 2, ("cp", "ep", "dp")), [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (RankGrid(4, 2, 2, ("ep", "dp", "cp")), [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        (RankGrid(8, 2, 4), [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            RankGrid(8, 4, 2, ("cp", "ep", "dp")),
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
    ],
)
def test_known_layouts(grid, rings, experts):
    assert grid.ring_ranks() == rings
    assert grid.expert_ranks() == experts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 4, 1), r"context_parallel_size = 4: must divide the world size 6; legal: \[1, 2, 3, 6\]"),
        ((6, 1, 4), r"expert_parallel_size = 4: must divide the world size 6; legal: \[1, 2, 3, 6\]"),
        ((4, 0, 1), "context_parallel_size = 0: must be at least 1"),
        ((4, 1, 1, ("cp", "ep", "ep")), "must be a permutation"),
        ((8, 4, 4, ("cp", "ep", "dp")), "do not tile 8 ranks; put 'ep' first or last"),
    ],
)
def test_errors_name_value_and_choices(arguments, message):
    with pytest.raises(ValueError, match=message):
        RankGrid(*arguments)
