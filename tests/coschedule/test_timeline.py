"""What is drawn and written of a trace: rows are in flight between their launch and their wait."""

import json

import pytest

from cpmoe.coschedule.timeline import chrome_trace, draw, transfers
from cpmoe.coschedule.trace import Span

SPANS = [
    Span("dispatch_start", 0, 1, False, 1.0, 1.5),
    Span("attend", 0, 0, False, 1.5, 3.0),
    Span("dispatch_wait", 0, 1, False, 3.0, 3.25),
    Span("experts", 0, 1, False, 3.25, 4.0),
    Span("experts", 0, 1, True, 5.0, 6.0),
    Span("dispatch_wait", 0, 1, True, 6.0, 6.5),
    Span("dispatch_start", 0, 1, True, 8.0, 9.0),
]


def test_rows_are_in_flight_from_launch_to_wait():
    """In backward the wait of forward launches, and the start waits."""
    assert list(transfers(SPANS)) == [
        Span("dispatch", 0, 1, False, 1.5, 3.25),
        Span("dispatch", 0, 1, True, 6.5, 9.0),
    ]


def test_transfers_of_two_micro_steps_are_not_mixed():
    later = [s._replace(start=s.start + 10, stop=s.stop + 10, micro_step=1) for s in SPANS]
    assert [(t.start, t.stop) for t in transfers(SPANS + later)] == [
        (1.5, 3.25), (6.5, 9.0), (11.5, 13.25), (16.5, 19.0)
    ]  # fmt: skip


def test_chrome_trace_has_ranks_lanes_and_microseconds():
    trace = json.loads(json.dumps(chrome_trace([SPANS, SPANS[:3]])))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    (flight,) = [e for e in events if e["pid"] == 1 and e["tid"] == 1]
    assert flight["name"] == "dispatch B"
    assert (flight["ts"], flight["dur"]) == (pytest.approx(1.5e6), pytest.approx(1.75e6))
    backward = [event for event in events if event["cat"] == "backward"]
    assert [event["name"] for event in backward if event["tid"] == 0] == [
        "experts B", "dispatch_wait B", "dispatch_start B"
    ]  # fmt: skip


def test_the_picture_is_drawn(tmp_path):
    draw([SPANS, SPANS[:3]], tmp_path / "trace.png", "title")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
