"""What runs is what the schedule says: forward in its order, backward in exactly the reverse."""

from __future__ import annotations

import pytest
import torch

from cpmoe.attention.slicing import shard_slices
from cpmoe.coschedule.trace import PhaseTrace
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale, init_weights
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import create_groups
from tests.distributed import run_distributed
from tests.numerics.cases import model_config

SEQ_LEN = 32
Event = tuple[str, int, int]


def traced(rank: int, world: int, policy: str, slicing: str) -> tuple[list[Event], list[Event], list[Event]]:
    """(schedule, forward, backward) of one micro-step, each as (kind, layer, slice)."""
    groups = create_groups(RankGrid(world, world, world))
    config = model_config("base", num_hidden_layers=3)
    model = CausalLM(config, groups, ModelOptions(coschedule_policy=policy))
    init_weights(model, 0)
    trace = PhaseTrace()
    model.model.observer = trace
    tokens_BS = torch.randint(0, 48, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions_BS = torch.arange(SEQ_LEN).expand_as(tokens_BS)
    slices = shard_slices(
        tokens_BS, tokens_BS, positions_BS, torch.zeros_like(tokens_BS), world, rank, slicing=slicing
    )
    trace.watch_forward()
    loss = model(slices, LossScale(tokens_BS.numel(), tokens_BS.numel(), 1)).loss
    trace.watch_backward(loss)
    loss.backward()
    schedule = [(p.kind, p.layer, p.slice) for p in model.model.schedule(len(slices))]
    forward, backward = (
        [(s.kind, s.layer, s.slice) for s in trace.spans if s.is_backward == direction]
        for direction in (False, True)
    )
    for span in trace.spans:
        assert span.start <= span.stop, span
    return schedule, forward, backward


@pytest.mark.parametrize(
    ("policy", "slicing"), [("serial", "none"), ("overlap", "batch"), ("overlap", "causal")]
)
def test_backward_runs_in_exactly_the_reverse_order(policy, slicing):
    for schedule, forward, backward in run_distributed(traced, 2, policy, slicing):
        assert forward == schedule
        assert backward == forward[::-1]
