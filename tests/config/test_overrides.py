import pytest


def test_values_are_typed_by_their_field(files):
    run = files.load(
        overrides=["train.steps=7", "optim.betas=[0.8, 0.9]", "model.use_qk_norm=true", "train.resume=never"]
    )
    assert run.recipe.train.steps == 7
    assert run.recipe.optim.betas == (0.8, 0.9)
    assert run.recipe.model.use_qk_norm is True
    assert run.recipe.train.resume == "never"


def test_the_json_is_reached_by_its_prefix_and_its_block_by_its_name(files):
    run = files.load(
        overrides=[
            "deepspeed.zero_optimization.stage=2",
            "deepspeed.zero_optimization.reduce_bucket_size=5e6",
            "deepspeed.cpmoe.expert_parallel_size=4",
            "cpmoe.context_parallel_size=4",
            "cpmoe.attention.layout=contiguous",
        ]
    )
    assert run.deepspeed["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 5_000_000}
    assert (run.batch.cp, run.batch.ep, run.cpmoe.attention.layout) == (4, 4, "contiguous")


def test_an_override_replaces_the_value_of_its_file(files):
    assert files.load({"train.steps": 3}, overrides=["train.steps=4"]).recipe.train.steps == 4


def test_text_with_equals_signs_and_colons(files):
    run = files.load(overrides=["train.out_dir=runs/lr=3", "data.source=owner/name:part"])
    assert (run.recipe.train.out_dir, run.recipe.data.source) == ("runs/lr=3", "owner/name:part")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=2.5", "train.steps = 2.5: must be a valid integer; legal: integers >= 1"),
        ("train.steps=yes", "train.steps = true: must be a valid integer; legal: integers >= 1"),
        ("train.steps=", "train.steps = null: must be a valid integer; legal: integers >= 1"),
        ("train.steps", "train.steps: is no override; legal: section.key=value"),
        ("train=3", "train: is no key; legal: section.key=value"),
        ("train..steps=3", "train..steps: is no key; legal: section.key=value"),
        ("train.steps.more=3", "train.steps.more = 3: train.steps is a value, not a block"),
        (
            "trian.steps=3",
            'trian.steps: unknown key, did you mean "train"?; '
            "legal: cpmoe, data, deepspeed, model, optim, train",
        ),
        (
            "zero_optimization.stage=3",
            "zero_optimization.stage: is a key of the JSON, "
            'did you mean "deepspeed.zero_optimization.stage"?; '
            "legal: cpmoe, data, deepspeed, model, optim, train",
        ),
        (
            "cpmoe.attention.backend=fast",
            'cpmoe.attention.backend = "fast": is none of the legal choices; '
            'legal: "auto", "reference", "sdpa", "triton", "triton_tf32", "flash"',
        ),
        (
            "deepspeed.zero_optimization.stage=4",
            "deepspeed.zero_optimization.stage = 4: must be less than or equal to 3; "
            "legal: integers >= 0 and <= 3",
        ),
    ],
)
def test_a_refused_override_names_the_command_line(files, override, message):
    assert files.refused({"train.steps": 5}, overrides=[override]) == [f"command line: {message}"]


def test_an_unknown_key_of_an_override(files):
    (line,) = files.refused(overrides=["optim.beta=[0.9,0.95]"])
    assert line.startswith(
        'command line: optim.beta = [0.9, 0.95]: unknown key, did you mean "betas"?; legal: '
    )


def test_a_value_that_is_not_yaml(files):
    (line,) = files.refused(overrides=["optim.betas=[0.9"])
    assert line.startswith("command line: optim.betas: line 1 column 5: is not YAML: ")


def test_one_key_twice_with_two_values(files):
    lines = files.refused(
        overrides=["cpmoe.expert_parallel_size=2", "deepspeed.cpmoe.expert_parallel_size=4"]
    )
    assert lines == [
        "command line: cpmoe.expert_parallel_size = 4: is given twice, the other value is 2; legal: one value"
    ]
    assert files.load(overrides=["train.steps=3", "train.steps=3"]).recipe.train.steps == 3
