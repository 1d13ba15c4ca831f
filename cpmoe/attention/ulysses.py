"""Ulysses and its hybrid with the ring: heads are exchanged for tokens around the attention of a ring.

Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509; both together as in Fang and Zhao, "USP", arXiv
2405.07719. The CP ranks of a sequence are r rings' places of u ranks each. Each of the u holds a part of
that place's tokens with all heads; an all-to-all among them gives each all of these tokens with its share
of the heads, attention runs over the ring of r ranks, and an all-to-all brings the output back.

Shape letters: U ranks of a Ulysses group, B batch, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from cpmoe.attention import phases
from cpmoe.attention.allgather import GatheredKeys
from cpmoe.attention.phases import AttentionState, TravellingKeys
from cpmoe.attention.plan import AttentionPlan
from cpmoe.attention.ring import RingKeys
from cpmoe.attention.scores import Scores
from cpmoe.parallel.transport import transport

STRATEGIES: dict[str, type[TravellingKeys]] = {"ring": RingKeys, "allgather": GatheredKeys}


def sharded_attention(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    plan: AttentionPlan,
    ring: ProcessGroup | None,
    ring_grad: ProcessGroup | None,
    ulysses: ProcessGroup | None = None,
    strategy: str = "ring",
    backend: str = "auto",
    scores: Scores | None = None,
    dkv_dtype: str = "float32",
) -> Tensor:
    """The strategy's attention over `plan`, between two exchanges of heads on `ulysses`: out [B, T, H, D].

    `plan` is the ring's: for U·T tokens, those of the group's ranks one after the other (`shard_batch` with
    `ulysses_size` U makes both). U must divide H; where it does not divide G, each KV head is exchanged as
    few times as makes their number a multiple of U. Exchanges are in the input dtype: q, k and v in one,
    the output in another, and backward the same two. `ulysses` is None for U = 1. All ranks of both groups
    call it. Raises ValueError for heads that cannot be shared out, and what the strategy raises.
    """
    qkv = q_BTHD, k_BTGD, v_BTGD
    state = start(*qkv, plan, ring, ring_grad, ulysses, strategy, backend, scores, dkv_dtype)
    phases.attend_own(state)
    phases.wait(state)
    out_BTHD = attend(state, ulysses)
    state.release()
    return out_BTHD


def start(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    plan: AttentionPlan,
    ring: ProcessGroup | None,
    ring_grad: ProcessGroup | None,
    ulysses: ProcessGroup | None = None,
    strategy: str = "ring",
    backend: str = "auto",
    scores: Scores | None = None,
    dkv_dtype: str = "float32",
    before: AttentionState | None = None,
) -> AttentionState:
    """Exchanges q, k and v for heads, then `phases.start`; arguments and errors of `sharded_attention`."""
    qkv = q_BTHD, k_BTGD, v_BTGD
    if ulysses is not None:
        qkv = _exchange_heads(*qkv, ulysses)
        if scores is not None and scores.dropout is not None:
            own_heads = scores.dropout.of_heads(dist.get_rank(ulysses) * qkv[0].shape[2], qkv[0].shape[2])
            scores = replace(scores, dropout=own_heads)
    return phases.start(STRATEGIES[strategy], *qkv, plan, ring, ring_grad, backend, scores, dkv_dtype, before)


def attend(state: AttentionState, ulysses: ProcessGroup | None) -> Tensor:
    """`phases.attend`, then the output exchanged back: [B, T, H, D]."""
    out_BTHD = phases.attend(state)
    return out_BTHD if ulysses is None else _Exchange.apply(out_BTHD, ulysses, False).flatten(2, 3)


def _exchange_heads(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, ulysses: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's share of the heads, of the tokens of all ranks of the group."""
    size, num_heads, num_kv_heads = dist.get_world_size(ulysses), q_BTHD.shape[2], k_BTGD.shape[2]
    if num_heads % size:
        raise ValueError(f"attention.ulysses_size = {size}: must divide the {num_heads} query heads")
    copies = size // math.gcd(size, num_kv_heads)
    if copies > 1:
        k_BTGD, v_BTGD = (x.repeat_interleave(copies, dim=2) for x in (k_BTGD, v_BTGD))
    shares = [x.unflatten(2, (size, -1)).flatten(3) for x in (q_BTHD, k_BTGD, v_BTGD)]
    together = _Exchange.apply(torch.cat(shares, dim=3), ulysses, True)
    q, k, v = together.split([share.shape[3] for share in shares], dim=2)
    sizes = q_BTHD.shape[3], k_BTGD.shape[3], v_BTGD.shape[3]
    q, k, v = (x.unflatten(2, (-1, size)) for x, size in zip((q, k, v), sizes, strict=True))
    return q, k, v


class _Exchange(torch.autograd.Function):
    """[B, T, U, ...], a share of heads for each rank → [B, U·T, ...], this rank's of all; or back."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, gathers_tokens: bool) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.gathers_tokens = group, gathers_tokens
        return (_gather_tokens if gathers_tokens else _gather_heads)(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return (_gather_heads if ctx.gathers_tokens else _gather_tokens)(grad, ctx.group), None, None


def _gather_tokens(x_BTUHD: Tensor, group: ProcessGroup) -> Tensor:
    return _all_to_all(x_BTUHD.movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _gather_heads(x_BTHD: Tensor, group: ProcessGroup) -> Tensor:
    parts = x_BTHD.unflatten(1, (dist.get_world_size(group), -1))
    return _all_to_all(parts.movedim(1, 0), group).movedim(0, 2)


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """parts[j] goes to rank j, which puts it at the place of the sender."""
    parts = parts.contiguous()
    return transport.all_to_all(torch.empty_like(parts), parts, group).wait()
