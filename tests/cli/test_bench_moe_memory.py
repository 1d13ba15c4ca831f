"""Memory figures of `bench moe`: a budget of rows bounds it under skew, and dedup sends fewer bytes."""

from __future__ import annotations

from typing import Any

from cpmoe.cli.bench.moe_memory import MODEL, figures_of, layers
from tests.distributed import run_distributed

# As large against its weights as the benchmark's layer against its own, and quick.
SMALL: dict[str, Any] = {**MODEL, "hidden_size": 64, "moe_intermediate_size": 128, "num_experts": 4}


def _work(rank: int, world: int) -> dict[str, dict[str, int]]:
    return layers(rank, world, 1024, SMALL)()


def test_figures():
    figures, rows = figures_of(run_distributed(_work, 2))
    assert figures["moe.skew_memory_ratio"] <= 1.2
    assert figures["moe.unbudgeted_skew_memory_ratio"] >= 1.5
    # Two of four experts at random: both are elsewhere, or both here, for a sixth of the tokens each.
    assert 0.8 < figures["moe.dedup_bytes_ratio"] < 0.9
    assert len(rows) == 8 and all(len(row) == 3 for row in rows)
