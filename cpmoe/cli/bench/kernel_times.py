"""The timing half of `bench kernels`: the Triton kernels on a GPU against torch's attention.

Shape letters: B batch, T tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cpmoe.attention.blocks import (
    BlockBackend,
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    select_backend,
)
from cpmoe.attention.mask import Mask
from cpmoe.attention.plan import AttentionPlan, build_plan
from cpmoe.attention.scores import Scores
from cpmoe.cli.bench.report import conditions, report

LENGTHS = (2048, 8192, 32768)
HEAD_SIZES = (64, 128)
NUM_HEADS, NUM_KV_HEADS = 16, 4
WARMUP, TURNS = 3, 15
RING_TOKENS, RING_SIZE = 32768, 4
OTHERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Work = Callable[[], Any]


def run(json_path: str | Path | None) -> dict[str, Any]:
    """Times, prints, and returns {"figures", "conditions"}. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("bench kernels --device cuda: this machine has no CUDA device")
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    for head_dim in HEAD_SIZES:
        for num_tokens in LENGTHS:
            for causal in (True, False):
                label = f"head {head_dim}, {num_tokens:,} tokens, {'causal' if causal else 'full'}"
                rows += _compared(label, num_tokens, head_dim, causal, figures)
    figures["kernels.ring_overhead"] = _ring_overhead()
    return report(
        "attention kernels, bfloat16, TFLOP/s",
        figures,
        conditions(gpu=torch.cuda.get_device_name(), heads=NUM_HEADS, kv_heads=NUM_KV_HEADS),
        rows,
        ("", "forward", "backward"),
        json_path,
    )


def _compared(
    label: str, num_tokens: int, head_dim: int, causal: bool, figures: dict[str, float]
) -> list[tuple[str, ...]]:
    """One row per contestant; the ratios of speed become figures."""
    q, k, v, grad_out = _tensors(num_tokens, head_dim)
    plan = build_plan(torch.zeros(1, num_tokens, dtype=torch.long), 1, 0, mask=Mask(causal=causal))
    flops = 4.0 * NUM_HEADS * head_dim * plan.num_pairs
    passes = {"triton": _blocks_passes(q, k, v, grad_out, plan)}
    for name, backend in OTHERS.items():
        passes[name] = _sdpa_passes(q, k, v, grad_out, causal, backend)
    seconds: dict[str, list[float | None]] = {
        name: [_seconds_or_none(work) for work in works] for name, works in passes.items()
    }
    rows = []
    for name, (forward, backward) in seconds.items():
        speeds = [
            f"{factor * flops / value / 1e12:.0f}" if value else "not supported"
            for factor, value in ((1.0, forward), (2.5, backward))
        ]
        rows.append((f"{label}, {name}", *speeds))
        if name == "triton":
            continue
        for step, ours, theirs in zip(
            ("forward", "backward"), seconds["triton"], (forward, backward), strict=True
        ):
            if ours and theirs:
                mask = "causal" if causal else "full"
                key = f"kernels.{step}_over_{name}.head{head_dim}.seq{num_tokens}.{mask}"
                figures[key] = theirs / ours
    return rows


def _tensors(num_tokens: int, head_dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    return [torch.randn(1, num_tokens, h, head_dim, device="cuda", dtype=torch.bfloat16) for h in heads]


def _forward_of(
    blocks: BlockBackend, q: Tensor, hops: list[tuple[KeyValueBlock, Any]]
) -> tuple[Tensor, Tensor]:
    state = RunningSoftmax(q, q.shape[-1])
    for block, reach in hops:
        blocks.forward(q, block, reach, state, Scores(q.shape[-1] ** -0.5))
    out, lse = state.result()
    return out.to(q.dtype), lse


def _blocks_passes(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, plan: AttentionPlan) -> list[Work]:
    """[forward, backward] of one rank's own hop, with all that a training step adds around the kernels."""
    blocks = select_backend("triton", q, k, v, Scores(q.shape[-1] ** -0.5))
    hops = [(KeyValueBlock(k, v, plan.all_tokens), plan.own.reach)]
    out, lse = _forward_of(blocks, q, hops)

    def backward() -> None:
        dq, dkv = QueryGradient(q), KeyValueGradient(plan.all_tokens, k, v)
        blocks.backward(SavedForward(q, grad_out, out, lse, Scores(q.shape[-1] ** -0.5)), *hops[0], dq, dkv)
        for x in (dq.result(), *dkv.result()):
            x.to(q.dtype)

    return [lambda: _forward_of(blocks, q, hops), backward]


def _sdpa_passes(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, causal: bool, backend: SDPBackend
) -> list[Work]:
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    grad_out_BHTD = grad_out.transpose(1, 2)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=True
            )

    kept: list[Tensor] = []

    def backward() -> None:
        if not kept:
            kept.append(forward())
        torch.autograd.grad(kept[0], leaves, grad_out_BHTD, retain_graph=True)

    return [forward, backward]


def _seconds_or_none(work: Work) -> float | None:
    """Median over turns, by events of the stream; None where torch's backend refuses the shape."""
    try:
        for _ in range(WARMUP):
            work()
    except RuntimeError as error:
        if "No available kernel" in str(error):
            return None
        raise
    times = []
    for _ in range(TURNS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def _ring_overhead() -> float:
    """Time of all ranks' hops of a causal ring in turn on one GPU, over one call of the same pairs, minus 1.

    Forward, RING_SIZE virtual ranks of RING_TOKENS tokens each, head size 128.
    """
    total = RING_SIZE * RING_TOKENS
    q, k, v, _ = _tensors(total, 128)
    documents_BS = torch.zeros(1, total, dtype=torch.long)
    blocks = select_backend("triton", q, k, v, Scores(q.shape[-1] ** -0.5))
    whole = build_plan(documents_BS, 1, 0)
    ranks = []
    for rank in range(RING_SIZE):
        plan = build_plan(documents_BS, RING_SIZE, rank)
        # Which tokens a rank holds changes no work, so every rank reads the first ones.
        local_q, local_k, local_v = (x[:, :RING_TOKENS] for x in (q, k, v))
        hops = []
        for hop in plan.hops:
            tokens = plan.all_tokens
            hops.append((KeyValueBlock(local_k, local_v, tokens), hop.reach))
        ranks.append((local_q, hops))

    def ring() -> None:
        for local_q, hops in ranks:
            _forward_of(blocks, local_q, hops)

    def single() -> None:
        _forward_of(blocks, q, [(KeyValueBlock(k, v, whole.all_tokens), whole.own.reach)])

    ring_seconds, single_seconds = _seconds_or_none(ring), _seconds_or_none(single)
    assert ring_seconds and single_seconds
    return ring_seconds / single_seconds - 1
