"""Schedules of a forward as data: phases of slices and layers, in the order in which every rank runs them.

A micro-batch is one slice, or two whose phases interleave so that one computes while the other's rows
and KV travel. Autograd runs backward in the exact reverse of forward, so a schedule describes both.

Pure: no torch, no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

POLICIES = ("serial", "overlap")


class Kind(NamedTuple):
    """What a phase does to the communication of its slice, and what must have run before it.

    needs     kinds of the same slice and layer
    starts    group on which it launches a transfer that a later phase waits for
    returns   group on which, in backward, that phase launches the gradient and this one waits for it
    waits     kind of the phase whose transfer it waits for
    within    groups on which it may communicate to the end by itself, forward or backward: hierarchical
              dispatch, and rounds of a budget of rows
    computes  whether it uses parameters of its layer, which are there in that layer's block only
    """

    needs: tuple[str, ...] = ()
    starts: str | None = None
    returns: str | None = None
    waits: str | None = None
    within: tuple[str, ...] = ()
    computes: bool = True


KINDS = {
    "project": Kind(),
    "kv_start": Kind(
        needs=("project",), starts="ring", returns="ring_grad", within=("ulysses",), computes=False
    ),
    "attend_own": Kind(needs=("kv_start",), computes=False),
    "kv_wait": Kind(needs=("kv_start",), waits="kv_start", computes=False),
    # On rings of three or more ranks further hops.
    "attend": Kind(needs=("attend_own", "kv_wait"), within=("ring", "ring_grad", "ulysses"), computes=False),
    "dense": Kind(needs=("attend",)),
    "route": Kind(needs=("attend",), starts="meta"),
    "dispatch_start": Kind(
        needs=("route",), starts="expert", returns="expert", waits="route", computes=False
    ),
    "shared": Kind(needs=("route",)),
    "dispatch_wait": Kind(
        needs=("dispatch_start",), waits="dispatch_start", within=("expert_within",), computes=False
    ),
    "experts": Kind(needs=("dispatch_wait",), within=("meta", "expert")),
    "combine_start": Kind(
        needs=("experts",), starts="expert", returns="expert", within=("expert_within",), computes=False
    ),
    "combine_wait": Kind(needs=("combine_start",), waits="combine_start", computes=False),
    "finish": Kind(needs=("combine_wait", "shared"), computes=False),
}
ATTENTION = ("project", "kv_start", "attend_own", "kv_wait", "attend")
DENSE = (*ATTENTION, "dense")
SPARSE = tuple(kind for kind in KINDS if kind != "dense")
# What ends a dense and a sparse layer for a slice; then the next layer may begin with it.
LAST = ("dense", "finish")


class Phase(NamedTuple):
    """`kind` of `slice` in `layer`, run inside the block of layer `host`.

    The host is the layer itself, or a later one for a phase that uses no parameters: a transfer may be in
    flight while the next block begins. Host L of L layers is the end of the decoder, after all blocks.
    """

    kind: str
    layer: int
    slice: int
    host: int

    def __str__(self) -> str:
        return f"{self.kind} of slice {self.slice} in layer {self.layer}, host {self.host}"


Schedule = tuple[Phase, ...]


def build_schedule(policy: str, sparse: Sequence[bool], num_slices: int, crossing: bool = True) -> Schedule:
    """The schedule of a decoder whose layer i is a mixture of experts where sparse[i].

    policy    serial: one slice after the other; overlap: two slices interleaved (one is serial)
    crossing  whether combine of the second slice may still travel when the next block begins; not where
              blocks are recomputed, since a recomputed block must begin from tensors alone
    """
    assert policy in POLICIES and num_slices in (1, 2), (policy, num_slices)
    return _build(policy, tuple(sparse), num_slices, crossing)


@cache
def _build(policy: str, sparse: tuple[bool, ...], num_slices: int, crossing: bool) -> Schedule:
    if policy == "serial" or num_slices == 1:
        return tuple(_serial(sparse, num_slices))
    return tuple(_overlap(sparse, crossing))


def segments(schedule: Schedule) -> dict[int, Schedule]:
    """The phases that each host runs, in order."""
    return {host: tuple(phases) for host, phases in groupby(schedule, key=lambda phase: phase.host)}


def _serial(sparse: Sequence[bool], num_slices: int) -> Iterator[Phase]:
    for layer, is_sparse in enumerate(sparse):
        for index in range(num_slices):
            for kind in SPARSE if is_sparse else DENSE:
                yield Phase(kind, layer, index, layer)


def _overlap(sparse: Sequence[bool], crossing: bool) -> Iterator[Phase]:
    """Slices 0 and 1; each transfer of one travels while the other computes, or its own queries what is here.

    ```
    compute  own(0)     | attend(0) | own(1)    | attend(1)   | experts(0)  | experts(1) | own(0, next layer)
    ring     kv(0)      | kv(1)     |           |             |             |            | kv(0)
    expert   combine(1) |           | counts(0) | dispatch(0) | dispatch(1) | combine(0) | combine(1)
    ```
    """
    in_flight = False  # combine of slice 1 of the layer before
    for layer, is_sparse in enumerate(sparse):

        def here(kinds: Sequence[str], index: int, layer: int = layer, back: int = 0) -> Iterator[Phase]:
            return (Phase(kind, layer - back, index, layer) for kind in kinds)

        yield from here(("project", "kv_start", "attend_own"), 0)
        if in_flight:
            yield from here(("combine_wait", "finish"), 1, back=1)
            in_flight = False
        yield from here(("project", "kv_start"), 1)
        yield from here(("kv_wait", "attend"), 0)
        yield from here(("route",) if is_sparse else ("dense",), 0)
        yield from here(("attend_own",), 1)
        if is_sparse:
            yield from here(("dispatch_start",), 0)
        yield from here(("kv_wait", "attend"), 1)
        if not is_sparse:
            yield from here(("dense",), 1)
            continue
        yield from here(("route",), 1)
        yield from here(("shared", "dispatch_wait"), 0)
        yield from here(("dispatch_start",), 1)
        yield from here(("experts", "combine_start"), 0)
        yield from here(("shared", "dispatch_wait", "experts", "combine_start"), 1)
        yield from here(("combine_wait", "finish"), 0)
        if crossing:
            in_flight = True
        else:
            yield from here(("combine_wait", "finish"), 1)
    if in_flight:
        last = len(sparse) - 1
        yield from (Phase(kind, last, 1, last + 1) for kind in ("combine_wait", "finish"))
