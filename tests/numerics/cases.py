"""Adversarial models and batches for the exactness grid: deterministic, the same global batch on any layout.

A case is a whole optimizer step: G micro-steps of `NUM_ROWS` sequences, which any DP degree that
divides NUM_ROWS shares out in order. Shape letters: B sequences, S full sequence, V vocabulary, M model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpmoe.config.recipe import ModelConfig
from tests.numerics.reference import IGNORED, PADDING, Batch

NUM_ROWS = 4

_BASE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "use_qk_norm": True,
    "rope_theta": 100.0,
    "router_aux_loss_coef": 0.1,
    "router_z_loss_coef": 0.02,
}
MODELS: dict[str, dict[str, Any]] = {
    "base": {},
    "tied": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "top1": {
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "use_qk_norm": False,
        "num_key_value_heads": 1,
    },
    "sliding": {
        "first_k_dense_replace": 0,
        "sliding_window": 7,
        "layer_types": ("sliding_attention", "full_attention"),
        "num_sink_tokens": 2,
    },
    "bent": {"first_k_dense_replace": 0, "attn_logit_softcapping": 1.5, "v_head_dim": 6},
    "dropout": {"attention_dropout": 0.3},
}


def model_config(variant: str, **changes: Any) -> ModelConfig:
    """A tiny model: base (first layer dense), tied (every layer MoE, 8 experts top-3), top1 (one KV head),
    sliding (a window and sinks in one of two layers), bent (a softcap, smaller heads of values), dropout (in
    attention)."""
    return ModelConfig(**{**_BASE, **MODELS[variant], **changes})


def full_weights(config: ModelConfig, seed: int, routing: str = "random") -> dict[str, Tensor]:
    """Whole weights by parameter name, float64, experts as [E, out, in].

    routing: random; skewed (the part of the vocabulary a token is of chooses its first two experts, by a
    wide margin); starved (no token ever reaches the last expert); crowded (every token's first expert is
    expert 1).
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * gain * shape[-1] ** -0.5

    def scale(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator, dtype=torch.float64)

    hidden, vocab, experts = config.hidden_size, config.vocab_size, config.num_experts
    # Logits of a few units: a saturated softmax would leave float32 itself no digits for the tolerances.
    embedding_VM = matrix(vocab, hidden, gain=1.0 if config.tie_word_embeddings else hidden**0.5)
    routers = [3.0 * matrix(experts, hidden) for _ in range(config.num_hidden_layers)]
    if routing == "skewed":
        directions_EM = 4 * torch.eye(experts, hidden, dtype=torch.float64)
        first_V = torch.arange(vocab) * experts // vocab
        embedding_VM += 2 * directions_EM[first_V] + directions_EM[(first_V + 1) % experts]
        routers = [0.3 * router + directions_EM for router in routers]
    elif routing in ("starved", "crowded"):
        embedding_VM[:, 0] = 6
        expert, sign = (experts - 1, -1) if routing == "starved" else (1, 1)
        for router in routers:
            router[:, 0] = 0
            router[expert, 0] = 2.5 * sign
    else:
        assert routing == "random", routing

    weights = {"model.embed_tokens.weight": embedding_VM}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        weights[f"{layer}.input_layernorm.weight"] = scale(hidden)
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = matrix(
                heads * config.head_dim, hidden, gain=2.0
            )
            if config.use_qk_norm:
                weights[f"{layer}.self_attn.{name}_norm.weight"] = scale(config.head_dim)
        weights[f"{layer}.self_attn.v_proj.weight"] = matrix(
            config.num_key_value_heads * config.v_head_dim, hidden
        )
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(
            hidden, config.num_attention_heads * config.v_head_dim
        )
        weights[f"{layer}.post_attention_layernorm.weight"] = scale(hidden)
        if index < config.first_k_dense_replace:
            _add_swiglu(weights, f"{layer}.mlp.", ".weight", (), hidden, config.intermediate_size, matrix)
            continue
        weights[f"{layer}.mlp.router.weight"] = routers[index]
        width = config.moe_intermediate_size
        prefix = f"{layer}.mlp.experts."
        _add_swiglu(weights, prefix, "", (experts,), hidden, width, matrix)
        gate_up = [weights.pop(f"{prefix}{name}_proj") for name in ("gate", "up")]
        weights[f"{prefix}gate_up_proj"] = torch.cat(gate_up, dim=1)
        if config.n_shared_experts:
            width *= config.n_shared_experts
            _add_swiglu(weights, f"{layer}.mlp.shared_expert.", ".weight", (), hidden, width, matrix)
    weights["model.norm.weight"] = scale(hidden)
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(vocab, hidden)
    return weights


def _add_swiglu(
    weights: dict[str, Tensor],
    prefix: str,
    suffix: str,
    stack: tuple[int, ...],
    hidden: int,
    width: int,
    matrix: Callable[..., Tensor],
) -> None:
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        weights[f"{prefix}{name}_proj{suffix}"] = matrix(*stack, *shape)


class CaseBuilder:
    """Random tokens cut into documents of given lengths; successive batches differ."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: list[list[int]], *, skewed: bool = False) -> Batch:
        """rows: document lengths of each sequence; shorter rows end in padding, as a loader's last would.

        `skewed` draws the token at position s from the s-th part of the vocabulary.
        """
        seq_len = max(sum(row) for row in rows)
        shape = (len(rows), seq_len)
        tokens_BS = torch.randint(self.vocab_size, shape, generator=self._generator)
        if skewed:
            quarter = self.vocab_size // 4
            tokens_BS = tokens_BS % quarter + quarter * (torch.arange(seq_len) * 4 // seq_len)
        labels_BS = torch.full(shape, IGNORED)
        positions_BS = torch.zeros(shape, dtype=torch.int64)
        documents_BS = torch.full(shape, PADDING)
        for index, row in enumerate(rows):
            start = 0
            for number, length in enumerate(row):
                stop = start + length
                labels_BS[index, start : stop - 1] = tokens_BS[index, start + 1 : stop]
                positions_BS[index, start:stop] = torch.arange(length)
                documents_BS[index, start:stop] = number
                start = stop
            tokens_BS[index, start:] = 0
        return Batch(tokens_BS, labels_BS, positions_BS, documents_BS)


class Case(NamedTuple):
    """What one optimizer step sees. `rows` are document lengths of the sequences of a micro-step."""

    model: str
    rows: list[list[int]]
    routing: str = "random"
    labels: str = "all"  # all | uneven (rows and chunks without any) | one (a single one in the whole step)


_WHOLE = [[32]] * NUM_ROWS
# Boundaries of 32 tokens: 8 and 16 on edges of ranks and chunks, 4 on a chunk edge at CP 4 and inside a
# chunk at CP 2, 13 to 15 inside a chunk, around two one-token documents.
_PACKED = [[32], [8, 8, 16], [13, 1, 1, 17], [4, 12, 8, 8]]
CASES: dict[str, Case] = {
    "whole": Case("base", _WHOLE),
    "packed": Case("base", _PACKED),
    "uneven": Case("tied", _PACKED, labels="uneven"),
    "one_label": Case("base", _PACKED, labels="one"),
    # 37 tokens: no multiple of any shard grid; the loader padded two of the rows.
    "ragged": Case("tied", [[37], [7, 30], [18, 1, 10], [1, 1, 1, 1, 1, 20]]),
    # 5 tokens: fewer than chunks at CP 4, so a rank holds padding only; one sequence is all padding.
    "short": Case("base", [[5], [1, 4], [2, 2], []]),
    "skewed": Case("base", _WHOLE, routing="skewed"),
    "starved": Case("base", _PACKED, routing="starved"),
    "crowded": Case("top1", _PACKED, routing="crowded"),
    "sliding": Case("sliding", _PACKED),
    "top1": Case("top1", [[32], [31, 1], [1, 31], [16, 16]], labels="uneven"),
}
# Outside the grids: not every backend computes them.
CASES_OF_SCORES: dict[str, Case] = {"bent": Case("bent", _PACKED), "dropout": Case("dropout", _PACKED)}
_ALL = CASES | CASES_OF_SCORES
# Chosen for routes that float32 rounding can not flip (test_cases.py holds the margin).
SEEDS = {
    "whole": 160,
    "packed": 104,
    "uneven": 155,
    "one_label": 104,
    "ragged": 131,
    "short": 144,
    "skewed": 173,
    "starved": 120,
    "crowded": 295,
    "sliding": 2,
    "top1": 105,
    "bent": 0,
    "dropout": 0,
}


def case_config(name: str) -> ModelConfig:
    return model_config(_ALL[name].model)


def case_weights(name: str) -> dict[str, Tensor]:
    return full_weights(case_config(name), SEEDS[name], _ALL[name].routing)


def case_step(name: str, num_micro_steps: int, step: int = 0) -> list[Batch]:
    """Global micro-batches of optimizer step `step`; rows rotate, so that each rank meets each kind."""
    case = _ALL[name]
    builder = CaseBuilder(case_config(name).vocab_size, seed=1000 * SEEDS[name] + step)
    batches = []
    for micro in range(num_micro_steps):
        turn = (micro + step) % NUM_ROWS
        rows = case.rows[turn:] + case.rows[:turn]
        batch = builder.batch(rows, skewed=case.routing == "skewed")
        if case.labels == "uneven":
            keep_BS = torch.zeros_like(batch.labels_BS, dtype=torch.bool)
            keep_BS[0], keep_BS[2, 1:4] = True, True
            batch = batch._replace(labels_BS=batch.labels_BS.where(keep_BS, IGNORED))
        elif case.labels == "one":
            only = torch.full_like(batch.labels_BS, IGNORED)
            if micro == num_micro_steps - 1:
                only[2, 18] = batch.tokens_BS[2, 19]
            batch = batch._replace(labels_BS=only)
        batches.append(batch)
    return batches


def data_rows(batch: Batch, data_rank: int, data_parallel_size: int) -> Batch:
    """The sequences of one data-parallel rank."""
    share = batch.tokens_BS.shape[0] // data_parallel_size
    return Batch(*(x[data_rank * share : (data_rank + 1) * share] for x in batch))


def sequence_numbers(micro: int, data_rank: int, data_parallel_size: int) -> Tensor:
    """The numbers of those sequences in micro-step `micro`, as the reference counts them."""
    share = NUM_ROWS // data_parallel_size
    return torch.arange(share) + micro * NUM_ROWS + data_rank * share


def num_labels(batches: list[Batch]) -> int:
    return sum(int((batch.labels_BS != IGNORED).sum()) for batch in batches)


def num_tokens(batches: list[Batch]) -> int:
    return sum(int((batch.documents_BS != PADDING).sum()) for batch in batches)
