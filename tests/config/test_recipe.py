import pickle

import pytest
from pydantic import ValidationError

from cpmoe.config.errors import UNSET, ConfigError, Problem
from cpmoe.config.recipe import DataConfig, ModelConfig, OptimConfig, Recipe
from cpmoe.config.settings import read_recipe
from cpmoe.config.validation import parse
from tests.config.support import RECIPE, Files


def test_defaults_follow_other_fields():
    model = parse(ModelConfig, {**RECIPE["model"], "num_attention_heads": 2})
    assert model.head_dim == model.v_head_dim == 32
    without = {key: value for key, value in RECIPE["model"].items() if key != "num_key_value_heads"}
    assert parse(ModelConfig, without).num_key_value_heads == 4


def test_layers_slide_where_there_is_a_window():
    fields = {**RECIPE["model"], "num_hidden_layers": 2}
    assert parse(ModelConfig, fields).layer_types == ("full_attention",) * 2
    fields["sliding_window"] = 64
    assert parse(ModelConfig, fields).layer_types == ("sliding_attention",) * 2
    fields["layer_types"] = ["sliding_attention", "full_attention"]
    assert parse(ModelConfig, fields).layer_types == ("sliding_attention", "full_attention")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must name the kind of each of num_hidden_layers 2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "which needs a sliding_window"),
        ({"num_sink_tokens": 4}, "every layer sees the first tokens anyway"),
    ],
)
def test_kinds_of_layers_fit_the_model(files, changes, message):
    changes = {f"model.{key}": value for key, value in changes.items()}
    (line,) = files.refused({"model.num_hidden_layers": 2, **changes})
    assert line.startswith(f"recipe.yaml: {next(iter(changes))} = ") and message in line


def test_blocks_are_frozen():
    recipe = parse(Recipe, RECIPE)
    with pytest.raises(ValidationError):
        recipe.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "+1e-5", "1.e-5", ".00001"])
def test_yaml_text_that_is_a_number_is_a_number(files, text):
    assert files.load(overrides=[f"optim.lr={text}"]).recipe.optim.lr == 1e-5
    files.recipe.write_text(f"optim: {{lr: {text}}}")
    assert parse(OptimConfig, read_recipe(files.recipe).tree["optim"]).lr == 1e-5


def test_integers_are_numbers_and_auto_is_zero(files):
    run = files.load({"optim.lr": 1, "model.rope_theta": 500000, "model.vocab_size": "auto"})
    assert (run.recipe.optim.lr, run.recipe.model.rope_theta, run.recipe.model.vocab_size) == (1.0, 5e5, 0)
    assert isinstance(run.recipe.optim.lr, float)


REFUSED = [
    ("model.hidden_size", True, "must be a valid integer; legal: integers >= 1"),
    ("model.hidden_size", "64", "must be a valid integer; legal: integers >= 1"),
    ("model.hidden_size", 64.0, "must be a valid integer; legal: integers >= 1"),
    ("model.num_hidden_layers", 0, "must be greater than or equal to 1; legal: integers >= 1"),
    ("model.use_qk_norm", 1, "must be a valid boolean; legal: true, false"),
    ("optim.lr", True, "must be a valid number; legal: numbers > 0"),
    ("optim.lr", "fast", "must be a valid number; legal: numbers > 0"),
    ("optim.lr", 0, "must be greater than 0; legal: numbers > 0"),
    ("optim.lr", float("inf"), "must be a finite number; legal: numbers > 0"),
    ("optim.weight_decay", -1, "must be greater than or equal to 0; legal: numbers >= 0"),
    ("optim.name", "adam", 'is none of the legal choices; legal: "adamw", "sgd"'),
    ("optim.min_lr_ratio", 1.5, "must be less than or equal to 1; legal: numbers >= 0 and <= 1"),
    ("train.recompute", None, 'is none of the legal choices; legal: "none", "full"'),
    ("train.resume", False, "must be a valid string; legal: text"),
    ("train.out_dir", "", "must have at least 1 character; legal: text"),
    ("data.max_documents", 0, "must be greater than or equal to 1; legal: integers >= 1"),
    (
        "data.tokenizer",
        "words",
        "is none of the legal choices; "
        "legal: bytes, bpe:SIZE (trained on the source), the path of a tokenizer.json",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED, ids=[f"{p}={v}" for p, v, _ in REFUSED])
def test_a_wrong_value_is_refused_with_path_value_constraint_and_choices(files, path, value, message):
    (line,) = files.refused({path: value})
    assert line.startswith(f"recipe.yaml: {path} = ")
    assert line.endswith(f": {message}")


def test_a_wrong_element_is_named(files):
    (line,) = files.refused({"optim.betas": [0.9, 1.0]})
    assert line == (
        "recipe.yaml: optim.betas.1 = 1.0: must be less than 1; legal: a list of 2: numbers >= 0 and < 1"
    )


def test_a_missing_field_is_named(files):
    (line,) = files.refused({"model.hidden_size": Files.DELETE})
    assert line == "recipe.yaml: model.hidden_size: is required; model does not give it; legal: integers >= 1"


def test_a_value_in_place_of_a_block(files):
    (line,) = files.refused({"train": 3})
    assert line.startswith("recipe.yaml: train = 3: must be a block of settings; legal: a block with steps, ")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("model.num_expert", "num_experts"),
        ("model.n_experts_per_tok", "num_experts_per_tok"),
        ("train.Steps", "steps"),
        ("optm", "optim"),
    ],
)
def test_an_unknown_key_names_the_nearest(files, path, nearest):
    (line,) = files.refused({path: 3})
    assert line.startswith(f'recipe.yaml: {path} = 3: unknown key, did you mean "{nearest}"?; legal: ')


def test_an_unlike_key_has_no_nearest(files):
    (line,) = files.refused({"train.zzz": 3})
    assert line.startswith("recipe.yaml: train.zzz = 3: unknown key; legal: eval_every, ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.num_attention_heads": 6, "model.num_key_value_heads": 3},
            "model.num_attention_heads = 6: must divide hidden_size 64 where head_dim is not given; "
            "legal: 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            {"model.num_key_value_heads": 3},
            "model.num_key_value_heads = 3: must divide num_attention_heads 4; legal: 1, 2, 4",
        ),
        ({"model.head_dim": 7}, "model.head_dim = 7: RoPE rotates pairs: must be even; legal: even numbers"),
        (
            {"model.num_experts_per_tok": 9},
            "model.num_experts_per_tok = 9: must not exceed num_experts 8; legal: 1 to 8",
        ),
        (
            {"model.first_k_dense_replace": 3, "model.intermediate_size": 8},
            "model.first_k_dense_replace = 3: must not exceed num_hidden_layers 2; legal: 0 to 2",
        ),
        (
            {"model.first_k_dense_replace": 1},
            "model.intermediate_size = 0: first_k_dense_replace = 1 makes dense layers of this width; "
            "legal: 1 or more",
        ),
    ],
)
def test_fields_of_the_model_agree(files, changes, message):
    assert files.refused(changes) == [f"recipe.yaml: {message}"]


def test_several_problems_are_told_at_once(files):
    lines = files.refused({"model.num_experts_per_tok": 9, "optim.lr": 0, "data.seq": 3})
    assert [line.split(" = ")[0] for line in lines] == [
        "recipe.yaml: model.num_experts_per_tok",
        "recipe.yaml: data.seq",
        "recipe.yaml: optim.lr",
    ]


def test_config_error_survives_a_process_boundary():
    error = ConfigError([Problem("data.seq_len", "is required", UNSET, "integers >= 2", "r.yaml")])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("name", ["bytes", "bpe:4096", "tokenizers/qwen3/tokenizer.json"])
def test_legal_tokenizers(name):
    assert parse(DataConfig, {"seq_len": 8, "tokenizer": name}).tokenizer == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {a: 1", "line 1 column 13: is not YAML: expected ',' or '}', but got '<stream end>'"),
        (
            "train:\n  steps: 1\n  steps: 2\n",
            'line 2 column 3: is not YAML: "steps" is given twice in one block',
        ),
        ("data: {yes: 1, true: 2}", "line 1 column 7: is not YAML: a key is given twice in one block"),
        ("data: {1: 2}", "data.1 = 1: a key must be text"),
        ("data: {null: 2}", "data.None = null: a key must be text"),
        ("a: \0", "the text: is not YAML: unacceptable character #x0000: special characters are not allowed"),
        ("a: " + "[" * 3000, "the text: is nested too deeply"),
        ("a: &a [*a]", "the text: is nested too deeply"),
        ("- 1\n", "the file = [1]: must hold a block of settings"),
        ("", "the file = null: must hold a block of settings"),
    ],
)
def test_a_file_that_is_no_recipe(files, text, message):
    files.recipe.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_recipe(files.recipe)
    assert str(error.value) == f"{files.recipe}: {message}"


def test_a_number_of_too_many_digits(files):
    files.recipe.write_text("model: {hidden_size: 1" + "0" * 5000 + "}")
    with pytest.raises(ConfigError, match="the text: is not YAML: Exceeds the limit"):
        read_recipe(files.recipe)


def test_a_file_that_is_no_utf8(files):
    files.recipe.write_bytes("a: é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"^--recipe = .*: is not text in UTF-8: "):
        read_recipe(files.recipe)


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError) as error:
        read_recipe(path)
    assert str(error.value) == (
        f'--recipe = "{path}": no such file or directory; legal: a file, such as recipes/*.yaml'
    )
