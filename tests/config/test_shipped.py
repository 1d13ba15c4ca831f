"""Every recipe and JSON of the repository is legal, alone and with each other."""

import json
from pathlib import Path

import pytest
import yaml
from deepspeed.runtime.config import DeepSpeedConfig as RealConfig

from cpmoe.config.resolve import RunConfig, load_run

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
JSONS = sorted(ROOT.glob("ds_configs/*.json"))


def load(recipe: Path, json_: Path | None, overrides: list[str] | None = None) -> RunConfig:
    cpmoe = json.loads(json_.read_text())["cpmoe"] if json_ else {}
    world_size = max(cpmoe.get("context_parallel_size", 1), cpmoe.get("expert_parallel_size", 1))
    return load_run(recipe, json_, overrides or [], world_size, {})


@pytest.mark.parametrize("json_", [None, *JSONS], ids=lambda path: path.stem if path else "default")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_pair_is_legal(recipe, json_):
    load(recipe, json_)


@pytest.mark.parametrize("json_", JSONS, ids=lambda path: path.stem)
def test_deepspeed_takes_what_it_is_handed(json_):
    alone = ["cpmoe.context_parallel_size=1", "cpmoe.expert_parallel_size=1"]
    run = load_run(ROOT / "recipes/quickstart.yaml", json_, alone, 1, {})
    real = RealConfig(run.deepspeed)
    assert real.train_batch_size == run.batch.global_batch_size
    assert real.gradient_clipping == (run.gradient_clipping if run.zero_stage else 0.0)
    assert real.zero_optimization_stage == run.zero_stage
    assert real.bfloat16_config.enabled == (run.dtype == "bfloat16")
    assert real.monitor_config.tensorboard.output_path == run.recipe.train.out_dir


def test_there_is_a_file_for_every_stage_and_precision():
    kinds = {(run.dtype, run.zero_stage) for run in (load(RECIPES[0], path) for path in JSONS)}
    assert kinds == {("float32", stage) for stage in range(4)} | {("bfloat16", stage) for stage in (1, 2, 3)}
    offload = [path for path in JSONS if "offload_optimizer" in path.read_text()]
    assert offload


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_header_carries_a_launch_command_of_files_that_exist(recipe):
    header = "".join(line for line in recipe.read_text().splitlines(True) if line.startswith("#"))
    assert "deepspeed " in header
    assert f"--recipe recipes/{recipe.name}" in header
    for word in header.replace("\\", " ").split():
        if word.startswith(("recipes/", "ds_configs/")):
            assert (ROOT / word).exists(), word


def test_no_two_recipes_write_to_one_folder():
    trees = [yaml.safe_load(path.read_text()) for path in RECIPES]
    assert len({tree["train"]["out_dir"] for tree in trees}) == len(trees)
    prepared = {(t["data"]["path"], t["data"]["source"], t["data"]["tokenizer"]) for t in trees}
    assert len({path for path, _, _ in prepared}) == len(prepared)


def test_quickstart_is_cp_2_and_ep_2_in_float32():
    run = load(ROOT / "recipes/quickstart.yaml", ROOT / "ds_configs/quickstart.json")
    assert (run.batch.cp, run.batch.ep, run.zero_stage, run.dtype) == (2, 2, 1, "float32")
    # One GPU alone runs it with CP 1 and EP 1.
    alone = ["cpmoe.context_parallel_size=1", "cpmoe.expert_parallel_size=1"]
    load_run(ROOT / "recipes/quickstart.yaml", ROOT / "ds_configs/quickstart.json", alone, 1, {})


def test_small_is_the_model_that_bench_train_measures():
    model = load(ROOT / "recipes/small.yaml", None).recipe.model
    assert (model.hidden_size, model.num_hidden_layers, model.head_dim) == (256, 4, 32)
    assert (model.num_attention_heads, model.num_key_value_heads) == (8, 4)
    assert (model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size) == (8, 2, 512)
    assert model.vocab_size == 4096


def test_the_large_recipe_has_the_parameters_its_name_says():
    path = ROOT / "recipes/qwen3_30b_a3b_128k.yaml"
    run = load_run(path, ROOT / "ds_configs/qwen3_30b_a3b_128k.json", [], 64, {})
    model = run.recipe.model
    heads = model.num_attention_heads + 2 * model.num_key_value_heads + model.num_attention_heads
    attention = model.hidden_size * model.head_dim * heads
    expert = 3 * model.hidden_size * model.moe_intermediate_size
    router = model.hidden_size * model.num_experts
    embeddings = 2 * model.vocab_size * model.hidden_size
    total = embeddings + model.num_hidden_layers * (attention + router + model.num_experts * expert)
    active = embeddings + model.num_hidden_layers * (attention + router + model.num_experts_per_tok * expert)
    assert total == pytest.approx(30.5e9, rel=0.01)
    assert active == pytest.approx(3.3e9, rel=0.02)
    assert run.recipe.data.seq_len == 131072
    assert run.batch.dp == 8
