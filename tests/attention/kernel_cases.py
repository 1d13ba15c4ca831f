"""Cases for the Triton kernels, their hop-by-hop run and the float64 answer.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpmoe.attention.dropout import Dropout
from cpmoe.attention.scores import Scores
from cpmoe.attention.spans import KeySpans
from cpmoe.kernels.architectures import architecture_of
from tests.attention.dropout_twin import twin_kept


@dataclass(frozen=True)
class KernelCase:
    """Queries attend to the keys of one or more hops; each hop has `num_keys` keys.

    mask  causal (over all keys of the first hop), window (of 40 keys), sinks (a window and the first 5 keys),
          documents (of 29 tokens), full, blind (half of the queries see nothing in the first hop, the last
          three never see anything)
    """

    name: str
    mask: str = "causal"
    num_queries: int = 100
    num_keys: int = 100
    batch_size: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    size_qk: int = 64
    size_v: int = 64
    num_hops: int = 1
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    dropout: float = 0.0
    scale: float = 0.125
    strided: bool = False
    descriptors: bool = False
    # Added to the scores of every key of a hop.
    lifts: tuple[float, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"


def visible(case: KernelCase, hop: int) -> Tensor:
    """[B, T, U]: which keys of the hop each query sees; batch rows differ."""
    query = torch.arange(case.num_queries)[None, :, None] - 3 * torch.arange(case.batch_size)[:, None, None]
    key = torch.arange(case.num_keys)[None, None, :]
    if case.mask == "full":
        return (key >= 0).expand(case.batch_size, case.num_queries, -1)
    if case.mask == "blind":
        last = case.num_queries - 3
        return (query >= (case.num_queries // 2 if hop == 0 else 0)) & (query < last) & (key >= 0)
    causal = key <= query if hop == 0 else (key >= 0) & (query >= 0)
    if case.mask == "causal":
        return causal
    if case.mask == "documents":
        return causal & (key // 29 == query // 29)
    window = causal & (key > query - 40)
    return window | (causal & (key < 5)) if case.mask == "sinks" else window


def spans(visible_BTU: Tensor) -> KeySpans:
    """The one or two runs of visible keys of each query."""
    bounds = torch.zeros(4, *visible_BTU.shape[:2], dtype=torch.int32)
    for b, t in visible_BTU.any(-1).nonzero().tolist():
        keys = visible_BTU[b, t].nonzero().flatten()
        jumps = (keys.diff() > 1).nonzero().flatten()
        assert len(jumps) < 2
        first = int(jumps[0]) + 1 if len(jumps) else 0
        bounds[:2, b, t] = torch.tensor((int(keys[first]), int(keys[-1]) + 1))
        if first:
            bounds[2:, b, t] = torch.tensor((int(keys[0]), int(keys[first - 1]) + 1))
    sinks = bounds[2:] if bounds[2:].any() else (None, None)
    return KeySpans(bounds[0], bounds[1], visible_BTU.shape[2], *sinks)


def tensors(case: KernelCase) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """(q, k of each hop, v of each hop, grad_out) in float64, exact in the case's dtype."""
    generator = torch.Generator().manual_seed(7)

    def random(num_tokens: int, num_heads: int, size: int) -> Tensor:
        shape = case.batch_size, num_tokens, num_heads, size
        return torch.randn(shape, generator=generator).to(case.dtype).double()

    q = random(case.num_queries, case.num_heads, case.size_qk)
    hops = range(case.num_hops)
    keys = [random(case.num_keys, case.num_kv_heads, case.size_qk) for _ in hops]
    values = [random(case.num_keys, case.num_kv_heads, case.size_v) for _ in hops]
    if case.lifts:
        # dQ is a difference of keys: large ones would only show how much of it cancels.
        q[..., 0] = 100.0 / case.scale
        for k, lift in zip(keys, case.lifts, strict=True):
            k[..., 0] = lift / 100.0
    return q, keys, values, random(case.num_queries, case.num_heads, case.size_v)


def names(case: KernelCase) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of the queries [2, B, T], heads [2, H] and keys of each hop [U], all int32."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    keys = [random(case.num_keys) for _ in range(case.num_hops)]
    return random(2, case.batch_size, case.num_queries), random(2, case.num_heads), keys


def naive(case: KernelCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv (of all hops, in order) by the definition, computed in `dtype`."""
    q, keys, values, grad_out = tensors(case)
    leaves = [x.to(dtype).requires_grad_() for x in (q, torch.cat(keys, 1), torch.cat(values, 1))]
    group = case.num_heads // case.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in leaves[1:])
    scores = torch.einsum("bthd,buhd->bhtu", leaves[0], k) * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    hidden = ~torch.cat([visible(case, hop) for hop in range(case.num_hops)], dim=2)[:, None]
    blind = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~blind, -torch.inf)
    probs = scores.softmax(-1).masked_fill(blind, 0.0)
    weights = torch.ones_like(probs)
    if case.dropout:
        queries, heads, key_names = names(case)
        kept = twin_kept(case.dropout, queries, heads, torch.cat(key_names))
        weights = kept.double() / (1 - case.dropout)
    out = torch.einsum("bhtu,buhd->bthd", probs * weights.to(dtype), v)
    lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, grad_out.to(dtype))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


def layout(x: Tensor, case: KernelCase, device: str) -> Tensor:
    """On the device, and where the case asks, a view with heads and batch apart, between rows of NaN."""
    x = x.to(device, case.dtype)
    if not case.strided:
        return x
    batch_size, num_tokens, num_heads, size = x.shape
    wide = torch.full((num_heads, num_tokens, batch_size, size + 3), torch.nan, dtype=x.dtype, device=device)
    wide[..., :size] = x.permute(2, 1, 0, 3)
    return wide[..., :size].permute(2, 1, 0, 3)


def by_kernels(case: KernelCase, device: str, precision: str = "ieee") -> dict[str, Tensor]:
    """The same through the kernels, hop by hop, into buffers that hold NaN."""
    from cpmoe.attention.blocks.triton.launch import Problem, query_rows

    def unwritten(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, device=device)

    q, keys, values, grad_out = tensors(case)
    q, grad_out = layout(q, case, device), layout(grad_out, case, device)
    query_names, head_names, key_names = names(case)
    dropout = None
    if case.dropout:
        dropout = Dropout(case.dropout, query_names.to(device), head_names.to(device))
    problems = [
        Problem(
            q,
            layout(k, case, device),
            layout(v, case, device),
            spans(visible(case, hop)),
            Scores(case.scale, case.softcap, dropout),
            precision,
            architecture_of(q.device),
            case.descriptors,
            key_names[hop].to(device),
        )
        for hop, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    rows = q.shape[:3]
    out, lse = unwritten(*rows, case.size_v), unwritten(*rows)
    for hop, problem in enumerate(problems):
        problem.forward(out, lse, continues=hop > 0).run()
    rounded = out.to(case.dtype)
    prepared = unwritten(2, rows[0], rows[2], rows[1])
    query_rows(grad_out, rounded, lse, prepared).run()
    dq = unwritten(*rows, case.size_qk)
    places = torch.arange(case.num_keys, dtype=torch.int32, device=device)
    dkv = []
    for hop, problem in enumerate(problems):
        problem.dq(grad_out, prepared, dq, continues=hop > 0).run()
        sums = [
            unwritten(*problem.k_BUGD.shape[:3], size).contiguous() for size in (case.size_qk, case.size_v)
        ]
        problem.dkv(grad_out, prepared, *sums, places, continues=False).run()
        dkv.append(sums)
    dk, dv = (torch.cat(x, dim=1) for x in zip(*dkv, strict=True))
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: x.cpu() for name, x in results.items()}
