"""The benchmark of the co-schedule, at sizes that say nothing: what it measures, keeps and draws."""

from __future__ import annotations

import argparse
import json

import pytest

from cpmoe.cli.bench import coschedule
from cpmoe.cli.bench.coschedule import Scenario


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    coschedule.add_options(parser)
    return parser.parse_args(arguments)


def test_a_scenario_is_measured_kept_and_drawn(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(coschedule, "SCENARIOS", (Scenario("tiny", 64, 1, "", memory=True),))
    path, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    result = coschedule.run(path, options("--only", "tiny", "--picture", str(picture)))
    assert set(result["figures"]) == {
        f"coschedule.{name}" for name in ("hidden.tiny", "speedup.tiny", "auto_ratio", "memory_ratio")
    }
    assert json.loads(path.read_text()) == result
    measured = result["scenarios"]["tiny"]
    assert measured["bytes"] > 0 and measured["choice"] in ("serial", "overlap")
    assert 0.5 < result["figures"]["coschedule.memory_ratio"] < 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "(warm-up)" in capfd.readouterr().out, "it prints as it goes"
    # Nothing is missing: nothing is measured again.
    assert coschedule.run(path, options("--resume"))["scenarios"]["tiny"] == measured
    assert "(warm-up)" not in capfd.readouterr().out


def test_a_scenario_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"--only nothing: legal: seq16384_1gbit, "):
        coschedule.run(None, options("--only", "nothing"))
    with pytest.raises(ValueError, match="--picture shows one scenario"):
        coschedule.run(None, options("--picture", "p.png"))
