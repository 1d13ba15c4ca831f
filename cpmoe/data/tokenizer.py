"""Text to token ids: bytes, a `tokenizer.json`, or a byte-level BPE trained on the training documents.

Every encoded document ends with the end-of-document token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
# Names that published tokenizers give to it, tried where no tokenizer_config.json says which it is.
END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
)
LEGAL = "legal: bytes | path/to/tokenizer.json | bpe:VOCABULARY_SIZE"


class Tokenizer(Protocol):
    """`vocab_size` counts every id, `end_of_document` is one of them."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array per text, each with the end-of-document token last."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Writes what `load_tokenizer` needs to `folder`/tokenizer.json; nothing for bytes."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0..255, the end of a document is 256."""

    vocab_size = 257
    end_of_document = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = []
        for text in texts:
            raw = text.encode("utf-8")
            ids = np.empty(len(raw) + 1, dtype=np.uint16)
            ids[:-1] = np.frombuffer(raw, dtype=np.uint8)
            ids[-1] = self.end_of_document
            encoded.append(ids)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        del folder


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library; text is encoded without its template (no BOS)."""

    def __init__(self, tokenizer: HFTokenizer, end_of_document: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.end_of_document = end_of_document
        # Ids may have holes, so the number of entries would be too small.
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.end_of_document], dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i != self.end_of_document])

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "tokenizer.json"))
        eos = self._tokenizer.id_to_token(self.end_of_document)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}) + "\n")


def load_tokenizer(name: str) -> Tokenizer:
    """ "bytes" or the path of a `tokenizer.json`.

    Its end-of-document token is the `eos_token` of a tokenizer_config.json beside it, else the first of
    END_OF_DOCUMENT_NAMES that it knows. Raises ValueError where the file is missing or has no such token.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = tokenizer_path(name)
    from tokenizers import Tokenizer as HFTokenizer

    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"data.tokenizer = {name!r}: not a tokenizer.json of `tokenizers`: {error}"
        ) from error
    names = _configured_eos(path.parent / "tokenizer_config.json") or END_OF_DOCUMENT_NAMES
    for candidate in names:
        token = tokenizer.token_to_id(candidate)
        if token is not None:
            return JsonTokenizer(tokenizer, token)
    raise ValueError(
        f"data.tokenizer = {name!r}: has no end-of-document token; looked for {', '.join(names)}; "
        'name it as "eos_token" in a tokenizer_config.json beside the file'
    )


def tokenizer_path(name: str) -> Path:
    """The file that `data.tokenizer` names. Raises ValueError where there is none."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"data.tokenizer = {name!r}: no such file; {LEGAL}")
    return path


def bpe_vocab_size(name: str) -> int | None:
    """N of "bpe:N", None for another kind of tokenizer. Raises ValueError where N is no legal size."""
    if not name.startswith("bpe:"):
        return None
    size = name.removeprefix("bpe:")
    # 256 bytes and the end-of-document token come before any merge.
    if not size.isdecimal() or int(size) < 257:
        raise ValueError(
            f"data.tokenizer = {name!r}: the vocabulary size must be a number of at least 257; {LEGAL}"
        )
    return int(size)


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids (fewer where the text has fewer pairs to merge)."""
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end_of_document = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end_of_document is not None
    return JsonTokenizer(tokenizer, end_of_document)


def _configured_eos(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    # transformers writes the token as a string, or as an AddedToken with its content.
    if isinstance(eos, dict):
        eos = eos.get("content")
    return (eos,) if eos else ()
