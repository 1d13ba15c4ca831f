"""The budget of rows: how many rounds, who travels when, and that no rank ever gets more than it allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.moe.experts import Experts
from cpmoe.moe.rounds import num_rounds, round_of_slots
from cpmoe.moe.router import count_rows
from tests.distributed import run_distributed
from tests.moe.runs import Case, build_layer, gradients, groups_for


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_rank_gets_more_than_the_budget_and_a_round_less_would_not_do(data):
    nodes, per_node = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (4, 1)]))
    ranks = nodes * per_node
    rows = np.array(data.draw(st.lists(st.integers(0, 40), min_size=ranks**2, max_size=ranks**2)))
    rows_PP = rows.reshape(ranks, ranks)
    max_rows = data.draw(st.integers(ranks, 60))
    rounds = num_rounds(rows_PP, max_rows, nodes)

    def fits(count: int) -> bool:
        """The next ⌈rows / count⌉ of each pair, on the rank they are for and on the one between."""
        most_PP = -(-rows_PP // count)
        arriving = [most_PP[:, rank].sum() for rank in range(ranks)]
        if nodes > 1:
            for node in range(nodes):
                there = range(node * per_node, (node + 1) * per_node)
                for place in range(per_node):
                    arriving.append(most_PP[place::per_node][:, there].sum())
        return max(arriving) <= max_rows

    assert fits(rounds)
    assert rounds == 1 or not fits(rounds - 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_slot_travels_once_and_pairs_part_evenly(data):
    ranks, width = data.draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (3, 2)]))
    experts, rounds = ranks * width, data.draw(st.integers(1, 5))
    k = data.draw(st.integers(1, experts))
    chosen = st.one_of(st.permutations(range(experts)).map(lambda p: p[:k]), st.just([experts] * k))
    indices_TK = torch.tensor(data.draw(st.lists(chosen, max_size=12)), dtype=torch.int64).view(-1, k)
    turns_TK = round_of_slots(indices_TK, count_rows(indices_TK, experts), ranks, rounds)
    for rank in range(ranks):
        turns = turns_TK[indices_TK // width == rank]
        assert torch.equal(turns, turns.sort().values), "in the order of the tokens"
        sizes = torch.bincount(turns, minlength=rounds)
        assert len(sizes) == rounds
        assert int(sizes.max()) <= -(-len(turns) // rounds)


def watched(rank: int, world: int, case: Case) -> dict[str, Any]:
    """The most rows that this rank's experts ever got at once, forward and backward, and hook calls."""
    layer = build_layer(case, groups_for(case))
    seen, hooks = [0], []
    forward = Experts.forward

    def counted(self, rows_RM, splits, weights=None):
        seen.append(len(rows_RM))
        return forward(self, rows_RM, splits, weights)

    for name, parameter in layer.named_parameters():
        parameter.register_hook(lambda _, name=name: hooks.append(name))
    x, mask, cotangent = case.inputs(rank)
    Experts.forward = counted
    try:
        y, _ = layer(x.requires_grad_(), mask)
        (y * cotangent).sum().backward()
    finally:
        Experts.forward = forward
    return {"rows": seen, "hooks": hooks, "grads": gradients(layer)}


def test_experts_never_get_more_rows_than_the_budget():
    plain = Case(2, (30, 21), experts=4, k=2, favourites=(0, 1))
    for dispatcher in ("alltoall", "dedup", "allgather"):
        budget = {"dispatcher": dispatcher, "max_rows_per_rank": 20}
        for result in run_distributed(watched, 2, Case(2, plain.tokens, favourites=(0, 1), dispatch=budget)):
            assert max(result["rows"]) <= 20
            assert sorted(result["hooks"]) == sorted(result["grads"]), "each gradient arrives once, whole"
    assert max(run_distributed(watched, 2, plain)[0]["rows"]) == 2 * sum(plain.tokens)
