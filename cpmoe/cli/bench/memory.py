"""Peak memory of a step's activations per rank, against sequence length, for CP = 1, 2 and 4.

Counted exactly: the bytes of all live tensors during forward and backward, less what was live before
(weights and gradient buffers). Temporaries inside one operator are not seen.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cpmoe.cli.bench.report import conditions, report
from cpmoe.cli.bench.teams import Team, Work

LENGTHS = (4096, 8192, 16384)
DEGREES = (1, 2, 4)
MIB = 1024**2


class PeakBytes(TorchDispatchMode):
    """Tracks the bytes of storages made under it; `peak` is the most alive at one time.

    Storages of `known` tensors do not count, also where an operator returns a view of one.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)


def run(json_path: str | Path | None) -> dict[str, Any]:
    """Measures, prints, and returns {"figures", "conditions"}."""
    peaks: dict[int, list[int]] = {}
    for degree in DEGREES:
        with Team(_activations, degree, 1) as team:
            peaks[degree] = [max(column) for column in zip(*team.turn()[1], strict=True)]
    ratios = {
        degree: [degree * cp / one for cp, one in zip(peaks[degree], peaks[1], strict=True)]
        for degree in DEGREES
    }
    figures = {f"memory.ratio_to_ideal.cp{degree}": max(ratios[degree]) for degree in DEGREES[1:]}
    rows = [
        (f"CP = {degree}", *(f"{peak / MIB:.1f} MiB  {ratio:.3f}" for peak, ratio in zip(
            peaks[degree], ratios[degree], strict=True)))
        for degree in DEGREES
    ]  # fmt: skip
    return report(
        "peak activations per rank, and their ratio to 1/CP of CP = 1 (the figure is the worst length)",
        figures,
        conditions(),
        rows,
        ("", *(f"{length:,} tokens" for length in LENGTHS)),
        json_path,
    )


def _activations(rank: int, size: int) -> Work:
    from cpmoe.attention.sharding import shard_batch
    from cpmoe.cli.bench.train import MODEL
    from cpmoe.config.recipe import ModelConfig
    from cpmoe.model.options import ModelOptions
    from cpmoe.model.transformer import CausalLM, LossScale, init_weights
    from cpmoe.parallel.grid import RankGrid
    from cpmoe.parallel.groups import create_groups

    groups = create_groups(RankGrid(size, context_parallel_size=size))
    model = CausalLM(ModelConfig.model_validate(MODEL), groups, ModelOptions(loss_chunk_tokens=128))
    init_weights(model, 0)
    known = []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        known += [parameter.data, parameter.grad]

    def measure(length: int) -> int:
        tokens_BS = torch.randint(0, MODEL["vocab_size"], (1, length))
        shard = shard_batch(
            tokens_BS, tokens_BS, torch.arange(length)[None], torch.zeros_like(tokens_BS), size, rank
        )
        with PeakBytes(known) as memory:
            model((shard,), LossScale(length, length, 1)).loss.backward()
        return memory.peak

    return lambda: [measure(length) for length in LENGTHS]
