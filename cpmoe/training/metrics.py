"""What a person watches: one line a step, TensorBoard through DeepSpeed's monitor, JSONL beside it."""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from cpmoe.training.console import say

GIB = 1024**3

# Dense bfloat16 FLOP/s of the vendors' data sheets, by a part of the device's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "MI300X": 1307e12}
CPU_RATE_SAMPLES = 6
CPU_RATE_PAUSE = 0.1  # seconds


class Monitor(Protocol):
    """The part of DeepSpeed's MonitorMaster that is used."""

    def write_events(self, events: list[tuple[str, float, int]]) -> None: ...


@dataclass(frozen=True)
class StepMetrics:
    """Everything known of one optimizer step; equal on all ranks but for times and memory.

    Losses are in nats; `loss` is the mean over the step's label tokens, `aux_loss` the mean over sparse
    layers and micro-steps (1 where balanced), `z_loss` the mean over sparse layers and tokens. Times in
    seconds, memory in bytes, `load_max_over_mean` per sparse layer. `comm_exposed_seconds` is the part of
    `seconds` in which this rank stood still for the ring, an all-to-all or token counts.
    """

    step: int
    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_seen: int
    seconds: float
    data_seconds: float
    comm_exposed_seconds: float
    memory: int
    memory_total: int
    load_max_over_mean: tuple[float, ...]
    first_sparse_layer: int
    dropped_tokens: int
    flops_per_second: float


def device_memory(device: torch.device) -> tuple[int, int]:
    """Peak bytes used by this process on `device` so far, and the bytes the device has.

    On the CPU: peak resident memory, and the memory of the machine.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device), total
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, psutil.virtual_memory().total


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that count as 100 % for one rank: the data sheet's on GPUs, a measured product on the CPU.

    None for a GPU that the table does not know.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
    # At a run's start other ranks still load: the best of a few moments.
    rates = []
    for _ in range(CPU_RATE_SAMPLES):
        rates.append(matmul_rate())
        time.sleep(CPU_RATE_PAUSE)
    return max(rates)


def matmul_rate(size: int = 768, repeats: int = 5) -> float:
    """FLOP/s of float32 matrix products on this process's threads: the best of `repeats`."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


class MetricsWriter:
    """Writes each step to the terminal, metrics.jsonl and DeepSpeed's monitor. Only rank 0 has one."""

    def __init__(
        self, folder: Path, monitor: Monitor, world_size: int, total_steps: int, peak: float | None
    ) -> None:
        self.monitor = monitor
        self.world_size = world_size
        self.total_steps = total_steps
        self.peak = peak
        self._file = open(folder / "metrics.jsonl", "a+b")  # noqa: SIM115
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":  # the last line was cut short
                self._file.write(b"\n")
        self._seconds: list[float] = []

    def explain(self) -> None:
        """Says once what the columns of the steps' lines mean."""
        mfu = ""
        if self.peak is not None:
            mfu = f"mfu of {self.peak / 1e12:,.3g} TFLOP/s a rank, causal attention counted at half; "
        say(
            f"{mfu}comm exposed, data: share of the step spent waiting for transfers, for data\n"
            "moe max/mean: rows of the fullest expert over the mean, in the layer where that is largest"
        )

    def step(self, metrics: StepMetrics, show: bool) -> None:
        self._seconds = [*self._seconds[-49:], metrics.seconds]
        self._write_json("train", asdict(metrics))
        self.monitor.write_events(self._events(metrics))
        if show:
            say(self._line(metrics))

    def evaluation(self, step: int, loss: float, by_position: list[tuple[int, float]]) -> None:
        """Held-out loss in nats per token, and by the first position of each part of the sequence."""
        self._write_json("eval", {"step": step, "loss": loss, "loss_by_position": by_position})
        events = [("Eval/loss", loss, step)]
        # Padded with zeros: TensorBoard sorts names as text.
        events += [(f"EvalByPosition/loss_from_{start:06d}", value, step) for start, value in by_position]
        self.monitor.write_events(events)
        say(f"step {step}/{self.total_steps}  held-out loss {loss:.4f}")

    def trace(self, step: int, picture: Path) -> None:
        """A picture of who did what when, also in TensorBoard where the JSON asks for that."""
        board: Any = getattr(self.monitor, "tb_monitor", None)
        summary_writer = getattr(board, "summary_writer", None)
        if summary_writer is not None:
            from matplotlib.image import imread

            summary_writer.add_image("Trace/phases", imread(picture), step, dataformats="HWC")
        say(f"step {step}/{self.total_steps}  trace {picture.with_suffix('.json')} and {picture}")

    def close(self) -> None:
        self._file.close()

    def _write_json(self, kind: str, values: dict[str, Any]) -> None:
        self._file.write((json.dumps({"kind": kind, **values}) + "\n").encode())
        self._file.flush()

    def _mfu(self, metrics: StepMetrics) -> float | None:
        return None if self.peak is None else metrics.flops_per_second / self.world_size / self.peak

    def _events(self, m: StepMetrics) -> list[tuple[str, float, int]]:
        """What stands before the slash is a section of TensorBoard's page."""
        values: dict[str, float] = {
            "Train/loss": m.loss,
            "Train/aux_loss": m.aux_loss,
            "Train/z_loss": m.z_loss,
            "Train/grad_norm": m.grad_norm,
            "Train/lr": m.lr,
            "Train/tokens_seen": m.tokens_seen,
            "Speed/tokens_per_second": m.tokens / m.seconds,
            "Speed/memory_gib": m.memory / GIB,
            "Speed/data_fraction": m.data_seconds / m.seconds,
            "Speed/comm_exposed_fraction": m.comm_exposed_seconds / m.seconds,
            "MoE/dropped_tokens": m.dropped_tokens,
        }
        mfu = self._mfu(m)
        if mfu is not None:
            values["Speed/mfu"] = mfu
        for layer, load in enumerate(m.load_max_over_mean, start=m.first_sparse_layer):
            values[f"MoE/max_over_mean_layer_{layer:03d}"] = load
        return [(name, value, m.step) for name, value in values.items()]

    def _line(self, m: StepMetrics) -> str:
        mfu = self._mfu(m)
        left = (self.total_steps - m.step) * sorted(self._seconds)[len(self._seconds) // 2]
        parts = [
            f"step {m.step}/{self.total_steps}",
            f"loss {m.loss:.4f}",
            f"grad_norm {m.grad_norm:.3f}",
            f"lr {m.lr:.1e}",
            f"tokens/s {m.tokens / m.seconds / self.world_size:,.0f}/rank",
            f"mfu {mfu:.1%}" if mfu is not None else "",
            f"mem {m.memory / GIB:.1f} GiB ({m.memory / m.memory_total:.0%})",
            f"comm exposed {m.comm_exposed_seconds / m.seconds:.1%}",
            f"data {m.data_seconds / m.seconds:.1%}",
            f"moe max/mean {max(m.load_max_over_mean):.2f}" if m.load_max_over_mean else "",
            f"dropped {m.dropped_tokens}" if m.dropped_tokens else "",
            f"eta {format_seconds(left)}",
        ]
        return "  ".join(part for part in parts if part)


def format_seconds(seconds: float) -> str:
    """3h12m, 4m05s or 12s."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"
