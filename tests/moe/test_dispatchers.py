"""Every dispatcher against the twin: forward and every gradient, over ranks, skew, padding and emptiness."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.moe.runs import Case, run_cases
from tests.moe.test_layer import CASES, check_results

DISPATCHERS: dict[str, dict[str, Any]] = {
    "dedup": {"dispatcher": "dedup"},
    "allgather": {"dispatcher": "allgather"},
    "one node": {"dispatcher": "hierarchical", "ranks_per_node": 4},
    "nodes of two": {"dispatcher": "hierarchical", "ranks_per_node": 2},
    "nodes of one": {"dispatcher": "hierarchical", "ranks_per_node": 1},
}
MORE = {
    "several experts of each rank": Case(4, (6, 3, 0, 5), experts=16, k=6, pad_every=3, shared=1),
    "all to one node": Case(4, (5, 2, 4, 3), experts=8, k=3, favourites=(0, 1, 3)),
}


def _cases(world: int, dispatch: dict[str, Any]) -> dict[str, Case]:
    return {
        name: replace(case, dispatch=dispatch)
        for name, case in (CASES | MORE).items()
        if case.world == world and _fits(case, dispatch.get("ranks_per_node"))
    }


def _fits(case: Case, ranks_per_node: int | None) -> bool:
    """Whether nodes of that size divide the ranks, and each has equal parts of the expert groups."""
    return ranks_per_node is None or case.world % ranks_per_node == 0


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_float64_matches_the_twin(world, dispatcher):
    cases = _cases(world, DISPATCHERS[dispatcher])
    if not cases:
        return
    chosen = list(cases.values())
    ranks = run_distributed(run_cases, world, chosen) if world > 1 else [run_cases(0, 1, chosen)]
    for (name, case), results in zip(cases.items(), zip(*ranks, strict=True), strict=True):
        try:
            check_results(case, list(results), forward=1e-12, gradient=1e-10)
        except AssertionError as error:
            raise AssertionError(f"{dispatcher}, {name}: {error}") from error
