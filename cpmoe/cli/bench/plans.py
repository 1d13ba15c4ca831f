"""Figures of attention plans, which need no processes: balance, bytes, and the time to make one.

Shape letters: S full sequence, T local tokens, N ranks.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from cpmoe.attention.layout import LAYOUTS, token_indices
from cpmoe.attention.mask import CAUSAL, Mask
from cpmoe.attention.picture import draw
from cpmoe.attention.plan import AttentionPlan, RemoteHop, build_plan
from cpmoe.attention.spans import spans_of_reach

WINDOW_SEQ_LEN = 16384
WINDOW = Mask(window=(1023, None))
WINDOW_CP_SIZES = (2, 8)
MILLION, RANKS, DOCUMENTS, BUILDS = 1 << 20, 64, 10_000, 5
PICTURE_RANKS = 8


def skewed_packing(seq_len: int) -> Tensor:
    """One document of half the sequence, two of an eighth, and documents of 512 tokens: ids [1, S]."""
    eighth = seq_len // 8
    lengths = [4 * eighth, eighth, eighth]
    lengths += [512] * ((seq_len - sum(lengths)) // 512)
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def plan_figures() -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """(figures, rows of a table: what, value, conditions)"""
    skewed = skewed_packing(MILLION)
    imbalance = {layout: build_plan(skewed, RANKS, 0, layout).imbalance for layout in ("zigzag", "balanced")}
    seconds = {layout: _seconds_to_plan(layout) for layout in LAYOUTS}
    window = max(_window_bytes_ratio(cp_size) for cp_size in WINDOW_CP_SIZES)
    figures = {f"plan.imbalance_{layout}": value for layout, value in imbalance.items()}
    figures["plan.seconds_1m_tokens"] = max(seconds.values())
    figures["attention.window_bytes_ratio"] = window
    skew = "1 M tokens, 64 ranks, half of them one document"
    many = "1 M tokens, 64 ranks, 10,000 documents"
    rows = [(f"imbalance, {layout}", f"{value:.3f}", skew) for layout, value in imbalance.items()]
    rows += [
        (f"plan of a rank, {layout}", f"{1e3 * value:.0f} ms", many) for layout, value in seconds.items()
    ]
    return figures, [
        *rows,
        ("bytes sent of those a window needs", f"{window:.3f}", "16,384 tokens, CP 2 and 8"),
    ]


def draw_layouts(folder: Path) -> list[Path]:
    """A picture of the skewed packing in zigzag and in balanced."""
    documents_BS = skewed_packing(PICTURE_RANKS * 4096)
    return [
        draw(
            [build_plan(documents_BS, PICTURE_RANKS, rank, layout) for rank in range(PICTURE_RANKS)],
            folder / f"plan_{layout}.png",
            f"{layout}: one long document, two shorter ones, many short ones",
        )
        for layout in ("zigzag", "balanced")
    ]


def _seconds_to_plan(layout: str) -> float:
    """Until a backend, of spans or of stacks of rectangles, can start with any hop."""
    cuts = np.random.default_rng(0).choice(np.arange(1, MILLION), DOCUMENTS - 1, replace=False)
    starts_S = torch.zeros(1, MILLION, dtype=torch.int64)
    starts_S[0, torch.from_numpy(cuts)] = 1
    documents_BS = starts_S.cumsum(1)
    seconds = []
    for rank in range(BUILDS):
        start = time.perf_counter()
        plan = build_plan(documents_BS, RANKS, rank, layout)
        for hop in plan.hops:
            tokens = hop.fetch.receive if isinstance(hop, RemoteHop) else plan.all_tokens
            spans_of_reach(hop.reach, tokens)
            assert hop.reach.stacks or isinstance(hop, RemoteHop)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _window_bytes_ratio(cp_size: int) -> float:
    """Tokens sent, KV and dKV, over twice the tokens that queries of other ranks see."""
    documents_BS = torch.zeros(1, WINDOW_SEQ_LEN, dtype=torch.int64)
    plans = [build_plan(documents_BS, cp_size, rank, mask=WINDOW) for rank in range(cp_size)]
    sent = sum(b.kv + b.dkv for plan in plans for b in plan.sent_bytes(1, 1, 1, 1)) / 2
    left = WINDOW.window[0]
    assert left is not None
    needed = 0
    for plan in plans:
        index_T = token_indices(plan.segments[plan.cp_rank])
        seen_S = np.zeros(WINDOW_SEQ_LEN, dtype=bool)
        for index in index_T.tolist():
            seen_S[max(index - left, 0) : index] = True
        seen_S[index_T] = False
        needed += 2 * int(seen_S.sum())
    return sent / needed


def pairs_ratio(cp_size: int) -> float:
    """Pairs under the window over pairs without it: what the window needs of the time of all."""

    def pairs(mask: Mask) -> int:
        documents_BS = torch.zeros(1, WINDOW_SEQ_LEN, dtype=torch.int64)
        plan: AttentionPlan = build_plan(documents_BS, cp_size, 0, mask=mask)
        return sum(plan.pairs_N)

    return pairs(WINDOW) / pairs(CAUSAL)
