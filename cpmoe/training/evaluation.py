"""Held-out loss, in whole and by position in the sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cpmoe.attention.sharding import IGNORED_LABEL, SequenceShard
from cpmoe.model.transformer import LossScale
from cpmoe.parallel.groups import Groups
from cpmoe.training.engine import TrainingEngine

NUM_PARTS = 8


def evaluate(
    engine: TrainingEngine,
    shards: list[SequenceShard],
    seq_len: int,
    groups: Groups,
) -> tuple[float, list[tuple[int, float]]]:
    """Mean loss per label token over all ranks' `shards`, and the same by eighths of the sequence.

    Collective on world; every rank passes equally many shards. Returns (loss, [(first position of the part,
    loss), ...]) in nats; a part without a label is left out.
    """
    device = engine.deepspeed.device
    sums = torch.zeros(2, NUM_PARTS, dtype=torch.float64, device=device)
    engine.deepspeed.eval()
    with torch.no_grad():
        for shard in shards:
            output = engine.deepspeed((shard,), LossScale(1, 1, 1))
            part_T = (shard.index_T.to(device) * NUM_PARTS // seq_len).clamp_max(NUM_PARTS - 1)
            labelled_BT = shard.labels_BT != IGNORED_LABEL
            losses_BT = output.losses_T.view_as(shard.labels_BT)
            sums[0].index_add_(0, part_T, losses_BT.sum(0, dtype=torch.float64))
            sums[1].index_add_(0, part_T, labelled_BT.sum(0, dtype=torch.float64))
    engine.deepspeed.train()
    if groups.world is not None:
        dist.all_reduce(sums, group=groups.world)
    losses, labels = sums.tolist()
    by_position = [
        (-(-part * seq_len // NUM_PARTS), loss / count)
        for part, (loss, count) in enumerate(zip(losses, labels, strict=True))
        if count
    ]
    return sum(losses) / max(sum(labels), 1), by_position
