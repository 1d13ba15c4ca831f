"""How long a rank stands still for communication: the part of it that no computation hides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class CommClock:
    """Measures waits for transfers in flight; those of one process belong to one clock.

    On the CPU a wait counts for the time in which the thread stood still. On CUDA it counts for the time in
    which the current stream did: events around the wait say so later, and nothing is synchronised here.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event, Any]] = []

    def wait(self, works: Sequence[dist.Work], device: torch.device, what: Any = None) -> None:
        """`work.wait()` for a transfer of tensors on `device`, measured; `what` is for `standing`."""
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            for work in works:
                work.wait()
            after.record()
            self._pairs.append((before, after, what))
        else:
            start = time.perf_counter()
            for work in works:
                work.wait()
            self._seconds += time.perf_counter() - start

    def standing(self) -> Any:
        """On CUDA, what the stream waits for now; None where it waits for nothing that was measured.

        For another thread than that of the waits.
        """
        for before, after, what in list(self._pairs):
            if not after.query():
                return what if before.query() else None
        return None

    def take(self) -> float:
        """Seconds since the last call. On CUDA it blocks until the last measured wait is over."""
        seconds, pairs = self._seconds, self._pairs
        for before, after, _ in pairs:
            after.synchronize()
            seconds += before.elapsed_time(after) / 1000
        # Not before: while this blocks, `standing` looks at them.
        self._seconds, self._pairs = 0.0, []
        return seconds


comm_clock = CommClock()
"""The clock of this process: ring, all-to-all and token counts wait by it; DeepSpeed's reductions do not."""
