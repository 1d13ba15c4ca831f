"""The phases of all ranks as a trace for Perfetto (ui.perfetto.dev, chrome://tracing), and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cpmoe.coschedule.trace import Span

LANES = ("compute", "expert rows in flight")
TRANSFERS = {"dispatch": ("dispatch_start", "dispatch_wait"), "combine": ("combine_start", "combine_wait")}
COLOURS = {
    "project": "#c6dbef",
    "attend": "#3182bd",
    "dense": "#9ecae1",
    "route": "#fdd0a2",
    "experts": "#e6550d",
    "shared": "#fdae6b",
    "finish": "#d9d9d9",
    "dispatch": "#74c476",
    "combine": "#31a354",
    "wait": "#252525",
}
WAITS = ("dispatch_start", "dispatch_wait", "combine_start", "combine_wait")


def transfers(spans: Sequence[Span]) -> Iterator[Span]:
    """Spans named dispatch and combine, from when rows were launched until they were waited for."""
    ends = {(*span[:4], span.micro_step): span for span in spans}
    for span in spans:
        for name, (start, wait) in TRANSFERS.items():
            launch, arrival = (wait, start) if span.is_backward else (start, wait)
            other = ends.get((arrival, *span[1:4], span.micro_step))
            if span.kind == launch and other is not None:
                yield span._replace(kind=name, start=span.stop, stop=other.stop)


def chrome_trace(ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """One process per rank, one thread per lane; times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for lane, (name, shown) in enumerate(zip(LANES, (spans, transfers(spans)), strict=True)):
            events.append(
                {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
            )
            events += [_event(span, rank, lane) for span in shown]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, rank: int, lane: int) -> dict[str, Any]:
    direction = "backward" if span.is_backward else "forward"
    return {
        "ph": "X",
        "pid": rank,
        "tid": lane,
        "name": f"{span.kind} {'AB'[span.slice]}",
        "cat": direction,
        "ts": span.start * 1e6,
        "dur": (span.stop - span.start) * 1e6,
        "args": {"layer": span.layer, "slice": span.slice, "direction": direction},
    }


def draw(ranks: Sequence[Sequence[Span]], path: Path, title: str) -> None:
    """A PNG: for each rank what it computes, where it stands still (black), and its rows in flight."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    labels: list[str] = []
    figure, axes = pyplot.subplots(figsize=(16, 0.9 + 1.1 * len(ranks)), dpi=110, layout="constrained")
    for rank, spans in enumerate(ranks):
        in_flight = list(transfers(spans))
        lanes = [("", spans)]
        lanes += [(f" rows {'AB'[s]}", [t for t in in_flight if t.slice == s]) for s in range(2)]
        for suffix, shown in lanes:
            if not shown:
                continue
            place = len(labels)
            labels.append(f"rank {rank}{suffix}")
            for span in shown:
                colour = COLOURS["wait" if span.kind in WAITS else span.kind]
                bar = [(span.start * 1e3, (span.stop - span.start) * 1e3)]
                axes.broken_barh(bar, (place - 0.4, 0.8), color=colour, edgecolor="white", lw=0.3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the step began")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)
