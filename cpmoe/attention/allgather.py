"""All-gather attention: every rank gathers the KV of all and attends locally (Llama 3, arXiv 2407.21783).

The naive strategy of the same interface as ring.py: nothing overlaps and all KV is held at once, which is
right where KV is small.

Shape letters: N ranks, B batch, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from cpmoe.attention.blocks import (
    BlockBackend,
    KeyValueBlock,
    KeyValueGradient,
    QueryGradient,
    RunningSoftmax,
    SavedForward,
    select_backend,
)
from cpmoe.attention.inputs import check_inputs, wire_dtype
from cpmoe.attention.plan import AttentionPlan
from cpmoe.attention.scores import Scores
from cpmoe.parallel.transport import transport


def allgather_attention(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    plan: AttentionPlan,
    ring: ProcessGroup | None,
    ring_grad: ProcessGroup | None,
    backend: str = "auto",
    scores: Scores | None = None,
    dkv_dtype: str = "float32",
) -> Tensor:
    """The same function, arguments and errors as `ring_attention`.

    Forward and backward each gather the KV of N ranks in the input dtype on `ring`; backward sends
    every rank's dKV home on `ring_grad` in `dkv_dtype`. In bfloat16 each part is rounded once: relative error
    of dK 2.6e-3, 2.5e-3, 2.5e-3 on 2, 4, 8 ranks where `ring_attention` says its own. All ranks of the ring
    call it.
    """
    check_inputs(q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad)
    scores = scores or Scores(q_BTHD.shape[-1] ** -0.5)
    blocks = select_backend(backend, q_BTHD, k_BTGD, v_BTGD, scores)
    wire = wire_dtype(q_BTHD.dtype, dkv_dtype)
    return _AllGatherAttention.apply(q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad, blocks, scores, wire)


def _gather(own: KeyValueBlock, group: ProcessGroup | None) -> Tensor:
    """[N, elements]: every rank's packed KV."""
    packed = own.pack(own.tokens)
    if group is None:
        return packed[None]
    size = dist.get_world_size(group)
    gathered = packed.new_empty((size, *packed.shape))
    return transport.all_gather(gathered, packed, group).wait()


def _send_home(parts: Tensor, group: ProcessGroup | None, wire: torch.dtype) -> Tensor:
    """Sum over ranks of parts[r], for this rank's r: a reduce-scatter that sums in one fixed order."""
    if group is None:
        return parts[0]
    dtype, parts = parts.dtype, parts.to(wire)
    received = transport.all_to_all(torch.empty_like(parts), parts, group).wait()
    return received.sum(dim=0, dtype=dtype)


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        plan: AttentionPlan,
        ring: ProcessGroup | None,
        ring_grad: ProcessGroup | None,
        blocks: BlockBackend,
        scores: Scores,
        wire: torch.dtype,
    ) -> Tensor:
        own = KeyValueBlock(k_BTGD, v_BTGD, plan.all_tokens)
        gathered = _gather(own, ring)
        state = RunningSoftmax(q_BTHD, v_BTGD.shape[3])
        for hop in plan.hops:
            block = KeyValueBlock.from_packed(gathered[hop.source], own.sizes, plan.all_tokens)
            blocks.forward(q_BTHD, block, hop.reach, state, scores)
        out_BTHD, lse_BTH = state.result()
        out_BTHD = out_BTHD.to(q_BTHD.dtype)
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BTH)
        ctx.plan, ctx.ring, ctx.ring_grad, ctx.blocks, ctx.scores = plan, ring, ring_grad, blocks, scores
        ctx.wire = wire
        return out_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_BTHD: Tensor):  # type: ignore[override]
        q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BTH = ctx.saved_tensors
        plan = ctx.plan
        own = KeyValueBlock(k_BTGD, v_BTGD, plan.all_tokens)
        gathered = _gather(own, ctx.ring)
        saved = SavedForward(q_BTHD, grad_out_BTHD, out_BTHD, lse_BTH, ctx.scores)
        dq = QueryGradient(q_BTHD)
        parts = gathered.new_zeros(gathered.shape, dtype=lse_BTH.dtype)
        for hop in plan.hops:
            block = KeyValueBlock.from_packed(gathered[hop.source], own.sizes, plan.all_tokens)
            dkv = KeyValueGradient(plan.all_tokens, k_BTGD, v_BTGD)
            ctx.blocks.backward(saved, block, hop.reach, dq, dkv)
            parts[hop.source] = dkv.packed()
        dk_BTGD, dv_BTGD = own.sizes.views(_send_home(parts, ctx.ring_grad, ctx.wire))
        dtype = q_BTHD.dtype
        return dq.result().to(dtype), dk_BTGD.to(dtype), dv_BTGD.to(dtype), *6 * [None]
