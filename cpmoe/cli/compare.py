"""`python -m cpmoe compare RUN_A RUN_B`: whether two runs, on other layouts say, computed the same.

Compares the loss and the gradient norm of every step that both have, and the held-out losses. Exits with 0
where no relative difference is above the tolerance, with 1 where one is. Runs that compute the same differ
by about 1e-7 at first, the rounding of float32; training amplifies it, to 1e-3 within some hundred steps.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from cpmoe.training.run_folder import read_metrics

Records = dict[int, dict[str, Any]]


class Difference(NamedTuple):
    """Of one number over the steps that two runs share; relative, infinite where one is not finite."""

    largest: float
    at_step: int
    first_beyond: int | None


def main(arguments: list[str]) -> int:
    """Prints the table. Raises ValueError for a folder without a record, or without steps in common."""
    options = _parse_arguments(arguments)
    (train_a, evaluations_a), (train_b, evaluations_b) = (
        _read(folder, options.steps) for folder in (options.run_a, options.run_b)
    )
    shared = sorted(train_a.keys() & train_b.keys())
    if not shared:
        raise ValueError(f"{options.run_a} and {options.run_b} have no step in common")
    differences = {
        "loss": compare(train_a, train_b, "loss", options.tolerance),
        "grad_norm": compare(train_a, train_b, "grad_norm", options.tolerance),
    }
    if evaluations_a.keys() & evaluations_b.keys():
        differences["held-out loss"] = compare(evaluations_a, evaluations_b, "loss", options.tolerance)
    _print(differences, options.tolerance)
    print(
        f"steps {shared[0]} to {shared[-1]}: {len(shared)} in both, {len(train_a)} and {len(train_b)} in each"
    )
    if any(train_a[step]["tokens_seen"] != train_b[step]["tokens_seen"] for step in shared):
        print("note: the runs had seen different numbers of tokens at the same step: other data or batches")
    beyond = {name: d.first_beyond for name, d in differences.items() if d.first_beyond is not None}
    if beyond:
        first = ", ".join(f"{name} from step {step}" for name, step in beyond.items())
        print(f"DIFFERENT: beyond {options.tolerance:g}: {first}")
        return 1
    print(f"OK: the same within {options.tolerance:g}")
    return 0


def compare(a: Records, b: Records, name: str, tolerance: float) -> Difference:
    """The number `name` of two runs, over the steps that both have (one at least)."""
    relative = {step: _relative(a[step][name], b[step][name]) for step in sorted(a.keys() & b.keys())}
    at_step = max(relative, key=lambda step: relative[step])
    beyond = (step for step, difference in relative.items() if difference > tolerance)
    return Difference(relative[at_step], at_step, next(beyond, None))


def _relative(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


def _read(folder: Path, steps: int | None) -> tuple[Records, Records]:
    try:
        kinds = read_metrics(folder)
    except OSError as error:
        raise ValueError(f"{folder}: holds no metrics.jsonl of a run: {error.strerror}") from error
    train, evaluations = (
        {step: record for step, record in records.items() if steps is None or step <= steps}
        for records in kinds
    )
    return train, evaluations


def _print(differences: dict[str, Difference], tolerance: float) -> None:
    table = Table()
    table.add_column("")
    for column in ("largest relative difference", "at step", f"first step beyond {tolerance:g}"):
        table.add_column(column, justify="right")
    for name, difference in differences.items():
        first = "none" if difference.first_beyond is None else str(difference.first_beyond)
        table.add_row(name, f"{difference.largest:.1e}", str(difference.at_step), first)
    Console().print(table)


def _parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cpmoe compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_a", type=Path, help="the train.out_dir of one run")
    parser.add_argument("run_b", type=Path, help="that of the other")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative (default: %(default)g)")
    parser.add_argument("--steps", type=int, help="compare the first so many steps (default: all)")
    return parser.parse_args(arguments)
