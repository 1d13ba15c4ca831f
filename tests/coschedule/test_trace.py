"""What runs is what the schedule says: forward in its order, backward in exactly the reverse."""

from __future__ import annotations

import pytest
import torch

from cpmoe.attention.slicing import shard_slices
from cpmoe.coschedule.trace import PhaseTrace, RankTrace, TransferSpan
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale, init_weights
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import create_groups
from tests.distributed import run_distributed
from tests.numerics.cases import model_config

SEQ_LEN = 32
Event = tuple[str, int, int]


def traced(rank: int, world: int, policy: str, slicing: str) -> tuple[list[Event], RankTrace]:
    """The schedule of a micro-step as (kind, layer, slice), and the step's trace."""
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
    trace.end()
    return [(p.kind, p.layer, p.slice) for p in model.model.schedule(len(slices))], trace.result()


def _computes_meanwhile(transfer: TransferSpan, trace: RankTrace) -> bool:
    """Whether the other slice attended or ran experts between the launch and the wait."""
    return any(
        span.slice != transfer.slice
        and span.kind in ("attend_own", "attend", "experts")
        and transfer.start <= span.start <= span.stop <= transfer.wait
        for span in trace.phases
    )


@pytest.mark.parametrize(
    ("policy", "slicing"), [("serial", "none"), ("overlap", "batch"), ("overlap", "causal")]
)
def test_backward_runs_in_exactly_the_reverse_order(policy, slicing):
    for schedule, trace in run_distributed(traced, 2, policy, slicing):
        forward, backward = (
            [(s.kind, s.layer, s.slice) for s in trace.phases if s.is_backward == direction]
            for direction in (False, True)
        )
        assert forward == schedule
        assert backward == forward[::-1]
        assert all(0 <= span.start <= span.stop for span in trace.phases)
        assert all(0 <= t.start <= t.wait <= t.stop and t.num_bytes > 0 for t in trace.transfers)
        found = {(t.group, t.is_backward) for t in trace.transfers}
        both = {(group, direction) for group in ("ring", "expert") for direction in (False, True)}
        assert both | {("ring_grad", True), ("meta", False)} >= found >= both - {("ring", True)}
        hidden = [_computes_meanwhile(t, trace) for t in trace.transfers if t.group == "expert"]
        assert len(hidden) == 2 * 2 * 2 * (1 if slicing == "none" else 2)
        # Under overlap all but the last combine, in forward and in backward the last dispatch.
        assert sum(hidden) == (0 if policy == "serial" else len(hidden) - 2)
