import json
import subprocess
import sys

import pytest
import yaml

from cpmoe.config.autos import LEGAL_AUTO, SHARED
from cpmoe.config.resolve import load_data, load_run
from tests.config.support import RECIPE

COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}
# Two legal values of each setting that both files may give, as the JSON writes them.
VALUES = {
    "train_micro_batch_size_per_gpu": (2, 4),
    "train_batch_size": (8, 16),
    "gradient_clipping": (0.5, 2.0),
    "optimizer.type": ("AdamW", "SGD"),
    "optimizer.params.lr": (1e-4, 2e-4),
    "optimizer.params.betas": ([0.8, 0.9], [0.8, 0.99]),
    "optimizer.params.eps": (1e-6, 1e-7),
    "optimizer.params.weight_decay": (0.2, 0.3),
    "optimizer.params.momentum": (0.8, 0.9),
    "scheduler.params.warmup_max_lr": (1e-4, 2e-4),
    "scheduler.params.warmup_num_steps": (5, 6),
    "scheduler.params.cos_min_ratio": (0.2, 0.3),
}


def json_for(path, value):
    """A JSON in which `path` is legal."""
    tree = {path: value}
    if path == "scheduler.params.warmup_max_lr":
        tree["scheduler.type"] = "WarmupLR"
    elif path.startswith("scheduler"):
        tree |= {"scheduler.type": "WarmupCosineLR", "scheduler.params.total_num_steps": "auto"}
    return tree


def recipe_for(pair):
    """Changes that make the recipe silent about this setting."""
    return {"optim.name": "sgd"} if pair.json == "optimizer.params.momentum" else {}


def in_recipe(json_path, value):
    return {"AdamW": "adamw", "SGD": "sgd"}.get(value, value) if json_path == "optimizer.type" else value


def value_at(block, path):
    for part in path.split("."):
        block = block[part] if isinstance(block, dict) else getattr(block, part)
    return list(block) if isinstance(block, tuple) else block


def test_every_shared_setting_has_values_here():
    assert set(VALUES) == {pair.json for pair in SHARED}


@pytest.mark.parametrize("pair", SHARED, ids=[pair.json for pair in SHARED])
def test_the_same_value_in_both_is_legal_and_another_names_both(files, pair):
    ours, theirs = VALUES[pair.json]
    recipe = recipe_for(pair) | {pair.recipe: in_recipe(pair.json, ours)}
    run = files.load(recipe, json_for(pair.json, ours))
    assert value_at(run.recipe, pair.recipe) == in_recipe(pair.json, ours)

    (line,) = files.refused(recipe, json_for(pair.json, theirs))
    assert line.startswith(f"recipe.yaml: {pair.recipe} = ")
    assert f": deepspeed.json says {pair.json} = " in line
    assert line.endswith('; legal: one value in both, or in one place only ("auto" in the JSON)')


@pytest.mark.parametrize("pair", SHARED, ids=[pair.json for pair in SHARED])
def test_auto_takes_the_recipes_value(files, pair):
    value = in_recipe(pair.json, VALUES[pair.json][0])
    run = files.load(recipe_for(pair) | {pair.recipe: value}, json_for(pair.json, "auto"))
    assert value_at(run.recipe, pair.recipe) == value
    assert '"auto"' not in json.dumps(run.deepspeed)
    if pair.json in ("gradient_clipping", "train_micro_batch_size_per_gpu") or "scheduler" in pair.json:
        assert value_at(run.deepspeed, pair.json) == value


@pytest.mark.parametrize("pair", SHARED, ids=[pair.json for pair in SHARED])
def test_a_value_that_only_the_json_gives_wins_over_the_default(files, pair):
    value = VALUES[pair.json][1]
    recipe = recipe_for(pair)
    if pair.recipe == "optim.lr":
        recipe["optim"] = {}  # the recipe needs no lr where the JSON gives it
    run = files.load(recipe, json_for(pair.json, value))
    assert value_at(run.recipe, pair.recipe) == in_recipe(pair.json, value)


def test_a_faulty_value_of_the_json_is_told_once(files):
    assert files.refused({"optim": {}}, {"optimizer.params.lr": -1}) == [
        "deepspeed.json: optimizer.params.lr = -1: must be greater than 0; legal: numbers > 0"
    ]


def test_a_conflict_with_the_command_line_names_it(files):
    assert files.refused(
        {"optim.max_grad_norm": 1.0}, {"gradient_clipping": 1.0}, ["optim.max_grad_norm=2"]
    ) == [
        "command line: optim.max_grad_norm = 2: deepspeed.json says gradient_clipping = 1.0; "
        'legal: one value in both, or in one place only ("auto" in the JSON)'
    ]
    (line,) = files.refused({"optim.max_grad_norm": 1.0}, {}, ["deepspeed.gradient_clipping=2"])
    assert line.startswith(
        "recipe.yaml: optim.max_grad_norm = 1.0: command line says deepspeed.gradient_clipping = 2; "
    )


def test_two_names_of_one_setting_inside_the_json(files):
    json_ = {"optimizer.params.lr": 1e-3, **json_for("scheduler.params.warmup_max_lr", 2e-3)}
    (line,) = files.refused({"optim": {}}, json_)
    assert line.startswith("deepspeed.json: optimizer.params.lr: optim.lr = 0.001: ")
    assert "deepspeed.json says scheduler.params.warmup_max_lr = 0.002" in line


@pytest.mark.parametrize("path", LEGAL_AUTO)
def test_every_legal_auto_is_resolved(files, path):
    recipe = {"optim.warmup_steps": 5} if path.startswith("scheduler.params.warmup_num") else {}
    json_ = json_for(path, "auto")
    if path == "scheduler.params.warmup_min_lr":
        json_["scheduler.type"] = "WarmupDecayLR"
    if path.endswith("momentum"):
        recipe["optim.name"] = "sgd"
    assert '"auto"' not in json.dumps(files.load(recipe, json_).deepspeed)


@pytest.mark.parametrize("path", ["zero_optimization.reduce_bucket_size", "bf16.enabled", "steps_per_print"])
def test_auto_without_a_value_in_the_recipe(files, path):
    (line,) = files.refused(json_={path: "auto"})
    assert line.startswith(
        f'deepspeed.json: {path} = "auto": the recipe has no value for it, "auto" is no choice here; legal: '
    )


def test_monitors_write_below_the_run_folder(files):
    run = files.load(
        {"train.out_dir": "runs/a"},
        {"tensorboard": {"enabled": True, "output_path": "auto"}, "csv_monitor.output_path": "auto"},
    )
    assert run.deepspeed["tensorboard"] == {"enabled": True, "output_path": "runs/a"}
    assert run.deepspeed["csv_monitor"] == {"output_path": "runs/a"}


def test_deepspeed_gets_neither_our_block_nor_an_optimizer(files):
    run = files.load(json_={"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.99]}}})
    assert {"cpmoe", "optimizer"} & set(run.deepspeed) == set()
    assert (run.recipe.optim.name, run.recipe.optim.betas) == ("adamw", (0.9, 0.99))


def test_clipping_is_never_left_to_deepspeeds_hidden_default(files):
    assert files.load({"optim.max_grad_norm": 0}).deepspeed["gradient_clipping"] == 0.0
    run = files.load({"optim.max_grad_norm": 0.25})
    assert (run.deepspeed["gradient_clipping"], run.gradient_clipping) == (0.25, 0.25)
    run = files.load({"optim.max_grad_norm": 0.25}, {"zero_optimization.stage": 0})
    assert (run.deepspeed["gradient_clipping"], run.gradient_clipping) == (0.0, 0.25)


def test_precision_and_stage(files):
    run = files.load()
    assert (run.dtype, run.zero_stage) == ("float32", 1)
    run = files.load(json_={"bf16.enabled": True, "zero_optimization.stage": 3})
    assert (run.dtype, run.zero_stage) == ("bfloat16", 3)
    assert files.load(json_={"zero_optimization": {}}).zero_stage == 0


def test_offload_keeps_the_optimizer_that_cpmoe_builds(files):
    offload = {"zero_optimization.stage": 2, "zero_optimization.offload_optimizer.device": "cpu"}
    assert files.load(json_=offload).deepspeed["zero_force_ds_cpu_optimizer"] is False


def test_a_scheduler_reaches_deepspeed(files):
    run = files.load(
        {"train.steps": 50, "optim.warmup_steps": 5},
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
            }
        },
    )
    assert run.deepspeed["scheduler"] == {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 50, "warmup_num_steps": 5},
    }


def test_two_schedules_are_one_too_many(files):
    (line,) = files.refused({"optim.schedule": "cosine"}, {"scheduler": COSINE})
    assert line.startswith(
        'recipe.yaml: optim.schedule = "cosine": deepspeed.json says scheduler.type = "WarmupCosineLR"; '
    )
    (line,) = files.refused({"optim.warmup_steps": 5}, {"scheduler": COSINE})
    assert line == (
        "recipe.yaml: optim.warmup_steps = 5: has no effect beside the scheduler of deepspeed.json; "
        'legal: "auto" in scheduler.params.warmup_num_steps, or leave it out here'
    )


def test_without_a_json_it_is_zero_1_in_float32(files):
    files.recipe.write_text(yaml.safe_dump(RECIPE))
    run = load_run(files.recipe, None, ["cpmoe.context_parallel_size=2"], 2, {})
    assert (run.zero_stage, run.dtype, run.batch.cp, run.batch.ep) == (1, "float32", 2, 1)
    assert run.deepspeed["tensorboard"]["enabled"] is True


@pytest.mark.parametrize("scheduler", [None, COSINE])
def test_what_the_run_folder_keeps_loads_as_the_same_run(files, tmp_path, scheduler):
    json_ = {"bf16.enabled": True, "cpmoe.communication.ring.max_ctas": 8}
    if scheduler:
        json_["scheduler"] = scheduler
    run = files.load({"train.global_batch_size": 12}, json_)
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(run.recipe_tree()))
    (tmp_path / "saved.json").write_text(json.dumps(run.json_tree()))
    again = load_run(tmp_path / "saved.yaml", tmp_path / "saved.json", [], 4, {})
    assert (again.recipe, again.deepspeed, again.batch) == (run.recipe, run.deepspeed, run.batch)
    assert json.loads(again.to_json()) == json.loads(run.to_json())


def test_data_alone_needs_no_legal_model(files):
    files.recipe.write_text("data: {seq_len: 64}")
    assert load_data(files.recipe, ["data.tokenizer=bpe:512"]).tokenizer == "bpe:512"
    with pytest.raises(ValueError, match=r"data\.seq_len = 1: must be greater than or equal to 2"):
        load_data(files.recipe, ["data.seq_len=1"])


def test_a_configuration_is_resolved_without_torch_or_deepspeed(files):
    files.load()
    code = (
        "import sys; from cpmoe.config.resolve import load_run; "
        f"load_run({str(files.recipe)!r}, {str(files.json)!r}, [], 4, {{}}); "
        "sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"bf16.enabled": True}, "fp32"),
        ({"bf16.enabled": True, "communication_data_type": "bf16"}, "bf16"),
    ],
)
def test_bfloat16_gradients_are_summed_in_float32_unless_asked_otherwise(files, changes, expected):
    assert files.load({}, changes).deepspeed.get("communication_data_type") == expected
