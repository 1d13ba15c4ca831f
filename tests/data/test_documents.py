"""Every kind of source, and what a person reads when it is not there or not what was expected."""

import gzip
import json
import os
import sysconfig

import pyarrow
import pytest
from pyarrow import parquet

from cpmoe.data.documents import DocumentSource
from tests.data.helpers import data_config, write_jsonl

TEXTS = [f"document {i}\n\nits second paragraph" for i in range(5)]


def read(tmp_path, source, **fields):
    return list(DocumentSource(data_config(tmp_path, source, **fields)))


def test_jsonl_json_and_compressed_jsonl(tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    compressed = tmp_path / "b.jsonl.gz"
    compressed.write_bytes(gzip.compress(lines.read_bytes()))
    array = tmp_path / "c.json"
    array.write_text(json.dumps([{"text": text} for text in TEXTS]))
    for path in (lines, compressed, array):
        assert read(tmp_path, path) == TEXTS
        assert read(tmp_path, path, max_documents=3) == TEXTS[:3]


def test_parquet_with_its_column(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"content": TEXTS, "n": list(range(5))}), path)
    assert read(tmp_path, path, text_column="content") == TEXTS
    with pytest.raises(ValueError, match=r"data\.text_column = 'text'.*no such column; legal: content, n"):
        read(tmp_path, path)
    with pytest.raises(ValueError, match=r"data\.text_column = 'n': must hold text.*holds int"):
        read(tmp_path, path, text_column="n")


def test_several_text_files_are_one_document_each(tmp_path):
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text)
    for source in (tmp_path / "texts", f"{folder}/*.txt", f"{tmp_path}/**/*.txt"):
        opened = DocumentSource(data_config(tmp_path, source))
        assert opened.count == 5
        assert list(opened) == list(opened) == TEXTS


@pytest.mark.parametrize("blank_line_every", [7, 10**9])
def test_one_text_file_is_cut_into_passages(tmp_path, blank_line_every):
    lines = [f"line {i}\n" + "\n" * (i % blank_line_every == 6) for i in range(3000)]
    path = tmp_path / "book.txt"
    path.write_text("".join(lines))
    passages = read(tmp_path, path)
    assert "".join(passages) == path.read_text(), "nothing is lost or changed"
    assert 50 < len(passages) <= 130
    if blank_line_every == 7:
        assert all(passage.endswith("\n\n") for passage in passages[:-1])


def test_empty_and_missing_texts_are_skipped_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text":"a"}\n{"text":null}\n{"id":3}\n{"text":""}\n{"text":" \\n"}\n{"text":"b"}\n')
    source = DocumentSource(data_config(tmp_path, path))
    assert list(source) == ["a", "b"]
    assert source.skipped == {"undecodable": 0, "empty": 4}


def test_python_stdlib_is_the_running_pythons_own(tmp_path):
    source = DocumentSource(data_config(tmp_path, "python-stdlib"))
    texts = list(source)
    assert len(texts) + sum(source.skipped.values()) == source.count > 300
    with open(os.path.join(sysconfig.get_path("stdlib"), "argparse.py"), encoding="utf-8") as file:
        assert file.read() in texts
    assert not any("import pytest\n" in text for text in texts), "neither site-packages nor tests"
    assert read(tmp_path, "python-stdlib", max_documents=4) == texts[:4]


def test_undecodable_files_of_the_stdlib_are_counted(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    for name, content in {"b.py": b"b = 1", "a.py": b"a = 1", "bad.py": b"\xe9", "test/t.py": b"t"}.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    source = DocumentSource(data_config(tmp_path, "python-stdlib"))
    assert list(source) == ["a = 1", "b = 1"]
    assert source.skipped == {"undecodable": 1, "empty": 0}
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"has no \.py files in its standard library folder"):
        DocumentSource(data_config(tmp_path, "python-stdlib"))


@pytest.mark.parametrize("name", ["nope.txt", "./nope", "~/cpmoe-nope/x", "a/b/c", "nope.jsonl.gz"])
def test_missing_file(tmp_path, name):
    with pytest.raises(ValueError, match=r"data\.source = .*no such file or folder; legal: python-stdlib \|"):
        DocumentSource(data_config(tmp_path, name))


def test_folders_and_globs_without_documents(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"the folder holds no \.txt, \.json, \.jsonl, \.parquet file"):
        DocumentSource(data_config(tmp_path, tmp_path / "empty"))
    with pytest.raises(ValueError, match="the glob matches no file"):
        DocumentSource(data_config(tmp_path, f"{tmp_path}/*.txt"))


def test_files_of_several_or_unknown_kinds(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    write_jsonl(folder / "b.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"must be of one kind, they are \.jsonl, \.txt; choose with a glob"):
        DocumentSource(data_config(tmp_path, folder))
    assert read(tmp_path, folder / "*.jsonl") == TEXTS
    (folder / "c.csv").write_text("a")
    with pytest.raises(ValueError, match=r"must be of one kind, they are \.csv"):
        DocumentSource(data_config(tmp_path, folder / "c.csv"))


def test_sources_without_a_document(tmp_path):
    (tmp_path / "zero.txt").touch()
    with pytest.raises(ValueError, match="every file is empty"):
        DocumentSource(data_config(tmp_path, tmp_path / "zero.txt"))
    (tmp_path / "blank.txt").write_text("\n\n\n")
    with pytest.raises(ValueError, match="has no document with text in it"):
        read(tmp_path, tmp_path / "blank.txt")


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text":"a"}\n{"text":\n')
    with pytest.raises(ValueError, match=r"data\.source = .*bad\.jsonl.*reading it failed.*JSON parse error"):
        read(tmp_path, tmp_path / "bad.jsonl")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin1") * 10)
    with pytest.raises(ValueError, match=r"latin\.txt.*reading it failed: UnicodeDecodeError"):
        read(tmp_path, tmp_path / "latin.txt")


def test_text_that_stops_being_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 60)
    path.write_text(path.read_text() + '{"text": 5}\n')
    with pytest.raises(ValueError, match=r"data\.text_column = 'text': must hold text.*holds int"):
        read(tmp_path, path)


def test_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"data\.source = 'owner/name:en': no such file or folder, and the hub"
    ):
        read(tmp_path, "owner/name:en")
