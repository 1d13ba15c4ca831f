"""Preparing once: what is written, who is held out, and that nothing half-made or foreign is ever touched."""

import json
import multiprocessing
import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmoe.data.prepare import document_hash, prepare, split_documents
from cpmoe.data.store import SPLITS, open_prepared
from cpmoe.data.tokenizer import train_bpe
from tests.data.helpers import data_config, write_jsonl


def distinct_texts(count: int) -> list[str]:
    words = random.Random(0)
    return [
        f"{i} " + " ".join(words.choices(["alpha", "beta", "gamma", "é"], k=i % 17)) for i in range(count)
    ]


def texts_of(folder, split: str) -> list[str]:
    data = open_prepared(folder)
    tokenizer, documents = data.tokenizer(), data.documents(split)
    return [tokenizer.decode(documents[i].tolist()) for i in range(len(documents))]


def test_all_documents_are_there_in_order_and_end_with_the_token(tmp_path):
    texts = distinct_texts(200)
    folder = prepare(data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), heldout_fraction=0.2))
    data = open_prepared(folder)
    data.verify()
    train, heldout = (texts_of(folder, split) for split in SPLITS)
    assert train == [text for text in texts if text in set(train)]
    assert sorted(train + heldout) == sorted(texts)
    assert 20 <= len(heldout) <= 60, "about a fifth of 200"
    assert data.meta.documents == {"train": len(train), "heldout": len(heldout)}
    for split in SPLITS:
        documents = data.documents(split)
        assert documents.num_tokens == data.meta.tokens[split]
        assert all(documents[i][-1] == data.meta.end_of_document for i in range(len(documents)))


def test_duplicated_documents_are_on_one_side(tmp_path):
    texts = distinct_texts(40) * 5
    random.Random(1).shuffle(texts)
    folder = prepare(data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), heldout_fraction=0.3))
    train, heldout = (texts_of(folder, split) for split in SPLITS)
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 200


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=30).filter(lambda hashes: len(set(hashes)) > 1),
    st.floats(0, 1, exclude_max=True),
)
def test_split_is_a_partition_by_hash_with_both_sides_filled(hashes, fraction):
    train, heldout = (side.tolist() for side in split_documents(np.array(hashes, dtype=np.uint64), fraction))
    assert train and heldout
    assert sorted(train + heldout) == list(range(len(hashes)))
    assert not {hashes[i] for i in train} & {hashes[i] for i in heldout}
    unforced = [h for h in hashes if h not in (min(hashes), max(hashes))]
    assert all((h in {hashes[i] for i in heldout}) == (h < int(fraction * 2**64)) for h in unforced)


@pytest.mark.parametrize("fraction", [0.0, 0.999])
def test_no_side_is_empty(tmp_path, fraction):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "two"])
    folder = prepare(data_config(tmp_path, source, heldout_fraction=fraction))
    sides = [set(texts_of(folder, split)) for split in SPLITS]
    assert sorted(map(sorted, sides)) == [["one"], ["two"]]


def test_one_text_alone_cannot_be_split(tmp_path):
    with pytest.raises(ValueError, match="needs at least 2 documents of different text"):
        prepare(data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["same", "same"])))
    assert not (tmp_path / "prepared").exists()


def test_seed_chooses_other_heldout_documents(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", distinct_texts(100))
    chosen = [
        texts_of(prepare(data_config(tmp_path, source, path=str(tmp_path / f"{i}"), seed=seed)), "heldout")
        for i, seed in enumerate((0, 0, 1))
    ]
    assert chosen[0] == chosen[1] != chosen[2]


def test_second_call_returns_what_is_there_even_without_the_source(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", distinct_texts(20))
    data = data_config(tmp_path, source)
    before = (prepare(data) / "tokens.bin").stat()
    after = (prepare(data_config(tmp_path, source, seq_len=64)) / "tokens.bin").stat()
    source.unlink()
    prepare(data)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_other_settings_are_an_error_that_names_them_and_force_replaces(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", distinct_texts(20))
    prepare(data_config(tmp_path, source))
    other = data_config(tmp_path, source, seed=4, max_documents=9)
    with pytest.raises(
        ValueError,
        match=r"already holds other.*data\.seed = 4, prepared with 0; data\.max_documents = 9, prepared",
    ):
        prepare(other)
    assert sum(open_prepared(prepare(other, force=True)).meta.documents.values()) == 9
    assert sorted(p.name for p in tmp_path.iterdir()) == [".prepared.lock", "a.jsonl", "prepared"]


def test_changed_files_are_noticed(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", distinct_texts(20))
    train_bpe(iter(["some text"]), 257).save(tmp_path)
    data = data_config(tmp_path, source, tokenizer=str(tmp_path / "tokenizer.json"))
    prepare(data)
    train_bpe(iter(["some other text"] * 9), 270).save(tmp_path)
    with pytest.raises(ValueError, match=r"data\.tokenizer = .*changed since"):
        prepare(data)
    write_jsonl(source, distinct_texts(21))
    with pytest.raises(ValueError, match=r"the files of data\.source = .*changed since"):
        prepare(data)


def test_failure_leaves_nothing_behind_and_keeps_what_was_there(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", distinct_texts(20))
    data = data_config(tmp_path, source)
    prepare(data)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(source.read_text() * 30 + '{"text": 5}\n')
    with pytest.raises(ValueError, match="must hold text"):
        prepare(data_config(tmp_path, bad), force=True)
    open_prepared(prepare(data)).verify()
    assert {p.name for p in tmp_path.iterdir()} == {".prepared.lock", "a.jsonl", "bad.jsonl", "prepared"}


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    leftover = tmp_path / ".prepared.partial-0123"
    leftover.mkdir()
    (leftover / "tokens.bin").write_bytes(b"half")
    prepare(data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", distinct_texts(20))))
    assert not leftover.exists()


def test_foreign_folders_are_never_touched(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", distinct_texts(20))
    foreign = tmp_path / "prepared"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    for force in (False, True):
        with pytest.raises(ValueError, match=r"data\.path = .*holds something else than prepared data"):
            prepare(data_config(tmp_path, source), force=force)
    assert (foreign / "thesis.tex").read_text() == "precious"
    with pytest.raises(ValueError, match=r"data\.path = .*is a file"):
        prepare(data_config(tmp_path, source, path=str(source)))
    with pytest.raises(ValueError, match=r"lies inside data\.source"):
        prepare(data_config(tmp_path, tmp_path, path=str(tmp_path / "inside")))


def _prepare_and_look(data) -> tuple[int, str]:
    folder = prepare(data)
    return os.stat(folder / "tokens.bin").st_ino, open_prepared(folder).meta.checksum


def test_processes_that_call_together_get_one_folder(tmp_path):
    data = data_config(tmp_path, "python-stdlib", max_documents=60)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(_prepare_and_look, [data] * 3, chunksize=1)
    assert len(set(results)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".prepared.lock", "prepared"]


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_bpe_learns_from_training_documents_only(tmp_path, fraction):
    texts = [f"{random.Random(i).getrandbits(40):x} " * (2 + i) for i in range(30)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = prepare(data_config(tmp_path, source, tokenizer="bpe:1000", heldout_fraction=fraction))
    train = texts_of(folder, "train")
    assert sorted(train + texts_of(folder, "heldout")) == sorted(texts)
    for name, learned_from in {"train": train, "all": texts}.items():
        (tmp_path / name).mkdir()
        train_bpe(iter(learned_from), 1000).save(tmp_path / name)
    expected, too_much = ((tmp_path / name / "tokenizer.json").read_text() for name in ("train", "all"))
    assert expected != too_much, "the held-out documents would have changed it"
    assert (folder / "tokenizer.json").read_text() == expected


def test_large_vocabularies_take_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "</s>": 70_000, "a": 65_536, "b": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a b a", "b b"])
    data = open_prepared(prepare(data_config(tmp_path, source, tokenizer=str(tmp_path / "tokenizer.json"))))
    assert data.meta.vocab_size == 70_001
    assert data.tokens.tolist() == [65_536, 2, 65_536, 70_000, 2, 2, 70_000]


def test_another_split_of_the_same_tokens_is_other_data(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", distinct_texts(40))
    few, more, again = (
        open_prepared(
            prepare(data_config(tmp_path, source, path=str(tmp_path / name), heldout_fraction=part))
        )
        for name, part in (("few", 0.1), ("more", 0.5), ("again", 0.1))
    )
    assert few.meta.checksum == more.meta.checksum
    assert few.documents("train").checksum == again.documents("train").checksum
    assert few.documents("train").checksum != more.documents("train").checksum


def test_damaged_folders_are_refused(tmp_path):
    folder = prepare(data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", distinct_texts(20))))
    tokens = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(tokens[:10] + b"\xff" + tokens[11:])
    with pytest.raises(ValueError, match=r"checksum of tokens\.bin"):
        open_prepared(folder).verify()
    (folder / "tokens.bin").write_bytes(tokens[:-2])
    with pytest.raises(ValueError, match=r"tokens\.bin has \d+ bytes, meta\.json asks for \d+"):
        open_prepared(folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format_version": 0}))
    with pytest.raises(ValueError, match="format version 0, this cpmoe reads 1"):
        open_prepared(folder)
    (folder / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json is damaged"):
        open_prepared(folder)
    with pytest.raises(ValueError, match=r"holds no prepared data.*cpmoe prepare"):
        open_prepared(tmp_path / "nowhere")


def test_document_hash_is_the_same_on_every_machine():
    assert document_hash("text", 0) == 17685134191405182151
    assert document_hash("text", 1) != document_hash("text", 0)
