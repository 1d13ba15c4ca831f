"""Ring and all-gather attention on two single-thread processes, against torch's SDPA on two threads.

Forward and backward of one causal document: 8 heads, 4 KV heads, head size 64, float32, zigzag.

Shape letters: B batch, S full sequence, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from cpmoe.attention.allgather import allgather_attention
from cpmoe.attention.plan import build_plan
from cpmoe.attention.ring import ring_attention
from cpmoe.cli.bench.report import conditions, report, spread
from cpmoe.cli.bench.teams import Team, Work, paired_ratio, take_turns

# Sequence length -> (forward and backward passes in a turn, turns): a turn lasts about half a second.
LENGTHS = {2048: (4, 31), 8192: (1, 15)}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
STRATEGIES = {"ring": ring_attention, "all-gather": allgather_attention}


def run(json_path: str | Path | None) -> dict[str, Any]:
    """Measures, prints, and returns {"figures", "conditions"}."""
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    for seq_len, (passes, turns) in LENGTHS.items():
        with (
            Team(_single, 1, 2, seq_len, passes) as single,
            Team(_sharded, 2, 1, "ring", seq_len, passes) as ring,
            Team(_sharded, 2, 1, "all-gather", seq_len, passes) as allgather,
        ):
            seconds = take_turns({"single": single, "ring": ring, "all-gather": allgather}, turns)
        figures[f"attention.ratio_vs_single.seq{seq_len}"] = paired_ratio(seconds["ring"], seconds["single"])
        for name, values in seconds.items():
            ratios = [ours / theirs for ours, theirs in zip(values, seconds["single"], strict=True)]
            rows.append(
                (
                    f"{seq_len:,} tokens, {name}",
                    f"{1e3 * median(values) / passes:.1f} ms",
                    f"{median(ratios):.3f}",
                    spread(ratios),
                )
            )
    return report(
        "attention, forward and backward: two processes of one thread; single is one process of two",
        figures,
        conditions(heads=NUM_HEADS, kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="float32"),
        rows,
        ("", "median", "of single, paired", "quartiles"),
        json_path,
    )


def _tensors(num_tokens: int) -> list[torch.Tensor]:
    """[q, k, v, grad_out], tokens before heads as a projection makes them."""
    torch.manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    tensors = [torch.randn(1, num_tokens, h, HEAD_DIM) for h in heads]
    for leaf in tensors[:3]:
        leaf.requires_grad_()
    return tensors


def _single(rank: int, size: int, seq_len: int, passes: int) -> Work:
    q_BSHD, k_BSGD, v_BSGD, grad_out_BSHD = _tensors(seq_len)

    def work() -> None:
        for _ in range(passes):
            q_BHSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q_BSHD, k_BSGD, v_BSGD))
            out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out_BHSD, (q_BSHD, k_BSGD, v_BSGD), grad_out_BSHD.transpose(1, 2))

    return work


def _sharded(rank: int, size: int, strategy: str, seq_len: int, passes: int) -> Work:
    ring, ring_grad = (dist.new_group(list(range(size))) for _ in range(2))
    q_BTHD, k_BTGD, v_BTGD, grad_out_BTHD = _tensors(seq_len // size)
    plan = build_plan(torch.zeros(1, seq_len, dtype=torch.long), size, rank)
    attention = STRATEGIES[strategy]

    def work() -> None:
        for _ in range(passes):
            out_BTHD = attention(q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad)
            torch.autograd.grad(out_BTHD, (q_BTHD, k_BTGD, v_BTGD), grad_out_BTHD)

    return work
