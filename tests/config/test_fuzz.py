"""Whatever the files hold, the answer is a run or a ConfigError whose lines name what is wrong."""

import json
from copy import deepcopy

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cpmoe.config.autos import LEGAL_AUTO, SHARED
from cpmoe.config.deepspeed import DeepSpeedConfig
from cpmoe.config.errors import ConfigError
from cpmoe.config.recipe import Recipe
from cpmoe.config.refused import REFUSED
from cpmoe.config.resolve import resolve
from cpmoe.config.settings import Settings, apply_overrides, leaves
from tests.config.support import JSON, RECIPE, changed


def paths_of(block, prefix=""):
    for name, field in block.model_fields.items():
        yield f"{prefix}{name}"
        inner = [*getattr(field.annotation, "__args__", ()), field.annotation]
        for candidate in inner:
            if hasattr(candidate, "model_fields"):
                yield from paths_of(candidate, f"{prefix}{name}.")


RECIPE_PATHS = [*paths_of(Recipe), "model.typo", "typo"]
JSON_PATHS = [*paths_of(DeepSpeedConfig), *REFUSED, "typo", "zero_optimization.typo"]
values = st.one_of(
    st.sampled_from(
        [None, True, False, "auto", "", "1e-5", -1, 0, 1, 2, 3, 8, 0.5, 1e9, float("inf"), [], {}]
    ),
    st.recursive(
        st.one_of(st.integers(-3, 9), st.text("ab.=:", max_size=3), st.floats(allow_nan=False)),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        max_leaves=3,
    ),
)


def put(tree, changes):
    """Changes in turn, a later one inside the value of an earlier one left out."""
    tree = deepcopy(tree)
    for path, value in changes:
        try:
            tree = changed(tree, {path: value})
        except (TypeError, AttributeError):
            continue
    return tree


def outcome(recipe, json_, overrides, world_size):
    recipe_settings = Settings("recipe.yaml", deepcopy(recipe))
    json_settings = Settings("deepspeed.json", deepcopy(json_), prefix="deepspeed.")
    try:
        apply_overrides(recipe_settings, json_settings, overrides)
        return resolve(recipe_settings, json_settings, world_size, {})
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.path
            assert problem.constraint
            assert problem.source or problem.path == "the world size"
        return None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(RECIPE_PATHS), values), max_size=3),
    st.lists(st.tuples(st.sampled_from(JSON_PATHS), values), max_size=3),
    st.lists(
        st.builds(
            lambda path, value: f"{path}={yaml.safe_dump(value, default_flow_style=True)}",
            st.sampled_from([*RECIPE_PATHS, *(f"deepspeed.{path}" for path in JSON_PATHS)]),
            values,
        ),
        max_size=2,
    ),
    st.integers(0, 8),
)
@example([], [("optimizer", 3)], ["deepspeed.optimizer.type=auto"], 4)
@example([("data", None)], [("cpmoe", [])], ["data.seq_len=4"], 4)
@example([], [(pair.json, "auto") for pair in SHARED], [], 4)
def test_any_tree_is_resolved_or_refused(recipe_changes, json_changes, overrides, world_size):
    run = outcome(put(RECIPE, recipe_changes), put(JSON, json_changes), overrides, world_size)
    if run is None:
        return
    json.dumps(run.deepspeed, allow_nan=False)
    assert not {path for path, value in leaves(run.deepspeed) if value == "auto" and path in LEGAL_AUTO}
    batch = run.batch
    assert batch.global_batch_size == batch.micro_batch_size * batch.gradient_accumulation_steps * batch.dp
    assert batch.dp * batch.cp == batch.world_size == world_size
