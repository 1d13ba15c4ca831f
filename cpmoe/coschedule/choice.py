"""serial or overlap: which of them the next step takes while both are measured, and which is chosen.

Pure: no torch, no process group. Ranks that add the same numbers make the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

MIN_ROUNDS, MAX_ROUNDS = 4, 12
# Overlap must be better by this share of a step: below, neither choice is a loss worth speaking of.
MARGIN = 0.01
# The true median lies outside of `Measurement.bounds` with at most this probability.
DOUBT = 1 / 8


class Timing(NamedTuple):
    """An optimizer step of the slowest rank, in seconds; a step that `counts` not was a warm-up or traced."""

    step: int
    policy: str
    seconds: float
    counts: bool


class Measurement:
    """Times of the steps of a run so far, taken in turn under both policies, until one is chosen.

    A round is a counted step of each, the order turning from round to round so that what drifts over
    steps, such as the balance of the experts, favours neither. The first step of each policy since the
    process began does not count: it pays for memory and kernels.
    """

    def __init__(self, timings: Iterable[Timing] = ()) -> None:
        self.timings = list(timings)
        self.choice = self._decide()
        self._warm: set[str] = set()

    def next_policy(self) -> str:
        """What the next step runs under."""
        if self.choice is not None:
            return self.choice
        counted = sum(timing.counts for timing in self.timings)
        order = ("serial", "overlap") if counted // 2 % 2 == 0 else ("overlap", "serial")
        return order[counted % 2]

    def add(self, step: int, seconds: float, counts: bool = True) -> None:
        """Step `step` ran under `next_policy()`; it does not count where something else slowed it down."""
        policy = self.next_policy()
        self.timings.append(Timing(step, policy, seconds, counts and policy in self._warm))
        self._warm.add(policy)
        self.choice = self._decide()

    def gains(self) -> list[float]:
        """1 - overlap / serial of each whole round."""
        serial, overlap = (self.seconds(policy) for policy in ("serial", "overlap"))
        return [1 - b / a for a, b in zip(serial, overlap, strict=False)]

    def seconds(self, policy: str) -> list[float]:
        """The counted steps under `policy`."""
        return [timing.seconds for timing in self.timings if timing.counts and timing.policy == policy]

    def bounds(self) -> tuple[float, float]:
        """An interval of gains between two of its order statistics that holds the true median, but for DOUBT.

        Distribution-free: the k-th smallest of n values is above the median with the probability of fewer
        than k heads in n throws of a coin. From MIN_ROUNDS on.
        """
        gains = sorted(self.gains())
        left_out, throws = 0, math.comb(len(gains), 0)
        while (throws := throws + math.comb(len(gains), left_out + 1)) <= DOUBT / 2 * 2 ** len(gains):
            left_out += 1
        return gains[left_out], gains[-1 - left_out]

    def _decide(self) -> str | None:
        rounds = len(self.gains())
        if rounds < MIN_ROUNDS:
            return None
        low, high = self.bounds()
        if low > MARGIN:
            return "overlap"
        if high < MARGIN:
            return "serial"
        if rounds < MAX_ROUNDS:
            return None
        return "overlap" if low > 0 and median(self.gains()) > MARGIN else "serial"

    def __str__(self) -> str:
        gain, (low, high) = median(self.gains()), self.bounds()
        return (
            f"a step under overlap takes {1 - gain:.3f} of the time of the serial one beside it "
            f"({1 - high:.3f} to {1 - low:.3f} over {len(self.gains())} rounds)"
        )
