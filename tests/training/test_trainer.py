"""The loop on real processes: resume to the bit, stop on bad numbers, what is written."""

import json
import math
import os
import signal
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
    overrides = ("train.eval_every=2", "train.trace_steps=[2]", "cpmoe.coschedule.policy=overlap")
    run_distributed(_train, 2, run, overrides, monitor)
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
    for name in ("loss", "aux_loss", "z_loss", "grad_norm", "lr", "tokens_seen"):
        assert f"Train/{name}" in tags
    assert {"Eval/loss", "EvalByPosition/loss_from_000000", "Speed/tokens_per_second", "Speed/mfu"} <= tags
    assert {"MoE/max_over_mean_layer_001", "MoE/dropped_tokens"} <= tags
    assert "Train/Samples/lr" not in tags, "DeepSpeed's own, by shards instead of steps"
    assert events.Tags()["images"] == ["Trace/phases"]
    trace = json.loads((run / "traces" / "step-2.json").read_text())
    shown = {(event["pid"], event["cat"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    assert shown == {(rank, direction) for rank in (0, 1) for direction in ("forward", "backward")}
    written = [event.value for event in events.Scalars("Train/loss")]
    assert written == pytest.approx([record["loss"] for record in steps])

    from cpmoe.config.resolve import load_run

    again = load_run(run / "recipe.yaml", run / "deepspeed.json", (), 2)
    assert again == tiny_run(tmp_path / "rank0", 2, (f"train.out_dir={run}", *overrides), monitor)


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
                experts.gate_up_proj.data[0, 0, 0] = float("nan")
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
        ("weight", "the loss", "rank 1: model.layers.1.mlp.experts.gate_up_proj"),
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


def _signalled(
    rank: int, world_size: int, out: Path, overrides: tuple[str, ...], ranks: list[int], method: str
):
    """SIGTERM reaches `ranks` at the end of `method` of the second step. Returns the step of the stop."""
    trainer = _trainer(rank, world_size, out, ("train.steps=9", *overrides))
    owner = trainer.engine if method == "step" else trainer
    original = getattr(owner, method)

    def interrupted(*arguments):
        result = original(*arguments)
        if rank in ranks and trainer.step == (1 if method == "step" else 2):
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    setattr(owner, method, interrupted)
    trainer.train()
    return trainer.step


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("method", ["step", "evaluate", "save", "_one_step"])
def test_a_signal_at_any_moment_stops_all_ranks_after_one_step(tmp_path, ranks, method):
    overrides = ("train.eval_every=1", "train.save_every=1")
    assert run_distributed(_signalled, 2, tmp_path / "run", overrides, ranks, method) == [3, 3]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000003"]


def _refused(rank: int, world_size: int, out: Path, overrides: tuple[str, ...]):
    with pytest.raises(ValueError) as caught:
        _trainer(rank, world_size, out, overrides)
    return str(caught.value)


def test_a_run_never_mixes_with_later_checkpoints_of_another(tmp_path):
    run_distributed(_train, 2, tmp_path / "run", ("train.save_every=2",), {})
    record = (tmp_path / "run" / "recipe.yaml").read_text()
    first = tmp_path / "run" / "checkpoints" / "step_00000002"
    for resume in ("never", str(first)):
        messages = run_distributed(_refused, 2, tmp_path / "run", (f"train.resume={resume}", "optim.lr=0.5"))
        assert len(set(messages)) == 1
        assert "step_00000004" in messages[0] and "train.out_dir" in messages[0]
    assert (tmp_path / "run" / "recipe.yaml").read_text() == record


def test_two_runs_do_not_share_a_folder(tmp_path):
    from cpmoe.training.run_folder import claim_folder

    lock = claim_folder(tmp_path / "run")
    messages = run_distributed(_refused, 2, tmp_path / "run", ())
    assert messages == [f"rank 0: train.out_dir = {str(tmp_path / 'run')!r}: another run is writing there; "
                        "wait for it, or choose another"] * 2  # fmt: skip
    lock.release()


def test_a_damaged_checkpoint_stops_every_rank(tmp_path):
    run_distributed(_train, 2, tmp_path / "run", (), {})
    (tmp_path / "run" / "checkpoints" / "step_00000004" / "rank_00001.pt").write_bytes(b"damaged")
    for message in run_distributed(_refused, 2, tmp_path / "run", ("train.steps=5",)):
        assert message.startswith("rank 1: ") and "rank_00001.pt" in message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_a_sparse_layer_expert_parallelism_changes_nothing(tmp_path, stage):
    losses = []
    for ep in (1, 2):
        deepspeed = {
            "zero_optimization": {"stage": stage},
            "cpmoe": {"context_parallel_size": 2, "expert_parallel_size": ep},
        }
        out = tmp_path / f"ep{ep}"
        run_distributed(_train, 2, out, ("model.first_k_dense_replace=2", "optim.name=sgd"), deepspeed)
        losses.append([(r["loss"], r["grad_norm"]) for r in _records(out, "train")])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-6, atol=0)


def test_the_record_of_a_run_that_went_back_is_that_of_its_last_course(tmp_path):
    from cpmoe.training.run_folder import read_metrics

    steps = [("train", 1), ("eval", 1), ("train", 2), ("train", 3), ("eval", 3), ("train", 2)]
    lines = [json.dumps({"kind": kind, "step": step, "loss": i}) for i, (kind, step) in enumerate(steps)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:4], lines[4][:9], *lines[4:]]) + "\n")
    train, evaluations = read_metrics(tmp_path)
    assert {step: record["loss"] for step, record in train.items()} == {1: 0, 2: 5}
    assert list(evaluations) == [1]
