"""Checks that a schedule can run: needs, hosts, transfers, and one order of collectives on all ranks.

Runs on the real schedule when a model is built, whatever the routing: a phase takes part in its
collectives also with no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from cpmoe.coschedule.schedule import DENSE, KINDS, LAST, SPARSE, Phase, Schedule


class ScheduleError(ValueError):
    """A schedule that would hang, fail or compute something else."""


def verify(schedule: Schedule, sparse: Sequence[bool], num_slices: int, crossing: bool = True) -> None:
    """Raises ScheduleError unless `schedule` runs every phase of every layer and slice once, in legal order.

    - every phase that the model needs is there, none twice, none else;
    - what a phase needs ran before it: kinds of its layer, the layer before as a whole, and for attention the
      keys of earlier slices, which must not be replaced before;
    - a phase runs in the block of its layer, or later where it uses no parameters; blocks run in order;
    - a wait follows the start of its transfer.

    `crossing` as in `build_schedule`: without it every phase runs in the block of its layer.
    """
    expected = {
        (kind, layer, index)
        for layer, is_sparse in enumerate(sparse)
        for index in range(num_slices)
        for kind in (SPARSE if is_sparse else DENSE)
    }
    done: set[tuple[str, int, int]] = set()
    in_flight: dict[tuple[str, int, int], Phase] = {}
    host = 0
    for phase in schedule:
        key = phase.kind, phase.layer, phase.slice
        if key in done:
            raise ScheduleError(f"{phase}: runs twice")
        if key not in expected:
            raise ScheduleError(f"{phase}: is no phase of this model")
        _check_host(phase, host, len(sparse) if crossing else phase.layer)
        host = phase.host
        for need in _needs(phase, sparse, num_slices):
            if need not in done:
                kind, layer, index = need
                raise ScheduleError(f"{phase}: needs {kind} of slice {index} in layer {layer} before it")
        does = KINDS[phase.kind]
        if does.waits and in_flight.pop((does.waits, phase.layer, phase.slice), None) is None:
            raise ScheduleError(f"{phase}: waits for a transfer that {does.waits} did not start")
        if does.starts:
            in_flight[key] = phase
        done.add(key)
    if missing := expected - done:
        name, layer, index = min(missing, key=lambda key: (key[1], key[2]))
        raise ScheduleError(f"{name} of slice {index} in layer {layer}: never runs")
    assert not in_flight, "each start is needed by its wait"


def issue_order(schedule: Schedule) -> dict[str, list[Phase]]:
    """For each group, the phases that issue collectives on it in forward, in order."""
    order: dict[str, list[Phase]] = {}
    for phase in schedule:
        kind = KINDS[phase.kind]
        for group in (*kind.within, *([kind.starts] if kind.starts else [])):
            order.setdefault(group, []).append(phase)
    return order


def backward_issue_order(schedule: Schedule) -> dict[str, list[Phase]]:
    """The same for backward, which runs in the reverse order: what waited launches the gradient."""
    order: dict[str, list[Phase]] = {}
    for phase in reversed(schedule):
        kind = KINDS[phase.kind]
        returns = KINDS[kind.waits].returns if kind.waits else None
        for group in (*kind.within, *([returns] if returns else [])):
            order.setdefault(group, []).append(phase)
    return order


def verify_ranks(schedules: Sequence[Schedule]) -> None:
    """Raises ScheduleError where ranks that run `schedules`, one each, would not meet in their collectives.

    Two ranks must issue the collectives of a group in one order, forward and backward, and no rank may wait
    for one that another rank issues only after a wait for the first rank; where forward is free of that, so
    is backward, whose launches and waits are those of forward reversed.
    """
    for order_of in (issue_order, backward_issue_order):
        orders = [order_of(schedule) for schedule in schedules]
        for rank, other in enumerate(orders[1:], start=1):
            for group in sorted(orders[0].keys() | other.keys()):
                for mine, theirs in zip_longest(orders[0].get(group, []), other.get(group, [])):
                    if mine != theirs:
                        raise ScheduleError(
                            f"group {group}: rank 0 issues {mine}, rank {rank} issues {theirs}"
                        )
    _run_together(schedules)


def _run_together(schedules: Sequence[Schedule]) -> None:
    """Lets every rank run until it waits for another, over and over."""
    place = [0] * len(schedules)
    started: list[set[tuple[str, int, int]]] = [set() for _ in schedules]
    while any(at < len(schedule) for at, schedule in zip(place, schedules, strict=True)):
        before = list(place)
        for rank, schedule in enumerate(schedules):
            while place[rank] < len(schedule):
                phase = schedule[place[rank]]
                key, kind = (phase.kind, phase.layer, phase.slice), KINDS[phase.kind]
                if kind.waits and not all((kind.waits, *key[1:]) in ranks for ranks in started):
                    break
                if kind.starts or kind.within:
                    started[rank].add(key)
                if kind.within and not all(key in ranks for ranks in started):
                    break
                place[rank] += 1
        if place == before:
            stuck = [
                f"rank {rank} in {schedule[at]}"
                for rank, (at, schedule) in enumerate(zip(place, schedules, strict=True))
                if at < len(schedule)
            ]
            raise ScheduleError(f"ranks wait for each other: {'; '.join(stuck)}")


def _needs(phase: Phase, sparse: Sequence[bool], num_slices: int) -> list[tuple[str, int, int]]:
    needs = [(kind, phase.layer, phase.slice) for kind in KINDS[phase.kind].needs]
    if phase.kind == "project" and phase.layer > 0:
        last = LAST[sparse[phase.layer - 1]]
        needs.append((last, phase.layer - 1, phase.slice))
    if phase.kind == "kv_start" and phase.layer > 0:
        # These still read this slice's keys and values.
        needs += [("attend", phase.layer - 1, index) for index in range(phase.slice + 1, num_slices)]
    if phase.kind in ("kv_start", "attend"):
        # Slices attend in order, and each to the keys of those before it.
        needs += [(phase.kind, phase.layer, index) for index in range(phase.slice)]
    return needs


def _check_host(phase: Phase, host: int, last: int) -> None:
    if phase.host < host:
        raise ScheduleError(f"{phase}: block {host} has begun")
    latest = phase.layer if KINDS[phase.kind].computes else last
    if not phase.layer <= phase.host <= latest:
        raise ScheduleError(f"{phase}: its host must be in [{phase.layer}, {latest}]")
