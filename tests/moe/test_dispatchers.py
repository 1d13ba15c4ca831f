"""Every dispatcher against the twin: forward and every gradient, over ranks, skew, padding and emptiness."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed import run_distributed
from tests.moe.runs import Case, run_cases
from tests.moe.test_layer import CASES, check_results

DISPATCHERS: dict[str, dict[str, Any]] = {
    "dedup": {"dispatcher": "dedup"},
    "allgather": {"dispatcher": "allgather"},
    "nodes of two": {"dispatcher": "hierarchical", "ranks_per_node": 2},
    "nodes of one": {"dispatcher": "hierarchical", "ranks_per_node": 1},
    "alltoall in rounds": {"max_rows_per_rank": 4},
    "dedup in rounds": {"dispatcher": "dedup", "max_rows_per_rank": 5},
    "nodes of two in rounds": {"dispatcher": "hierarchical", "ranks_per_node": 2, "max_rows_per_rank": 6},
    "allgather in rounds": {"dispatcher": "allgather", "max_rows_per_rank": 9},
}
MORE = {
    "several experts of each rank": Case(4, (6, 3, 0, 5), experts=16, k=6, pad_every=3, shared=1),
    "all to one node": Case(4, (5, 2, 4, 3), experts=8, k=3, favourites=(0, 1, 3)),
}


def _cases(world: int, dispatch: dict[str, Any]) -> dict[str, Case]:
    return {
        name: replace(case, dispatch=dispatch) for name, case in (CASES | MORE).items() if case.world == world
    }


@st.composite
def random_cases(draw) -> Case:
    """Any numbers of tokens, also none; experts without rows; all rows for few experts; equal scores."""
    ep = draw(st.sampled_from([1, 2]))
    experts = draw(st.sampled_from([2, 4, 6]))
    return Case(
        ep,
        (draw(st.integers(0, 12)), draw(st.integers(0, 12))),
        experts=experts,
        k=draw(st.integers(1, min(experts, 3))),
        pad_every=draw(st.sampled_from([0, 0, 1, 3])),
        favourites=tuple(draw(st.sets(st.integers(0, experts - 1), max_size=2))),
        ties=draw(st.booleans()),
        normalize=draw(st.booleans()),
        dispatch=DISPATCHERS[draw(st.sampled_from(list(DISPATCHERS)))],
    )


@settings(max_examples=6, deadline=None)
@given(st.lists(random_cases(), min_size=6, max_size=10))
def test_any_tokens_on_two_ranks(cases):
    ranks = run_distributed(run_cases, 2, cases)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        check_results(case, list(results), forward=1e-12, gradient=1e-10)


@pytest.mark.parametrize(
    ("dispatcher", "world"),
    # One rank has no way to travel, but rounds.
    [("alltoall in rounds", 1), *itertools.product(DISPATCHERS, (2, 4))],
)
def test_float64_matches_the_twin(dispatcher, world):
    cases = _cases(world, DISPATCHERS[dispatcher])
    chosen = list(cases.values())
    ranks = run_distributed(run_cases, world, chosen) if world > 1 else [run_cases(0, 1, chosen)]
    for (name, case), results in zip(cases.items(), zip(*ranks, strict=True), strict=True):
        try:
            check_results(case, list(results), forward=1e-12, gradient=1e-10)
        except AssertionError as error:
            raise AssertionError(f"{dispatcher}, {name}: {error}") from error
