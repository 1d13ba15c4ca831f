"""The decoder block as phases that a schedule interleaves over slices of the micro-batch.

Shape letters: B batch rows and T local tokens of a slice, M model dim, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cpmoe.attention.phases import AttentionState
from cpmoe.attention.plan import AttentionPlan
from cpmoe.config.recipe import ModelConfig
from cpmoe.model.layers import Attention, RMSNorm, Rotary, SwiGLU
from cpmoe.model.options import ModelOptions
from cpmoe.moe.layer import MoELayer, MoEState, MoEStats
from cpmoe.moe.replay import RoutingReplay
from cpmoe.parallel.groups import Groups


class SliceInputs(NamedTuple):
    """What stays the same for a slice in all layers.

    rotary       angles of its tokens
    plans        of its attention, by kind of layer
    real_BT      False at padding
    names_2BT    of the queries of its plans, where attention has dropout (`dropout.query_names`)
    """

    rotary: Rotary
    plans: Mapping[str, AttentionPlan]
    real_BT: Tensor
    names_2BT: Tensor | None = None


@dataclass
class SliceState:
    """A slice on its way through the decoder: its residual stream, and what its next phases start from."""

    inputs: SliceInputs
    x_BTM: Tensor
    replay: RoutingReplay | None = None
    # The slice before this one in the same sequences, whose keys and values this one attends to.
    before: SliceState | None = None
    is_last: bool = True  # no slice attends to this one's keys and values
    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    attention: AttentionState | None = None
    attended_BTHD: Tensor | None = None
    moe: MoEState | None = None
    stats: MoEStats | None = None

    @property
    def attending(self) -> AttentionState:
        assert self.attention is not None, "started before"
        return self.attention

    @property
    def sparse(self) -> MoEState:
        assert self.moe is not None, "routed before"
        return self.moe


# Runs the phases that a block hosts on the slices.
Execute = Callable[[Sequence[SliceState]], None]


class DecoderBlock(nn.Module):
    """Pre-norm attention, then a dense SwiGLU or a mixture of experts.

    ZeRO-3 gathers a block as one unit, so its phases may use any parameter of it at any time, and
    recomputation is inside, where the parameters are there in backward too.
    """

    def __init__(self, config: ModelConfig, index: int, groups: Groups, options: ModelOptions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            config,
            index,
            groups,
            options.attention_strategy,
            options.attention_backend,
            options.attention_dkv_dtype,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.kind = config.layer_types[index]
        self.is_sparse = index >= config.first_k_dense_replace
        self.mlp: nn.Module = (
            MoELayer(config, groups, options.experts)
            if self.is_sparse
            else SwiGLU(config.hidden_size, config.intermediate_size)
        )
        self.recompute = options.recompute == "full"

    def forward(
        self, slices: Sequence[SliceState], execute: Execute, *xs: Tensor
    ) -> tuple[Tensor | tuple[MoEStats | None, ...], ...]:
        """Runs the phases this block hosts: (*xs, statistics) of the slices.

        `xs` are the residual streams [B, T, M]. They come and go as arguments of their own, since hooks see
        these alone: ZeRO-3 reduces the gradients of a block when those of its arguments are there. With
        recomputation a block starts from `xs` alone; else a slice's state may come with rows in flight.
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return self._compute(slices, execute, *xs)
        fresh: list[SliceState] = []
        for state in slices:
            before = fresh[-1] if state.before is not None else None
            fresh.append(SliceState(state.inputs, state.x_BTM, RoutingReplay(), before, state.is_last))
        # Stopping early could leave a collective that other ranks still wait for.
        return checkpoint(
            self._compute_and_forget, fresh, execute, *xs,
            use_reentrant=False, preserve_rng_state=False, early_stop=False,
        )  # fmt: skip

    @staticmethod
    def _compute(
        slices: Sequence[SliceState], execute: Execute, *xs: Tensor
    ) -> tuple[Tensor | tuple[MoEStats | None, ...], ...]:
        for state, x_BTM in zip(slices, xs, strict=True):
            state.x_BTM, state.stats = x_BTM, None
        execute(slices)
        return *(state.x_BTM for state in slices), tuple(state.stats for state in slices)

    @staticmethod
    def _compute_and_forget(
        slices: Sequence[SliceState], execute: Execute, *xs: Tensor
    ) -> tuple[Tensor | tuple[MoEStats | None, ...], ...]:
        """For a checkpoint, which holds `slices` until backward is over: they must hold nothing else."""
        outputs = DecoderBlock._compute(slices, execute, *xs)
        for state in slices:
            state.x_BTM, state.stats = state.x_BTM.new_empty(0), None
        return outputs

    @property
    def moe(self) -> MoELayer:
        assert isinstance(self.mlp, MoELayer)
        return self.mlp

    # The phases, by the names of `coschedule.schedule.KINDS`.

    def project(self, state: SliceState) -> None:
        """Queries, keys and values of the slice."""
        normed_BTM = self.input_layernorm(state.x_BTM)
        state.qkv = self.self_attn.project(normed_BTM, state.inputs.rotary)

    def kv_start(self, state: SliceState) -> None:
        """Keys and values begin to travel."""
        assert state.qkv is not None
        before = state.before.attention if state.before is not None else None
        names_2BT = state.inputs.names_2BT
        state.attention = self.self_attn.kv_start(
            *state.qkv, state.inputs.plans[self.kind], before, names_2BT
        )
        state.qkv = None

    def attend_own(self, state: SliceState) -> None:
        """Attention to the keys on this rank, of this slice and of the one before it."""
        self.self_attn.attend_own(state.attending)

    def kv_wait(self, state: SliceState) -> None:
        self.self_attn.kv_wait(state.attending)

    def attend(self, state: SliceState) -> None:
        """Attention to the keys of other ranks, of this slice and of the one before it."""
        state.attended_BTHD = self.self_attn.attend(state.attending)
        over = [state] if state.is_last else []
        for each in [*over, state.before] if state.before is not None else over:
            each.attending.release()
            each.attention = None

    def dense(self, state: SliceState) -> None:
        """What follows attention in a dense layer."""
        normed_BTM = self._end_attention(state)
        state.x_BTM = state.x_BTM + self.mlp(normed_BTM)

    def route(self, state: SliceState) -> None:
        """What follows attention in a sparse layer: chooses experts, and counts begin to travel."""
        normed_BTM = self._end_attention(state)
        state.moe = self.moe.route(normed_BTM, state.inputs.real_BT, state.replay)
        state.stats = state.moe.stats

    def dispatch_start(self, state: SliceState) -> None:
        self.moe.dispatch_start(state.sparse)

    def shared(self, state: SliceState) -> None:
        self.moe.run_shared_expert(state.sparse)

    def dispatch_wait(self, state: SliceState) -> None:
        self.moe.dispatch_wait(state.sparse)

    def experts(self, state: SliceState) -> None:
        self.moe.run_experts(state.sparse)

    def combine_start(self, state: SliceState) -> None:
        self.moe.combine_start(state.sparse)

    def combine_wait(self, state: SliceState) -> None:
        self.moe.combine_wait(state.sparse)

    def finish(self, state: SliceState) -> None:
        """Adds what the experts computed to the residual stream."""
        state.x_BTM = state.x_BTM + self.moe.finish(state.sparse)
        state.moe = None

    def _end_attention(self, state: SliceState) -> Tensor:
        assert state.attended_BTHD is not None
        state.x_BTM = state.x_BTM + self.self_attn.output(state.attended_BTHD)
        state.attended_BTHD = None
        return self.post_attention_layernorm(state.x_BTM)
