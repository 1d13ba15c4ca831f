import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmoe.config.batch import BatchSizes, solve
from cpmoe.config.errors import Problem

sizes = st.one_of(st.none(), st.integers(1, 24))


@given(sizes, sizes, sizes, st.integers(1, 8))
def test_a_solution_keeps_what_was_given_and_satisfies_the_equation(micro, accumulation, total, dp):
    solution = solve(BatchSizes(micro, accumulation, total), dp)
    if isinstance(solution, Problem):
        legal = [
            (m, a)
            for m in range(1, 25)
            for a in range(1, 25)
            if m * a * dp == total and micro in (None, m) and accumulation in (None, a)
        ]
        # Without a word about the two factors the micro-batch is 1, and no larger one is guessed.
        if micro is None and accumulation is None:
            legal = [pair for pair in legal if pair[0] == 1]
        assert legal == []
        return
    got_micro, got_accumulation, got_total = solution
    assert got_total == got_micro * got_accumulation * dp
    for asked, got in ((micro, got_micro), (accumulation, got_accumulation), (total, got_total)):
        assert asked in (None, got)


def test_the_equation_names_every_factor_with_cp_divided_out(files):
    run = files.load({"train.micro_batch_size": 2, "train.global_batch_size": 16})
    assert run.batch.describe() == (
        "global batch 16 sequences = micro-batch 2 x accumulation 4 x DP 2   "
        "(world 4 = DP 2 x CP 2; EP 2)   tokens/step 32,768"
    )
    assert run.batch.tokens_per_step == 16 * 2048


def test_deepspeed_is_told_its_own_count(files):
    run = files.load({"train.micro_batch_size": 2, "train.global_batch_size": 16})
    assert run.deepspeed["train_micro_batch_size_per_gpu"] == 2
    assert run.deepspeed["gradient_accumulation_steps"] == 4
    assert run.deepspeed["train_batch_size"] == 2 * 4 * 4


def test_padding_is_told(files):
    batch = files.load({"data.seq_len": 2045}).batch
    assert batch.padded_seq_len == 2048
    assert batch.describe().endswith("tokens/step 4,090   (sequences of 2,045 padded to 2,048)")


@pytest.mark.parametrize(
    ("recipe", "json_", "expected"),
    [
        ({}, {}, (1, 1, 2)),
        ({"train.micro_batch_size": 3}, {}, (3, 1, 6)),
        ({"train.global_batch_size": 12}, {}, (1, 6, 12)),
        ({"train.global_batch_size": "auto"}, {"gradient_accumulation_steps": 5}, (1, 5, 10)),
        ({"train.global_batch_size": 12}, {"gradient_accumulation_steps": 3}, (2, 3, 12)),
        ({}, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, (3, 2, 12)),
        ({"train.global_batch_size": 0}, {"train_batch_size": 12}, (1, 6, 12)),
        ({"train.micro_batch_size": 3}, {"train_micro_batch_size_per_gpu": "auto"}, (3, 1, 6)),
        ({"train.global_batch_size": 8}, {"gradient_accumulation_steps": "auto"}, (1, 4, 8)),
        ({"train.global_batch_size": 8, "train.micro_batch_size": "auto"}, {}, (4, 1, 8)),
        (
            {"train.global_batch_size": 8, "train.micro_batch_size": "auto"},
            {"gradient_accumulation_steps": 2},
            (2, 2, 8),
        ),
        (
            {"train.global_batch_size": 8, "train.micro_batch_size": "auto"},
            {"train_micro_batch_size_per_gpu": 1},
            (1, 4, 8),
        ),
        ({"train.micro_batch_size": "auto"}, {}, (1, 1, 2)),
    ],
)
def test_sizes_come_from_either_file(files, recipe, json_, expected):
    run = files.load(recipe, json_)
    batch = run.batch
    assert (batch.micro_batch_size, batch.gradient_accumulation_steps, batch.global_batch_size) == expected
    train = run.recipe.train
    assert (train.micro_batch_size, train.global_batch_size) == (expected[0], expected[2])


@pytest.mark.parametrize(
    ("recipe", "json_", "message"),
    [
        (
            {"train.micro_batch_size": 4, "train.global_batch_size": 12},
            {},
            "recipe.yaml: train.global_batch_size = 12: must be a multiple of micro-batch 4 x DP 2 "
            "= 8 sequences; legal: 8, 16, micro-batch 1 or 2 or 3 or 6",
        ),
        (
            {"train.global_batch_size": 5},
            {},
            "recipe.yaml: train.global_batch_size = 5: must be a multiple of micro-batch 1 x DP 2 "
            "= 2 sequences; legal: 4, 6",
        ),
        (
            {"train.global_batch_size": 8},
            {"gradient_accumulation_steps": 3},
            "recipe.yaml: train.global_batch_size = 8: must be a multiple of gradient_accumulation_steps 3 "
            "x DP 2 = 6 sequences; legal: 6, 12, accumulation 1 or 2 or 4",
        ),
        (
            {"train.micro_batch_size": 2, "train.global_batch_size": 16},
            {"gradient_accumulation_steps": 3},
            "recipe.yaml: train.global_batch_size = 16: must be micro-batch 2 x "
            "gradient_accumulation_steps 3 x DP 2 = 12 sequences; legal: 12, accumulation 4",
        ),
        (
            {},
            {"train_batch_size": 5},
            "deepspeed.json: train_batch_size: train.global_batch_size = 5: must be a multiple of "
            "micro-batch 1 x DP 2 = 2 sequences; legal: 4, 6",
        ),
    ],
)
def test_an_equation_that_does_not_hold(files, recipe, json_, message):
    assert files.refused(recipe, json_) == [message]
