"""Settings that recipe and JSON share: "auto" values, and what happens where both give one."""

from __future__ import annotations

from typing import Any, NamedTuple

from cpmoe.config.errors import Problem, show
from cpmoe.config.recipe import Recipe
from cpmoe.config.settings import Settings, leaves

OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw", "SGD": "sgd"}
"""JSON name -> recipe name. DeepSpeed's "Adam" decays weights as AdamW does, unless told otherwise."""

JSON_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


class Shared(NamedTuple):
    """One setting with two names."""

    json: str
    recipe: str


SHARED = (
    Shared("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
    Shared("train_batch_size", "train.global_batch_size"),
    Shared("gradient_clipping", "optim.max_grad_norm"),
    Shared("optimizer.type", "optim.name"),
    Shared("optimizer.params.lr", "optim.lr"),
    Shared("optimizer.params.betas", "optim.betas"),
    Shared("optimizer.params.eps", "optim.eps"),
    Shared("optimizer.params.weight_decay", "optim.weight_decay"),
    Shared("optimizer.params.momentum", "optim.momentum"),
    Shared("scheduler.params.warmup_max_lr", "optim.lr"),
    Shared("scheduler.params.warmup_num_steps", "optim.warmup_steps"),
    Shared("scheduler.params.cos_min_ratio", "optim.min_lr_ratio"),
)
JSON_NAMES = tuple(pair.json for pair in SHARED)
BATCH_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
FOLLOWS = {
    "scheduler.params.total_num_steps": "train.steps",
    "tensorboard.output_path": "train.out_dir",
    "csv_monitor.output_path": "train.out_dir",
}
"""Keys of the JSON that may be "auto" and say something else than the recipe's setting they follow."""
FROM_ZERO = ("scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio")
LEGAL_AUTO = (*(pair.json for pair in SHARED), "gradient_accumulation_steps", *FOLLOWS, *FROM_ZERO)


def take_autos(deepspeed: Settings) -> tuple[list[str], list[Problem]]:
    """Paths of the JSON that say "auto", and a problem for each that the recipe cannot fill."""
    autos = [path for path, value in leaves(deepspeed.tree) if value == "auto"]
    # cpmoe's own "auto" choices (of a backend) are values like any other.
    foreign = [path for path in autos if path not in LEGAL_AUTO and not path.startswith("cpmoe.")]
    problems = [
        Problem(path, 'the recipe has no value for it, "auto" is no choice here', "auto", _auto_legal())
        for path in foreign
    ]
    return [path for path in autos if path in LEGAL_AUTO or path in foreign], problems


def share(recipe: Settings, deepspeed: Settings) -> list[Problem]:
    """Puts into `recipe` what only the JSON gives; returns a problem for each setting given differently."""
    problems = []
    for json_path, recipe_path in SHARED:
        if not deepspeed.gives(json_path):
            continue
        value = _as_recipe(json_path, deepspeed.get(json_path))
        if not recipe.gives(recipe_path) or _is_zero_auto(recipe, recipe_path):
            origin = deepspeed.located(Problem(json_path, ""))
            recipe.put(recipe_path, value, f"{origin.source}: {origin.path}")
        elif not _equal(recipe.get(recipe_path), value):
            problems.append(_conflict(recipe, recipe_path, deepspeed, json_path))
    return problems


def check_scheduler(recipe: Settings, deepspeed: Settings) -> list[Problem]:
    """Problems of a "scheduler" block beside a recipe that describes a schedule as well."""
    if not deepspeed.gives("scheduler"):
        return []
    problems = []
    if recipe.gives("optim.schedule"):
        problems.append(_conflict(recipe, "optim.schedule", deepspeed, "scheduler.type"))
    for json_path, recipe_path in SHARED:
        unused = json_path.startswith("scheduler.") and not isinstance(
            deepspeed.get(json_path), (int, float, str)
        )
        if unused and recipe_path != "optim.lr" and recipe.gives(recipe_path):
            place = recipe.place(recipe_path)
            constraint = f"has no effect beside the scheduler of {deepspeed.place('scheduler')}"
            legal = f'"auto" in {json_path}, or leave it out here'
            problems.append(Problem(recipe_path, constraint, recipe.get(recipe_path), legal, place))
    return problems


def auto_value(path: str, recipe: Recipe) -> Any:
    """What "auto" at `path` of the JSON becomes; None for the batch sizes, which the equation decides."""
    if path in BATCH_SIZES:
        return None
    if path in FROM_ZERO:
        return 0.0
    followed = FOLLOWS.get(path) or next(pair.recipe for pair in SHARED if pair.json == path)
    value: Any = recipe
    for part in followed.split("."):
        value = getattr(value, part)
    return JSON_OPTIMIZERS[value] if path == "optimizer.type" else value


def _conflict(recipe: Settings, recipe_path: str, deepspeed: Settings, json_path: str) -> Problem:
    other = deepspeed.located(Problem(json_path, ""))
    constraint = f"{other.source} says {other.path} = {show(deepspeed.get(json_path))}"
    legal = 'one value in both, or in one place only ("auto" in the JSON)'
    return recipe.located(Problem(recipe_path, constraint, recipe.get(recipe_path), legal))


def _auto_legal() -> str:
    return f'a value, or leave it out ("auto" works for {", ".join(LEGAL_AUTO)})'


def _as_recipe(json_path: str, value: Any) -> Any:
    return OPTIMIZERS.get(str(value), value) if json_path == "optimizer.type" else value


def _is_zero_auto(recipe: Settings, path: str) -> bool:
    return path == "train.global_batch_size" and recipe.get(path) == 0


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    try:
        return float(left) == float(right)
    except (TypeError, ValueError):
        return left == right
