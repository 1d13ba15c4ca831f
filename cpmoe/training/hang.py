"""Ends a run that stands still, and says where: rank, step, phase, group and peers of what it waits for."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cpmoe.parallel.comm_clock import comm_clock
from cpmoe.parallel.progress import progress
from cpmoe.parallel.transport import transport

HANG_STATUS = 124  # that of timeout(1)
# The launcher ends all ranks when the first one leaves: each may say first where it stands.
GRACE_SECONDS = 5.0
LONGEST_LOOK = 5.0


class HangWatch:
    """A thread that looks whether this process gets anything done; `with` it around a run.

    After `seconds` in which nothing was, while the loop says that it does something, it writes where the
    process stands to stderr and, with the stacks of all threads, to hangs/rank-N.txt in `folder`, and ends
    the process with HANG_STATUS. Time in which this thread did not run either (a stopped machine) does not
    count. 0 seconds: no watch.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        rank: int,
        end: Callable[[int], object] = os._exit,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.seconds = seconds
        self.path = folder / "hangs" / f"rank-{rank}.txt"
        self.rank = rank
        self._end = end
        self._grace = grace
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpmoe-hang", daemon=True)

    def __enter__(self) -> HangWatch:
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        interval = min(self.seconds / 8, LONGEST_LOOK)
        idle, beats, looked = 0.0, progress.beats, time.monotonic()
        while not self._left.wait(interval):
            now = time.monotonic()
            elapsed, looked = min(now - looked, 2 * interval), now
            if progress.beats != beats or not progress.doing:
                idle, beats = 0.0, progress.beats
                continue
            idle += elapsed
            if idle >= self.seconds:
                self._report()
                self._left.wait(self._grace)
                self._end(HANG_STATUS)
                return

    def _report(self) -> None:
        text = f"rank {self.rank}: nothing got done for {self.seconds:g} s {whereabouts()}\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "w") as file:
                file.write(text)
                file.flush()
                faulthandler.dump_traceback(file)
            text += f"  Python stacks: {self.path}; to blame is a rank that writes none or waits for nobody\n"
        except OSError as error:
            text += f"  {self.path} can not be written: {error}\n"
            faulthandler.dump_traceback(sys.stderr)
        os.write(2, text.encode())


def whereabouts() -> str:
    """Where this process stands: step, what the loop does, the transfers it waits for and has in flight."""
    lines = [f"in step {progress.step}: {progress.doing}"]
    waiting = transport.waiting or comm_clock.standing()
    if waiting is not None:
        lines.append(f"waits for {waiting}")
    elif progress.phase is not None:
        lines.append(f"in {progress.phase}")
    lines += [f"in flight: {flight}" for flight in list(transport.in_flight) if flight is not waiting]
    return "\n  ".join(lines)
