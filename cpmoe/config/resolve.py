"""From a recipe, a DeepSpeed JSON, overrides and a world size to one resolved, checked run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cpmoe.config import autos, checks
from cpmoe.config.batch import BatchEquation, BatchSizes, solve
from cpmoe.config.deepspeed import CpmoeConfig, DeepSpeedConfig
from cpmoe.config.errors import ConfigError, Problem, raise_if_any
from cpmoe.config.policy import choose_policy, conditions_of
from cpmoe.config.recipe import DataConfig, Recipe
from cpmoe.config.refused import take_refused
from cpmoe.config.settings import Settings, apply_overrides, read_deepspeed, read_recipe
from cpmoe.config.slicing import choose_slicing
from cpmoe.config.validation import parse

DEFAULT_DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
    "tensorboard": {"enabled": True, "output_path": "auto", "job_name": "tensorboard"},
}
"""What runs without a JSON: ZeRO-1, float32, no context and no expert parallelism."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run, with every "auto" resolved."""

    recipe: Recipe
    cpmoe: CpmoeConfig
    deepspeed: dict[str, Any]
    """What `deepspeed.initialize` gets: no "cpmoe", no "optimizer" (cpmoe builds it from the recipe), no
    "auto", batch sizes in DeepSpeed's own count. A "scheduler" is there only where the JSON gave one."""
    batch: BatchEquation
    dtype: Literal["float32", "bfloat16"]
    zero_stage: int
    gradient_clipping: float
    """Largest gradient norm, 0 for none. At stage 0 DeepSpeed gets 0: its norm there differs between
    replicas of experts, so the engine clips."""

    @property
    def slicing(self) -> str:
        """How a micro-batch is cut: none, batch or causal; where the policy is auto, in overlap."""
        return self.cpmoe.coschedule.slices

    @property
    def policy(self) -> str:
        """serial, overlap, or auto where the first steps are measured."""
        return self.cpmoe.coschedule.policy

    @property
    def conditions(self) -> dict[str, Any]:
        """What a measurement of the policies depends on."""
        return conditions_of(self.recipe, self.cpmoe, self.batch.world_size, self.zero_stage, self.dtype)

    def recipe_tree(self) -> dict[str, Any]:
        """The resolved recipe as plain data; with `json_tree` beside it, it loads as the same run."""
        tree = self.recipe.model_dump(mode="json")
        if "scheduler" in self.deepspeed:
            for name in ("schedule", "warmup_steps", "min_lr_ratio"):
                del tree["optim"][name]
        return tree

    def json_tree(self) -> dict[str, Any]:
        """The resolved JSON with its "cpmoe" block, sizes in sequences, as a file for --deepspeed_config."""
        return {
            **self.deepspeed,
            "train_batch_size": self.batch.global_batch_size,
            "gradient_clipping": self.gradient_clipping,
            "cpmoe": {
                **self.cpmoe.model_dump(mode="json", exclude={"communication"}),
                "communication": self.cpmoe.communication.options(),
            },
        }

    def to_json(self) -> str:
        """Everything as text, for a record of the run."""
        content = {
            "recipe": self.recipe_tree(),
            "deepspeed_config": self.json_tree(),
            "deepspeed_engine": self.deepspeed,
            "batch": {**asdict(self.batch), "tokens_per_step": self.batch.tokens_per_step},
            "dtype": self.dtype,
        }
        return json.dumps(content, indent=2)


def load_run(
    recipe_path: str | Path,
    deepspeed_path: str | Path | None,
    overrides: Iterable[str] = (),
    world_size: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> RunConfig:
    """Reads, merges and checks a run's configuration; starts nothing and imports neither torch nor deepspeed.

    `overrides` are `section.key=value`, with `deepspeed.key` and `cpmoe.key` for the JSON. Raises ConfigError
    (a ValueError) with one line per problem: origin, field path, value, constraint, legal choices.
    """
    recipe, deepspeed = read_settings(recipe_path, deepspeed_path, overrides)
    return resolve(recipe, deepspeed, world_size, environ)


def load_data(recipe_path: str | Path, overrides: Iterable[str] = ()) -> DataConfig:
    """The data block of a recipe, for what needs no model. Raises ConfigError."""
    recipe, _ = read_settings(recipe_path, None, overrides)
    try:
        return parse(DataConfig, recipe.block("data"), "data")
    except ConfigError as error:
        raise ConfigError(recipe.located(problem) for problem in error.problems) from None


def read_settings(
    recipe_path: str | Path, deepspeed_path: str | Path | None, overrides: Iterable[str] = ()
) -> tuple[Settings, Settings]:
    """Recipe and JSON with the overrides put over them, not yet checked."""
    recipe = read_recipe(recipe_path)
    if deepspeed_path is None:
        tree = json.loads(json.dumps(DEFAULT_DEEPSPEED))
        deepspeed = Settings("the default JSON", tree, prefix="deepspeed.")
    else:
        deepspeed = read_deepspeed(deepspeed_path)
    apply_overrides(recipe, deepspeed, list(overrides))
    return recipe, deepspeed


def resolve(
    recipe_settings: Settings,
    deepspeed_settings: Settings,
    world_size: int,
    environ: Mapping[str, str] = os.environ,
) -> RunConfig:
    """Resolves settings already read; see `load_run`."""
    if world_size < 1:
        raise ConfigError([Problem("the world size", "must be at least 1", world_size, "integers >= 1")])
    recipe, config = _parse_both(recipe_settings, deepspeed_settings)
    cpmoe, stage = config.cpmoe, config.zero_optimization.stage

    def locate(problem: Problem) -> Problem:
        if problem.source:
            return problem
        in_recipe = problem.path.partition(".")[0] in Recipe.model_fields
        return (recipe_settings if in_recipe else deepspeed_settings).located(problem)

    problems = [
        *checks.check_grid(cpmoe, recipe, world_size),
        *checks.check_ulysses(cpmoe, recipe),
        *checks.check_scores(cpmoe, recipe),
        *checks.check_sequence(cpmoe, recipe),
        *checks.check_experts(config, recipe),
        *checks.check_nodes(cpmoe, world_size),
        *checks.check_budget(cpmoe),
        *checks.check_zero(config),
        *checks.check_optimizer(config, recipe),
        *checks.check_packages(config),
        *checks.check_environment(environ),
    ]
    cp = cpmoe.context_parallel_size
    shares = recipe.train.micro_batch_size == 0
    given = recipe_settings.gives("train.micro_batch_size") and not shares
    sizes = BatchSizes(
        micro=recipe.train.micro_batch_size if given else None,
        accumulation=config.gradient_accumulation_steps or (1 if shares else None),
        total=recipe.train.global_batch_size or None,
    )
    solution = None if world_size % cp else solve(sizes, world_size // cp)
    slicing: str | Problem = "none"
    if isinstance(solution, tuple):
        has_experts = recipe.model.first_k_dense_replace < recipe.model.num_hidden_layers
        slicing = choose_slicing(cpmoe, solution[0], recipe.data.seq_len, has_experts)
    problems += [problem for problem in (solution, slicing) if isinstance(problem, Problem)]
    raise_if_any([locate(problem) for problem in problems])
    assert isinstance(solution, tuple) and isinstance(slicing, str)

    micro, accumulation, total = solution
    train = recipe.train.model_copy(update={"micro_batch_size": micro, "global_batch_size": total})
    recipe = recipe.model_copy(update={"train": train})
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if config.bf16.enabled else "float32"
    cpmoe = _with_coschedule(cpmoe, slices=slicing)
    policy = choose_policy(cpmoe, conditions_of(recipe, cpmoe, world_size, stage, dtype))
    if isinstance(policy, Problem):
        raise ConfigError([locate(policy)])
    if policy != cpmoe.coschedule.policy:
        slicing = "none" if policy == "serial" else slicing
        cpmoe = _with_coschedule(cpmoe, policy=policy, slices=slicing, measurement=None)
    chunks = checks.shard_chunks(cpmoe) * (2 if slicing == "causal" else 1)
    batch = BatchEquation(
        world_size=world_size,
        dp=world_size // cp,
        cp=cp,
        ep=cpmoe.expert_parallel_size,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        global_batch_size=total,
        seq_len=recipe.data.seq_len,
        padded_seq_len=-(-recipe.data.seq_len // chunks) * chunks,
    )
    return RunConfig(
        recipe=recipe,
        cpmoe=cpmoe,
        deepspeed=_deepspeed_dict(config, recipe, batch),
        batch=batch,
        dtype=dtype,
        zero_stage=stage,
        gradient_clipping=recipe.optim.max_grad_norm,
    )


def _parse_both(recipe_settings: Settings, deepspeed_settings: Settings) -> tuple[Recipe, DeepSpeedConfig]:
    """Both files as blocks, each with what the other one decides; raises with the problems of both."""
    auto_paths, problems = autos.take_autos(deepspeed_settings)
    tree, refused = take_refused(deepspeed_settings.tree)
    problems += refused
    tree = _without(tree, auto_paths)
    try:
        parse(DeepSpeedConfig, tree)
    except ConfigError as error:
        problems += error.problems
    problems = [deepspeed_settings.located(problem) for problem in problems]
    json_is_sound = not problems
    problems += autos.check_scheduler(recipe_settings, deepspeed_settings)
    problems += autos.share(recipe_settings, deepspeed_settings)
    try:
        recipe = parse(Recipe, recipe_settings.tree)
    except ConfigError as error:
        located = [recipe_settings.located(problem) for problem in error.problems]
        # A faulty value that the JSON gave was told already, by its name there.
        problems += [p for p in located if json_is_sound or not p.source.endswith(autos.JSON_NAMES)]
    raise_if_any(problems)

    for path in auto_paths:
        value = autos.auto_value(path, recipe)
        if value is not None:
            _put(tree, path, value)
    try:
        return recipe, parse(DeepSpeedConfig, tree)
    except ConfigError as error:
        raise ConfigError(deepspeed_settings.located(problem) for problem in error.problems) from None


def _deepspeed_dict(config: DeepSpeedConfig, recipe: Recipe, batch: BatchEquation) -> dict[str, Any]:
    resolved = config.model_dump(
        mode="json", exclude_unset=True, exclude_none=True, exclude={"cpmoe", "optimizer"}
    )
    offload = config.zero_optimization.offload_optimizer
    resolved.update(
        train_micro_batch_size_per_gpu=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        train_batch_size=batch.deepspeed_train_batch_size,
        gradient_clipping=recipe.optim.max_grad_norm if config.zero_optimization.stage else 0.0,
        zero_allow_untested_optimizer=True,
    )
    if config.bf16.enabled and config.communication_data_type is None:
        # Partial gradients of ranks cancel: summed in bfloat16 they triple the error of one process.
        resolved["communication_data_type"] = "fp32"
    if offload and offload.device != "none":
        resolved["zero_force_ds_cpu_optimizer"] = False
    return resolved


def _with_coschedule(cpmoe: CpmoeConfig, **changes: str | None) -> CpmoeConfig:
    return cpmoe.model_copy(update={"coschedule": cpmoe.coschedule.model_copy(update=changes)})


def _put(tree: dict, path: str, value: Any) -> None:
    *parents, key = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[key] = value


def _without(tree: dict, paths: list[str], prefix: str = "") -> dict:
    return {
        key: _without(value, paths, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
        if f"{prefix}{key}" not in paths
    }
