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
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from cpmoe.attention import ring
from cpmoe.attention.slicing import shard_slices
from cpmoe.cli.bench.memory import PeakBytes
from cpmoe.config.recipe import ModelConfig
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import CausalLM, LossScale, init_weights
from cpmoe.moe import dispatch
from cpmoe.parallel import collectives
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import create_groups

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


class Wire:
    """Counts the bytes that this rank sends to others, or lets nothing travel.

    Without transfers what would be received is zeros of the same shape, and token counts are those that
    an earlier step with transfers exchanged; the computation is the same.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._splits: list[dispatch.RowSplits] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        launch, exchange, splits = (
            collectives.PendingAllToAll.launch,
            ring._Exchange.__init__,
            dispatch.CountExchange.splits,
        )
        self._splits = []

        def counting_launch(pending: Any, rows: Tensor, *, transposed: bool) -> None:
            counts = pending.output_splits if transposed else pending.input_splits
            away = sum(counts) - counts[dist.get_rank(pending.group)]
            self.sent += away * rows[:0].new_empty(1, *rows.shape[1:]).nbytes
            launch(pending, rows, transposed=transposed)

        def counting_exchange(transfer: Any, hop: Any, sent: Tensor, group: Any) -> None:
            self.sent += sent.nbytes
            exchange(transfer, hop, sent, group)

        def kept_splits(counts: Any) -> dispatch.RowSplits:
            self._splits.append(splits(counts))
            return self._splits[-1]

        with (
            mock.patch.object(collectives.PendingAllToAll, "launch", counting_launch),
            mock.patch.object(ring._Exchange, "__init__", counting_exchange),
            mock.patch.object(dispatch.CountExchange, "splits", kept_splits),
        ):
            yield

    @contextmanager
    def silent(self) -> Iterator[None]:
        left = iter(self._splits)

        def launch(pending: Any, rows: Tensor, *, transposed: bool) -> None:
            arriving = sum(pending.input_splits if transposed else pending.output_splits)
            pending._received = rows.new_zeros(arriving, *rows.shape[1:])

        def wait(pending: Any) -> Tensor:
            received, pending._received = pending._received, None
            return received

        def exchange(transfer: Any, hop: Any, sent: Tensor, group: Any) -> None:
            transfer.tokens, transfer._works = hop.receive, []
            transfer._received = sent.new_zeros(*sent.shape[:2], hop.receive.wire_tokens, *sent.shape[3:])

        with (
            mock.patch.object(collectives.PendingAllToAll, "launch", launch),
            mock.patch.object(collectives.PendingAllToAll, "wait", wait),
            mock.patch.object(ring._Exchange, "__init__", exchange),
            mock.patch.object(dispatch.CountExchange, "__init__", lambda *_: None),
            mock.patch.object(dispatch.CountExchange, "splits", lambda _: next(left)),
        ):
            yield


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
    wire = Wire()
    with wire.counted():
        step("serial")
    turns = {"compute": "serial", "serial": "serial", "overlap": "overlap"}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(1 + scenario["rounds"]):
        for name, policy in turns.items():
            with wire.silent() if name == "compute" else _as_it_is():
                elapsed = _timed(step, policy)
            if turn:
                seconds[name].append(elapsed)
    peaks = {policy: _largest(_peak(step, policy)) for policy in POLICIES}
    result = {"seconds": seconds, "bytes": _largest(wire.sent), "peak_bytes": peaks}
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


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


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
