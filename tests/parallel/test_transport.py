"""Every transfer is known while it is in flight: its group, its peers, and the phase that launched it."""

from __future__ import annotations

import pytest
import torch

from cpmoe.attention.slicing import shard_slices
from cpmoe.coschedule.schedule import KINDS
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale, init_weights
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import create_groups
from cpmoe.parallel.transport import InFlight, transport
from tests.distributed import run_distributed
from tests.numerics.cases import model_config

# (group, kind of the phase, its slice, forward | backward | recomputed forward)
Launch = tuple[str, str, int, str]


class Record:
    """Notes each launch, and what was in flight then."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.texts: list[str] = []
        self.most_in_flight = 0

    def launched(self, flight: InFlight) -> None:
        phase, is_backward, is_recomputed = flight.place
        how = "backward" if is_backward else "recomputed forward" if is_recomputed else "forward"
        assert str(flight.place) == f"{how} of {phase}"
        self.launches.append((flight.group.group_desc, phase.kind, phase.slice, how))
        self.texts.append(str(flight))
        self.most_in_flight = max(self.most_in_flight, len(transport.in_flight))
        assert flight in transport.in_flight

    def waits(self, flight: InFlight) -> None:
        assert transport.waiting is flight

    def arrived(self, flight: InFlight) -> None:
        assert flight in transport.in_flight


def record_a_step(rank: int, world: int, recompute: str) -> Record:
    groups = create_groups(RankGrid(world, world, world))
    options = ModelOptions(coschedule_policy="overlap", recompute=recompute)
    model = CausalLM(model_config("base", first_k_dense_replace=0), groups, options)
    init_weights(model, 0)
    tokens_BS = torch.randint(0, 48, (2, 32), generator=torch.Generator().manual_seed(1))
    positions_BS = torch.arange(32).expand_as(tokens_BS)
    slices = shard_slices(
        tokens_BS, tokens_BS, positions_BS, torch.zeros_like(tokens_BS), world, rank, slicing="batch"
    )
    transport.observer = record = Record()
    model(slices, LossScale(64, 64, 1)).loss.backward()
    transport.observer = None
    assert not transport.in_flight and transport.waiting is None
    return record


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_launch_knows_its_phase(recompute):
    for record in run_distributed(record_a_step, 2, recompute):
        launches = record.launches
        for group, kind, _, how in launches:
            does = KINDS[kind]
            if how != "backward":
                assert group in (*does.within, does.starts)
            else:  # what the wait of forward brought goes back from there
                assert group in does.within or KINDS[str(does.waits)].returns == group
        again = {how for *_, how in launches} - {"forward", "backward"}
        assert again == ({"recomputed forward"} if recompute == "full" else set())
        rows = [launch[1:] for launch in launches if launch[0] == "expert" and launch[3] == "forward"]
        back = [launch[1:] for launch in launches if launch[0] == "expert" and launch[3] == "backward"]
        waits = [(kind.replace("start", "wait"), index, "backward") for kind, index, _ in rows]
        assert sorted(back) == sorted(waits) and len(rows) == 8
        assert {index for _, _, index, _ in launches} == {0, 1}
        assert record.most_in_flight > 1


def test_a_transfer_says_who_takes_part():
    texts = run_distributed(record_a_step, 2, "none")[1].texts
    ring = next(text for text in texts if text.startswith("group ring ("))
    assert "from rank 0, to rank 0;" in ring and "forward of kv_start of slice 0 in layer 0" in ring
    expert = next(text for text in texts if text.startswith("group expert ("))
    assert "(ranks 0, 1; " in expert and "bytes to receive" in expert
