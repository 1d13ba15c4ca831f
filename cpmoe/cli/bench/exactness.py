"""Twenty optimizer steps on every kind of layout, beside one process: how far do loss and norm drift?

One small model, SGD and clipping that bites, packed documents, two micro-steps in all layouts, float32,
through the DeepSpeed engine. What differs between layouts is the order of float32 sums.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cpmoe.cli.bench.report import conditions, report
from cpmoe.cli.bench.teams import Team, Work

STEPS = 20
SEQUENCES = 8
ACCUMULATION = 2
SEQ_LEN = 90
RECIPE: dict[str, Any] = {
    "model": {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "use_qk_norm": True,
        "router_z_loss_coef": 1e-3,
        "initializer_range": 0.1,
    },
    "data": {"seq_len": SEQ_LEN},
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "constant", "max_grad_norm": 0.5},
    "train": {"steps": STEPS, "global_batch_size": SEQUENCES, "out_dir": "unused"},
}


class Layout(NamedTuple):
    """A run's degrees; DP is processes / cp."""

    processes: int
    cp: int
    ep: int
    zero: int
    more: dict[str, Any] | None = None

    def __str__(self) -> str:
        text = f"DP {self.processes // self.cp} CP {self.cp} EP {self.ep} ZeRO-{self.zero}"
        chosen = [str(value) for block in (self.more or {}).values() for value in block.values()]
        return " ".join([text, *chosen])


LAYOUTS = [
    Layout(1, 1, 1, 0),
    Layout(2, 2, 1, 0),
    Layout(2, 2, 2, 1),
    Layout(2, 1, 2, 2),
    Layout(2, 2, 2, 3),
    Layout(2, 2, 2, 1, {"attention": {"strategy": "allgather"}}),
    Layout(4, 2, 2, 0),
    Layout(4, 4, 2, 1),
    Layout(4, 2, 4, 2),
    Layout(4, 2, 2, 3),
    Layout(4, 4, 4, 3),
]


def run(json_path: str | Path | None) -> dict[str, Any]:
    """Measures, prints, and returns {"figures", "conditions"}."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for layout in LAYOUTS:
        with Team(_train, layout.processes, 1, layout) as team:
            curves[str(layout)] = team.turn()[1][0]
    alone = curves[str(LAYOUTS[0])]
    rows, worst = [], {"loss": 0.0, "grad_norm": 0.0}
    for name, curve in curves.items():
        drift = {
            what: max(abs(a[i] - b[i]) / b[i] for a, b in zip(curve, alone, strict=True))
            for i, what in enumerate(worst)
        }
        worst = {what: max(worst[what], drift[what]) for what in worst}
        rows.append((name, f"{curve[-1][0]:.6f}", f"{drift['loss']:.1e}", f"{drift['grad_norm']:.1e}"))
    figures = {f"exactness.{what}_drift": value for what, value in worst.items()}
    return report(
        f"{STEPS} steps in float32 on {len(LAYOUTS)} layouts; largest relative difference to one process",
        figures,
        conditions(steps=STEPS, optimizer="SGD, clipping 0.5"),
        rows,
        ("layout", "last loss", "loss", "gradient norm"),
        json_path,
    )


def _batch(step: int) -> tuple[torch.Tensor, ...]:
    """Tokens, labels, positions, documents [sequences, S]; documents of 1 to 60 tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 128, (SEQUENCES, SEQ_LEN), generator=generator)
    # Every token follows from the one before, so that there is something to learn.
    for place in range(1, SEQ_LEN):
        tokens[:, place] = (tokens[:, place - 1] * 5 + tokens[:, place] % 4) % 128
    labels = tokens.roll(-1, 1)
    positions, documents = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row in range(SEQUENCES):
        place = document = 0
        while place < SEQ_LEN:
            length = min(int(torch.randint(1, 61, (), generator=generator)), SEQ_LEN - place)
            positions[row, place : place + length] = torch.arange(length)
            documents[row, place : place + length] = document
            labels[row, place + length - 1] = -100
            place, document = place + length, document + 1
    labels[0] = -100
    return tokens, labels, positions, documents


def _train(rank: int, size: int, layout: Layout) -> Work:
    import torch.distributed as dist
    import yaml

    from cpmoe.attention.sharding import shard_batch
    from cpmoe.config.resolve import load_run
    from cpmoe.model.transformer import LossScale
    from cpmoe.training.engine import TrainingEngine, build_groups, build_model, init_distributed

    micro = SEQUENCES // ACCUMULATION // (size // layout.cp)
    config = {
        "zero_optimization": {"stage": layout.zero},
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": ACCUMULATION,
        "cpmoe": {
            "context_parallel_size": layout.cp,
            "expert_parallel_size": layout.ep,
            **(layout.more or {}),
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        recipe_path, config_path = Path(folder, "recipe.yaml"), Path(folder, "deepspeed.json")
        recipe_path.write_text(yaml.safe_dump(RECIPE))
        config_path.write_text(json.dumps(config))
        settings = load_run(recipe_path, config_path, [], size)
    init_distributed()
    groups = build_groups(settings)
    engine = TrainingEngine(settings, build_model(settings, groups), groups)
    grid = groups.grid

    def train() -> list[tuple[float, float]]:
        curve = []
        for step in range(STEPS):
            batch = _batch(step % 2)
            scale = LossScale(int((batch[1] != -100).sum()), batch[0].numel(), ACCUMULATION)
            loss = torch.zeros((), dtype=torch.float64)
            for index in range(ACCUMULATION):
                first = (index * grid.data_parallel_size + grid.data_rank(rank)) * micro
                tokens, labels, positions, documents = (field[first : first + micro] for field in batch)
                cp_rank = grid.context_rank(rank)
                shard = shard_batch(tokens, labels, positions, documents, layout.cp, cp_rank)
                loss += engine.micro_step((shard,), scale).cross_entropy.double() / scale.num_label_tokens
            dist.all_reduce(loss)
            curve.append((float(loss), engine.step()))
        return curve

    return train
