"""Tokenizers: lossless, an end-of-document token last, and nothing of a published file's template."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from cpmoe.data.tokenizer import ByteTokenizer, bpe_vocab_size, load_tokenizer, train_bpe

TEXTS = ["def f(x):\n    return x\n", "naïve 🦜 text", "x" * 50, "\r\n\t \x00"]


def word_file(folder, vocab, special=()):
    """A tokenizer.json with a BOS template, truncation and padding, as published ones may have."""
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", vocab["a"])]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_bytes_are_lossless(texts):
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 257
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == [*text.encode(), 256]
        assert tokenizer.decode(ids.tolist()) == text


def test_bpe_is_lossless_compresses_and_reloads(tmp_path):
    trained = train_bpe(iter(TEXTS * 20), 300)
    trained.save(tmp_path)
    reloaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for tokenizer in (trained, reloaded):
        assert 257 < tokenizer.vocab_size <= 300
        for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
            assert ids[-1] == tokenizer.end_of_document and tokenizer.end_of_document not in ids[:-1]
            assert tokenizer.decode(ids.tolist()) == text
            assert ids.max() < tokenizer.vocab_size
        assert sum(map(len, tokenizer.encode_batch(TEXTS))) < sum(len(text.encode()) for text in TEXTS)
    assert [i.tolist() for i in trained.encode_batch(TEXTS)] == [
        i.tolist() for i in reloaded.encode_batch(TEXTS)
    ]


def test_template_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    path = word_file(tmp_path, {"<unk>": 0, "a": 1, "b": 2, "</s>": 7})
    tokenizer = load_tokenizer(path)
    assert [ids.tolist() for ids in tokenizer.encode_batch(["b b b b", ""])] == [[2, 2, 2, 2, 7], [7]]
    assert tokenizer.vocab_size == 8, "ids with holes: the largest counts"


def test_end_of_document_is_the_configured_one_before_a_guessed_one(tmp_path):
    path = word_file(tmp_path, {"<unk>": 0, "a": 1}, ["</s>", "<stop>"])
    assert load_tokenizer(path).end_of_document == 2
    for eos in ("<stop>", {"content": "<stop>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(path).end_of_document == 3
    other = tmp_path / "other"
    other.mkdir()
    load_tokenizer(path).save(other)
    assert load_tokenizer(str(other / "tokenizer.json")).end_of_document == 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<gone>"}))
    with pytest.raises(ValueError, match="has no end-of-document token; looked for <gone>"):
        load_tokenizer(path)


def test_tokenizer_files_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer = 'nope\.json': no such file; legal: bytes \|"):
        load_tokenizer("nope.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json of `tokenizers`"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    path = word_file(tmp_path, {"<unk>": 0, "a": 1})
    with pytest.raises(ValueError, match=r"has no end-of-document token; looked for <\|endoftext\|>"):
        load_tokenizer(path)


def test_bpe_sizes():
    assert bpe_vocab_size("bpe:257") == 257
    assert bpe_vocab_size("bytes") is None
    for name in ("bpe:256", "bpe:", "bpe:4k"):
        with pytest.raises(ValueError, match=f"data.tokenizer = '{name}': the vocabulary size must be"):
            bpe_vocab_size(name)
