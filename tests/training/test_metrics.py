"""What a person reads: the line of a step, durations, and events for the monitor."""

import json

import pytest
import torch

from cpmoe.training.metrics import (
    MetricsWriter,
    StepMetrics,
    device_memory,
    format_seconds,
    matmul_rate,
    peak_flops,
)

METRICS = StepMetrics(
    step=120, loss=2.41309, aux_loss=1.01, z_loss=3.5, grad_norm=0.8421, lr=3e-4, tokens=39248,
    tokens_seen=4_709_760, seconds=2.0, data_seconds=0.008, comm_exposed_seconds=0.062,
    memory=61 * 1024**3, memory_total=142 * 1024**3,
    load_max_over_mean=(1.02, 1.07), first_sparse_layer=1, dropped_tokens=0, flops_per_second=8e14,
)  # fmt: skip


class _Events(list):
    def write_events(self, events):
        self.extend(events)


def test_line_events_and_jsonl(tmp_path, capsys):
    events = _Events()
    writer = MetricsWriter(tmp_path, events, world_size=2, total_steps=5000, peak=1e15)
    writer.step(METRICS, show=True)
    writer.evaluation(120, 2.5, [(0, 3.0), (512, 2.0)])
    writer.close()
    step_line, eval_line = capsys.readouterr().out.splitlines()
    assert step_line == (
        "step 120/5000  loss 2.4131  grad_norm 0.842  lr 3.0e-04  tokens/s 9,812/rank  "
        "mfu 40.0%  mem 61.0 GiB (43%)  comm exposed 3.1%  data 0.4%  moe max/mean 1.07  eta 2h42m"
    )
    assert eval_line == "step 120/5000  held-out loss 2.5000"
    values = {name: value for name, value, step in events if step == 120}
    assert values["Speed/tokens_per_second"] == 39248 / 2
    assert values["Speed/mfu"] == 0.4
    assert values["Speed/comm_exposed_fraction"] == 0.031
    assert values["MoE/max_over_mean_layer_002"] == 1.07
    assert values["Eval/loss"] == 2.5 and values["EvalByPosition/loss_from_000512"] == 2.0
    train, evaluation = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert train["kind"] == "train" and train["loss"] == 2.41309
    assert evaluation == {
        "kind": "eval", "step": 120, "loss": 2.5, "loss_by_position": [[0, 3.0], [512, 2.0]],
    }  # fmt: skip


@pytest.mark.parametrize("peak", [7.21e10, None])
def test_columns_are_explained(tmp_path, capsys, peak):
    writer = MetricsWriter(tmp_path, _Events(), 2, 5000, peak)
    writer.explain()
    writer.step(METRICS, show=True)
    writer.close()
    *legend, line = capsys.readouterr().out.splitlines()
    assert max(map(len, [*legend, line])) < 180
    for column in ("comm exposed", "data", "moe max/mean"):
        assert column in line and column in " ".join(legend)
    assert ("mfu" in line) == ("mfu of 0.0721 TFLOP/s a rank" in legend[0]) == (peak is not None)


def test_hidden_steps_are_recorded_too(tmp_path, capsys):
    writer = MetricsWriter(tmp_path, _Events(), 2, 5000, None)
    writer.step(METRICS, show=False)
    writer.close()
    assert capsys.readouterr().out == ""
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_line_cut_short_spoils_no_other(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "tra')
    writer = MetricsWriter(tmp_path, _Events(), 2, 5000, None)
    writer.step(METRICS, show=False)
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["step"] == 120


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.7, "1m00s"), (245, "4m05s"), (3599.6, "1h00m"), (11525, "3h12m")]
)
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


def test_the_cpu_has_memory_and_a_matrix_rate():
    used, total = device_memory(torch.device("cpu"))
    assert 0 < used < total
    assert matmul_rate(size=64, repeats=2) > 0
    assert peak_flops(torch.device("cpu")) > 0
