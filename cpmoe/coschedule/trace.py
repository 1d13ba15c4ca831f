"""When each phase and each transfer ran on this rank, forward and backward.

Forward is observed by the executor. Backward needs nothing in the model: autograd numbers its nodes in the
order of forward, so the nodes of a phase are a range of numbers, and hooks on the first and the last of
them to run say when the phase's backward began and ended. Transfers are observed where they pass.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from cpmoe.coschedule.schedule import Phase
from cpmoe.parallel.transport import InFlight, transport

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


class Span(NamedTuple):
    """One phase of a slice in a layer, from `start` to `stop` in seconds of the clock."""

    kind: str
    layer: int
    slice: int
    is_backward: bool
    start: float
    stop: float


class TransferSpan(NamedTuple):
    """A transfer on `group` that `phase` launched: in flight from `start`, waited for from `wait` to `stop`.

    It may have been over before: `stop` is when the wait for it was.
    """

    group: str
    phase: str
    layer: int
    slice: int
    is_backward: bool
    num_bytes: int
    start: float
    wait: float
    stop: float


class RankTrace(NamedTuple):
    """What one rank did."""

    phases: Sequence[Span] = ()
    transfers: Sequence[TransferSpan] = ()


class HostClock:
    """Seconds since it was made, of the thread that computes."""

    def __init__(self) -> None:
        self._origin: Any = self.now()

    def now(self) -> Any:
        """The moment, for `seconds`."""
        return time.perf_counter()

    def seconds(self, moment: Any) -> float:
        return moment - self._origin


class StreamClock(HostClock):
    """Seconds on the current CUDA stream: when work ran, not when the host launched it."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        moment.synchronize()
        return self._origin.elapsed_time(moment) / 1000


class PhaseTrace:
    """An observer for `execute` and for `transport`; `watch_backward` makes it observe a backward too.

    Call `watch_forward` before each forward and `end` after its backward: phases that run again inside a
    backward are not recorded, their transfers are.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.clock = StreamClock() if device is not None and device.type == "cuda" else HostClock()
        self._spans: list[tuple[Phase, bool, Any, Any]] = []
        self._flights: list[tuple[InFlight, list[Any]]] = []
        self._open: dict[InFlight, list[Any]] = {}
        self._in_forward = False
        self._phases: list[Phase] = []
        # Numbers of autograd nodes: the phase's own are in [first, last).
        self._first: list[int] = []
        self._last: list[int] = []

    def watch_forward(self) -> None:
        """Call before a forward."""
        self._in_forward = True
        transport.observer = self

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        if not self._in_forward:
            yield
            return
        first, start = _next_number(), self.clock.now()
        yield
        self._spans.append((phase, False, start, self.clock.now()))
        self._phases.append(phase)
        self._first.append(first)
        self._last.append(_next_number())

    def watch_backward(self, loss: Tensor) -> None:
        """Call between the forward and the backward of `loss`."""
        nodes: dict[int, list[tuple[int, Node]]] = {}
        for node in _graph(loss):
            number = node._sequence_nr()
            at = bisect_right(self._first, number) - 1
            if at >= 0 and number < self._last[at]:
                nodes.setdefault(at, []).append((number, node))
        for at, numbered in nodes.items():
            self._watch(self._phases[at], numbered)
        self._in_forward = False
        self._phases, self._first, self._last = [], [], []

    def end(self) -> None:
        """Call after the backward."""
        transport.observer = None

    def launched(self, flight: InFlight) -> None:
        self._open[flight] = [self.clock.now()]
        self._flights.append((flight, self._open[flight]))

    def waits(self, flight: InFlight) -> None:
        if flight in self._open:
            self._open[flight].append(self.clock.now())

    def arrived(self, flight: InFlight) -> None:
        if flight in self._open:
            self._open.pop(flight).append(self.clock.now())

    def result(self) -> RankTrace:
        """All that was recorded, in seconds since this trace was made. On CUDA it waits for the stream."""
        seconds = self.clock.seconds
        phases = [Span(*phase[:3], back, seconds(a), seconds(b)) for phase, back, a, b in self._spans]
        transfers = [
            TransferSpan(
                flight.group.group_desc, *_phase_of(flight), flight.num_bytes, *map(seconds, moments)
            )
            for flight, moments in self._flights
            if len(moments) == 3
        ]
        return RankTrace(phases, transfers)

    def _watch(self, phase: Phase, numbered: list[tuple[int, Node]]) -> None:
        begun: list[Any] = []

        def begin(*_: object) -> None:
            begun.append(self.clock.now())

        def end(*_: object) -> None:
            self._spans.append((phase, True, begun[0], self.clock.now()))

        max(numbered, key=lambda pair: pair[0])[1].register_prehook(begin)
        min(numbered, key=lambda pair: pair[0])[1].register_hook(end)


def _phase_of(flight: InFlight) -> tuple[str, int, int, bool]:
    phase, is_backward, is_recomputed = flight.place
    assert phase is not None, "no transfer is launched outside the phases"
    return (*phase[:3], is_backward or is_recomputed)


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def _graph(loss: Tensor) -> Iterator[Node]:
    """Every node that the backward of `loss` runs, but those that only store a gradient."""
    assert loss.grad_fn is not None
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following.name() != ACCUMULATE_GRAD:
                seen.add(following)
                waiting.append(following)
