"""A mixture of experts written as plainly as possible, token by token: the twin that tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    pre = x @ gate.T
    return (pre / (1 + torch.exp(-pre)) * (x @ up.T)) @ down.T


def moe(
    tokens: Tensor, weights: dict[str, Tensor], k: int, normalize: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [T, M] without padding → (output [T, M], probs [T, E], logsumexp [T], counts [E])."""
    num_experts = weights["router"].shape[0]
    logits = tokens @ weights["router"].T
    exps = torch.exp(logits)
    probs = exps / exps.sum(1, keepdim=True)
    counts = torch.zeros(num_experts, dtype=torch.int64)
    outputs = []
    for token, row in zip(tokens, probs, strict=True):
        chosen = sorted(range(num_experts), key=lambda e: (-row[e].item(), e))[:k]
        total = sum(row[e] for e in chosen) if normalize else 1.0
        output = torch.zeros_like(token)
        for e in chosen:
            counts[e] += 1
            output = output + row[e] / total * swiglu(
                token, weights["gate"][e], weights["up"][e], weights["down"][e]
            )
        if "shared_gate" in weights:
            output = output + swiglu(
                token, weights["shared_gate"], weights["shared_up"], weights["shared_down"]
            )
        outputs.append(output)
    stacked = torch.stack(outputs) if outputs else tokens.new_zeros(tokens.shape)
    return stacked, probs, torch.log(exps.sum(1)), counts


def aux_loss(probs: Tensor, counts: Tensor, k: int) -> Tensor:
    """Switch balance loss of all tokens: E / (K T²) Σ_i c_i Σ_t p_ti."""
    num_tokens, num_experts = probs.shape
    return num_experts / (k * max(num_tokens, 1) ** 2) * (counts * probs.sum(0)).sum()
