"""What is drawn and written of a trace: phases, waits, and transfers in flight between launch and wait."""

import json

import pytest

from cpmoe.coschedule.timeline import Panel, chrome_trace, draw
from cpmoe.coschedule.trace import RankTrace, Span, TransferSpan

TRACE = RankTrace(
    [
        Span("attend", 0, 0, False, 1.5, 3.0),
        Span("dispatch_wait", 0, 1, False, 3.0, 3.25),
        Span("experts", 0, 1, False, 3.25, 4.0),
        Span("experts", 0, 1, True, 5.0, 6.0),
    ],
    [
        TransferSpan("meta", "route", 0, 1, False, 32, 0.5, 0.9, 1.0),
        TransferSpan("expert", "dispatch_start", 0, 1, False, 800, 1.5, 3.0, 3.25),
        TransferSpan("expert", "combine_start", 0, 0, False, 800, 2.5, 3.5, 3.6),
        TransferSpan("ring", "attend", 0, 0, False, 400, 1.5, 2.0, 2.25),
        TransferSpan("ring_grad", "attend", 0, 0, True, 400, 6.0, 6.5, 7.0),
    ],
)


def _events(thread: str, trace: dict) -> list[tuple[str, float, float]]:
    """(name, start, duration) of what lies on the threads of this name, on rank 1."""
    places = [
        (e["pid"], e["tid"])
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["args"]["name"] == thread and e["pid"] == 1
    ]
    return [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in trace["traceEvents"]
        if e["ph"] == "X" and (e["pid"], e["tid"]) in places
    ]


def test_chrome_trace_has_phases_waits_and_transfers_of_each_rank():
    trace = json.loads(json.dumps(chrome_trace([RankTrace(TRACE.phases[:1]), TRACE])))
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert [name for name, *_ in _events("compute", trace)] == [
        "attend A", "dispatch_wait B", "experts B", "experts B"
    ]  # fmt: skip
    assert ("wait for dispatch B", 3.0, pytest.approx(0.25)) in _events("waits", trace)
    assert _events("ring in flight", trace) == [
        ("ring A", 1.5, pytest.approx(0.75)), ("ring_grad A", 6.0, pytest.approx(1.0))
    ]  # fmt: skip
    assert sorted(_events("expert in flight", trace)) == [
        ("combine A", 2.5, pytest.approx(1.1)),
        ("dispatch B", 1.5, pytest.approx(1.75)),
        ("meta B", 0.5, pytest.approx(0.5)),
    ]


def test_transfers_in_flight_together_lie_on_threads_of_their_own():
    trace = chrome_trace([TRACE])
    rows = [e for e in trace["traceEvents"] if e.get("name") in ("dispatch B", "combine A")]
    assert len({event["tid"] for event in rows}) == 2


def test_the_picture_is_drawn(tmp_path):
    one_slice = RankTrace([span._replace(slice=0) for span in TRACE.phases])
    draw([Panel("serial", [one_slice]), Panel("overlap", [TRACE, TRACE])], tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
