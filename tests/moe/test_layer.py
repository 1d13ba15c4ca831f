"""The layer against its twin: forward and every gradient, over ranks, skew, padding and emptiness."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cpmoe.moe.layer import MoELayer
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import Groups
from tests.distributed import run_distributed
from tests.moe.runs import (
    Case,
    build_layer,
    groups_for,
    join_weights,
    model_config,
    reference_of,
    relative_error,
    run_case,
)

CASES = {
    "one process": Case(1, (13,)),
    "padding and a shared expert": Case(1, (13,), pad_every=3, shared=2),
    "weights not normalised": Case(1, (9,), normalize=False),
    "one expert a token": Case(1, (9,), k=1, normalize=False),
    "every token to every expert": Case(2, (7, 4), k=4),
    "replicas without expert parallelism": Case(1, (6, 9), pad_every=4),
    "a rank without tokens": Case(2, (11, 0), shared=1),
    "a rank with padding only": Case(4, (6, 1, 5, 0), pad_every=2, k=1, normalize=False),
    "all to one expert": Case(2, (9, 5), k=1, favourites=(3,), normalize=False),
    "all to one expert, one a rank": Case(4, (3, 5, 2, 4), k=1, favourites=(2,), shared=1),
    "all to two experts of one rank": Case(2, (8, 3), experts=6, favourites=(0, 2)),
    "one expert a rank": Case(4, (5, 0, 7, 2), k=3, pad_every=3),
    "two experts a rank, replicas": Case(2, (5, 1, 0, 8), k=2, pad_every=5, shared=1),
    "strided expert groups": Case(2, (5, 3, 2, 6), rank_order=("cp", "dp", "ep")),
    "more experts than rows": Case(4, (1, 0, 2, 1), experts=16, k=2),
}


def check(case: Case, forward: float, gradient: float) -> None:
    check_results(case, run_everywhere(case), forward, gradient)


def run_everywhere(case: Case) -> list[dict[str, Any]]:
    return run_distributed(run_case, case.world, case) if case.world > 1 else [run_case(0, 1, case)]


def check_results(case: Case, results: list[dict[str, Any]], forward: float, gradient: float) -> None:
    expected = reference_of(case, join_weights(results, "weights", case))
    assert torch.equal(sum(r["counts"] for r in results), expected["counts"])
    for rank, result in enumerate(results):
        assert relative_error(result["y"][0], expected["y"][rank]) <= forward, rank
        assert relative_error(result["x"][0], expected["x"][rank]) <= gradient, rank
    for name in ("aux", "z"):
        assert relative_error(sum(r[name] for r in results), expected[name]) <= forward, name
    grads = join_weights(results, "grads", case)
    assert grads.keys() == expected["grads"].keys()
    for name, value in grads.items():
        assert relative_error(value, expected["grads"][name]) <= gradient, name
    for name in ("gate_up", "down"):
        assert torch.count_nonzero(grads[name][expected["counts"] == 0]) == 0, name


@pytest.mark.parametrize("name", CASES)
def test_float64_matches_the_twin(name):
    check(CASES[name], forward=1e-12, gradient=1e-10)


def test_cases_have_idle_and_crowded_experts():
    case = CASES["all to one expert, one a rank"]
    results = run_distributed(run_case, case.world, case)
    assert sum(r["counts"] for r in results).tolist() == [0, 0, sum(case.tokens), 0]


@pytest.mark.parametrize("backend", ["grouped_mm", "loop", "auto"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, (13,), pad_every=3, dtype=torch.float32),
        Case(2, (9, 5), k=1, favourites=(3,), shared=1, dtype=torch.float32),
        Case(2, (5, 1, 0, 8), pad_every=5, dtype=torch.float32),
    ],
    ids=["one process", "all to one expert", "two experts a rank"],
)
def test_float32_matches_the_twin(case, backend):
    check(replace(case, backend=backend), forward=1e-6, gradient=1e-5)


def test_padding_alone_gives_zeros_and_zero_gradients():
    result = run_case(0, 1, Case(1, (5,), pad_every=1))
    assert result["counts"].sum() == 0 and result["aux"] == 0 and result["z"] == 0
    assert torch.count_nonzero(result["y"]) == 0 and torch.count_nonzero(result["x"]) == 0
    for name, grad in result["grads"].items():
        assert torch.count_nonzero(grad) == 0, name


def test_output_at_padding_is_zero():
    case = Case(1, (7,), pad_every=2)
    x, mask, _ = case.inputs(0)
    y, _ = build_layer(case, groups_for(case))(x, mask)
    assert torch.count_nonzero(y[~mask]) == 0 and torch.all(y[mask].abs().sum(-1) > 0)


def test_two_runs_are_bit_equal():
    case = Case(2, (9, 6), experts=8, k=3, dtype=torch.float32)
    first, second = (run_distributed(run_case, case.world, case) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a["y"], b["y"]) and torch.equal(a["x"], b["x"])
        assert all(torch.equal(a["grads"][name], b["grads"][name]) for name in a["grads"])


@pytest.mark.parametrize("rank_order", [("ep", "cp", "dp"), ("cp", "dp", "ep")])
def test_initial_weights_do_not_depend_on_expert_parallelism(rank_order):
    def weights(ep: int) -> dict[str, torch.Tensor]:
        case = Case(ep, (1,) * 4, experts=8, rank_order=rank_order)
        grid = RankGrid(4, expert_parallel_size=ep, rank_order=rank_order)
        ranks = [
            {
                "weights": dict(build_layer(case, Groups(grid, rank)).named_parameters()),
                "expert_rank": grid.expert_rank(rank),
            }
            for rank in range(4)
        ]
        return join_weights(ranks, "weights", case)

    whole = weights(1)
    gate, up = whole["gate_up"].detach().chunk(2, dim=1)
    assert len({tuple(expert.flatten().tolist()) for expert in gate}) == 8
    assert not torch.equal(gate, up)
    assert abs(float(gate.std()) - 0.5) < 0.05
    for ep in (2, 4):
        parts = weights(ep)
        assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_an_expert_degree_that_does_not_divide_is_refused():
    groups = Groups(RankGrid(4, expert_parallel_size=4), 0)
    with pytest.raises(ValueError, match=r"expert_parallel_size = 4: must divide model.num_experts 6"):
        MoELayer(model_config(num_experts=6), groups)
