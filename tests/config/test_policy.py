"""When policy "auto" measures, when it need not, and which stored measurements it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.support import Files

AUTO = {"cpmoe.coschedule.policy": "auto"}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def choice(files: Files, json_: dict[str, Any], recipe: dict[str, Any] | None = None) -> tuple[str, str]:
    run = files.load(recipe, json_)
    again = json.loads(json.dumps(run.json_tree()))["cpmoe"]["coschedule"]
    assert again == {"policy": run.policy, "slices": run.slicing, "measurement": None}
    return run.policy, run.slicing


def test_auto_is_the_default_and_measures_where_something_travels(files):
    assert choice(files, {}) == ("auto", "causal")
    assert choice(files, AUTO, {"train.micro_batch_size": 2}) == ("auto", "batch")
    assert choice(files, {"cpmoe.coschedule": {"slices": "batch"}, "cpmoe.expert_parallel_size": 1},
                  {"train.micro_batch_size": 2}) == ("auto", "batch")  # fmt: skip


@pytest.mark.parametrize(
    ("json_", "recipe"),
    [
        ({"cpmoe.coschedule.slices": "none"}, {}),
        ({"cpmoe.context_parallel_size": 1, "cpmoe.expert_parallel_size": 1}, {}),
        ({"cpmoe.context_parallel_size": 1, "cpmoe.expert_parallel_size": 1,
          "cpmoe.coschedule.slices": "causal"}, {}),
        ({"cpmoe.expert_parallel_size": 1}, {}),
        ({}, {"data.seq_len": 7}),
        ({}, {"model.first_k_dense_replace": 2, "model.intermediate_size": 32}),
    ],
)  # fmt: skip
def test_auto_is_serial_where_there_is_nothing_to_overlap(files, json_, recipe):
    assert choice(files, AUTO | json_, recipe) == ("serial", "none")


def stored(files: Files, **changes: Any) -> str:
    """A measurement of a run like that of `files`, changed."""
    record = {"policy": "overlap", "conditions": files.load(json_=AUTO).conditions, "timings": []}
    path = files.folder / "measured.json"
    path.write_text(json.dumps(record | changes))
    return str(path)


@pytest.mark.parametrize(("policy", "slices"), [("overlap", "causal"), ("serial", "none")])
def test_a_stored_choice_is_taken(files, policy, slices):
    path = stored(files, policy=policy)
    assert choice(files, AUTO | {"cpmoe.coschedule.measurement": path}) == (policy, slices)


def refusal(files: Files, path: str, **more: Any) -> str:
    (line,) = files.refused(json_=AUTO | {"cpmoe.coschedule.measurement": path}, **more)
    assert line.startswith("deepspeed.json: cpmoe.coschedule.measurement = ") and "legal: " in line
    return line


def test_a_measurement_that_does_not_fit_is_refused(files):
    assert "can not be read" in refusal(files, str(files.folder / "nowhere.json"))
    assert "not finished" in refusal(files, stored(files, policy=None))
    for text in ("", "[]", "{}", '{"policy": "overlap"}'):
        (files.folder / "measured.json").write_text(text)
        assert "is no measurement" in refusal(files, str(files.folder / "measured.json"))
    path = stored(files)
    line = refusal(files, path, recipe={"data.seq_len": 4096}, world_size=2)
    assert "seq_len 2048 there and 4096 here" in line and "world_size 4 there and 2 here" in line


def test_a_given_policy_needs_no_measurement(files):
    run = files.load(json_={"cpmoe.coschedule": {"policy": "serial", "measurement": "nowhere.json"}})
    assert (run.policy, run.slicing) == ("serial", "none")
