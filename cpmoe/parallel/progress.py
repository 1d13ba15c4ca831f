"""Where this process is in its run: written in passing by what runs, read by a watchdog and by traces.

The phases of a forward are noted with the numbers that autograd gives its nodes, so that a transfer of
backward, which runs inside a node, is known by the phase that made the node in forward.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """A phase of a schedule, None outside all of them, and whether its backward runs or it runs again."""

    phase: Any = None
    is_backward: bool = False
    is_recomputed: bool = False

    def __str__(self) -> str:
        if self.phase is None:
            return "backward outside the phases" if self.is_backward else "outside the phases"
        how = "backward" if self.is_backward else "recomputed forward" if self.is_recomputed else "forward"
        return f"{how} of {self.phase}"


class Progress:
    """The place of one process; there is one for all of it, like its main thread.

    step   optimizer step, 1-based
    doing  what the training loop does, "" where that may take as long as it likes
    phase  of a schedule, in forward; None outside
    beats  grows with whatever gets done
    """

    def __init__(self) -> None:
        self.step = 0
        self.doing = ""
        self.beats = 0
        self.phase: Any = None
        self._phases: list[Any] = []
        self._numbers: list[int] = []

    def begin(self, doing: str) -> None:
        """The loop does `doing` from now on."""
        self.doing = doing
        self.beats += 1

    def begin_forward(self) -> None:
        """Forgets the phases of the forward before."""
        self._phases, self._numbers = [], []

    def enter(self, phase: Any) -> None:
        """`phase` begins on this thread, in forward."""
        self.beats += 1
        self.phase = phase
        if torch._C._current_autograd_node() is None:  # else it runs again, in backward
            self._phases.append(phase)
            self._numbers.append(torch._C._autograd._get_sequence_nr())

    def leave(self) -> None:
        self.phase = None

    def place(self) -> Place:
        """Where the calling thread is, which runs the forward or the backward of the model."""
        node = torch._C._current_autograd_node()
        if node is None or self.phase is not None:
            return Place(self.phase, False, node is not None)
        at = bisect_right(self._numbers, node._sequence_nr()) - 1
        return Place(self._phases[at] if at >= 0 else None, True)


progress = Progress()
"""The place of this process."""
