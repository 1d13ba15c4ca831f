"""A tiny run on a small text, for tests of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from cpmoe.config.resolve import RunConfig, load_run

MODEL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "router_z_loss_coef": 1e-3,
}


def write_text(folder: Path) -> Path:
    """Forty small documents in a jsonl file."""
    path = folder / "text.jsonl"
    lines = [{"text": f"document {i}: " + "the quick brown fox " * (i % 7 + 1)} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tiny_run(
    folder: Path, world_size: int, overrides: tuple[str, ...] = (), deepspeed: dict[str, Any] | None = None
) -> RunConfig:
    """A run of CP x EP as `deepspeed` says (2 x 2 by default) whose files lie in `folder`."""
    recipe = {
        "model": MODEL,
        "data": {
            "source": str(folder / "text.jsonl"),
            "path": str(folder / "data"),
            "seq_len": 30,
            "heldout_fraction": 0.2,
        },
        "optim": {"lr": 0.01, "schedule": "linear", "max_grad_norm": 0.5},
        "train": {
            "steps": 4, "global_batch_size": 2, "out_dir": str(folder / "run"), "eval_sequences": 3,
        },
    }  # fmt: skip
    config = {
        "zero_optimization": {"stage": 1},
        "cpmoe": {
            "context_parallel_size": min(2, world_size),
            "expert_parallel_size": min(2, world_size),
        },
        **(deepspeed or {}),
    }
    recipe_path, config_path = folder / "recipe.yaml", folder / "deepspeed.json"
    recipe_path.write_text(yaml.safe_dump(recipe))
    config_path.write_text(json.dumps(config))
    return load_run(recipe_path, config_path, overrides, world_size)
