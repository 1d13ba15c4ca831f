"""Floating-point operations of a training step, for the utilisation that is printed."""

from __future__ import annotations

from cpmoe.config.recipe import ModelConfig


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of forward and backward per token of a sequence of `seq_len` tokens.

    Matrix products only, a multiply-add counts two, backward twice forward. Attention is halved for
    causality, and a sliding window is counted, which sink tokens are not; nor are document boundaries and
    recomputation (the usual definition of MFU, Chowdhery et al., 2022, appendix B, with the causal half).
    """
    hidden, sizes = config.hidden_size, config.head_dim + config.v_head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    projections = hidden * sizes * (heads + kv_heads)
    keys = sum(_mean_keys(seq_len, config.sliding_window, kind) for kind in config.layer_types)
    attention = heads * sizes * keys
    dense = 3 * hidden * config.intermediate_size
    expert = 3 * hidden * config.moe_intermediate_size
    sparse = hidden * config.num_experts + expert * (config.num_experts_per_tok + config.n_shared_experts)
    num_dense = config.first_k_dense_replace
    num_sparse = config.num_hidden_layers - num_dense
    layers = config.num_hidden_layers * projections + attention + num_dense * dense + num_sparse * sparse
    return 3 * 2 * (layers + hidden * config.vocab_size)


def _mean_keys(seq_len: int, sliding_window: int | None, kind: str) -> float:
    """Keys that a token of a causal layer sees on average."""
    window = seq_len
    if kind == "sliding_attention" and sliding_window is not None:
        window = min(sliding_window, seq_len)
    return window - window * window / (2 * seq_len)
