"""The batch equation: how many sequences and tokens one optimizer step sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpmoe.config.errors import Problem, divisors


@dataclass(frozen=True)
class BatchEquation:
    """global_batch_size = micro_batch_size x gradient_accumulation_steps x dp, in sequences.

    The CP ranks of one ring share their sequences, so CP is divided out: dp = world_size / cp.
    """

    world_size: int
    dp: int
    cp: int
    ep: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    seq_len: int
    padded_seq_len: int
    """`seq_len` rounded up to the chunks of the shard grid; padding is never seen by a loss."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks, padding not counted."""
        return self.global_batch_size * self.seq_len

    @property
    def deepspeed_train_batch_size(self) -> int:
        """DeepSpeed's own count, which takes every rank for a data-parallel one."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    def describe(self) -> str:
        """Every factor with its name, on one line."""
        text = (
            f"global batch {self.global_batch_size:,} sequences = micro-batch {self.micro_batch_size:,} "
            f"x accumulation {self.gradient_accumulation_steps:,} x DP {self.dp:,}   "
            f"(world {self.world_size:,} = DP {self.dp:,} x CP {self.cp:,}; EP {self.ep:,})   "
            f"tokens/step {self.tokens_per_step:,}"
        )
        if self.padded_seq_len != self.seq_len:
            text += f"   (sequences of {self.seq_len:,} padded to {self.padded_seq_len:,})"
        return text


@dataclass(frozen=True)
class BatchSizes:
    """The three sizes in sequences; None where nobody gave one."""

    micro: int | None
    accumulation: int | None
    total: int | None


def solve(sizes: BatchSizes, dp: int) -> tuple[int, int, int] | Problem:
    """(micro-batch, accumulation, global batch) of the equation, or why there are none.

    A size that nobody gave follows from the others; where they leave it open, the micro-batch is 1 and
    the accumulation is 1.
    """
    micro, accumulation, total = sizes.micro, sizes.accumulation, sizes.total
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return micro, accumulation, micro * accumulation * dp
    if accumulation is None:
        micro = micro or 1
        if total % (micro * dp) == 0:
            return micro, total // (micro * dp), total
    elif total % (accumulation * dp) == 0 and micro in (None, total // (accumulation * dp)):
        return total // (accumulation * dp), accumulation, total

    factors = [("micro-batch", micro), ("gradient_accumulation_steps", accumulation), ("DP", dp)]
    product = math.prod(value for _, value in factors if value)
    equation = " x ".join(f"{name} {value}" for name, value in factors if value)
    verb = "must be" if micro and accumulation else "must be a multiple of"
    constraint = f"{verb} {equation} = {product} sequences"
    return Problem("train.global_batch_size", constraint, total, _choices(sizes, product, dp))


def _choices(sizes: BatchSizes, product: int, dp: int) -> str:
    assert sizes.total is not None
    if sizes.micro and sizes.accumulation:
        choices = [str(product)]
    else:
        below = sizes.total // product * product
        choices = [str(value) for value in (below, below + product) if value]
    per_rank = sizes.total // dp if sizes.total % dp == 0 else 0
    for name, other in (("micro-batch", sizes.accumulation), ("accumulation", sizes.micro)):
        values = [value for value in divisors(per_rank) if other is None or value * other == per_rank]
        if values:
            choices.append(f"{name} {' or '.join(map(str, values))}")
    return ", ".join(choices)
