"""What a benchmark prints and writes: figures, their spread, and the conditions they were taken under."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table


def conditions(**more: Any) -> dict[str, Any]:
    """Processor, cores and versions of this machine, and what the benchmark adds."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "deepspeed")},
        **more,
    }


def spread(values: list[float]) -> str:
    """First and third quartile, as text."""
    if len(values) < 2:
        return ""
    low, _, high = quantiles(values, n=4)
    return f"{low:.4g} to {high:.4g}"


def report(
    title: str,
    figures: dict[str, float],
    conditions: dict[str, Any],
    rows: Sequence[tuple[str, ...]],
    columns: tuple[str, ...],
    json_path: str | Path | None,
) -> dict[str, Any]:
    """Prints a table of `rows` and the figures; writes {"figures", "conditions"} to `json_path` if given."""
    console = Console(highlight=False)
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name} = {value:.4g}")
    console.print("conditions: " + ", ".join(f"{key} {value}" for key, value in conditions.items()))
    result = {"figures": figures, "conditions": conditions}
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
    return result


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
