"""Overlap beside serial and beside computation alone, CP = EP = 2 on two hosts joined by a slow cable.

Two network namespaces on this machine, one single-thread process each (launch/two_hosts.sh, which needs
root; without it both processes talk over loopback and the rates do not hold). In each round, in turn,
forward and backward of one micro-batch:

compute  the same work with no transfer, unsliced
serial   unsliced: the ring overlaps inside attention, all else waits
overlap  two slices, interleaved

hidden = 1 − (overlap − compute) / (serial − compute); speedup = serial / overlap; the bound of overlap is the
larger of compute and the bytes a host sends over the rate of the cable. auto_ratio is the time of what policy
auto chooses in these rounds over that of the better one, in the worst scenario.

Scenarios take one to five minutes each, and what is measured is in the file of --json at once: with --resume
a later call measures only what is missing there.
"""

from __future__ import annotations

import argparse
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
    """`batch` sequences of `seq_len` in a micro-batch, over a cable of `rate`; whether memory is measured."""

    name: str
    seq_len: int
    batch: int
    rate: str
    memory: bool = False


SCENARIOS = (
    Scenario("seq16384_1gbit", 16384, 1, "1gbit"),
    Scenario("seq8192_2gbit", 8192, 1, "2gbit", memory=True),
    Scenario("batch", 8192, 2, "1gbit"),
    Scenario("negligible", 8192, 2, "", memory=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(scenario.name for scenario in SCENARIOS)
    parser.add_argument("--only", action="append", metavar="SCENARIO", help=f"of {names}; more than once too")
    parser.add_argument("--resume", action="store_true", help="measure only what the file of --json lacks")
    parser.add_argument("--picture", type=Path, help="PNG of --only's scenario: serial above overlap")


def run(json_path: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints, and returns {"figures", "conditions", "scenarios"}."""
    chosen = [s for s in SCENARIOS if options.only is None or s.name in options.only]
    if options.only and len(chosen) < len(set(options.only)):
        raise ValueError(f"--only {' '.join(options.only)}: legal: {', '.join(s.name for s in SCENARIOS)}")
    if options.picture and len(chosen) != 1:
        raise ValueError("--picture shows one scenario: give it by --only")
    measured: dict[str, Any] = {}
    if options.resume and json_path is not None and json_path.exists():
        measured = json.loads(json_path.read_text())["scenarios"]
    for scenario in chosen:
        if scenario.name in measured:
            continue
        print(f"{scenario.name}: {scenario.batch} x {scenario.seq_len} tokens, {scenario.rate or 'no rate'}")
        measured[scenario.name] = _measure(scenario, options.picture)
        print(", ".join(f"{name} {value:.4g}" for name, value in _figures(scenario, measured).items()))
        if json_path is not None:
            json_path.write_text(json.dumps({"scenarios": measured}) + "\n")
    shown = [scenario for scenario in SCENARIOS if scenario.name in measured]
    figures: dict[str, float] = {}
    for scenario in shown:
        figures |= _figures(scenario, measured)
    hosts = {measured[scenario.name]["hosts"] for scenario in shown}
    result = report(
        "forward and backward of one micro-batch, seconds",
        figures | _worst(measured),
        conditions(hosts=", ".join(sorted(hosts)), threads_per_process=1),
        [_row(scenario, measured[scenario.name]) for scenario in shown],
        ("", "compute", "serial", "overlap", "sent by a host", "overlap / bound", "auto"),
        None,
    )
    result["scenarios"] = measured
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _row(scenario: Scenario, measured: dict[str, Any]) -> tuple[str, ...]:
    seconds = measured["seconds"]
    bound = median(seconds["compute"])
    if scenario.rate and measured["hosts"] != LOOPBACK:
        bound = max(bound, 8 * measured["bytes"] / BITS[scenario.rate])
    times = (seconds[name] for name in ("compute", "serial", "overlap"))
    return (
        scenario.name,
        *(f"{median(values):.2f} ({spread(values)})" for values in times),
        f"{measured['bytes'] / 1e6:.0f} MB",
        f"{median(seconds['overlap']) / bound:.3f}",
        measured["choice"],
    )


def _figures(scenario: Scenario, measured: dict[str, Any]) -> dict[str, float]:
    seconds = measured[scenario.name]["seconds"]
    rounds = list(zip(seconds["compute"], seconds["serial"], seconds["overlap"], strict=False))
    hidden = median(1 - (overlap - compute) / (serial - compute) for compute, serial, overlap in rounds)
    speedup = median(serial / overlap for _, serial, overlap in rounds)
    if scenario.name == "negligible":
        return {"coschedule.negligible_ratio": 1 / speedup}
    if scenario.name == "batch":
        return {"coschedule.hidden_batch": hidden, "coschedule.speedup_batch": speedup}
    return {f"coschedule.hidden.{scenario.name}": hidden, f"coschedule.speedup.{scenario.name}": speedup}


def _worst(measured: dict[str, Any]) -> dict[str, float]:
    """What all scenarios have, of the one where it is worst."""
    times = [{k: median(v) for k, v in m["seconds"].items()} for m in measured.values()]
    choices = [m["choice"] for m in measured.values()]
    peaks = [m["peak_bytes"] for m in measured.values() if m["peak_bytes"]]
    worst = {
        "coschedule.auto_ratio": max(
            time[choice] / min(time["serial"], time["overlap"])
            for time, choice in zip(times, choices, strict=True)
        )
    }
    if peaks:
        worst["coschedule.memory_ratio"] = max(peak["overlap"] / peak["serial"] for peak in peaks)
    return worst


LOOPBACK = "loopback, no rate limit"


def _measure(scenario: Scenario, picture: Path | None) -> dict[str, Any]:
    """What rank 0 of `coschedule_host` wrote, and on which hosts it ran."""
    with tempfile.TemporaryDirectory(prefix="cpmoe-bench-") as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "cpmoe.cli.bench.coschedule_host"]
        command += [json.dumps(scenario._asdict()), str(out)]
        if picture is not None:
            command += ["--picture", str(picture)]
        rate = ["--rate", scenario.rate] if scenario.rate else []
        done = subprocess.run([str(TWO_HOSTS), *rate, "--plain", "--", *command], check=False)
        if done.returncode == NO_HOSTS:
            print("no hosts of their own: both processes run on loopback, without a rate", flush=True)
            _on_loopback(command, Path(folder, "store"))
        elif done.returncode:
            raise RuntimeError(f"bench coschedule: the processes of {scenario.name} failed")
        hosts = LOOPBACK if done.returncode else "two network namespaces"
        return {**json.loads(out.read_text()), "hosts": hosts}


def _on_loopback(command: list[str], store: Path) -> None:
    processes = [
        subprocess.Popen([*command, "--store", str(store), "--rank", str(rank)]) for rank in range(2)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError("bench coschedule: the processes on loopback failed")
