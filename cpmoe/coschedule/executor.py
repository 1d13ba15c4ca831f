"""Runs the phases of a schedule.

It knows nothing about what a phase computes: a block has a method for each kind, which takes the state of
a slice and advances it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from cpmoe.coschedule.schedule import Phase
from cpmoe.parallel.progress import progress


class Observer(Protocol):
    def __call__(self, phase: Phase) -> AbstractContextManager[Any]:
        """Entered when the phase begins and left when it ends."""


def execute(
    phases: Iterable[Phase], blocks: Sequence[Any], slices: Sequence[Any], observer: Observer | None = None
) -> None:
    """Calls blocks[phase.layer].<phase.kind>(slices[phase.slice]) for every phase, in order."""
    for phase in phases:
        progress.enter(phase)
        with nullcontext() if observer is None else observer(phase):
            getattr(blocks[phase.layer], phase.kind)(slices[phase.slice])
    progress.leave()
