"""The whole training step of one process that sees everything, in float64, from the formulas alone.

Independent twin of the product: dense masks over whole sequences, a loop over experts, full logits,
autograd; it shares parameter names and config fields with `cpmoe`, and no code.

Shape letters: B sequences, S full sequence, H query heads, G KV heads, D head dim, M model dim,
I expert width, E experts, K top-k, V vocabulary, L MoE layers, P tokens of a micro-step (B x S).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.attention.dropout_twin import twin_mask

SEED = 11  # of dropout
IGNORED = -100
PADDING = -1


class Batch(NamedTuple):
    """One micro-step of all data-parallel ranks: int64 [B, S] each, labels already shifted."""

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor


@dataclass
class StepResult:
    """Loss of an optimizer step (global over ranks and micro-steps) and its exact gradient."""

    loss: float
    cross_entropy: float
    aux: float  # sum over layers, mean over micro-steps; without its coefficient
    zloss: float  # sum over layers of mean logsumexp^2; without its coefficient
    grads: dict[str, Tensor]
    grad_norm: float
    counts_GLE: Tensor  # int64: routed rows of every expert, per micro-step and MoE layer
    margin: float  # smallest gap of router logits between a chosen and a rejected expert


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x_BSHD: Tensor, positions_BS: Tensor, theta: float) -> Tensor:
    """RoPE of halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), frequency theta^(-2i/D)."""
    half = x_BSHD.shape[-1] // 2
    frequency_D = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_BSHD = positions_BS[:, :, None, None].double() * frequency_D
    x1, x2 = x_BSHD[..., :half], x_BSHD[..., half:]
    cos, sin = angle_BSHD.cos().to(x1.dtype), angle_BSHD.sin().to(x1.dtype)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def _attention(
    config: Any, weights: Mapping[str, Tensor], x_BSM: Tensor, batch: Batch, layer: int, first_sequence: int
) -> Tensor:
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    batch_size, seq_len, _ = x_BSM.shape

    def heads(name: str, count: int) -> Tensor:
        return (x_BSM @ weights[f"{name}.weight"].T).view(batch_size, seq_len, count, -1)

    q_BSHD, k_BSGD, v_BSGD = (
        heads("q_proj", num_heads),
        heads("k_proj", num_kv_heads),
        heads("v_proj", num_kv_heads),
    )
    if config.use_qk_norm:
        q_BSHD = _norm(q_BSHD, weights["q_norm.weight"], config.rms_norm_eps)
        k_BSGD = _norm(k_BSGD, weights["k_norm.weight"], config.rms_norm_eps)
    q_BSHD = _rotate(q_BSHD, batch.positions_BS, config.rope_theta)
    k_BSGD = _rotate(k_BSGD, batch.positions_BS, config.rope_theta)

    docs = batch.documents_BS
    order = torch.arange(seq_len)
    seen_BSS = (
        (docs[:, :, None] == docs[:, None, :]) & (order[:, None] >= order) & (docs != PADDING)[:, :, None]
    )
    if config.layer_types[layer] == "sliding_attention":
        is_near_SS = order[:, None] - order < config.sliding_window
        seen_BSS &= is_near_SS | (batch.positions_BS < config.num_sink_tokens)[:, None]
    if config.attention_dropout:
        numbers = range(first_sequence, first_sequence + batch_size)
        kept_BHSS = twin_mask(config.attention_dropout, SEED, layer, numbers, num_heads, seq_len)
    outputs = []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores_BSS = q_BSHD[:, :, head] @ k_BSGD[:, :, kv_head].transpose(1, 2) / math.sqrt(q_BSHD.shape[-1])
        if config.attn_logit_softcapping:
            cap = config.attn_logit_softcapping
            scores_BSS = cap * torch.tanh(scores_BSS / cap)
        # A padding row sees nothing: it is computed as if it saw everything, then set to 0.
        scores_BSS = scores_BSS.masked_fill(~seen_BSS & seen_BSS.any(-1, keepdim=True), -math.inf)
        probs_BSS = scores_BSS.softmax(-1) * seen_BSS.any(-1, keepdim=True)
        if config.attention_dropout:
            probs_BSS = probs_BSS * kept_BHSS[:, head] / (1 - config.attention_dropout)
        outputs.append(probs_BSS @ v_BSGD[:, :, kv_head])
    return torch.cat(outputs, dim=-1) @ weights["o_proj.weight"].T


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = x @ gate.T
    return (hidden * torch.sigmoid(hidden) * (x @ up.T)) @ down.T


@dataclass
class Routed:
    """Balance terms of one micro-step, collected layer by layer; token sums run over real tokens."""

    counts: list[Tensor] = field(default_factory=list)
    aux: list[Tensor] = field(default_factory=list)
    zsum: list[Tensor] = field(default_factory=list)
    margin: float = math.inf


def _experts(
    config: Any, weights: Mapping[str, Tensor], x_PM: Tensor, real_P: Tensor, routed: Routed
) -> Tensor:
    num_experts, top_k = config.num_experts, config.num_experts_per_tok
    logits_PE = x_PM @ weights["router.weight"].T
    probs_PE = logits_PE.softmax(-1)
    ranked_PE, order_PE = probs_PE.sort(dim=-1, descending=True)
    scale_P = 1 / ranked_PE[:, :top_k].sum(-1) if config.norm_topk_prob else torch.ones_like(ranked_PE[:, 0])

    y_PM = torch.zeros_like(x_PM)
    counts = []
    for expert in range(num_experts):
        chosen_P = (order_PE[:, :top_k] == expert).any(-1) & real_P
        counts.append(chosen_P.sum())
        gate_IM, up_IM = weights["experts.gate_up_proj"][expert].chunk(2)
        out_PM = _swiglu(x_PM, gate_IM, up_IM, weights["experts.down_proj"][expert])
        y_PM = y_PM + (chosen_P * probs_PE[:, expert] * scale_P)[:, None] * out_PM
    if config.n_shared_experts:
        y_PM = y_PM + _swiglu(
            x_PM, *(weights[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
        )

    counts_E, num_real = torch.stack(counts), max(int(real_P.sum()), 1)
    routed.counts.append(counts_E)
    # Switch Transformer (arXiv 2101.03961, eq. 4) with top-k counts: E · Σ_i (c_i / kT) · mean_t p_{t,i}.
    probs_sum_E = (probs_PE * real_P[:, None]).sum(0)
    routed.aux.append(num_experts / (top_k * num_real**2) * (counts_E * probs_sum_E).sum())
    # ST-MoE (arXiv 2202.08906, eq. 5), as a sum over tokens.
    routed.zsum.append((logits_PE.logsumexp(-1).square() * real_P).sum())
    if top_k < num_experts and real_P.any():
        ranked_PE = logits_PE.detach()[real_P].sort(dim=-1, descending=True).values
        gap_P = ranked_PE[:, top_k - 1] - ranked_PE[:, top_k]
        routed.margin = min(routed.margin, gap_P.min().item())
    return y_PM


def forward_logits(
    config: Any, weights: Mapping[str, Tensor], batch: Batch, first_sequence: int = 0
) -> tuple[Tensor, Routed]:
    """Logits [B, S, V] of one micro-step and the balance terms of its MoE layers.

    Rows are sequences `first_sequence` and on.
    """

    def below(prefix: str) -> dict[str, Tensor]:
        return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}

    routed = Routed()
    real_P = batch.documents_BS.flatten() != PADDING
    x_BSM = weights["model.embed_tokens.weight"][batch.tokens_BS]
    for index in range(config.num_hidden_layers):
        layer = below(f"model.layers.{index}.")
        h_BSM = _norm(x_BSM, layer["input_layernorm.weight"], config.rms_norm_eps)
        attention = below(f"model.layers.{index}.self_attn.")
        x_BSM = x_BSM + _attention(config, attention, h_BSM, batch, index, first_sequence)
        h_PM = _norm(x_BSM, layer["post_attention_layernorm.weight"], config.rms_norm_eps).flatten(0, 1)
        mlp = below(f"model.layers.{index}.mlp.")
        if index < config.first_k_dense_replace:
            y_PM = _swiglu(h_PM, *(mlp[f"{name}_proj.weight"] for name in ("gate", "up", "down")))
        else:
            y_PM = _experts(config, mlp, h_PM, real_P, routed)
        x_BSM = x_BSM + y_PM.view_as(x_BSM)
    x_BSM = _norm(x_BSM, weights["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return x_BSM @ weights[head].T, routed


def reference_step(
    config: Any,
    weights: Mapping[str, Tensor],
    micro_steps: list[Batch],
    dtype: torch.dtype = torch.float64,
) -> StepResult:
    """Loss and gradient of one optimizer step over `micro_steps`, each with the rows of all ranks.

    cross entropy = Σ token losses / valid labels of the whole step; aux = mean over micro-steps of the
    switch loss of that micro-step's real tokens; z = Σ logsumexp² / real tokens of the whole step; the
    last two summed over layers, times their coefficients. `weights` holds whole tensors by parameter
    name, experts as [E, ...], and is not changed. Another `dtype` is a naive model of that precision.
    """
    leaves = {name: value.detach().clone().to(dtype).requires_grad_() for name, value in weights.items()}
    num_labels = max(sum(int((batch.labels_BS != IGNORED).sum()) for batch in micro_steps), 1)
    num_real = max(sum(int((batch.documents_BS != PADDING).sum()) for batch in micro_steps), 1)

    cross_entropy = aux = zloss = torch.zeros((), dtype=torch.float64)
    counts, margin = [], math.inf
    for micro, batch in enumerate(micro_steps):
        logits_BSV, routed = forward_logits(config, leaves, batch, micro * len(batch.tokens_BS))
        valid_BS = batch.labels_BS != IGNORED
        picked = logits_BSV.gather(-1, batch.labels_BS.clamp(min=0)[..., None])[..., 0]
        cross_entropy = cross_entropy + ((logits_BSV.logsumexp(-1) - picked) * valid_BS).sum() / num_labels
        if routed.aux:
            aux = aux + torch.stack(routed.aux).sum() / len(micro_steps)
            zloss = zloss + torch.stack(routed.zsum).sum() / num_real
            counts.append(torch.stack(routed.counts))
        margin = min(margin, routed.margin)
    loss = cross_entropy + config.router_aux_loss_coef * aux + config.router_z_loss_coef * zloss
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    grads = {name: grad.double() for name, grad in zip(leaves, found, strict=True)}
    return StepResult(
        loss=loss.item(),
        cross_entropy=cross_entropy.item(),
        aux=aux.item(),
        zloss=zloss.item(),
        grads=grads,
        grad_norm=math.sqrt(sum(grad.square().sum().item() for grad in grads.values())),
        counts_GLE=torch.stack(counts) if counts else torch.zeros(len(micro_steps), 0, 0, dtype=torch.int64),
        margin=margin,
    )


def clip_coefficient(grad_norm: float, max_norm: float) -> float:
    """The factor of global-norm clipping, with the 1e-6 that torch and DeepSpeed add; max_norm 0 is off."""
    return min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0


class ReferenceSGD:
    """buf = momentum · buf + (g + decay · w); w -= lr · buf. Only matrices decay."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.buffers: dict[str, Tensor] = {}

    def step(
        self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], clip: float = 1.0
    ) -> dict[str, Tensor]:
        """The new weights, float64."""
        new = {}
        for name, weight in weights.items():
            grad = clip * grads[name] + _decay(self.weight_decay, weight) * weight
            self.buffers[name] = self.momentum * self.buffers.get(name, torch.zeros_like(grad)) + grad
            new[name] = weight - self.lr * self.buffers[name]
        return new


class ReferenceAdamW:
    """AdamW (arXiv 1711.05101): decoupled decay, bias-corrected moments, eps outside the root.

    Only matrices decay.
    """

    def __init__(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = 0

    def step(
        self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], clip: float = 1.0
    ) -> dict[str, Tensor]:
        """The new weights, float64."""
        self.steps += 1
        beta1, beta2 = self.betas
        new = {}
        for name, weight in weights.items():
            grad = clip * grads[name]
            mean, square = self.moments.get(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
            mean = beta1 * mean + (1 - beta1) * grad
            square = beta2 * square + (1 - beta2) * grad * grad
            self.moments[name] = mean, square
            denominator = (square / (1 - beta2**self.steps)).sqrt() + self.eps
            update = mean / (1 - beta1**self.steps) / denominator
            new[name] = weight * (1 - self.lr * _decay(self.weight_decay, weight)) - self.lr * update
        return new


def _decay(weight_decay: float, weight: Tensor) -> float:
    return weight_decay if weight.ndim > 1 else 0.0
