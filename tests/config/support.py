"""A small legal run, written to real files so that messages can name them."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from cpmoe.config.errors import ConfigError
from cpmoe.config.resolve import RunConfig, load_run

RECIPE: dict[str, Any] = {
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "data": {"seq_len": 2048},
    "optim": {"lr": 1e-3},
    "train": {"steps": 10, "out_dir": "runs/test"},
}
JSON: dict[str, Any] = {
    "zero_optimization": {"stage": 1},
    "cpmoe": {"context_parallel_size": 2, "expert_parallel_size": 2},
}


class Files:
    """A recipe and a JSON in a folder, changed by dotted paths; a value of `DELETE` removes the key."""

    DELETE = object()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.json = folder / "deepspeed.json"

    def load(
        self,
        recipe: dict[str, Any] | None = None,
        json_: dict[str, Any] | None = None,
        overrides: Sequence[str] = (),
        world_size: int = 4,
        environ: dict[str, str] | None = None,
    ) -> RunConfig:
        self.recipe.write_text(yaml.safe_dump(changed(RECIPE, recipe or {})))
        self.json.write_text(json.dumps(changed(JSON, json_ or {})))
        return load_run(self.recipe, self.json, list(overrides), world_size, environ or {})

    def refused(self, *args: Any, **kwargs: Any) -> list[str]:
        """The lines of the message, with the folder's name cut off; fails where nothing is refused."""
        try:
            self.load(*args, **kwargs)
        except ConfigError as error:
            return [line.replace(f"{self.folder}/", "") for line in str(error).splitlines()]
        raise AssertionError("nothing was refused")


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    tree = deepcopy(tree)
    for path, value in changes.items():
        *parents, key = path.split(".")
        block = tree
        for part in parents:
            block = block.setdefault(part, {})
        if value is Files.DELETE:
            del block[key]
        else:
            block[key] = value
    return tree
