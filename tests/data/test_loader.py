"""The batch stream: one order of sequences for every number of ranks, and a cursor that survives a change."""

import json
import re

import numpy as np
import pytest
import torch

from cpmoe.data.loader import BatchStream, SequenceBatch, heldout_batches
from cpmoe.data.packing import HeldoutDataset, PackedDataset
from cpmoe.data.prepare import prepare
from cpmoe.data.store import DocumentSet, open_prepared
from tests.data.helpers import data_config, unique_documents, write_jsonl

LENGTHS = [5, 1, 30, 2, 2, 17, 64, 9]
SEQ_LEN = 8


def dataset(seq_len: int = SEQ_LEN, seed: int = 0) -> PackedDataset:
    return PackedDataset(unique_documents(LENGTHS), seq_len, seed)


def steps(dp_size: int, accumulation: int, state: dict | None, count: int, micro_batch_size: int = 1):
    """Runs all ranks; returns [step][micro-step][rank] -> SequenceBatch and the state after."""
    streams = [BatchStream(dataset(), r, dp_size, micro_batch_size, accumulation) for r in range(dp_size)]
    if state is not None:
        for stream in streams:
            stream.load_state_dict(json.loads(json.dumps(state)))
    taken = [[stream.next_step() for stream in streams] for _ in range(count)]
    states = [stream.state_dict() for stream in streams]
    assert all(state == states[0] for state in states)
    for stream in streams:
        stream.close()
    return [[[rank[g] for rank in step] for g in range(accumulation)] for step in taken], states[0]


def in_order(taken) -> list[list[int]]:
    """The tokens of all sequences in the order of the data set: step, micro-step, rank, row."""
    return [row for step in taken for micro in step for batch in micro for row in batch.tokens_BS.tolist()]


def test_batches_are_the_next_sequences_of_the_data_set():
    stream = BatchStream(dataset(), 0, 1, micro_batch_size=3, accumulation=2)
    expected = dataset()
    for step in range(3):
        batches = stream.next_step()
        assert len(batches) == 2
        for g, batch in enumerate(batches):
            assert isinstance(batch, SequenceBatch)
            first = step * 6 + g * 3
            rows = [expected[first + row] for row in range(3)]
            assert batch.sequences_B.tolist() == [first, first + 1, first + 2]
            for ours, theirs in zip(batch[:4], zip(*rows, strict=True), strict=True):
                assert ours.dtype == torch.int64 and ours.shape == (3, SEQ_LEN)
                np.testing.assert_array_equal(ours.numpy(), np.stack(theirs))
    stream.close()


@pytest.mark.parametrize(
    ("dp_size", "accumulation", "micro_batch_size"), [(1, 8, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)]
)
def test_ranks_share_nothing_and_leave_nothing_out(dp_size, accumulation, micro_batch_size):
    taken, state = steps(dp_size, accumulation, None, 4, micro_batch_size)
    expected = dataset()
    assert in_order(taken) == [expected[i].tokens_S.tolist() for i in range(32)]
    assert state["sequences_consumed"] == 32


def test_resume_over_1_2_and_4_ranks_reads_as_one_run():
    first, state = steps(1, 4, None, 2)
    second, state = steps(2, 2, state, 3)
    third, state = steps(4, 1, state, 2)
    whole, whole_state = steps(1, 4, None, 7)
    assert in_order(first) + in_order(second) + in_order(third) == in_order(whole)
    assert state == whole_state


def test_resume_with_another_step_size_continues_at_the_exact_sequence():
    _, state = steps(1, 3, None, 1)
    taken, state = steps(2, 1, state, 2, micro_batch_size=2)
    assert in_order(taken) == [dataset()[i].tokens_S.tolist() for i in range(3, 11)]
    assert state["sequences_consumed"] == 11


def test_state_counts_what_was_handed_out_and_loading_drops_what_was_built_ahead():
    stream = BatchStream(dataset(), 0, 1, 1, 2)
    fresh = stream.state_dict()
    first = stream.next_step()
    assert stream.state_dict()["sequences_consumed"] == 2
    assert stream.epoch == 2 * SEQ_LEN / sum(LENGTHS)
    stream.next_step()
    stream.load_state_dict(fresh)
    again = stream.next_step()
    assert [b.tokens_BS.tolist() for b in first] == [b.tokens_BS.tolist() for b in again]
    stream.close()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (dataset(16), "data.seq_len: 8 in the checkpoint, 16 in this run; windows shuffled together: 16 in"),
        (dataset(seed=9), "data.seed: 0 in the checkpoint, 9 in this run. Restore"),
        (
            PackedDataset(unique_documents(LENGTHS[:-1]), SEQ_LEN, 0),
            f"checksum of the training documents: '{LENGTHS}' in the checkpoint, '{LENGTHS[:-1]}' in this",
        ),
    ],
)
def test_state_of_other_data_is_refused(other, told):
    state = BatchStream(dataset(), 0, 1, 1, 1).state_dict()
    with pytest.raises(ValueError, match=re.escape(told)):
        BatchStream(other, 0, 1, 1, 1).load_state_dict(state)


def test_state_of_another_rule_of_shuffling_is_refused(monkeypatch):
    stream = BatchStream(dataset(), 0, 1, 1, 1)
    state = stream.state_dict()
    monkeypatch.setattr("cpmoe.data.packing.ORDER_VERSION", 0)
    with pytest.raises(ValueError, match="version of the order: 1 in the checkpoint, 0 in this run"):
        stream.load_state_dict(state)


def test_state_of_another_split_is_refused_by_the_name_of_the_setting(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {i} " * (i % 9 + 1) for i in range(50)])
    streams = []
    for fraction in (0.1, 0.3):
        config = data_config(tmp_path, source, path=str(tmp_path / f"{fraction}"), heldout_fraction=fraction)
        documents = open_prepared(prepare(config)).documents("train")
        streams.append(BatchStream(PackedDataset(documents, SEQ_LEN, 0), 0, 1, 1, 1))
    told = r"data\.heldout_fraction: 0\.1 in the checkpoint, 0\.3 in this run; checksum of the training"
    with pytest.raises(ValueError, match=told):
        streams[1].load_state_dict(json.loads(json.dumps(streams[0].state_dict())))


def test_failure_in_the_background_reaches_the_caller():
    one = np.array([4], dtype=np.int64)
    truncated = DocumentSet(np.zeros(2, dtype=np.uint16), np.zeros(1, dtype=np.int64), one, vocab_size=257)
    stream = BatchStream(PackedDataset(truncated, 4, 0), 0, 1, 1, 1)
    with pytest.raises(IndexError):
        stream.next_step()


@pytest.mark.parametrize("num_sequences", [1, 5, 8, 11])
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (2, 2), (4, 1), (3, 2)])
def test_heldout_is_evaluated_once_on_any_number_of_ranks(num_sequences, dp_size, micro_batch_size):
    heldout = HeldoutDataset(unique_documents(LENGTHS), SEQ_LEN, num_sequences)
    shares = [heldout_batches(heldout, rank, dp_size, micro_batch_size) for rank in range(dp_size)]
    assert len({len(share) for share in shares}) == 1, "ranks take part in equally many collectives"
    rounds = len(shares[0])
    rows = [
        row
        for r in range(rounds)
        for rank in range(dp_size)
        for row in zip(*(field.tolist() for field in shares[rank][r]), strict=True)
    ]
    assert len(rows) == num_sequences + -num_sequences % (dp_size * micro_batch_size)
    assert [row[0] for row in rows[:num_sequences]] == [s.tokens_S.tolist() for s in heldout]
    assert [row[4] for row in rows] == list(range(len(rows)))
    for tokens, labels, positions, documents, _ in rows[num_sequences:]:
        assert set(tokens) == {0} and set(labels) == {-100}
        assert set(positions) == {0} and set(documents) == {-1}
