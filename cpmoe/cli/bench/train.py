"""Training speed with CP = EP = 2, beside transformers' Qwen3-MoE under plain data parallelism.

Both train the same architecture on the same two single-thread processes, in turn, with ZeRO-1 and
AdamW in float32, and 2 x 2048 tokens a step.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cpmoe.cli.bench.report import conditions, report, spread
from cpmoe.cli.bench.teams import Team, Work, paired_ratio, take_turns
from cpmoe.config.recipe import ModelConfig

SEQ_LEN = 2048
# Random tokens at a higher rate throw the router off balance, which no trained model shows.
LEARNING_RATE = 1e-4
PROCESSES = 2
# Steps until the balance loss has evened the experts' load, as it is in training.
WARMUP = 12
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "use_qk_norm": True,
}
RECIPE: dict[str, Any] = {
    "model": MODEL,
    "data": {"seq_len": SEQ_LEN},
    "optim": {"lr": LEARNING_RATE, "schedule": "constant"},
    "train": {"steps": 1000, "micro_batch_size": 2, "global_batch_size": 2, "out_dir": "unused"},
}
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 1},
    "cpmoe": {
        "context_parallel_size": 2,
        "expert_parallel_size": 2,
        "coschedule": {"policy": "overlap"},
    },
}


def run(json_path: str | Path | None, rounds: int = 7) -> dict[str, Any]:
    """Measures, prints, and returns {"figures", "conditions"}."""
    from cpmoe.model.flops import flops_per_token

    with (
        Team(_cpmoe, PROCESSES, 1) as ours,
        Team(_transformers, PROCESSES, 1) as theirs,
        Team(_matmul, PROCESSES, 1) as products,
    ):
        seconds = take_turns({"cpmoe": ours, "transformers": theirs}, rounds, WARMUP)
        rates = []
        for _ in range(rounds):
            rates.append(sum(products.turn()[1]))
    tokens = PROCESSES * SEQ_LEN
    flops = flops_per_token(ModelConfig.model_validate(MODEL), SEQ_LEN) * tokens
    speed = {name: tokens / median(values) for name, values in seconds.items()}
    figures = {
        "train.tokens_per_second": speed["cpmoe"],
        "train.transformers_tokens_per_second": speed["transformers"],
        "train.ratio_vs_transformers": paired_ratio(seconds["transformers"], seconds["cpmoe"]),
        "train.fraction_of_matmul_rate": flops / median(seconds["cpmoe"]) / median(rates),
    }
    rows = [
        (
            name,
            f"{median(values):.3f}",
            spread(values),
            f"{speed[name]:,.0f}",
            f"{flops / median(values) / 1e9:.1f}",
        )
        for name, values in seconds.items()
    ]
    return report(
        "training step, 2 processes",
        figures,
        conditions(rounds=rounds, threads_per_process=1, matmul_gflops=round(median(rates) / 1e9, 1)),
        rows,
        ("", "seconds", "quartiles", "tokens/s", "GFLOP/s"),
        json_path,
    )


def _tokens(rank: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, MODEL["vocab_size"], (batch, SEQ_LEN), generator=generator)


def _cpmoe(rank: int, size: int) -> Work:
    import yaml

    from cpmoe.attention.slicing import shard_slices
    from cpmoe.config.resolve import load_run
    from cpmoe.model.transformer import LossScale
    from cpmoe.training.engine import TrainingEngine, build_groups, build_model, init_distributed

    with tempfile.TemporaryDirectory() as folder:
        recipe, config = Path(folder, "recipe.yaml"), Path(folder, "deepspeed.json")
        recipe.write_text(yaml.safe_dump(RECIPE))
        config.write_text(json.dumps(DEEPSPEED))
        settings = load_run(recipe, config, [], size)
    init_distributed()
    groups = build_groups(settings)
    engine = TrainingEngine(settings, build_model(settings, groups), groups)
    tokens_BS = _tokens(0, PROCESSES)
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[:, -1] = -100
    positions_BS = torch.arange(SEQ_LEN).repeat(PROCESSES, 1)
    scale = LossScale(PROCESSES * (SEQ_LEN - 1), PROCESSES * SEQ_LEN, 1)

    def step() -> None:
        documents_BS = torch.zeros_like(tokens_BS)
        cp_rank = groups.grid.context_rank(rank)
        slices = shard_slices(
            tokens_BS, labels_BS, positions_BS, documents_BS, size, cp_rank, slicing=settings.slicing
        )
        engine.micro_step(slices, scale)
        engine.step()

    return step


def _transformers(rank: int, size: int) -> Work:
    import deepspeed
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from cpmoe.training.engine import init_distributed

    init_distributed()
    settings = {name: value for name, value in MODEL.items() if name != "use_qk_norm"}
    settings |= {
        "intermediate_size": MODEL["moe_intermediate_size"],
        "norm_topk_prob": True,
        "max_position_embeddings": SEQ_LEN,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(settings))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
        ),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
        },
        dist_init_required=False,
    )
    tokens_BS = _tokens(rank, 1)

    def step() -> None:
        engine.backward(engine(input_ids=tokens_BS, labels=tokens_BS).loss)
        engine.step()

    return step


def _matmul(rank: int, size: int) -> Work:
    from cpmoe.training.metrics import matmul_rate

    return matmul_rate
