"""The loop on real processes: resume to the bit, stop on bad numbers, what is written."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.distributed import run_distributed
from tests.training.support import tiny_run, write_text


def _trainer(rank: int, world_size: int, out: Path, overrides: tuple[str, ...] = (), deepspeed=None):
    """A trainer that writes to `out`; each rank has its copy of the text and the configuration beside it."""
    from cpmoe.data.prepare import prepare
    from cpmoe.data.store import open_prepared
    from cpmoe.training.engine import init_distributed
    from cpmoe.training.trainer import Trainer

    own = out.parent / f"rank{rank}"
    own.mkdir(exist_ok=True)
    write_text(own)
    run = tiny_run(own, world_size, (f"train.out_dir={out}", *overrides), deepspeed)
    prepared = open_prepared(prepare(run.recipe.data))
    return Trainer(run, prepared, init_distributed())


def _train(rank: int, world_size: int, out: Path, overrides: tuple[str, ...], deepspeed: dict):
    """Trains, and returns the rank's state at the end."""
    trainer = _trainer(rank, world_size, out, overrides, deepspeed)
    trainer.train()
    return trainer.engine.state_dict()


def _records(run: Path, kind: str):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_bit_identical(tmp_path, stage):
    deepspeed = {"zero_optimization": {"stage": stage}}
    overrides = ("train.save_every=2",)
    whole = run_distributed(_train, 2, tmp_path / "whole", overrides, deepspeed)
    half = tmp_path / "half"
    run_distributed(_train, 2, half, overrides, deepspeed)
    # As if the run had been killed after step 2.
    for path in (half / "checkpoints").glob("step_00000004/*"):
        path.unlink()
    (half / "checkpoints" / "step_00000004").rmdir()
    resumed = run_distributed(_train, 2, half, overrides, deepspeed)
    for one, other in zip(whole, resumed, strict=True):
        ones, others = list(_tensors(one)), list(_tensors(other))
        assert len(ones) == len(others) > 10
        assert all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))
    losses = [[r["loss"] for r in _records(run, "train")] for run in (tmp_path / "whole", half)]
    assert losses[0] == losses[1][:4] == losses[1][:2] + losses[1][4:]


def test_what_a_run_writes(tmp_path):
    monitor = {"tensorboard": {"enabled": True, "output_path": "auto", "job_name": "tensorboard"}}
    run = tmp_path / "run"
    run_distributed(_train, 2, run, ("train.eval_every=2",), monitor)
    steps = _records(run, "train")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in steps)
    assert steps[-1]["tokens_seen"] == 4 * 2 * 30
    assert [record["step"] for record in _records(run, "eval")] == [2, 4]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["deepspeed"] == "0.19.8" and environment["packages"]["torch"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for name in ("loss", "aux_loss", "z_loss", "grad_norm", "lr", "tokens_per_second", "tokens_seen"):
        assert f"Train/{name}" in tags
    assert {"Eval/loss", "Train/moe_max_over_mean/layer_0", "Train/dropped_tokens"} <= tags
    assert any(tag.startswith("Eval/loss_from_position_") for tag in tags)
    written = [event.value for event in events.Scalars("Train/loss")]
    assert written == pytest.approx([record["loss"] for record in steps])

    from cpmoe.config.resolve import load_run

    again = load_run(run / "recipe.yaml", run / "deepspeed.json", (), 2)
    assert again == tiny_run(tmp_path / "rank0", 2, (f"train.out_dir={run}", "train.eval_every=2"), monitor)


def _overflow_in_backward(module, arguments, output):
    output.register_hook(lambda grad: grad * float("inf"))


def _spoil(rank: int, world_size: int, out: Path, where: str):
    """Makes a weight, or only a gradient, of rank 1 not finite before the second step."""
    from cpmoe.training.guard import NonFiniteError

    trainer = _trainer(rank, world_size, out, ("train.save_every=1", "train.eval_sequences=0"))
    step = trainer._one_step
    experts = trainer.engine.model.model.layers[1].mlp.experts

    def spoiled_step():
        if trainer.step == 1 and rank == 1:
            if where == "weight":
                experts.up_proj.data[0, 0, 0] = float("nan")
            else:
                experts.register_forward_hook(_overflow_in_backward)
        step()

    trainer._one_step = spoiled_step
    before = [p.detach().clone() for p in trainer.engine.model.parameters()]
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    after = list(trainer.engine.model.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    finite = all(p.isfinite().all() for p in after) or (where == "weight" and rank == 1)
    return str(caught.value), any(changed), finite


@pytest.mark.parametrize(
    ("where", "what", "name"),
    [
        ("weight", "the loss", "rank 1: model.layers.1.mlp.experts.up_proj"),
        ("gradient", "the gradient", "rank 1: model.layers.1.mlp.experts."),
    ],
)
def test_a_bad_number_stops_the_run_and_is_named(tmp_path, where, what, name):
    for message, changed, finite in run_distributed(_spoil, 2, tmp_path / where, where):
        assert message.startswith(f"step 2: {what} is not finite")
        assert name in message
        assert changed and finite
    checkpoints = sorted(path.name for path in (tmp_path / where / "checkpoints").iterdir())
    assert checkpoints == ["step_00000001"]
