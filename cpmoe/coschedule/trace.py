"""When each phase ran on this rank, forward and backward.

Forward is observed by the executor. Backward needs nothing in the model: autograd numbers its nodes in the
order of forward, so the nodes of a phase are a range of numbers, and hooks on the first and the last of
them to run say when the phase's backward began and ended.

Times are of the host: on CUDA when work was launched, not when it ran.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from cpmoe.coschedule.schedule import Phase

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


class Span(NamedTuple):
    """One phase of a slice in a layer, from `start` to `stop` in seconds of `time.perf_counter`."""

    kind: str
    layer: int
    slice: int
    is_backward: bool
    start: float
    stop: float
    micro_step: int = 0


class PhaseTrace:
    """An observer for `execute`; `watch_backward` makes it observe the backward of a loss too.

    Call `watch_forward` before each forward: phases that run again inside a backward are not recorded.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._micro_step = -1
        self._in_forward = False
        self._phases: list[Phase] = []
        # Numbers of autograd nodes: the phase's own are in [first, last).
        self._first: list[int] = []
        self._last: list[int] = []

    def watch_forward(self) -> None:
        """Call before a forward."""
        self._micro_step += 1
        self._in_forward = True

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        if not self._in_forward:
            yield
            return
        first, start = _next_number(), time.perf_counter()
        yield
        self._record(phase, False, start, time.perf_counter(), self._micro_step)
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

    def _record(self, phase: Phase, is_backward: bool, start: float, stop: float, micro_step: int) -> None:
        self.spans.append(Span(*phase[:3], is_backward, start, stop, micro_step))

    def _watch(self, phase: Phase, numbered: list[tuple[int, Node]]) -> None:
        begun: list[float] = []
        micro_step = self._micro_step

        def begin(*_: object) -> None:
            begun.append(time.perf_counter())

        def end(*_: object) -> None:
            self._record(phase, True, begun[0], time.perf_counter(), micro_step)

        max(numbered, key=lambda pair: pair[0])[1].register_prehook(begin)
        min(numbered, key=lambda pair: pair[0])[1].register_hook(end)


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
