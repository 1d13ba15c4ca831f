"""The reference itself against others: transformers' Qwen3-MoE, torch's optimizers, finite differences.

transformers rounds norms, RoPE and router probabilities to float32 whatever the model's dtype, so it
is compared within float32 tolerances; finite differences hold the rest in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from cpmoe.config.recipe import ModelConfig
from tests.numerics.cases import CaseBuilder, full_weights, model_config
from tests.numerics.reference import (
    IGNORED,
    Batch,
    ReferenceAdamW,
    ReferenceSGD,
    clip_coefficient,
    forward_logits,
    reference_step,
)


def _qwen(config: ModelConfig, weights: dict[str, Tensor]) -> Qwen3MoeForCausalLM:
    theirs: Any = Qwen3MoeConfig  # its signature is made at run time
    model = Qwen3MoeForCausalLM(
        theirs(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_word_embeddings,
            router_aux_loss_coef=config.router_aux_loss_coef,
            mlp_only_layers=list(range(config.first_k_dense_replace)),
            attn_implementation="eager",
            experts_implementation="eager",
        )
    ).double()
    state = dict(weights)
    for name in list(state):
        if name.endswith("router.weight"):
            state[name.replace("router", "gate")] = state.pop(name)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def _qwen_grads(model: Qwen3MoeForCausalLM) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in list(grads):
        if name.endswith("mlp.gate.weight"):
            grads[name.replace("gate.", "router.")] = grads.pop(name)
    return grads


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_documents_are_qwen3_moe_on_each_document(norm_topk_prob: bool, tied: bool) -> None:
    config = model_config("base", norm_topk_prob=norm_topk_prob, tie_word_embeddings=tied, n_shared_experts=0)
    weights = full_weights(config, seed=3)
    batch = CaseBuilder(config.vocab_size, seed=5).batch([[7, 1, 15], [23], [11, 12]])
    leaves = {name: value.requires_grad_() for name, value in weights.items()}
    logits_BSV, _ = forward_logits(config, leaves, batch)
    valid_BS = batch.labels_BS != IGNORED
    ours = F.cross_entropy(logits_BSV[valid_BS], batch.labels_BS[valid_BS], reduction="sum")
    ours.backward()

    model = _qwen(config, {name: value.detach() for name, value in weights.items()})
    theirs = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        for document in batch.documents_BS[row].unique():
            picked_S = batch.documents_BS[row] == document
            logits_SV = model(batch.tokens_BS[row, picked_S][None]).logits[0]
            theirs = theirs + F.cross_entropy(
                logits_SV, batch.labels_BS[row, picked_S], reduction="sum", ignore_index=IGNORED
            )
            torch.testing.assert_close(logits_BSV[row, picked_S], logits_SV, rtol=1e-5, atol=1e-5)
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    grads = _qwen_grads(model)
    assert set(grads) == set(leaves)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert (leaf.grad - grads[name]).norm() <= 1e-5 * grads[name].norm(), name


def test_the_switch_loss_is_that_of_transformers() -> None:
    """With one MoE layer: theirs sums the counts over k without dividing by k, and averages over layers."""
    config = model_config("base", n_shared_experts=0, router_z_loss_coef=0.0)
    weights = full_weights(config, seed=4)
    batch = CaseBuilder(config.vocab_size, seed=6).batch([[24], [24], [24]])
    result = reference_step(config, weights, [batch])
    output = _qwen(config, weights)(batch.tokens_BS, output_router_logits=True)
    assert result.counts_GLE.shape[1] == 1
    assert result.aux * config.num_experts_per_tok == pytest.approx(output.aux_loss.item(), rel=1e-6)
    logsumexp = output.router_logits[-1].logsumexp(-1)
    assert result.zloss == pytest.approx(logsumexp.square().mean().item(), rel=1e-5)


@pytest.mark.parametrize(("variant", "seed"), [("base", 38), ("tied", 17), ("top1", 34)])
def test_the_gradient_is_that_of_the_loss_it_reports(variant: str, seed: int) -> None:
    """Central differences along one random direction per tensor, aux and z loss and accumulation included."""
    config = model_config(variant)
    weights = full_weights(config, seed)
    builder = CaseBuilder(config.vocab_size, seed=8)
    steps = [builder.batch([[9, 4], [13]]), builder.batch([[13], [5, 1, 2]])]
    result = reference_step(config, weights, steps)
    assert result.margin > 1e-2  # the finite step below can not change a route
    generator = torch.Generator().manual_seed(9)
    for name, weight in weights.items():
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        losses = [
            reference_step(config, {**weights, name: weight + sign * 1e-5 * direction}, steps).loss
            for sign in (1, -1)
        ]
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx((result.grads[name] * direction).sum().item(), rel=1e-5, abs=1e-9), name


def test_padding_from_the_loader_changes_nothing() -> None:
    config = model_config("base")
    weights = full_weights(config, seed=7)
    batch = CaseBuilder(config.vocab_size, seed=8).batch([[9, 4], [13]])
    padded = Batch(*(F.pad(x, (0, 3), value=v) for x, v in zip(batch, (0, IGNORED, 0, -1), strict=True)))
    a, b = (reference_step(config, weights, [x]) for x in (batch, padded))
    assert b.loss == pytest.approx(a.loss, rel=1e-14)
    assert torch.equal(a.counts_GLE, b.counts_GLE)
    for name, grad in a.grads.items():
        assert (b.grads[name] - grad).norm() <= 1e-13 * grad.norm(), name


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_optimizers_are_those_of_torch(optimizer: str) -> None:
    """Matrices decay and vectors do not; clipping bites in some steps."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        shapes = {"matrix": (4, 3), "vector": (5,)}
        return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}

    weights = draw()
    params = {name: value.clone().requires_grad_() for name, value in weights.items()}
    groups = [
        {"params": params["matrix"], "weight_decay": 0.1},
        {"params": params["vector"], "weight_decay": 0.0},
    ]
    if optimizer == "adamw":
        ours: ReferenceAdamW | ReferenceSGD = ReferenceAdamW(1e-2, (0.8, 0.9), 1e-8, 0.1)
        theirs: torch.optim.Optimizer = torch.optim.AdamW(groups, 1e-2, (0.8, 0.9), 1e-8)
    else:
        momentum = 0.9 if optimizer == "momentum" else 0.0
        ours = ReferenceSGD(1e-2, momentum, weight_decay=0.1)
        theirs = torch.optim.SGD(groups, 1e-2, momentum)
    biting = 0
    for _ in range(8):
        grads = draw()
        for name, param in params.items():
            param.grad = grads[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 4.0).item()
        clip = clip_coefficient(norm, 4.0)
        biting += clip < 1
        theirs.step()
        weights = ours.step(weights, grads, clip)
        for name, param in params.items():
            torch.testing.assert_close(param.detach(), weights[name], rtol=1e-12, atol=1e-13)
    assert 0 < biting < 8
