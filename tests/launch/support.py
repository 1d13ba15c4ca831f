"""Settings that make any recipe and JSON of the repository small enough to train in seconds."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
JSONS = sorted((ROOT / "ds_configs").glob("*.json"))

TINY = (
    "model.vocab_size=auto",
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=8",
    "model.intermediate_size=32",
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=16",
    "data.tokenizer=bytes",
    "data.seq_len=60",
    "data.heldout_fraction=0.2",
    "optim.warmup_steps=1",
    "train.global_batch_size=2",
    "train.eval_every=0",
    "train.eval_sequences=2",
    "train.save_every=0",
    "train.log_every=1",
)
"""60 tokens are no multiple of the 4 chunks of two ranks: every run pads."""


def tiny(folder: Path, run: str, steps: int) -> list[str]:
    """Overrides for a tiny run of `steps` steps in `folder`/`run`; its text is prepared in `folder`, once."""
    text = folder / "text.jsonl"
    if not text.exists():
        lines = [{"text": f"document {i}: " + "the quick brown fox " * (i % 7 + 1)} for i in range(60)]
        text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = (f"data.source={text}", f"data.path={folder / 'data'}", f"train.out_dir={folder / run}")
    return [*TINY, *places, f"train.steps={steps}"]


def records(run: Path, kind: str) -> list[dict]:
    """The records of one kind, train or eval, in a run's metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def train(rank: int, world_size: int, recipe: Path, deepspeed: Path | None, overrides: list[str]) -> str:
    """On a rank of `run_distributed`, without a launcher: trains to the end; returns the run's dtype."""
    from cpmoe.config.resolve import load_run
    from cpmoe.training.engine import init_distributed
    from cpmoe.training.trainer import Trainer
    from recipes.pretrain import prepare_data

    run, prepared = prepare_data(load_run(recipe, deepspeed, overrides, world_size))
    Trainer(run, prepared, init_distributed()).train()
    return run.dtype
