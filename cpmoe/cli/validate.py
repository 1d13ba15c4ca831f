"""`python -m cpmoe validate`: what a run's arguments resolve to, or why they are refused."""

from __future__ import annotations

import argparse
import math

import yaml

from cpmoe.config.deepspeed import CpmoeConfig
from cpmoe.config.errors import ConfigError
from cpmoe.config.resolve import RunConfig, read_settings, resolve
from cpmoe.config.settings import Settings
from cpmoe.config.validation import parse
from cpmoe.data.readiness import data_report
from cpmoe.parallel.grid import RankGrid

SHOWN_GROUPS = 4
SHOWN_RANKS = 8


def main(arguments: list[str]) -> int:
    """Prints the resolved run. Raises ValueError where it, or the data that is there, is refused."""
    options = _parse_arguments(arguments)
    recipe, deepspeed = read_settings(options.recipe, options.deepspeed_config, options.overrides)
    world_size = options.world_size or _smallest_world(deepspeed)
    run = resolve(recipe, deepspeed, world_size)
    state, notes = data_report(run.recipe)
    print(describe(run))
    print(f"data\n{_indent(state)}")
    for note in [*notes, *schedule_notes(run)]:
        print(f"note: {note}")
    ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
    if options.world_size is None:
        ranks += " (the fewest that this JSON can use; --world_size checks another number)"
    clip = run.gradient_clipping or "off"
    print(f"OK: {run.dtype}, ZeRO stage {run.zero_stage}, gradient clipping {clip}, {ranks}")
    return 0


def describe(run: RunConfig) -> str:
    """The resolved configuration, the batch equation and the groups, as text."""
    batch = run.batch
    sections = {
        "recipe": _yaml(run.recipe_tree()),
        "cpmoe": _yaml(run.cpmoe.model_dump(mode="json", exclude_none=True, exclude={"communication"})),
        "DeepSpeed": _yaml(run.deepspeed),
        "batch": f"{batch.describe()}\nDeepSpeed counts every rank as a data-parallel one: train_batch_size "
        f"{batch.deepspeed_train_batch_size:,} = {batch.micro_batch_size:,} x "
        f"{batch.gradient_accumulation_steps:,} x world {batch.world_size:,}",
        "groups": _groups(run),
    }
    return "\n".join(f"{title}\n{_indent(text)}" for title, text in sections.items())


def schedule_notes(run: RunConfig) -> list[str]:
    """What is legal in the recipe's schedule, and probably not meant."""
    optim, steps = run.recipe.optim, run.recipe.train.steps
    if "scheduler" in run.deepspeed or optim.warmup_steps < steps:
        return []
    reached = min(steps / optim.warmup_steps, 1)
    return [
        f"optim.warmup_steps = {optim.warmup_steps}: is not below train.steps {steps}; the learning rate "
        f"ends at {reached:.0%} of optim.lr and never decays"
    ]


def _parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cpmoe validate", description=__doc__)
    parser.add_argument("--recipe", required=True, help="YAML: what is trained")
    parser.add_argument("--deepspeed_config", help="DeepSpeed JSON: how it runs (default: ZeRO-1, float32)")
    parser.add_argument(
        "--world_size", "--num_gpus", type=_positive, help="ranks (default: the fewest that CP and EP allow)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change one setting")
    return parser.parse_intermixed_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _smallest_world(deepspeed: Settings) -> int:
    try:
        cpmoe = parse(CpmoeConfig, deepspeed.block("cpmoe"))
    except ConfigError:
        return 1  # the whole JSON is parsed next, and says what is wrong with its origin
    cp, ep = cpmoe.context_parallel_size, cpmoe.expert_parallel_size
    return cp * ep if cpmoe.rank_order[:2] == ("cp", "ep") else math.lcm(cp, ep)


def _groups(run: RunConfig) -> str:
    grid = RankGrid(
        run.batch.world_size,
        run.cpmoe.context_parallel_size,
        run.cpmoe.expert_parallel_size,
        run.cpmoe.rank_order,
        run.cpmoe.attention.ulysses_size,
    )
    kinds = {
        "ring": (grid.ring_ranks(), "share a sequence"),
        "expert": (grid.expert_ranks(), "hold all experts together"),
        "replica": (grid.replica_ranks(), "hold the same experts"),
    }
    if grid.ulysses_size > 1:
        kinds["ulysses"] = grid.ulysses_ranks(), "exchange heads at one place of a ring"
    return "\n".join(
        f"{name:7}  {len(lists)} x {len(lists[0])} ranks that {meaning}: {_lists(lists)}"
        for name, (lists, meaning) in kinds.items()
    )


def _lists(lists: list[list[int]]) -> str:
    shown = [
        "[" + " ".join(map(str, ranks[:SHOWN_RANKS])) + (" ..." if len(ranks) > SHOWN_RANKS else "") + "]"
        for ranks in lists[:SHOWN_GROUPS]
    ]
    return " ".join([*shown, "..."] if len(lists) > SHOWN_GROUPS else shown)


def _yaml(tree: dict) -> str:
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False).rstrip()


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
