"""The decoder: embedding, blocks that a schedule runs, head and losses.

Shape letters: B batch, T local tokens, M model dim, V vocabulary, E experts, L sparse layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from operator import add
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpmoe.attention.dropout import query_names
from cpmoe.attention.sharding import SequenceShard
from cpmoe.config.recipe import ModelConfig
from cpmoe.coschedule.executor import Observer, execute
from cpmoe.coschedule.schedule import Schedule, build_schedule, segments
from cpmoe.coschedule.verify import verify
from cpmoe.model.block import DecoderBlock, SliceInputs, SliceState
from cpmoe.model.layers import RMSNorm, rotary_angles
from cpmoe.model.loss import chunked_cross_entropy
from cpmoe.model.options import ModelOptions
from cpmoe.moe.balance import router_z_loss, switch_aux_loss
from cpmoe.moe.experts import init_experts
from cpmoe.moe.layer import MoELayer, MoEStats
from cpmoe.parallel.groups import Groups
from cpmoe.parallel.progress import progress


class LossScale(NamedTuple):
    """Denominators that make the sum of all ranks' losses over a step the loss of the whole step.

    num_label_tokens  labels that count, over all ranks and micro-steps of the optimizer step
    num_tokens        tokens that are no padding, likewise
    num_micro_steps   micro-steps of the optimizer step
    """

    num_label_tokens: int
    num_tokens: int
    num_micro_steps: int


class ModelOutput(NamedTuple):
    """What one rank computes for one micro-step. Only `loss` carries a gradient.

    loss             scalar; its sum over ranks and micro-steps is the loss of the step
    cross_entropy    scalar, this rank's sum of token losses in nats, not divided
    losses_T         this rank's token losses in the order of `flat`, 0 where the label is ignored
    aux_loss         scalar, this rank's share of the balance loss summed over layers, before its coefficient
    z_loss           scalar, this rank's sum of router logsumexp² over layers and tokens, not divided
    counts_LE        int64, routed rows per sparse layer and global expert over all ranks
    """

    loss: Tensor
    cross_entropy: Tensor
    losses_T: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    counts_LE: Tensor


class Decoder(nn.Module):
    """Embedding, blocks and final norm; the names of its parameters are those of HF decoders."""

    def __init__(self, config: ModelConfig, groups: Groups, options: ModelOptions) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderBlock(config, index, groups, options) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.config = config
        self.seed = options.seed
        self.policy, self.crossing = options.coschedule_policy, options.recompute == "none"
        self.observer: Observer | None = None
        for num_slices in (1, 2):
            sparse = [block.is_sparse for block in self.blocks()]
            verify(self.schedule(num_slices), sparse, num_slices, self.crossing)

    def forward(self, slices: Sequence[SequenceShard]) -> tuple[Tensor, list[list[MoEStats]]]:
        """Slices of [B, T] tokens → hidden states of all their tokens, [tokens, M], in the order of `flat`.

        Also the statistics of every slice, for each sparse layer.
        """
        progress.begin_forward()
        x_TM = self.embed_tokens(flat([shard.tokens_BT for shard in slices]))
        states = self._states(slices, x_TM)
        xs = [state.x_BTM for state in states]
        blocks = self.blocks()
        hosted = segments(self.schedule(len(slices)))
        all_stats = []
        for host, block in enumerate(blocks):
            *xs, stats = block(states, partial(execute, hosted[host], blocks, observer=self.observer), *xs)
            if block.is_sparse:
                all_stats.append([s for s in stats if s is not None])
        for state, x_BTM in zip(states, xs, strict=True):
            state.x_BTM = x_BTM
        execute(hosted.get(len(blocks), ()), blocks, states, self.observer)
        return self.norm(flat([state.x_BTM for state in states])), all_stats

    def schedule(self, num_slices: int) -> Schedule:
        """The phases of a forward, in the order in which every rank runs them."""
        sparse = [block.is_sparse for block in self.blocks()]
        return build_schedule(self.policy, sparse, num_slices, self.crossing)

    def blocks(self) -> list[DecoderBlock]:
        return [cast(DecoderBlock, block) for block in self.layers]

    def _states(self, slices: Sequence[SequenceShard], x_TM: Tensor) -> list[SliceState]:
        config = self.config
        xs = x_TM.split([shard.tokens_BT.numel() for shard in slices])
        states: list[SliceState] = []
        for shard, x in zip(slices, xs, strict=True):
            rotary = rotary_angles(shard.positions_BT, config.head_dim, config.rope_theta, x.dtype)
            names_2BT = None
            if config.attention_dropout and self.training:
                # The plans of all kinds of layers have the same queries.
                plan = next(iter(shard.plans.values()))
                names_2BT = query_names(self.seed, shard.sequences_B, plan)
            inputs = SliceInputs(rotary, shard.plans, shard.documents_BT >= 0, names_2BT)
            before = states[-1] if shard.follows else None
            if before is not None:
                before.is_last = False
            states.append(SliceState(inputs, x.view(*shard.tokens_BT.shape, -1), before=before))
        return states


class LMHead(nn.Module):
    """Output projection and cross entropy in one, so that logits exist only in chunks."""

    def __init__(self, config: ModelConfig, chunk_tokens: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.chunk_tokens = chunk_tokens

    def forward(self, x_TM: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the token losses, and each of them [T]."""
        return chunked_cross_entropy(x_TM, self.weight, labels_T, self.chunk_tokens)


class CausalLM(nn.Module):
    """The whole model of one rank: its part of the sequence and of the experts, its share of the loss."""

    def __init__(self, config: ModelConfig, groups: Groups, options: ModelOptions | None = None) -> None:
        super().__init__()
        options = options or ModelOptions()
        assert config.vocab_size > 0, "the vocabulary size is taken from the data before the model is built"
        self.model = Decoder(config, groups, options)
        self.lm_head = LMHead(config, options.loss_chunk_tokens)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.config = config
        self.groups = groups

    def forward(self, slices: Sequence[SequenceShard], scale: LossScale) -> ModelOutput:
        """The loss of this rank's `slices` of one micro-batch; all ranks of the run take part.

        loss = Σ cross entropy / V + Σ_layers (aux_coef · aux / G + z_coef · Σ logsumexp² / tokens), with
        V, tokens and G of `scale`. Counts of the balance loss are those of this micro-step over all
        ranks. Communicates on ring, ring_grad, expert and meta in the blocks, and on world once.
        """
        hidden_TM, stats = self.model(slices)
        counts = [sum_of(s.counts_E for s in layer) for layer in stats]
        counts_LE = self._stack(counts, hidden_TM, torch.int64)
        reduced = None
        if self.groups.world is not None and stats:
            reduced = dist.all_reduce(counts_LE, group=self.groups.world, async_op=True)
        cross_entropy, losses_T = self.lm_head(hidden_TM, flat([shard.labels_BT for shard in slices]))
        if reduced is not None:
            reduced.wait()
        wide = cross_entropy.dtype
        probs_sum_LE = self._stack([sum_of(s.probs_sum_E for s in layer) for layer in stats], hidden_TM, wide)
        aux_loss = switch_aux_loss(probs_sum_LE, counts_LE, self.config.num_experts_per_tok).sum()
        z_sum = sum((s.zsum for layer in stats for s in layer), start=cross_entropy.new_zeros(()))
        loss = (
            cross_entropy / max(scale.num_label_tokens, 1)
            + self.config.router_aux_loss_coef / scale.num_micro_steps * aux_loss
            + self.config.router_z_loss_coef * router_z_loss(z_sum, scale.num_tokens)
        )
        return ModelOutput(
            loss, cross_entropy.detach(), losses_T, aux_loss.detach(), z_sum.detach(), counts_LE
        )

    def _stack(self, rows: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
        if rows:
            return torch.stack(rows)
        return like.new_zeros((0, self.config.num_experts), dtype=dtype)


def flat(parts: Sequence[Tensor]) -> Tensor:
    """[B, T, ...] of every slice → [tokens, ...]: slice after slice, row after row."""
    return torch.cat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor, itself where there is one."""
    return reduce(add, tensors)


def init_weights(model: CausalLM, seed: int) -> None:
    """Draws every weight from normal(0, initializer_range), norms 1; the same on any layout.

    Each tensor, and each global expert in it, has a generator of its own that is seeded by `seed`, its
    name and the expert's index, so that neither EP nor the order of creation changes a weight.
    """
    std = model.config.initializer_range
    for module_name, module in model.named_modules():
        if isinstance(module, MoELayer):
            init_experts(module.experts, seed, f"{module_name}.experts")
    for name, parameter in _shared_parameters(model):
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
            continue
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0, std, generator=generator)
        with torch.no_grad():
            parameter.copy_(values)


def _shared_parameters(model: CausalLM) -> Iterator[tuple[str, nn.Parameter]]:
    return ((n, p) for n, p in model.named_parameters() if not is_expert(n))


def is_expert(name: str) -> bool:
    """Whether the parameter of this name is split over the expert group (shared experts are not)."""
    return ".mlp.experts." in name


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
