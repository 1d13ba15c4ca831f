"""Ring and all-gather attention on two single-thread processes against one of two threads; plans.

Forward and backward, float32: 8 heads, 4 KV heads, head size 64, zigzag.

- ratio_vs_single: one causal document, of the time of torch's SDPA
- window_time_ratio: a window of 1024 at 16384 tokens, of the time that its share of the (query, key) pairs
  takes without a window; window_bytes_ratio: what is sent, of what other ranks' queries see
- packed_ratio: documents of 512 tokens, of the time of SDPA on one batch of them
- plan.*: max over mean work of the ranks on a skewed packing, and seconds to make a plan

Shape letters: B batch, T local tokens, S full sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from cpmoe.attention.allgather import allgather_attention
from cpmoe.attention.mask import CAUSAL, Mask
from cpmoe.attention.plan import build_plan
from cpmoe.attention.ring import ring_attention
from cpmoe.cli.bench.plans import WINDOW, WINDOW_SEQ_LEN, draw_layouts, pairs_ratio, plan_figures
from cpmoe.cli.bench.report import conditions, report, spread
from cpmoe.cli.bench.teams import Team, Work, paired_ratio, take_turns

# Sequence length -> (forward and backward passes in a turn, turns): a turn lasts about half a second.
LENGTHS = {2048: (4, 31), 8192: (1, 15)}
# Passes with the window and turns; a turn without it takes about two seconds.
WINDOW_PASSES, WINDOW_TURNS = 4, 7
PACKED_SEQ_LEN, DOCUMENT_LEN, PACKED_PASSES, PACKED_TURNS = 16384, 512, 2, 11
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
STRATEGIES = {"ring": ring_attention, "all-gather": allgather_attention}


def run(json_path: str | Path | None) -> dict[str, Any]:
    """Measures, prints, and returns {"figures", "conditions"}; draws two plans beside the JSON file."""
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    for seq_len, (passes, turns) in LENGTHS.items():
        with (
            Team(_single, 1, 2, seq_len, 1, passes) as single,
            Team(_sharded, 2, 1, "ring", seq_len, 1, CAUSAL, passes) as ring,
            Team(_sharded, 2, 1, "all-gather", seq_len, 1, CAUSAL, passes) as allgather,
        ):
            seconds = take_turns({"single": single, "ring": ring, "all-gather": allgather}, turns)
        figures[f"attention.ratio_vs_single.seq{seq_len}"] = paired_ratio(seconds["ring"], seconds["single"])
        rows += _rows(f"{seq_len:,} tokens", seconds, "single", passes)
    figures["attention.window_time_ratio"] = _window_time_ratio(rows)
    figures["attention.packed_ratio"] = _packed_ratio(rows)
    of_plans, plan_rows = plan_figures()
    figures.update(of_plans)
    if json_path is not None:
        draw_layouts(Path(json_path).parent)
    return report(
        "attention, forward and backward: two processes of one thread; single is one process of two",
        figures,
        conditions(heads=NUM_HEADS, kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="float32"),
        rows + [(*row, "") for row in plan_rows],
        ("", "median", "of single, paired", "quartiles"),
        json_path,
    )


def _window_time_ratio(rows: list[tuple[str, ...]]) -> float:
    args = ("ring", WINDOW_SEQ_LEN, 1)
    with (
        Team(_sharded, 2, 1, *args, CAUSAL, 1) as whole,
        Team(_sharded, 2, 1, *args, WINDOW, WINDOW_PASSES) as window,
    ):
        seconds = take_turns({"without window": whole, "window 1024": window}, WINDOW_TURNS)
    share = WINDOW_PASSES * pairs_ratio(2)
    needed = [share * second for second in seconds.pop("without window")]
    rows += _rows(f"{WINDOW_SEQ_LEN:,} tokens", {"needed": needed, **seconds}, "needed", WINDOW_PASSES)
    return paired_ratio(seconds["window 1024"], needed)


def _packed_ratio(rows: list[tuple[str, ...]]) -> float:
    num_documents = PACKED_SEQ_LEN // DOCUMENT_LEN
    args = (PACKED_SEQ_LEN, num_documents)
    with (
        Team(_single, 1, 2, *args, PACKED_PASSES) as single,
        Team(_sharded, 2, 1, "ring", *args, CAUSAL, PACKED_PASSES) as ring,
    ):
        seconds = take_turns({"single": single, "ring": ring}, PACKED_TURNS)
    rows += _rows(f"{num_documents} documents of {DOCUMENT_LEN}", seconds, "single", PACKED_PASSES)
    return paired_ratio(seconds["ring"], seconds["single"])


def _rows(what: str, seconds: dict[str, list[float]], base: str, passes: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, values in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(values, seconds[base], strict=True)]
        milliseconds = f"{1e3 * median(values) / passes:.1f} ms"
        rows.append((f"{what}, {name}", milliseconds, f"{median(ratios):.3f}", spread(ratios)))
    return rows


def _tensors(batch_size: int, num_tokens: int) -> list[Tensor]:
    """[q, k, v, grad_out], tokens before heads as a projection makes them."""
    torch.manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    tensors = [torch.randn(batch_size, num_tokens, h, HEAD_DIM) for h in heads]
    for leaf in tensors[:3]:
        leaf.requires_grad_()
    return tensors


def _single(rank: int, size: int, seq_len: int, num_documents: int, passes: int) -> Work:
    q_BSHD, k_BSGD, v_BSGD, grad_out_BSHD = _tensors(num_documents, seq_len // num_documents)

    def work() -> None:
        for _ in range(passes):
            q_BHSD, k_BGSD, v_BGSD = (x.transpose(1, 2) for x in (q_BSHD, k_BSGD, v_BSGD))
            out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out_BHSD, (q_BSHD, k_BSGD, v_BSGD), grad_out_BSHD.transpose(1, 2))

    return work


def _sharded(
    rank: int, size: int, strategy: str, seq_len: int, num_documents: int, mask: Mask, passes: int
) -> Work:
    ring, ring_grad = (dist.new_group(list(range(size))) for _ in range(2))
    q_BTHD, k_BTGD, v_BTGD, grad_out_BTHD = _tensors(1, seq_len // size)
    documents_BS = torch.arange(seq_len)[None] * num_documents // seq_len
    plan = build_plan(documents_BS, size, rank, mask=mask)
    attention = STRATEGIES[strategy]

    def work() -> None:
        for _ in range(passes):
            out_BTHD = attention(q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad)
            torch.autograd.grad(out_BTHD, (q_BTHD, k_BTGD, v_BTGD), grad_out_BTHD)

    return work
