"""The decoder: embedding, blocks of attention and (sparse) MLP, head and losses.

Shape letters: B batch, T local tokens, M model dim, V vocabulary, E experts, L sparse layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cpmoe.attention.plan import AttentionPlan
from cpmoe.attention.sharding import SequenceShard
from cpmoe.config.recipe import ModelConfig
from cpmoe.model.layers import Attention, RMSNorm, Rotary, SwiGLU, rotary_angles
from cpmoe.model.loss import chunked_cross_entropy
from cpmoe.moe.balance import router_z_loss, switch_aux_loss
from cpmoe.moe.experts import init_experts
from cpmoe.moe.layer import MoELayer, MoEStats
from cpmoe.moe.replay import RoutingReplay
from cpmoe.parallel.groups import Groups


@dataclass(frozen=True)
class ModelOptions:
    """How the model computes, none of which changes what it computes.

    attention_strategy  ring | allgather
    attention_backend   auto | reference | sdpa | triton | triton_tf32
    attention_dkv_dtype float32 | bfloat16: what gradients of keys and values are sent in
    experts_backend     auto | grouped_mm | loop
    recompute           none | full: forget a block's activations and compute them again in backward
    loss_chunk_tokens   rows of logits that exist at once
    """

    attention_strategy: str = "ring"
    attention_backend: str = "auto"
    attention_dkv_dtype: str = "float32"
    experts_backend: str = "auto"
    recompute: str = "none"
    loss_chunk_tokens: int = 1024


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
    token_losses_BT  this rank's token losses, 0 where the label is ignored
    aux_loss         scalar, this rank's share of the balance loss summed over layers, before its coefficient
    z_loss           scalar, this rank's sum of router logsumexp² over layers and tokens, not divided
    counts_LE        int64, routed rows per sparse layer and global expert over all ranks
    """

    loss: Tensor
    cross_entropy: Tensor
    token_losses_BT: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    counts_LE: Tensor


class DecoderBlock(nn.Module):
    """Pre-norm attention, then a dense SwiGLU or a mixture of experts.

    ZeRO-3 gathers a block as one unit, so its phases may use any parameter of it at any time, and
    recomputation is inside, where the parameters are there in backward too.
    """

    def __init__(self, config: ModelConfig, index: int, groups: Groups, options: ModelOptions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            config, groups, options.attention_strategy, options.attention_backend, options.attention_dkv_dtype
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_sparse = index >= config.first_k_dense_replace
        self.mlp: nn.Module = (
            MoELayer(config, groups, options.experts_backend)
            if self.is_sparse
            else SwiGLU(config.hidden_size, config.intermediate_size)
        )
        self.recompute = options.recompute == "full"

    def forward(
        self, x_BTM: Tensor, rotary: Rotary, plan: AttentionPlan, real_BT: Tensor
    ) -> tuple[Tensor, MoEStats | None]:
        """x_BTM [B, T, M] → the same, and the statistics of a sparse layer; real_BT is False at padding."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._compute(x_BTM, rotary, plan, real_BT, None)
        # Stopping early could leave a collective that other ranks still wait for.
        return checkpoint(
            self._compute, x_BTM, rotary, plan, real_BT, RoutingReplay(),
            use_reentrant=False, preserve_rng_state=False, early_stop=False,
        )  # fmt: skip

    def _compute(
        self,
        x_BTM: Tensor,
        rotary: Rotary,
        plan: AttentionPlan,
        real_BT: Tensor,
        replay: RoutingReplay | None,
    ) -> tuple[Tensor, MoEStats | None]:
        x_BTM = x_BTM + self.self_attn(self.input_layernorm(x_BTM), rotary, plan)
        normed_BTM = self.post_attention_layernorm(x_BTM)
        if not self.is_sparse:
            return x_BTM + self.mlp(normed_BTM), None
        y_BTM, stats = self.mlp(normed_BTM, real_BT, replay)
        return x_BTM + y_BTM, stats


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

    def forward(self, shard: SequenceShard) -> tuple[Tensor, list[MoEStats]]:
        """A shard of [B, T] tokens → hidden states [B, T, M] and the statistics of each sparse layer."""
        x_BTM = self.embed_tokens(shard.tokens_BT)
        config = self.config
        rotary = rotary_angles(shard.positions_BT, config.head_dim, config.rope_theta, x_BTM.dtype)
        real_BT = shard.documents_BT >= 0
        all_stats = []
        for block, kind in zip(self.layers, config.layer_types, strict=True):
            x_BTM, stats = block(x_BTM, rotary, shard.plans[kind], real_BT)
            if stats is not None:
                all_stats.append(stats)
        return self.norm(x_BTM), all_stats


class LMHead(nn.Module):
    """Output projection and cross entropy in one, so that logits exist only in chunks."""

    def __init__(self, config: ModelConfig, chunk_tokens: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.chunk_tokens = chunk_tokens

    def forward(self, x_BTM: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
        total, losses_T = chunked_cross_entropy(
            x_BTM.flatten(0, 1), self.weight, labels_BT.flatten(), self.chunk_tokens
        )
        return total, losses_T.view(labels_BT.shape)


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

    def forward(self, shard: SequenceShard, scale: LossScale) -> ModelOutput:
        """The loss of this rank's `shard` in one micro-step; all ranks of the run take part.

        loss = Σ cross entropy / V + Σ_layers (aux_coef · aux / G + z_coef · Σ logsumexp² / tokens), with
        V, tokens and G of `scale`. Counts of the balance loss are those of this micro-step over all
        ranks. Communicates on ring, ring_grad, expert and meta in the blocks, and on world once.
        """
        hidden_BTM, stats = self.model(shard)
        counts_LE = self._stack([s.counts_E for s in stats], hidden_BTM, torch.int64)
        reduced = None
        if self.groups.world is not None and stats:
            reduced = dist.all_reduce(counts_LE, group=self.groups.world, async_op=True)
        cross_entropy, token_losses_BT = self.lm_head(hidden_BTM, shard.labels_BT)
        if reduced is not None:
            reduced.wait()
        wide = cross_entropy.dtype
        probs_sum_LE = self._stack([s.probs_sum_E for s in stats], hidden_BTM, wide)
        aux_loss = switch_aux_loss(probs_sum_LE, counts_LE, self.config.num_experts_per_tok).sum()
        z_sum = sum((s.zsum for s in stats), start=cross_entropy.new_zeros(()))
        loss = (
            cross_entropy / max(scale.num_label_tokens, 1)
            + self.config.router_aux_loss_coef / scale.num_micro_steps * aux_loss
            + self.config.router_z_loss_coef * router_z_loss(z_sum, scale.num_tokens)
        )
        return ModelOutput(
            loss, cross_entropy.detach(), token_losses_BT, aux_loss.detach(), z_sum.detach(), counts_LE
        )

    def _stack(self, rows: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
        if rows:
            return torch.stack(rows)
        return like.new_zeros((0, self.config.num_experts), dtype=dtype)


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
