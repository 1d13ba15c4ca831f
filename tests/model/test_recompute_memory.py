"""Recomputation forgets: a block keeps its input between forward and backward, and nothing after its own."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cpmoe.attention.slicing import shard_slices
from cpmoe.model.layers import Attention
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale, init_weights
from cpmoe.moe.experts import Experts
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import Groups
from tests.numerics.cases import model_config

SEQ_LEN, LAYERS = 32, 3


class _Kept(torch.autograd.Function):
    """The identity; saves a copy for backward, as an expert saves its input."""

    @staticmethod
    def forward(ctx, x, refs):
        copy = x.clone()
        ctx.save_for_backward(copy)
        refs.append(StorageWeakRef(copy.untyped_storage()))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors
        return grad, None


def _alive(refs: list[StorageWeakRef]) -> int:
    gc.collect()
    return sum(not ref.expired() for ref in refs)


@pytest.mark.parametrize("slicing", ["none", "batch", "causal"])
def test_what_recomputation_keeps(monkeypatch, slicing):
    keys: list[StorageWeakRef] = []
    inputs: list[StorageWeakRef] = []
    project, experts = Attention.project, Experts.forward

    def seen_project(self, *args):
        q, k, v = project(self, *args)
        keys.extend(StorageWeakRef(x.untyped_storage()) for x in (k, v))
        return q, k, v

    def seen_experts(self, rows_RM, splits, weights=None):
        return experts(self, _Kept.apply(rows_RM, inputs), splits, weights)

    monkeypatch.setattr(Attention, "project", seen_project)
    monkeypatch.setattr(Experts, "forward", seen_experts)
    config = model_config("base", num_hidden_layers=LAYERS, first_k_dense_replace=0)
    options = ModelOptions(coschedule_policy="overlap", recompute="full", attention_backend="reference")
    model = CausalLM(config, Groups(RankGrid(1, 1, 1), 0), options)
    init_weights(model, 0)
    tokens_BS = torch.randint(0, config.vocab_size, (2, SEQ_LEN))
    positions_BS = torch.arange(SEQ_LEN).expand_as(tokens_BS)
    slices = shard_slices(
        tokens_BS, tokens_BS, positions_BS, torch.zeros_like(tokens_BS), 1, 0, slicing=slicing
    )
    late: list[int] = []
    for block in model.model.layers:
        # The last of a block's gradients: what its experts saved must be gone by then.
        block.self_attn.q_proj.weight.register_hook(lambda _: late.append(_alive(inputs)))
    loss = model(slices, LossScale(tokens_BS.numel(), tokens_BS.numel(), 1)).loss
    assert len(keys) == 2 * LAYERS * len(slices)
    assert _alive(keys) == _alive(inputs) == 0
    loss.backward()
    assert len(inputs) == 2 * LAYERS * len(slices) and late
    assert set(late) == {0}
