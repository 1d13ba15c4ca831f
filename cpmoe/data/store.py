"""A prepared folder: every document's tokens in one memory-mapped file, and which split each belongs to.

    tokens.bin     tokens of all documents one after another, uint16 or uint32, little endian
    offsets.npy    int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    train.npy      int64: numbers of the training documents, ascending
    heldout.npy    int64: numbers of the held-out documents, ascending
    tokenizer.json the tokenizer, except for "bytes"
    meta.json      settings, counts, checksum, format version; written last

Shapes: N documents.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmoe.data.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "heldout")
TOKENS_FILE, OFFSETS_FILE, META_FILE, TOKENIZER_FILE = (
    "tokens.bin",
    "offsets.npy",
    "meta.json",
    "tokenizer.json",
)


@dataclass(frozen=True)
class Meta:
    """What meta.json holds. `settings` are the fields of DataConfig that decide the content of the folder."""

    format_version: int
    settings: dict[str, Any]
    source_fingerprint: str | None
    tokenizer_fingerprint: str | None
    vocab_size: int
    end_of_document: int
    dtype: str
    documents: dict[str, int]
    tokens: dict[str, int]
    skipped: dict[str, int]
    checksum: str

    def save(self, folder: Path) -> None:
        content = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / META_FILE).write_text(content + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Meta:
        """Raises ValueError where `folder` was not prepared, or by another format version."""
        try:
            content = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"data.path = {str(folder)!r}: holds no prepared data ({META_FILE} is missing); "
                "make it with `python -m cpmoe prepare`"
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"data.path = {str(folder)!r}: {META_FILE} is damaged: {error}") from error
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"data.path = {str(folder)!r}: format version {version}, this cpmoe reads {FORMAT_VERSION}; "
                "prepare it again with `python -m cpmoe prepare --force`"
            )
        return cls(**content)


@dataclass(frozen=True)
class DocumentSet:
    """Documents of one split: document i is `tokens[starts_N[i] : starts_N[i] + lengths_N[i]]`.

    `tokens` is flat (memory-mapped uint16 or uint32, or any integer array), `starts_N` and `lengths_N`
    are int64. Every document has at least one token and ends with the end-of-document token.
    `checksum` names the tokens and which documents they are of, so that a resumed run notices other data;
    `heldout_fraction` is the share of all documents that was kept out of the training split.
    """

    tokens: np.ndarray
    starts_N: np.ndarray
    lengths_N: np.ndarray
    vocab_size: int
    checksum: str = ""
    heldout_fraction: float | None = None

    def __post_init__(self) -> None:
        assert len(self.starts_N) == len(self.lengths_N) > 0, "a split has at least one document"
        assert int(self.lengths_N.min()) > 0, "a document has at least its end-of-document token"

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_N.sum())

    def __len__(self) -> int:
        return len(self.starts_N)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self.starts_N[index]
        return self.tokens[start : start + self.lengths_N[index]]


@dataclass(frozen=True)
class PreparedData:
    """An opened prepared folder; tokens stay on disk until they are read."""

    path: Path
    meta: Meta
    tokens: np.ndarray
    offsets: np.ndarray

    def documents(self, split: str) -> DocumentSet:
        """The documents of "train" or "heldout"."""
        assert split in SPLITS, f"split {split!r} is none of {SPLITS}"
        chosen_N = np.load(self.path / f"{split}.npy")
        starts_N = self.offsets[chosen_N]
        lengths_N = self.offsets[chosen_N + 1] - starts_N
        # The same tokens are split otherwise by another heldout_fraction or seed.
        split_digest = hashlib.blake2b(chosen_N.astype("<i8").tobytes(), digest_size=8).hexdigest()
        checksum = f"{self.meta.checksum}-{split_digest}"
        fraction = self.meta.settings["heldout_fraction"]
        return DocumentSet(self.tokens, starts_N, lengths_N, self.meta.vocab_size, checksum, fraction)

    def tokenizer(self) -> Tokenizer:
        name = self.meta.settings["tokenizer"]
        return load_tokenizer(name if name == "bytes" else str(self.path / TOKENIZER_FILE))

    def verify(self) -> None:
        """Reads every token and raises ValueError where they are not those that were written."""
        digest = token_digest()
        step = 1 << 24
        for start in range(0, len(self.tokens), step):
            digest.update(self.tokens[start : start + step].tobytes())
        if digest.hexdigest() != self.meta.checksum:
            raise ValueError(
                f"data.path = {str(self.path)!r}: checksum of {TOKENS_FILE} is {digest.hexdigest()}, "
                f"{META_FILE} says {self.meta.checksum}; prepare it again with "
                "`python -m cpmoe prepare --force`"
            )


def open_prepared(path: str | Path) -> PreparedData:
    """Opens what `prepare` wrote. Raises ValueError where the folder is missing, incomplete or truncated."""
    folder = Path(path)
    meta = Meta.load(folder)
    dtype = np.dtype(meta.dtype)
    num_tokens = sum(meta.tokens.values())
    needed = {TOKENS_FILE: num_tokens * dtype.itemsize, OFFSETS_FILE: None}
    needed |= {f"{split}.npy": None for split in SPLITS}
    for name, size in needed.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else None
        if found is None or size not in (None, found):
            raise ValueError(
                f"data.path = {str(folder)!r}: {name} has {found} bytes, {META_FILE} asks for {size}; "
                "prepare it again with `python -m cpmoe prepare --force`"
            )
    tokens = np.memmap(folder / TOKENS_FILE, dtype=dtype, mode="r", shape=(num_tokens,))
    return PreparedData(folder, meta, tokens, np.load(folder / OFFSETS_FILE, mmap_mode="r"))


def token_digest() -> hashlib.blake2b:
    """The running checksum of the token file."""
    return hashlib.blake2b(digest_size=16)
