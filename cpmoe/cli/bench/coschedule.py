"""Overlap beside serial and beside computation alone, CP = EP = 2 on two hosts joined by a slow cable.

Two network namespaces on this machine, one single-thread process each (launch/two_hosts.sh, which needs
root; without it both processes talk over loopback and the rates do not hold). In each round, in turn,
forward and backward of one micro-batch:

compute  the same work with no transfer, unsliced
serial   unsliced: the ring overlaps inside attention, all else waits
overlap  two slices, interleaved

hidden = 1 − (overlap − compute) / (serial − compute); speedup = serial / overlap; the bound of overlap is the
larger of compute and the bytes a host sends over the rate of the cable.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cpmoe.cli.bench.report import conditions, report, spread

TWO_HOSTS = Path(__file__).parents[3] / "launch" / "two_hosts.sh"
NO_HOSTS = 3  # status of the script where hosts can not be made
BITS = {"": 0, "1gbit": 1e9, "2gbit": 2e9}


class Scenario(NamedTuple):
    """`batch` sequences of `seq_len` in a micro-batch, over a cable of `rate`."""

    name: str
    seq_len: int
    batch: int
    rate: str
    rounds: int


SCENARIOS = (
    Scenario("seq16384_1gbit", 16384, 1, "1gbit", 3),
    Scenario("seq8192_2gbit", 8192, 1, "2gbit", 5),
    Scenario("batch", 8192, 2, "1gbit", 3),
    Scenario("negligible", 8192, 2, "", 3),
)


def run(json_path: str | Path | None) -> dict[str, Any]:
    """Measures, prints, and returns {"figures", "conditions"}; an estimated 12 minutes."""
    figures: dict[str, float] = {}
    rows = []
    hosts = "two network namespaces"
    for scenario in SCENARIOS:
        measured, on_hosts = _measure(scenario)
        if not on_hosts:
            hosts = "loopback, no rate limit"
        compute, serial, overlap = (measured["seconds"][name] for name in ("compute", "serial", "overlap"))
        figures |= _figures(scenario, measured)
        bound = median(compute)
        if on_hosts and scenario.rate:
            bound = max(bound, 8 * measured["bytes"] / BITS[scenario.rate])
        rows.append(
            (
                scenario.name,
                *(f"{median(values):.2f} ({spread(values)})" for values in (compute, serial, overlap)),
                f"{measured['bytes'] / 1e6:.0f} MB",
                f"{median(overlap) / bound:.3f}",
            )
        )
    return report(
        "forward and backward of one micro-batch, seconds",
        figures,
        conditions(hosts=hosts, threads_per_process=1),
        rows,
        ("", "compute", "serial", "overlap", "sent by a host", "overlap / bound"),
        json_path,
    )


def _figures(scenario: Scenario, measured: dict[str, Any]) -> dict[str, float]:
    seconds = measured["seconds"]
    rounds = list(zip(seconds["compute"], seconds["serial"], seconds["overlap"], strict=True))
    hidden = median(1 - (overlap - compute) / (serial - compute) for compute, serial, overlap in rounds)
    speedup = median(serial / overlap for _, serial, overlap in rounds)
    if scenario.name == "negligible":
        memory = measured["peak_bytes"]
        return {
            "coschedule.negligible_ratio": 1 / speedup,
            "coschedule.memory_ratio": memory["overlap"] / memory["serial"],
        }
    if scenario.name == "batch":
        return {"coschedule.hidden_batch": hidden, "coschedule.speedup_batch": speedup}
    return {f"coschedule.hidden.{scenario.name}": hidden, f"coschedule.speedup.{scenario.name}": speedup}


def _measure(scenario: Scenario) -> tuple[dict[str, Any], bool]:
    """What rank 0 of `coschedule_host` wrote, and whether it ran on hosts of their own."""
    with tempfile.TemporaryDirectory(prefix="cpmoe-bench-") as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "cpmoe.cli.bench.coschedule_host"]
        command += [json.dumps(scenario._asdict()), str(out)]
        rate = ["--rate", scenario.rate] if scenario.rate else []
        done = subprocess.run([str(TWO_HOSTS), *rate, "--plain", "--", *command], check=False)
        if done.returncode == NO_HOSTS:
            print("no hosts of their own: both processes run on loopback, without a rate", flush=True)
            _on_loopback(command, Path(folder, "store"))
        elif done.returncode:
            raise RuntimeError(f"bench coschedule: the processes of {scenario.name} failed")
        return json.loads(out.read_text()), done.returncode == 0


def _on_loopback(command: list[str], store: Path) -> None:
    processes = [
        subprocess.Popen([*command, "--store", str(store), "--rank", str(rank)]) for rank in range(2)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError("bench coschedule: the processes on loopback failed")
