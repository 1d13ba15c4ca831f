"""The adversarial cases are what their names say; else the grid would compare the easy ones."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.cases import (
    CASES,
    CASES_OF_SCORES,
    NUM_ROWS,
    case_config,
    case_step,
    case_weights,
    data_rows,
    num_labels,
)
from tests.numerics.reference import IGNORED, PADDING, Batch, StepResult, forward_logits, reference_step


def _reference(name: str, num_micro_steps: int = 1) -> StepResult:
    return reference_step(case_config(name), case_weights(name), case_step(name, num_micro_steps))


@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize("name", [*CASES, *CASES_OF_SCORES])
def test_no_route_is_a_near_tie(name: str, num_micro_steps: int) -> None:
    """Router logits are a few units and float32 leaves them about 1e-6 off: 1e-3 can not flip."""
    assert _reference(name, num_micro_steps).margin > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_labels_are_the_next_token_of_the_same_document(name: str) -> None:
    for batch in case_step(name, 3):
        rows, starts = (batch.labels_BS != IGNORED).nonzero(as_tuple=True)
        assert torch.equal(batch.labels_BS[rows, starts], batch.tokens_BS[rows, starts + 1])
        assert torch.equal(batch.documents_BS[rows, starts], batch.documents_BS[rows, starts + 1])
        assert (batch.documents_BS[rows, starts] != PADDING).all()


def test_uneven_leaves_a_rank_without_labels_at_every_data_parallel_degree() -> None:
    (batch,) = case_step("uneven", 1)
    assert [num_labels([data_rows(batch, rank, 4)]) > 0 for rank in range(4)] == [True, False, True, False]
    shares = {num_labels([data_rows(batch, rank, 2)]) for rank in range(2)}
    assert len(shares) == 2
    # Under context parallelism too: the second half of the third sequence has none.
    assert num_labels([Batch(*(x[2:, 4:] for x in batch))]) == 0


def test_one_label_is_one_in_the_whole_step() -> None:
    assert [num_labels([batch]) for batch in case_step("one_label", 3)] == [0, 0, 1]


def test_starved_and_crowded_experts() -> None:
    starved_LE = _reference("starved").counts_GLE[0]
    assert (starved_LE[:, -1] == 0).all()  # at EP 4 a rank receives nothing at all
    crowded_LE = _reference("crowded").counts_GLE[0]
    assert (crowded_LE[:, 1] == NUM_ROWS * 32).all() and crowded_LE.sum() == crowded_LE[:, 1].sum()


def test_skewed_routes_follow_the_position() -> None:
    """A data-parallel or context-parallel rank's own counts are far from the global ones."""
    (batch,) = case_step("skewed", 1)
    config, weights = case_config("skewed"), case_weights("skewed")
    first = forward_logits(config, weights, Batch(*(x[:, :8] for x in batch)))[1].counts[0].double()
    whole = forward_logits(config, weights, batch)[1].counts[0].double()
    assert (first / first.sum() - whole / whole.sum()).abs().max() > 0.1
