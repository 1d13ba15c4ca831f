"""The FLOP count against torch's own counter on the same matrix products."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cpmoe.config.recipe import ModelConfig
from cpmoe.model.flops import flops_per_token


def test_counts_what_torch_counts():
    config = ModelConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, n_shared_experts=1, v_head_dim=6,
    )  # fmt: skip
    tokens, hidden = 64, config.hidden_size

    def linear(x, out):
        return x @ torch.randn(x.shape[-1], out)

    with FlopCounterMode(display=False) as counter:
        x = torch.randn(tokens, hidden)
        for layer in range(3):
            q, k, v = linear(x, 32), linear(x, 16), linear(x, 12)
            linear(q[:, :24], hidden)
            scores = torch.bmm(q.view(4, tokens, 8), k.repeat(1, 2).view(4, 8, tokens))
            torch.bmm(scores, v.repeat(1, 2).view(4, tokens, 6))
            widths = [48] if layer == 0 else [16, 16, 16]
            for width in widths:
                gate, _ = linear(x, width), linear(x, width)
                linear(gate, hidden)
            if layer:
                linear(x, 4)
        linear(x, 96)
    causal_half = 3 * 2 * tokens * tokens * (32 + 24) / 2
    assert flops_per_token(config, tokens) * tokens == 3 * (counter.get_total_flops() - causal_half)


def test_a_window_counts_the_keys_it_shows():
    """Per layer 2 products of 2 FLOPs a key and element, forward and twice in backward."""
    fields = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    }  # fmt: skip
    full = flops_per_token(ModelConfig(**fields), 1000)
    layer_types = ("sliding_attention", "full_attention")
    sliding = flops_per_token(ModelConfig(**fields, sliding_window=100, layer_types=layer_types), 1000)
    keys = sum(min(i, 100) for i in range(1000)) / 1000
    assert full - sliding == pytest.approx(3 * 2 * 2 * 32 * (500 - keys), rel=1e-2)
    assert flops_per_token(ModelConfig(**fields, sliding_window=2000), 1000) == full
