"""What each process of `bench coschedule` does: turns of compute, serial and overlap on one model."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.attention.slicing import shard_slices
from cpmoe.cli.bench.memory import PeakBytes
from cpmoe.config.recipe import ModelConfig
from cpmoe.coschedule.choice import MIN_ROUNDS, Measurement
from cpmoe.coschedule.timeline import Panel, draw
from cpmoe.coschedule.trace import PhaseTrace, RankTrace
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale, init_weights
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import create_groups
from cpmoe.parallel.transport import Wire, transport

MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
POLICIES = ("serial", "overlap")
TITLES = {
    "serial": "serial: one slice; rows are waited for",
    "overlap": "overlap: two slices, A above B in each lane; one computes while the other's rows travel",
}


class CountingWire(Wire):
    """Counts the bytes that this rank sends to others, and keeps the token counts that it receives."""

    def __init__(self) -> None:
        self.sent = 0
        self.counts: list[Tensor] = []

    def exchange(
        self, received: Tensor, sent: Tensor, from_rank: int, to_rank: int, group: ProcessGroup
    ) -> list[dist.Work]:
        self.sent += sent.nbytes
        return super().exchange(received, sent, from_rank, to_rank, group)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        group: ProcessGroup,
        receive_splits: list[int] | None,
        send_splits: list[int] | None,
    ) -> list[dist.Work]:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own = sent.shape[0] // size if send_splits is None else send_splits[rank]
        self.sent += sent.nbytes - sent[:own].nbytes
        return super().all_to_all(received, sent, group, receive_splits, send_splits)

    def all_gather(self, received: Tensor, sent: Tensor, group: ProcessGroup) -> list[dist.Work]:
        self.sent += sent.nbytes * (len(received) - 1)
        if group.group_desc == "meta":
            self.counts.append(received)
        return super().all_gather(received, sent, group)


class SilentWire(Wire):
    """Lets nothing travel: what would be received is zeros, but token counts are `counts`, in order."""

    def __init__(self, counts: list[Tensor]) -> None:
        self._counts = iter(counts)

    def exchange(self, received: Tensor, *_: Any) -> list[dist.Work]:
        received.zero_()
        return []

    def all_to_all(self, received: Tensor, *_: Any) -> list[dist.Work]:
        received.zero_()
        return []

    def all_gather(self, received: Tensor, sent: Tensor, group: ProcessGroup) -> list[dist.Work]:
        if group.group_desc == "meta":
            received.copy_(next(self._counts))
        else:
            received.zero_()
        return []


@contextmanager
def over(wire: Wire) -> Iterator[None]:
    """Transfers go over `wire` meanwhile."""
    before, transport.wire = transport.wire, wire
    yield
    transport.wire = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario")
    parser.add_argument("out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--store", help="a file, where the environment names no address")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    scenario = json.loads(options.scenario)
    torch.set_num_threads(1)
    if options.store:
        store = dist.FileStore(options.store, 2)
        dist.init_process_group("gloo", store=store, rank=options.rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    step = _Stepper(scenario["seq_len"], scenario["batch"])
    counted = CountingWire()
    with over(counted):
        step("serial")
    result = _take_turns(step, counted.counts)
    result["bytes"] = _largest(counted.sent)
    result["peak_bytes"] = {p: _largest(_peak(step, p)) for p in POLICIES if scenario["memory"]}
    if options.picture:
        panels = [Panel(TITLES[policy], step.traced(policy)) for policy in POLICIES]
        if dist.get_rank() == 0:
            draw(panels, options.picture)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    # Not through the interpreter's end: gloo's threads may still hold the last barrier.
    os._exit(0)


def _take_turns(step: _Stepper, counts: list[Tensor]) -> dict[str, Any]:
    """Seconds of compute, serial and overlap in rounds as policy auto measures them, and what it chooses."""
    measurement = Measurement()
    compute: list[float] = []
    turn = 0
    while measurement.choice is None:
        turn += 1
        if len(compute) <= len(measurement.gains()) and len(compute) < MIN_ROUNDS:
            with over(SilentWire(counts)):
                compute.append(_timed(step, "serial"))
            _say(f"  compute {compute[-1]:.2f} s")
        policy = measurement.next_policy()
        seconds = _timed(step, policy)
        measurement.add(turn, seconds)
        _say(f"  {policy} {seconds:.2f} s{'' if measurement.timings[-1].counts else ' (warm-up)'}")
    seconds_of = {policy: measurement.seconds(policy) for policy in POLICIES}
    return {"seconds": {"compute": compute, **seconds_of}, "choice": measurement.choice}


class _Stepper:
    """Forward and backward of one micro-batch, of the bench's model and random tokens."""

    def __init__(self, seq_len: int, batch: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        groups = create_groups(RankGrid(world, world, world))
        self.model = CausalLM(
            ModelConfig.model_validate(MODEL), groups, ModelOptions(coschedule_policy="overlap")
        )
        init_weights(self.model, 0)
        generator = torch.Generator().manual_seed(0)
        tokens_BS = torch.randint(0, MODEL["vocab_size"], (batch, seq_len), generator=generator)
        positions_BS = torch.arange(seq_len).expand_as(tokens_BS)
        fields = tokens_BS, tokens_BS, positions_BS, torch.zeros_like(tokens_BS)
        slicings = {"serial": "none", "overlap": "batch" if batch > 1 else "causal"}
        self.slices = {
            policy: shard_slices(*fields, world, rank, slicing=slicing)
            for policy, slicing in slicings.items()
        }
        self.scale = LossScale(tokens_BS.numel(), tokens_BS.numel(), 1)

    def __call__(self, policy: str) -> None:
        """The schedule of one slice is serial."""
        self.model(self.slices[policy], self.scale).loss.backward()

    def traced(self, policy: str) -> list[RankTrace]:
        """What both ranks did in a step, in rank order."""
        dist.barrier()
        self.model.model.observer = trace = PhaseTrace()
        trace.watch_forward()
        loss = self.model(self.slices[policy], self.scale).loss
        trace.watch_backward(loss)
        loss.backward()
        trace.end()
        self.model.model.observer = None
        ranks = [RankTrace()] * dist.get_world_size()
        dist.all_gather_object(ranks, trace.result())
        return ranks


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _timed(step: _Stepper, policy: str) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(policy)
    return _largest(time.perf_counter() - start)


def _peak(step: _Stepper, policy: str) -> int:
    with PeakBytes([]) as memory:
        step(policy)
    return memory.peak


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


if __name__ == "__main__":
    main()
