"""How a micro-batch is cut into slices: the choice of `coschedule.slices`, with "auto" resolved."""

from __future__ import annotations

from cpmoe.config.checks import shard_chunks
from cpmoe.config.deepspeed import CpmoeConfig
from cpmoe.config.errors import Problem

PATH = "cpmoe.coschedule.slices"


def choose_slicing(
    cpmoe: CpmoeConfig, micro_batch_size: int, seq_len: int, has_experts: bool = True
) -> str | Problem:
    """none, batch or causal, or what forbids the given choice.

    "auto" cuts where rows travel to experts (`has_experts`, and EP above 1): a micro-batch of two or more
    sequences between them, one sequence inside it, if it is long enough.
    """
    chosen, chunks = cpmoe.coschedule.slices, shard_chunks(cpmoe)
    if chosen == "batch" and micro_batch_size < 2:
        return Problem(
            PATH, "needs a micro-batch of two or more sequences", chosen, '"auto", "causal", "none"'
        )
    if chosen == "causal" and seq_len < 2 * chunks:
        constraint = f"cuts a sequence into 2 x {chunks} chunks, and data.seq_len is {seq_len}"
        return Problem(PATH, constraint, chosen, '"auto", "batch", "none"')
    if chosen != "auto":
        return chosen
    if cpmoe.coschedule.policy == "serial" or not has_experts or cpmoe.expert_parallel_size == 1:
        return "none"
    if micro_batch_size > 1:
        return "batch"
    return "causal" if seq_len >= 2 * chunks else "none"
