"""Micro-batches of packed sequences for one data-parallel rank, with a cursor that fits any number of ranks.

Shapes: B sequences of a micro-batch, S sequence.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from cpmoe.data.packing import HeldoutDataset, PackedDataset, PackedSequence, padding_sequence


class SequenceBatch(NamedTuple):
    """Whole sequences, int64 [B, S] on the CPU.

    Labels are already shifted; they are -100 where a document ends and in padding. Positions count within
    the document, documents within the sequence; padding is token 0, position 0, document -1. `sequences_B`
    [B] are the numbers of the sequences in the data set, which no two of a run share.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor
    documents_BS: torch.Tensor
    sequences_B: torch.Tensor


class BatchStream:
    """The training batches of one data-parallel rank. Ranks of one CP group pass the same `dp_rank`.

    An optimizer step consumes the next `dp_size * micro_batch_size * accumulation` sequences of `dataset`.
    Micro-step g of all ranks together is one contiguous run of them, of which rank r takes the r-th part,
    so the ranks never share a sequence and together leave none out. The step after the next is built by
    a background thread; the cursor counts what was handed out, not what was built.
    """

    def __init__(
        self, dataset: PackedDataset, dp_rank: int, dp_size: int, micro_batch_size: int, accumulation: int
    ) -> None:
        assert 0 <= dp_rank < dp_size and micro_batch_size > 0 and accumulation > 0
        self.dataset = dataset
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.micro_batch_size = micro_batch_size
        self.accumulation = accumulation
        self.sequences_consumed = 0
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpmoe-data")
        self._ahead: Future[list[SequenceBatch]] | None = None

    @property
    def sequences_per_step(self) -> int:
        return self.dp_size * self.micro_batch_size * self.accumulation

    @property
    def epoch(self) -> float:
        """Epochs completed by what was handed out, e.g. 1.25."""
        return self.dataset.epoch(self.sequences_consumed)

    def next_step(self) -> list[SequenceBatch]:
        """The `accumulation` micro-batches of the next optimizer step on this rank."""
        ahead = self._ahead or self._executor.submit(self._build, self.sequences_consumed)
        step = ahead.result()
        self.sequences_consumed += self.sequences_per_step
        self._ahead = self._executor.submit(self._build, self.sequences_consumed)
        return step

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the cursor, and what the cursor counts."""
        return {"sequences_consumed": self.sequences_consumed, "counted_in": self.dataset.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the exact next sequence, whatever the number of ranks was.

        Raises ValueError, naming each difference, where the state belongs to other data, another split,
        length or seed, or another rule of shuffling, since its cursor would then count other sequences.
        """
        saved = state["counted_in"]
        differences = [
            f"{name}: {saved.get(name)!r} in the checkpoint, {value!r} in this run"
            for name, value in self.dataset.identity().items()
            if saved.get(name) != value
        ]
        if differences:
            raise ValueError(
                f"the checkpoint's place in the data means nothing in this run. {'; '.join(differences)}. "
                "Restore the settings, or start anew with train.resume=never and another train.out_dir"
            )
        self._drop_ahead()
        self.sequences_consumed = int(state["sequences_consumed"])

    def close(self) -> None:
        """Ends the background thread."""
        self._drop_ahead()
        self._executor.shutdown()

    def _drop_ahead(self) -> None:
        if self._ahead is not None and not self._ahead.cancel():
            self._ahead.exception()
        self._ahead = None

    def _build(self, cursor: int) -> list[SequenceBatch]:
        size, per_micro_step = self.micro_batch_size, self.dp_size * self.micro_batch_size
        first = cursor + self.dp_rank * size
        return [
            _stack([self.dataset[i] for i in range(start, start + size)], start)
            for start in range(first, first + self.accumulation * per_micro_step, per_micro_step)
        ]


def heldout_batches(
    dataset: HeldoutDataset, dp_rank: int, dp_size: int, micro_batch_size: int
) -> list[SequenceBatch]:
    """This rank's share of the held-out sequences: equally many micro-batches on every rank.

    Sequences are dealt in runs of `micro_batch_size`; where they do not divide, the last ones are padding
    (nothing but document -1), so that every sequence is evaluated exactly once.
    """
    per_round = dp_size * micro_batch_size
    padding = [padding_sequence(dataset.seq_len)] * (-len(dataset) % per_round)
    sequences = [*dataset, *padding]
    starts = range(dp_rank * micro_batch_size, len(sequences), per_round)
    return [_stack(sequences[start : start + micro_batch_size], start) for start in starts]


def _stack(sequences: list[PackedSequence], first: int) -> SequenceBatch:
    """Sequences `first`, `first` + 1 … of the data set."""
    fields = [torch.from_numpy(np.stack(field)) for field in zip(*sequences, strict=True)]
    return SequenceBatch._make((*fields, torch.arange(first, first + len(sequences))))
