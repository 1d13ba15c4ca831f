"""What each process of `bench coschedule` does: turns of compute, serial and overlap on one model."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
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
POLICIES = {"serial": "none", "overlap": "auto"}


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
    step = _stepper(scenario["seq_len"], scenario["batch"])
    counted = CountingWire()
    with over(counted):
        step("serial")
    turns = {"compute": "serial", "serial": "serial", "overlap": "overlap"}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(1 + scenario["rounds"]):
        for name, policy in turns.items():
            with over(SilentWire(counted.counts) if name == "compute" else Wire()):
                elapsed = _timed(step, policy)
            if turn:
                seconds[name].append(elapsed)
    peaks = {policy: _largest(_peak(step, policy)) for policy in POLICIES}
    result = {"seconds": seconds, "bytes": _largest(counted.sent), "peak_bytes": peaks}
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(result))
    dist.barrier()
    # Not through the interpreter's end: gloo's threads may still hold the last barrier.
    os._exit(0)


def _stepper(seq_len: int, batch: int) -> Callable[[str], None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = create_groups(RankGrid(world, world, world))
    model = CausalLM(ModelConfig.model_validate(MODEL), groups, ModelOptions())
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(0, MODEL["vocab_size"], (batch, seq_len), generator=generator)
    positions_BS = torch.arange(seq_len).expand_as(tokens_BS)
    fields = tokens_BS, tokens_BS, positions_BS, torch.zeros_like(tokens_BS)
    slicings = {"serial": "none", "overlap": "batch" if batch > 1 else "causal"}
    slices = {
        policy: shard_slices(*fields, world, rank, slicing=slicing) for policy, slicing in slicings.items()
    }
    scale = LossScale(tokens_BS.numel(), tokens_BS.numel(), 1)

    def step(policy: str) -> None:
        model.model.policy = policy
        model(slices[policy], scale).loss.backward()

    return step


def _timed(step: Callable[[str], None], policy: str) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(policy)
    return _largest(time.perf_counter() - start)


def _peak(step: Callable[[str], None], policy: str) -> int:
    with PeakBytes([]) as memory:
        step(policy)
    return memory.peak


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


if __name__ == "__main__":
    main()
