"""What two records of runs are said to share."""

import json
import math
from pathlib import Path

import pytest

from cpmoe.cli.main import main


def run(folder: Path, losses: list[float], norms: list[float] | None = None, tokens: int = 10) -> str:
    """A record of one step for each loss, with an evaluation after the last."""
    folder.mkdir()
    norms = norms or [1.0] * len(losses)
    records: list[dict] = [
        {"kind": "train", "step": i, "loss": loss, "grad_norm": norm, "tokens_seen": tokens * i}
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)
    ]
    records.append({"kind": "eval", "step": len(losses), "loss": losses[-1]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return run(tmp_path / "base", [5.0, 4.0, 3.0])


def test_rounding_is_no_difference(tmp_path, capsys, base):
    other = run(tmp_path / "other", [5.0, 4.0 * (1 + 2e-7), 3.0, 2.0])
    assert main(["compare", base, other]) == 0
    printed = capsys.readouterr().out
    assert [cell.strip() for cell in printed.split("│") if "e-07" in cell] == ["2.0e-07"]
    assert "steps 1 to 3: 3 in both, 3 and 4 in each" in printed
    assert printed.endswith("OK: the same within 1e-05\n")
    assert "note" not in printed
    assert main(["compare", base, other, "--tolerance", "1e-8"]) == 1


def test_the_first_step_that_differs_is_told(tmp_path, capsys, base):
    other = run(tmp_path / "other", [5.0, 4.0004, 3.3], [1.0, 1.0, 1.1])
    assert main(["compare", base, other]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert (
        told == "DIFFERENT: beyond 1e-05: loss from step 2, grad_norm from step 3, held-out loss from step 3"
    )
    assert main(["compare", base, other, "--steps", "1"]) == 0
    assert main(["compare", base, other, "--tolerance", "0.2"]) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_equals_nothing(tmp_path, capsys, bad):
    runs = [run(tmp_path / name, [5.0, bad]) for name in ("one", "two")]
    assert main(["compare", *runs, "--tolerance", "9"]) == 1
    assert "loss from step 2" in capsys.readouterr().out


def test_other_batches_are_noted(tmp_path, capsys, base):
    assert main(["compare", base, run(tmp_path / "other", [5.0, 4.0, 3.0], tokens=20)]) == 0
    assert "note: the runs had seen different numbers of tokens" in capsys.readouterr().out


def test_what_can_not_be_compared_is_refused(tmp_path, capsys, base):
    assert main(["compare", base, str(tmp_path / "nowhere")]) == 2
    assert f"error: {tmp_path / 'nowhere'}: holds no metrics.jsonl" in capsys.readouterr().err
    assert main(["compare", base, base, "--steps", "0"]) == 2
    assert "no step in common" in capsys.readouterr().err
