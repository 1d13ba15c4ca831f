"""Three hundred steps under overlap with routing and documents that never repeat: no hang, no bad number."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from cpmoe.model.transformer import LossScale
from cpmoe.parallel.progress import progress
from cpmoe.training.engine import TrainingEngine, build_groups, build_model
from cpmoe.training.hang import HangWatch
from tests.distributed import run_distributed
from tests.numerics import cases
from tests.numerics.engine_jobs import EngineJob, run_config
from tests.numerics.model_jobs import Layout, load_weights, local_weights, rank_slices
from tests.numerics.reference import Batch

STEPS, COMPARED = 300, 8
CASE = "skewed"  # the part of the vocabulary that a token is of chooses its experts


def batch(step: int) -> Batch:
    """Documents of random lengths; tokens of a random part of the vocabulary, from one expert's to all."""
    choice = random.Random(step)
    rows: list[list[int]] = []
    for _ in range(cases.NUM_ROWS):
        cuts = sorted(choice.sample(range(1, 32), choice.randrange(0, 9)))
        rows.append([b - a for a, b in zip([0, *cuts], [*cuts, 32], strict=True)])
    drawn = cases.CaseBuilder(cases.case_config(CASE).vocab_size, seed=step).batch(rows)
    width = choice.choice((12, 24, 48))
    first = choice.randrange(0, 48 // 12) * 12
    tokens_BS = (first + drawn.tokens_BS % width) % 48
    return drawn._replace(tokens_BS=tokens_BS)


def losses(rank: int, world: int, folder: Path, policy: str, steps: int) -> list[float]:
    """This rank's losses; a rank that hangs says where."""
    job = EngineJob(Layout(world, 2, 4), "1", CASE, clip=1.0, optimizer="plain", policy=policy, slices="auto")
    run = run_config(job)
    groups = build_groups(run)
    model = build_model(run, groups)
    load_weights(model, local_weights(cases.case_weights(CASE), groups.grid, rank))
    engine = TrainingEngine(run, model, groups)
    found: list[float] = []
    with HangWatch(60, folder, rank):
        for step in range(steps):
            progress.step = step + 1
            batches = [batch(step)]
            scale = LossScale(cases.num_labels(batches), cases.num_tokens(batches), 1)
            args: Any = (groups.grid, rank, run.cpmoe.attention.layout, run.slicing, run.recipe.model)
            (slices,) = rank_slices(batches, *args)
            found.append(engine.micro_step(slices, scale).loss.item())
            engine.step()
        progress.begin("")
    engine.deepspeed.destroy()
    return found


@pytest.mark.slow
def test_300_steps_of_random_routing_and_documents(tmp_path):
    overlap = run_distributed(losses, 4, tmp_path, "overlap", STEPS, timeout=240)
    serial = run_distributed(losses, 4, tmp_path, "serial", COMPARED, timeout=120)
    assert not (tmp_path / "hangs").exists()
    assert all(math.isfinite(loss) for rank in overlap for loss in rank)
    for step in range(COMPARED):
        one, other = (sum(rank[step] for rank in ranks) for ranks in (overlap, serial))
        assert one == pytest.approx(other, rel=1e-5), step
