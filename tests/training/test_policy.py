"""Policy "auto" in the loop: it measures while it trains, and a resumed run takes what it wrote."""

from __future__ import annotations

import json
import shutil

import torch

from cpmoe.coschedule.choice import Measurement, Timing
from tests.distributed import run_distributed
from tests.training.test_trainer import _records, _tensors, _train

# Long enough for a choice, if the machine lets one of the policies be seen to be faster.
OVERRIDES = (
    "train.steps=12", "train.save_every=4", "train.keep_checkpoints=9", "train.eval_every=4",
    "train.eval_sequences=2", "train.trace_steps=[6]", "train.recompute=full",
)  # fmt: skip
STAGE_3 = {"zero_optimization": {"stage": 3}}


def test_a_run_that_measures_trains_as_serial_does_and_continues_to_the_bit(tmp_path):
    whole = run_distributed(_train, 2, tmp_path / "whole", OVERRIDES, STAGE_3)
    record = json.loads((tmp_path / "whole" / "coschedule.json").read_text())
    timings = [Timing(*timing) for timing in record["timings"]]
    assert Measurement(timings).choice == record["policy"]
    assert [t.step for t in timings] == list(range(1, len(timings) + 1)) and len(timings) >= 11
    assert {t.policy for t in timings} == {"serial", "overlap"}
    assert [t.step for t in timings if not t.counts] == [1, 3, 6], "two warm-ups, and step 6 was traced"

    # Every step counts: losses are those of a run that never measured.
    serial = (*OVERRIDES, "cpmoe.coschedule.policy=serial")
    run_distributed(_train, 2, tmp_path / "serial", serial, STAGE_3)
    losses = [[r["loss"] for r in _records(tmp_path / run, "train")] for run in ("whole", "serial")]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=0)
    assert not (tmp_path / "serial" / "coschedule.json").exists()

    # As if killed after step 4, in the middle of the measurement.
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole", half)
    for folder in sorted((half / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    resumed = run_distributed(_train, 2, half, OVERRIDES, STAGE_3)
    assert json.loads((half / "coschedule.json").read_text())["timings"][: len(timings)] == record["timings"]
    for one, other in zip(whole, resumed, strict=True):
        pairs = list(zip(_tensors(one), _tensors(other), strict=True))
        assert len(pairs) > 10 and all(torch.equal(a, b) for a, b in pairs)


def test_a_record_of_other_conditions_is_measured_anew(tmp_path):
    overrides = ("train.steps=2", "train.eval_sequences=0")
    run_distributed(_train, 2, tmp_path / "run", overrides, {})
    path = tmp_path / "run" / "coschedule.json"
    record = json.loads(path.read_text())
    record["conditions"]["seq_len"] += 1
    record["timings"] = [[step, "overlap", 1.0, True] for step in range(1, 5)]
    path.write_text(json.dumps(record))
    run_distributed(_train, 2, tmp_path / "run", ("train.steps=4", *overrides[1:]), {})
    assert [step for step, *_ in json.loads(path.read_text())["timings"]] == [3, 4]
