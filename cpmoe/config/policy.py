"""Which policy of the co-schedule a run takes: given, needless to ask, measured before, or to be measured.

A measurement is a JSON file: {"policy": serial | overlap | null, "conditions": {...}, "timings": [...]}; null
where it is not finished. A run with policy "auto" writes one into its folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cpmoe.config.deepspeed import CpmoeConfig
from cpmoe.config.errors import Problem, show
from cpmoe.config.recipe import Recipe
from cpmoe.config.settings import leaves

PATH = "cpmoe.coschedule.measurement"


def choose_policy(cpmoe: CpmoeConfig, conditions: dict[str, Any]) -> str | Problem:
    """serial, overlap, or auto where the run has to measure; or what forbids the given measurement.

    `cpmoe` with its slices resolved. "auto" is serial where nothing is sliced, or nothing travels that a
    slice could hide.
    """
    coschedule = cpmoe.coschedule
    if coschedule.policy != "auto":
        return coschedule.policy
    if coschedule.slices == "none" or cpmoe.context_parallel_size == cpmoe.expert_parallel_size == 1:
        return "serial"
    return "auto" if coschedule.measurement is None else _stored_policy(coschedule.measurement, conditions)


def conditions_of(
    recipe: Recipe, cpmoe: CpmoeConfig, world_size: int, stage: int, dtype: str
) -> dict[str, Any]:
    """What a measurement depends on, but for the machines: plain data, equal where it holds for both runs."""
    return {
        "world_size": world_size,
        "zero_stage": stage,
        "dtype": dtype,
        "micro_batch_size": recipe.train.micro_batch_size,
        "seq_len": recipe.data.seq_len,
        "recompute": recipe.train.recompute,
        "slices": cpmoe.coschedule.slices,
        # The size of the vocabulary is known only once the data is there.
        "model": recipe.model.model_dump(mode="json", exclude={"vocab_size"}),
        **cpmoe.model_dump(mode="json", exclude={"coschedule"}),
    }


def differences(stored: dict[str, Any], conditions: dict[str, Any]) -> list[str]:
    """Each condition in which a stored measurement and this run differ, in words."""
    there, here = dict(leaves(stored)), dict(leaves(conditions))
    return [
        f"{name} {show(there.get(name))} there and {show(here.get(name))} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _stored_policy(path: str, conditions: dict[str, Any]) -> str | Problem:
    legal = "the coschedule.json in the folder of a run like this one, or leave it out to measure"
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        policy, taken_under = stored["policy"], stored["conditions"]
    except OSError as error:
        return Problem(PATH, f"can not be read: {error.strerror}", path, legal)
    except (ValueError, TypeError, KeyError):
        return Problem(PATH, "is no measurement of the co-schedule", path, legal)
    if policy not in ("serial", "overlap"):
        return Problem(PATH, "was not finished: it chose nothing", path, legal)
    if found := differences(taken_under, conditions):
        return Problem(PATH, f"was taken under other conditions: {'; '.join(found)}", path, legal)
    return policy
