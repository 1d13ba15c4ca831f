"""What all ranks did as a trace for Perfetto (ui.perfetto.dev, chrome://tracing), and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from cpmoe.coschedule.trace import RankTrace, Span, TransferSpan

# Lanes of transfers and the groups whose transfers they show.
LANES = {
    "ring": ("ring", "ring_grad"),
    "expert": ("expert", "expert_across", "expert_within", "meta"),
    "heads": ("ulysses",),
}
COLOURS = {
    "project": "#c6dbef",
    "attend_own": "#6baed6",
    "attend": "#3182bd",
    "dense": "#9ecae1",
    "route": "#fdd0a2",
    "experts": "#e6550d",
    "shared": "#fdae6b",
    "finish": "#d9d9d9",
}
OTHER_PHASES = "#bdbdbd"  # copy rows, launch or wait
TRANSFER_COLOURS = {
    "ring": "#9e9ac8",
    "ring_grad": "#54278f",
    "meta": "#d9ef8b",
    "dispatch": "#74c476",
    "combine": "#006d2c",
    "ulysses": "#8dd3c7",
}
TRANSFER_LABELS = {"ring": "KV", "ring_grad": "KV gradients", "meta": "counts", "ulysses": "heads"}
WAIT = "#000000"
BACKWARD = "#f0f0f0"


class Panel(NamedTuple):
    """One part of a picture: what every rank did, under a title."""

    title: str
    ranks: Sequence[RankTrace]


def transfer_name(transfer: TransferSpan) -> str:
    """dispatch or combine for rows, else the group."""
    return transfer.phase.partition("_")[0] if transfer.group.startswith("expert") else transfer.group


def lanes(trace: RankTrace) -> Iterator[tuple[str, list[TransferSpan]]]:
    """The transfers of each lane that has any."""
    for name, groups in LANES.items():
        shown = [transfer for transfer in trace.transfers if transfer.group in groups]
        if shown:
            yield name, shown


def chrome_trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """One process per rank; threads: phases, waits, transfers in flight by lane. Times in microseconds.

    Transfers of one lane that are in flight together lie on threads of their own.
    """
    events: list[dict[str, Any]] = []
    for rank, trace in enumerate(ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        threads = [
            ("compute", [_event(span.kind, span, span.start, span.stop) for span in trace.phases]),
            ("waits", [_event(f"wait for {transfer_name(t)}", t, t.wait, t.stop) for t in trace.transfers]),
        ]
        for name, shown in lanes(trace):
            for row in _rows(shown):
                in_flight = [_event(transfer_name(t), t, t.start, t.stop) for t in row]
                threads.append((f"{name} in flight", in_flight))
        for thread, (name, on_thread) in enumerate(threads):
            place = {"pid": rank, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **place})
            events += [event | place for event in on_thread]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(panels: Sequence[Panel], path: Path) -> None:
    """A PNG of panels above each other on one time axis.

    Of each rank: its phases, black where it stands still for a transfer, and its transfers in flight; slice
    A in the upper half of a lane and slice B in the lower, where there are two.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = [sum(1 + len(list(lanes(trace))) for trace in panel.ranks) for panel in panels]
    figure, grid = pyplot.subplots(
        len(panels), figsize=(16, 1 + 0.6 * len(panels) + 0.33 * sum(heights)), dpi=100, sharex=True,
        squeeze=False, height_ratios=heights, layout="constrained",
    )  # fmt: skip
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw_panel(axes, panel)
    traces = [trace for panel in panels for trace in panel.ranks]
    grid[-1, 0].set_xlabel("milliseconds since the step began")
    grid[-1, 0].set_xlim(0, 1e3 * max(span.stop for trace in traces for span in trace.phases))
    kinds = {span.kind for trace in traces for span in trace.phases}
    names = {transfer_name(transfer) for trace in traces for transfer in trace.transfers}
    shown = {kind: colour for kind, colour in COLOURS.items() if kind in kinds}
    shown |= {"other phases": OTHER_PHASES, "waits": WAIT}
    shown |= {
        f"{TRANSFER_LABELS.get(name, name)} in flight": colour
        for name, colour in TRANSFER_COLOURS.items()
        if name in names
    }
    shown["backward"] = BACKWARD
    patches = [Patch(color=colour, label=label) for label, colour in shown.items()]
    figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_panel(axes: Any, panel: Panel) -> None:
    labels: list[str] = []
    is_sliced = any(span.slice for trace in panel.ranks for span in trace.phases)

    def bar(of: Span | TransferSpan, start: float, stop: float, colour: str) -> None:
        top, height = len(labels) - 1.42, 0.84
        if is_sliced:
            top, height = top + 0.42 * of.slice, 0.42
        axes.broken_barh([(start * 1e3, (stop - start) * 1e3)], (top, height), color=colour, lw=0)

    for is_backward, run in groupby(panel.ranks[0].phases, key=lambda span: span.is_backward):
        spans = list(run)
        if is_backward:
            axes.axvspan(spans[0].start * 1e3, spans[-1].stop * 1e3, color=BACKWARD, zorder=0, lw=0)
    for rank, trace in enumerate(panel.ranks):
        labels.append(f"rank {rank}  compute")
        for span in trace.phases:
            bar(span, span.start, span.stop, COLOURS.get(span.kind, OTHER_PHASES))
        for transfer in trace.transfers:
            bar(transfer, transfer.wait, transfer.stop, WAIT)
        for name, shown in lanes(trace):
            labels.append(name)
            for transfer in shown:
                bar(transfer, transfer.start, transfer.stop, TRANSFER_COLOURS[transfer_name(transfer)])
        axes.axhline(len(labels) - 0.5, color="#dddddd", lw=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _event(name: str, of: Span | TransferSpan, start: float, stop: float) -> dict[str, Any]:
    direction = "backward" if of.is_backward else "forward"
    return {
        "ph": "X",
        "name": f"{name} {'AB'[of.slice]}",
        "cat": direction,
        "ts": start * 1e6,
        "dur": (stop - start) * 1e6,
        "args": {"layer": of.layer, "slice": of.slice, "direction": direction},
    }


def _rows(transfers: Sequence[TransferSpan]) -> list[list[TransferSpan]]:
    """Transfers in as few rows as hold no two that overlap."""
    rows: list[list[TransferSpan]] = []
    for transfer in sorted(transfers, key=lambda t: t.start):
        free = next((row for row in rows if row[-1].stop <= transfer.start), None)
        if free is None:
            rows.append([transfer])
        else:
            free.append(transfer)
    return rows
