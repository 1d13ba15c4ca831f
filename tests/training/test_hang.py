"""A rank that never comes to a collective: the others say where they wait for it, and end."""

from __future__ import annotations

import re
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cpmoe.attention.slicing import shard_slices
from cpmoe.coschedule.schedule import Phase
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale, init_weights
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import create_groups
from cpmoe.parallel.progress import progress
from cpmoe.training.hang import HANG_STATUS, HangWatch
from tests.distributed import run_distributed
from tests.numerics.cases import model_config

SECONDS = 3.0
ABSENT = 2
AT = Phase("attend", 1, 1, 1)


class Stays:
    """Keeps the absent rank out of a phase of forward, or out of a gradient, until all others reported."""

    def __init__(self, folder: Path, others: int) -> None:
        self.folder, self.others = folder, others

    def wait(self, *_: Any) -> None:
        end = time.monotonic() + 60
        while len(list(self.folder.glob("hangs/*"))) < self.others and time.monotonic() < end:
            time.sleep(0.1)

    def __call__(self, phase: Phase) -> AbstractContextManager[None]:
        if phase == AT:
            self.wait()
        return nullcontext()


def report_of(rank: int, world: int, folder: Path, direction: str) -> tuple[str, list[int]]:
    """What this rank wrote, and the statuses with which it would have ended."""
    groups = create_groups(RankGrid(world, world, 2))
    config, options = model_config("base", first_k_dense_replace=0), ModelOptions(coschedule_policy="overlap")
    model = CausalLM(config, groups, options)
    init_weights(model, 0)
    stays = Stays(folder, world - 1)
    if rank == ABSENT and direction == "forward":
        model.model.observer = stays
    elif rank == ABSENT:
        model.model.layers[1].mlp.experts.down_proj.register_hook(stays.wait)
    tokens_BS = torch.randint(0, 48, (1, 64), generator=torch.Generator().manual_seed(1))
    fields = tokens_BS, tokens_BS, torch.arange(64)[None], torch.zeros_like(tokens_BS)
    slices = shard_slices(*fields, world, rank, slicing="causal")
    dist.barrier()
    statuses: list[int] = []
    progress.step = 7
    seconds = 0 if rank == ABSENT else SECONDS
    with HangWatch(seconds, folder, rank, end=statuses.append, grace=0):
        progress.begin("forward")
        loss = model(slices, LossScale(64, 64, 1)).loss
        progress.begin("backward")
        loss.backward()
        progress.begin("")
    path = folder / "hangs" / f"rank-{rank}.txt"
    return path.read_text() if path.exists() else "", statuses


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_others_name_group_peers_and_phase(tmp_path, direction):
    reports = run_distributed(report_of, 4, tmp_path, direction)
    for rank, (text, statuses) in enumerate(reports):
        if rank == ABSENT:
            assert (text, statuses) == ("", [])
            continue
        assert statuses == [HANG_STATUS]
        assert text.startswith(f"rank {rank}: nothing got done for 3 s in step 7: {direction}\n")
        waits = rf"waits for group (ring|ring_grad|expert|meta) \(.*\), {direction} of \w+ of slice"
        assert re.search(waits, text) and "in report_of" in text, text
    # In the ring rank 3 receives from rank 2, and shares experts with it.
    waits, *in_flight = [line.strip() for line in reports[3][0].splitlines()[1:]]
    assert waits.startswith("waits for group ring (from rank 2, to rank 0; ")
    assert f", {direction} of attend of slice 1 in layer 1" in waits
    if direction == "backward":
        assert any(line.startswith("in flight: group expert (ranks 2, 3;") for line in in_flight)


def test_what_may_take_long_is_not_watched(tmp_path):
    statuses: list[int] = []
    with HangWatch(0.2, tmp_path, 0, end=statuses.append, grace=0):
        progress.begin("")
        time.sleep(0.6)
    with HangWatch(0, tmp_path, 0, end=statuses.append, grace=0):
        progress.begin("data")
        time.sleep(0.3)
    progress.begin("")
    assert not statuses and not (tmp_path / "hangs").exists()
