"""How long a rank stands still for communication: the part of it that no computation hides."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


class CommClock:
    """Measures waits for transfers in flight; those of one process belong to one clock.

    On the CPU a wait counts for the time in which the thread stood still. On CUDA it counts for the time in
    which the current stream did: events around the wait say so later, and nothing is synchronised here.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, work: dist.Work, device: torch.device) -> None:
        """`work.wait()` for a transfer of tensors on `device`, measured."""
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            work.wait()
            after.record()
            self._pairs.append((before, after))
        else:
            start = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Seconds since the last call. On CUDA it blocks until the last measured wait is over."""
        seconds, self._seconds = self._seconds, 0.0
        pairs, self._pairs = self._pairs, []
        for before, after in pairs:
            after.synchronize()
            seconds += before.elapsed_time(after) / 1000
        return seconds


comm_clock = CommClock()
"""The clock of this process: ring, all-to-all and token counts wait by it; DeepSpeed's reductions do not."""
