"""Attention over a ring as phases, so that other work can stand between them.

Four autograd Functions, each with the mirror of its forward as backward:

start       forward launches the KV of the first hop; backward waits for dKV that comes home
attend_own  queries against this rank's own KV, in forward and in backward
wait        forward waits for the KV of the first hop; backward launches the last dKV home
attend      queries against the KV of other ranks, in forward and in backward

What lies between start and wait hides the first transfer, in both directions. How KV and dKV travel is a
strategy (`TravellingKeys`): ring.py, allgather.py.

Causal slices: a slice attends to the keys of the slices before it too; it is started after them and given
the state of the last one. Its queries read what earlier phases of those brought here, and add to the same
sums of dKV. k and v have one reader in the graph, the start of their slice: whatever attends to them adds
to float32 sums beside the graph, and empty tensors carry the order. Backward is deterministic, since
autograd runs it in the reverse of the order in which forward ran.

Shape letters: B batch, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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
from cpmoe.attention.plan import AttentionPlan, RemoteHop
from cpmoe.attention.reach import Reach
from cpmoe.attention.scores import Scores

# Keys of a rank, and which of them the queries see.
ReachedBlock = tuple[KeyValueBlock, Reach]


class TravellingKeys(Protocol):
    """KV of one slice in one layer on its way round the ranks, and its dKV on the way back.

    Between forward and backward it holds no tensor: what backward reads is saved by the graph, so that
    recomputation can replace it.
    """

    plan: AttentionPlan

    def __init__(
        self,
        plan: AttentionPlan,
        ring: ProcessGroup | None,
        ring_grad: ProcessGroup | None,
        wire: torch.dtype,
        before: TravellingKeys | None,
    ) -> None:
        """dKV travels in the dtype `wire`; `before` are those of the slice before."""

    def launch(self, own: KeyValueBlock) -> None:
        """Forward: launches the first transfer of this rank's KV."""

    def own_blocks(self) -> list[KeyValueBlock]:
        """Forward: this rank's own KV, this slice's and then those before it, from the last to the first."""

    def wait(self) -> None:
        """Forward: waits for the first transfer."""

    def held(self) -> tuple[Tensor, ...]:
        """Forward: tensors from which `remote_blocks` starts, in forward and again in backward."""

    def release(self) -> None:
        """Forward: lets all tensors go, since no further slice attends to these keys."""

    def remote_blocks(self, held: Sequence[Tensor]) -> Iterator[tuple[RemoteHop, list[ReachedBlock]]]:
        """Forward and backward: each remote hop, and the blocks that hold its keys.

        Transfers of the next hop are launched before a hop is yielded.
        """

    def own_gradients(self) -> list[KeyValueGradient]:
        """Backward: sums of dKV, for each of `own_blocks`."""

    def remote_gradients(self, hop: RemoteHop) -> list[KeyValueGradient]:
        """Backward: where the dKV of each of the hop's blocks is added up."""

    def deliver(self, hop: RemoteHop, dkv: KeyValueGradient) -> None:
        """Backward: dKV of this slice after the hop goes on its way, but for the last, which goes home."""

    def launch_home(self) -> None:
        """Backward: launches the transfer that takes dKV home."""

    def collect(self) -> tuple[Tensor, Tensor]:
        """Backward: waits for dKV that comes home; the gradients of k and v, in the accumulation dtype."""


class _Attention:
    """What the phases of one slice hand each other; holds no tensor between forward and backward."""

    def __init__(self, keys: TravellingKeys, blocks: BlockBackend, scores: Scores) -> None:
        self.keys, self.blocks, self.scores = keys, blocks, scores
        # From attend_own to attend, in forward, and from attend to attend_own, in backward.
        self.forward: tuple[Tensor, RunningSoftmax] | None = None
        self.backward: tuple[SavedForward, QueryGradient] | None = None


@dataclass
class AttentionState:
    """The attention of one slice between its phases: a phase leaves an empty tensor for those that follow."""

    attention: _Attention
    q_BTHD: Tensor | None
    before: AttentionState | None
    started: Tensor
    attended_own: Tensor | None = None
    waited: Tensor | None = None
    attended: Tensor | None = None

    def release(self) -> None:
        """To be called when no slice attends to this one's keys any more."""
        self.attention.keys.release()


def start(
    strategy: type[TravellingKeys],
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    plan: AttentionPlan,
    ring: ProcessGroup | None,
    ring_grad: ProcessGroup | None,
    backend: str = "auto",
    scores: Scores | None = None,
    dkv_dtype: str = "float32",
    before: AttentionState | None = None,
) -> AttentionState:
    """Begins the attention of a slice to its own keys and those of the slices `before`.

    Arguments and errors are those of `ring_attention`; k and v are this slice's own alone.
    """
    check_inputs(q_BTHD, k_BTGD, v_BTGD, plan, ring, ring_grad)
    scores = scores or Scores(q_BTHD.shape[-1] ** -0.5)
    blocks = select_backend(backend, q_BTHD, k_BTGD, v_BTGD, scores)
    wire = wire_dtype(q_BTHD.dtype, dkv_dtype)
    earlier = None if before is None else before.attention.keys
    attention = _Attention(strategy(plan, ring, ring_grad, wire, earlier), blocks, scores)
    after = () if before is None else (before.started,)
    started = _Start.apply(attention.keys, k_BTGD, v_BTGD, *after)
    return AttentionState(attention, q_BTHD, before, started)


def attend_own(state: AttentionState) -> None:
    """The blocks of this rank's own keys."""
    state.attended_own = _AttendOwn.apply(state.attention, state.q_BTHD, state.started)
    state.q_BTHD = None


def wait(state: AttentionState) -> None:
    """Waits for the first transfer."""
    state.waited = _Wait.apply(state.attention.keys, state.started)


def attend(state: AttentionState) -> Tensor:
    """The blocks of other ranks' keys: out [B, T, H, D]."""
    assert state.attended_own is not None and state.waited is not None, "phases in order"
    after = () if state.before is None else (state.before.attended,)
    out_BTHD, state.attended = _Attend.apply(state.attention, state.attended_own, state.waited, *after)
    state.before = None
    return out_BTHD


def run(strategy: type[TravellingKeys], *arguments) -> Tensor:
    """All phases one after the other; `arguments` are those of `start`."""
    state = start(strategy, *arguments)
    attend_own(state)
    wait(state)
    out_BTHD = attend(state)
    state.release()
    return out_BTHD


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys: TravellingKeys, k_BTGD: Tensor, v_BTGD: Tensor, *after: Tensor) -> Tensor:  # type: ignore[override]
        ctx.keys, ctx.dtype, ctx.num_after = keys, k_BTGD.dtype, len(after)
        keys.launch(KeyValueBlock(k_BTGD, v_BTGD, keys.plan.own_tokens))
        return k_BTGD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        dk_BTGD, dv_BTGD = ctx.keys.collect()
        return None, dk_BTGD.to(ctx.dtype), dv_BTGD.to(ctx.dtype), *ctx.num_after * [grad]


class _AttendOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attention: _Attention, q_BTHD: Tensor, started: Tensor) -> Tensor:  # type: ignore[override]
        keys, blocks = attention.keys, attention.keys.own_blocks()
        softmax = RunningSoftmax(q_BTHD, blocks[0].v_BTGD.shape[3])
        for block, reach in zip(blocks, keys.plan.own.parts, strict=True):
            attention.blocks.forward(q_BTHD, block, reach, softmax, attention.scores)
        attention.forward = q_BTHD, softmax
        ctx.save_for_backward(*(x for block in blocks for x in (block.k_BTGD, block.v_BTGD)))
        ctx.attention, ctx.tokens = attention, [block.tokens for block in blocks]
        return started.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        attention, kv = ctx.attention, ctx.saved_tensors
        (saved, dq), attention.backward = attention.backward, None
        blocks = map(KeyValueBlock, kv[::2], kv[1::2], ctx.tokens)
        sums = attention.keys.own_gradients()
        for block, reach, dkv in zip(blocks, attention.keys.plan.own.parts, sums, strict=True):
            attention.blocks.backward(saved, block, reach, dq, dkv)
        return None, dq.result().to(saved.q_BTHD.dtype), grad


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys: TravellingKeys, started: Tensor) -> Tensor:  # type: ignore[override]
        ctx.keys = keys
        keys.wait()
        return started.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        ctx.keys.launch_home()
        return None, grad


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attention: _Attention, *after: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert attention.forward is not None
        (q_BTHD, softmax), attention.forward = attention.forward, None
        held = attention.keys.held()
        for _, blocks in attention.keys.remote_blocks(held):
            for block, reach in blocks:
                attention.blocks.forward(q_BTHD, block, reach, softmax, attention.scores)
        out_BTHD, lse_BTH = softmax.result()
        out_BTHD = out_BTHD.to(q_BTHD.dtype)
        ctx.save_for_backward(q_BTHD, out_BTHD, lse_BTH, *held)
        ctx.attention, ctx.num_after = attention, len(after)
        return out_BTHD, q_BTHD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_BTHD: Tensor, grad: Tensor):  # type: ignore[override]
        q_BTHD, out_BTHD, lse_BTH, *held = ctx.saved_tensors
        attention, keys = ctx.attention, ctx.attention.keys
        saved = SavedForward(q_BTHD, grad_out_BTHD, out_BTHD, lse_BTH, attention.scores)
        dq = QueryGradient(q_BTHD)
        for hop, blocks in keys.remote_blocks(held):
            sums = keys.remote_gradients(hop)
            for (block, reach), dkv in zip(blocks, sums, strict=True):
                attention.blocks.backward(saved, block, reach, dq, dkv)
            keys.deliver(hop, sums[0])
        attention.backward = saved, dq
        return None, *ctx.num_after * [grad]
