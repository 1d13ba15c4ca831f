"""Schedules are legal as built, backward mirrors them, and the verifier rejects what is not legal."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmoe.coschedule.schedule import KINDS, POLICIES, Phase, Schedule, build_schedule, segments
from cpmoe.coschedule.verify import (
    ScheduleError,
    backward_issue_order,
    issue_order,
    verify,
    verify_ranks,
)

LAYERS = [[True], [False], [False, True, True], [True, False, True, False]]
CASES = list(itertools.product(POLICIES, LAYERS, (1, 2), (True, False)))


@pytest.mark.parametrize(("policy", "sparse", "num_slices", "crossing"), CASES)
def test_built_schedules_are_legal(policy, sparse, num_slices, crossing):
    schedule = build_schedule(policy, sparse, num_slices, crossing)
    verify(schedule, sparse, num_slices)
    verify_ranks([schedule] * 3)
    hosted = segments(schedule)
    assert [phase for host in sorted(hosted) for phase in hosted[host]] == list(schedule)
    assert crossing or all(phase.host == phase.layer for phase in schedule)


def test_every_transfer_of_one_slice_travels_while_the_other_computes():
    """Between the start and the wait of a row transfer the other slice attends or runs its experts."""
    schedule = build_schedule("overlap", [True] * 3, 2)
    place = {(p.kind, p.layer, p.slice): i for i, p in enumerate(schedule)}
    for layer, index, transfer in itertools.product(range(3), range(2), ("dispatch", "combine")):
        first, last = (place[f"{transfer}_{end}", layer, index] for end in ("start", "wait"))
        between = {p.kind for p in schedule[first:last] if p.slice != index}
        is_last = (layer, index, transfer) == (2, 1, "combine")
        assert is_last or between & {"attend_own", "attend", "experts"}, (layer, index, transfer)


@pytest.mark.parametrize("policy", POLICIES)
def test_kv_of_every_slice_travels_while_queries_meet_what_is_here(policy):
    schedule = build_schedule(policy, [True] * 3, 2)
    place = {(p.kind, p.layer, p.slice): i for i, p in enumerate(schedule)}
    for layer, index in itertools.product(range(3), range(2)):
        first, last = (place[kind, layer, index] for kind in ("kv_start", "kv_wait"))
        assert {p.kind for p in schedule[first:last]} & {"attend_own", "attend"}, (layer, index)


def test_serial_has_no_other_work_in_a_transfer():
    schedule = build_schedule("serial", [True, True], 2)
    for before, after in itertools.pairwise(schedule):
        assert (before.layer, before.slice) <= (after.layer, after.slice)


def _mutants(schedule: Schedule, data: st.DataObject) -> Schedule:
    kind = data.draw(st.sampled_from(["drop", "repeat", "swap", "host", "foreign"]))
    phases = list(schedule)
    at = data.draw(st.integers(0, len(phases) - 1))
    if kind == "drop":
        del phases[at]
    elif kind == "repeat":
        phases.insert(data.draw(st.integers(0, len(phases))), phases[at])
    elif kind == "swap":
        # A phase moved before one that it needs, directly or not.
        needing = [(i, j) for i, j in itertools.combinations(range(len(phases)), 2)
                   if phases[i].kind in KINDS[phases[j].kind].needs
                   and phases[i][1:3] == phases[j][1:3]]  # fmt: skip
        i, j = data.draw(st.sampled_from(needing))
        phases[i], phases[j] = phases[j], phases[i]
    elif kind == "host":
        at = data.draw(st.sampled_from([i for i, p in enumerate(phases) if KINDS[p.kind].computes]))
        phases[at] = phases[at]._replace(host=phases[at].host + data.draw(st.sampled_from([-1, 1])))
    else:
        phases[at] = phases[at]._replace(slice=2)
    return tuple(phases)


@settings(deadline=None)
@given(st.data())
def test_mutated_schedules_are_rejected(data):
    policy, sparse, num_slices, crossing = data.draw(st.sampled_from(CASES))
    mutant = _mutants(build_schedule(policy, sparse, num_slices, crossing), data)
    with pytest.raises(ScheduleError):
        verify(mutant, sparse, num_slices)


def test_a_rejection_says_what_and_where():
    schedule = build_schedule("overlap", [True], 2)
    late = [p for p in schedule if p.kind != "dispatch_wait"]
    with pytest.raises(ScheduleError, match=r"experts of slice 0 in layer 0.*needs dispatch_wait of slice 0"):
        verify(tuple(late), [True], 2)
    with pytest.raises(ScheduleError, match="finish of slice 1 in layer 0: never runs"):
        verify(schedule[:-1], [True], 2)
    with pytest.raises(ScheduleError, match="host must be in"):
        verify((Phase("project", 0, 0, 1), *schedule[1:]), [True], 2)


def test_order_on_each_group_forward_and_backward():
    schedule = build_schedule("overlap", [True, True], 2)
    order = issue_order(schedule)
    assert set(order) == {"ring", "ring_grad", "ulysses", "meta", "expert", "expert_within"}
    assert [p.slice for p in order["expert"] if p.kind != "experts"][:4] == [0, 1, 0, 1]
    assert [(p.kind, p.slice) for p in order["ring"][:4]] == [
        ("kv_start", 0), ("kv_start", 1), ("attend", 0), ("attend", 1)
    ]  # fmt: skip
    back = backward_issue_order(schedule)
    assert set(back) == set(order)
    assert {p.kind for p in back["meta"]} == {"experts"}, "counts have no gradient, rounds have one"
    assert [(p.kind, p.slice) for p in back["ring_grad"][:4]] == [
        ("attend", 1), ("kv_wait", 1), ("attend", 0), ("kv_wait", 0)
    ]  # fmt: skip
    assert [(p.kind, p.slice) for p in back["expert"] if p.kind != "experts"][:4] == [
        ("combine_wait", 1), ("combine_wait", 0), ("dispatch_wait", 1), ("dispatch_wait", 0)
    ]  # fmt: skip


def test_slices_attend_in_order_and_recomputed_blocks_keep_their_phases():
    schedule = list(build_schedule("overlap", [True, True], 2, crossing=False))
    for kind, moved in (
        ("attend", ("attend_own", "kv_wait", "attend")),
        ("kv_start", ("project", "kv_start")),
    ):
        ahead = [Phase(name, 0, 1, 0) for name in moved]
        others = [phase for phase in schedule if phase not in ahead]
        at = others.index(Phase(kind, 0, 0, 0))
        with pytest.raises(ScheduleError, match=rf"{kind} of slice 1 .* needs {kind} of slice 0"):
            verify((*others[:at], *ahead, *others[at:]), [True, True], 2)
    crossing = build_schedule("overlap", [True, True], 2)
    with pytest.raises(ScheduleError, match="host must be in"):
        verify(crossing, [True, True], 2, crossing=False)


def test_ranks_that_issue_in_other_orders_are_rejected():
    overlap, serial = (build_schedule(policy, [True, True], 2) for policy in ("overlap", "serial"))
    with pytest.raises(ScheduleError, match=r"group expert: rank 0 issues .*, rank 1 issues"):
        verify_ranks([overlap, serial])


def test_ranks_that_wait_for_each_other_are_rejected():
    """Each group's order is the same, and yet each rank waits for what the other has not issued."""
    dispatch = [Phase(kind, 0, 0, 0) for kind in ("dispatch_start", "dispatch_wait")]
    attend = Phase("attend", 0, 1, 0)
    started = Phase("route", 0, 0, 0)
    with pytest.raises(
        ScheduleError, match=r"wait for each other: rank 0 in dispatch_wait.*rank 1 in attend"
    ):
        verify_ranks([(started, *dispatch, attend), (started, attend, *dispatch)])


def test_a_combine_is_not_taken_for_the_dispatch_before_it():
    """Both are transfers of one slice in one layer; rank 1 issues its combine after its attention."""
    kinds = ("route", "dispatch_start", "dispatch_wait", "combine_start", "combine_wait")
    route, start, wait, combine, combined = (Phase(kind, 0, 0, 0) for kind in kinds)
    attend = Phase("attend", 0, 1, 0)
    ranks = [(route, start, wait, combine, combined, attend), (route, start, wait, attend, combine, combined)]
    with pytest.raises(ScheduleError, match=r"rank 0 in combine_start.*rank 1 in attend"):
        verify_ranks(ranks)
