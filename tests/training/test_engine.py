"""What the engine undoes of DeepSpeed's own set-up."""

import pytest
import torch

from tests.distributed import run_distributed
from tests.training.support import tiny_run, write_text


def _updates(rank: int, world_size: int, folder, optimizer: str, stage: int):
    """All parameters before and after two steps of one process in bfloat16, flat."""
    from cpmoe.data.prepare import prepare
    from cpmoe.data.store import open_prepared
    from cpmoe.training.engine import init_distributed
    from cpmoe.training.trainer import Trainer

    folder.mkdir()
    write_text(folder)
    overrides = (f"optim.name={optimizer}", "optim.momentum=0.9", "optim.weight_decay=5", "train.steps=2",
                 "train.eval_sequences=0")  # fmt: skip
    run = tiny_run(
        folder, world_size, overrides, {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    )
    trainer = Trainer(run, open_prepared(prepare(run.recipe.data)), init_distributed())
    before = torch.cat([p.detach().flatten() for p in trainer.engine.model.parameters()])
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in trainer.engine.model.parameters()])
    return before.tolist(), after.tolist()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bfloat16_starts_its_optimizer_alike_at_stage_0_and_1(tmp_path, optimizer):
    (before, stage_0), (_, stage_1) = (
        [torch.tensor(values) for values in run_distributed(_updates, 1, tmp_path / f"{i}", optimizer, i)[0]]
        for i in (0, 1)
    )
    # Both keep masters in float32 and show them in bfloat16.
    error = (stage_0 - stage_1).norm() / (stage_1 - before).norm()
    assert error <= torch.finfo(torch.bfloat16).eps


def _start_with_own_policy(rank: int, world_size: int, folder) -> str:
    from cpmoe.coschedule.verify import ScheduleError
    from cpmoe.training.engine import TrainingEngine, build_groups, build_model, init_distributed

    policy = ("serial", "overlap")[rank]
    run = tiny_run(folder, world_size, (f"cpmoe.coschedule.policy={policy}",))
    init_distributed()
    groups = build_groups(run)
    try:
        TrainingEngine(run, build_model(run, groups), groups)
    except ScheduleError as error:
        return str(error)
    return "started"


def test_ranks_with_other_schedules_do_not_start(tmp_path):
    for message in run_distributed(_start_with_own_policy, 2, tmp_path):
        assert message.startswith("group expert: rank 0 issues") and "rank 1 issues" in message
