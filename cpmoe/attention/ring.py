"""Ring attention: KV blocks travel the ring while each rank attends to the block it holds.

Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889, over the hops and transfers of
plan.py.

Shape letters: B batch, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
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
from cpmoe.attention.plan import AttentionPlan, Transfer
from cpmoe.attention.scores import Scores
from cpmoe.parallel.transport import transport


def ring_attention(
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
    """Attention of this rank's queries over the keys of all ranks that `plan` shows them: out [B, T, H, D].

    q [B, T, H, D], k and v [B, T, G, D] with H a multiple of G, of one floating dtype, any strides, equal in
    shape on every rank; v, and with it the output, may have another head size. `plan` from `build_plan` for
    the same documents. `scores` defaults to a scale of D^-0.5. Queries that see nothing (padding) give
    exactly 0. Outputs and gradients have the dtype of their input; sums over blocks are kept in float32
    (float64 for float64), and dKV is sent in it, or where `dkv_dtype` is bfloat16 and they are float32, in
    bfloat16: half the bytes, and one more rounding at each transfer. Measured for one causal document in
    bfloat16, head size 64: relative error of dK 2.1e-3, 2.5e-3, 3.4e-3 on 2, 4, 8 ranks against 1.9e-3,
    1.8e-3, 1.8e-3 with float32 on the wire.

    Forward sends KV on `ring`. Backward sends KV again on `ring` from the second hop on (the first block
    received is kept) and dKV on `ring_grad`. Both are None where the ring has one rank. All ranks of
    the ring call it in the same order. Raises ValueError for inputs that do not fit the plan or the backend.
    """
    check_inputs(q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad)
    scores = scores or Scores(q_BTHD.shape[-1] ** -0.5)
    blocks = select_backend(backend, q_BTHD, k_BTGD, v_BTGD, scores)
    wire = wire_dtype(q_BTHD.dtype, dkv_dtype)
    return _RingAttention.apply(q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad, blocks, scores, wire)


class _Exchange:
    """One transfer in flight: this rank's send and receive of `tokens`, packed (`KeyValueSizes`)."""

    def __init__(self, transfer: Transfer, sent: Tensor, group: ProcessGroup) -> None:
        size = sent.numel() // transfer.send.wire_tokens * transfer.receive.wire_tokens
        self.tokens = transfer.receive
        self._flight = transport.exchange(
            sent.new_empty(size), sent, transfer.from_rank, transfer.to_rank, group
        )

    def wait(self) -> Tensor:
        return self._flight.wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        plan: AttentionPlan,
        ring: ProcessGroup,
        ring_grad: ProcessGroup,
        blocks: BlockBackend,
        scores: Scores,
        wire: torch.dtype,
    ) -> Tensor:
        state = RunningSoftmax(q_BTHD, v_BTGD.shape[3])
        own = block = KeyValueBlock(k_BTGD, v_BTGD, plan.all_tokens)
        reach, first_received = plan.own.reach, None
        for hop in plan.remote:
            sent = (block if plan.is_relayed else own).pack(hop.fetch.send)
            fetching = _Exchange(hop.fetch, sent, ring)
            blocks.forward(q_BTHD, block, reach, state, scores)
            packed = fetching.wait()
            first_received = packed if first_received is None else first_received
            block, reach = KeyValueBlock.from_packed(packed, own.sizes, hop.fetch.receive), hop.reach
        blocks.forward(q_BTHD, block, reach, state, scores)
        out_BTHD, lse_BTH = state.result()
        out_BTHD = out_BTHD.to(q_BTHD.dtype)
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BTH, first_received)
        ctx.plan, ctx.ring, ctx.ring_grad, ctx.blocks, ctx.scores = plan, ring, ring_grad, blocks, scores
        ctx.wire = wire
        return out_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_BTHD: Tensor):  # type: ignore[override]
        """Remote blocks first, own block last, so that the last dKV travels home behind it."""
        q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BTH, packed = ctx.saved_tensors
        plan, blocks = ctx.plan, ctx.blocks
        saved = SavedForward(q_BTHD, grad_out_BTHD, out_BTHD, lse_BTH, ctx.scores)
        dq = QueryGradient(q_BTHD)
        own = KeyValueBlock(k_BTGD, v_BTGD, plan.all_tokens)
        own_dkv = KeyValueGradient(plan.all_tokens, k_BTGD, v_BTGD)
        fetching, delivering = None, None
        for hop, following in zip_longest(plan.remote, plan.remote[1:]):
            packed = packed if fetching is None else fetching.wait()
            block = KeyValueBlock.from_packed(packed, own.sizes, hop.fetch.receive)
            if following is not None:
                sent = (block if plan.is_relayed else own).pack(following.fetch.send)
                fetching = _Exchange(following.fetch, sent, ctx.ring)
            dkv = KeyValueGradient(hop.deliver.send, k_BTGD, v_BTGD)
            blocks.backward(saved, block, hop.reach, dq, dkv)
            if delivering is not None:
                (dkv if plan.is_relayed else own_dkv).add_packed(delivering.tokens, delivering.wait())
            delivering = _Exchange(hop.deliver, dkv.packed().to(ctx.wire), ctx.ring_grad)
        blocks.backward(saved, own, plan.own.reach, dq, own_dkv)
        if delivering is not None:
            own_dkv.add_packed(delivering.tokens, delivering.wait())
        dk_BTGD, dv_BTGD = own_dkv.result()
        dtype = q_BTHD.dtype
        return dq.result().to(dtype), dk_BTGD.to(dtype), dv_BTGD.to(dtype), *6 * [None]
