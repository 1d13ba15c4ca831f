"""Documents in memory whose every token tells which document it belongs to, and where."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cpmoe.config.recipe import DataConfig
from cpmoe.data.store import DocumentSet

SENTINEL = 2**32 - 1


def unique_documents(lengths: Sequence[int], seed: int = 0) -> DocumentSet:
    """Token number t appears once. Documents lie in the file in mixed order with gaps of SENTINEL between."""
    random = np.random.default_rng(seed)
    lengths_N = np.array(lengths, dtype=np.int64)
    first_N = np.cumsum(lengths_N) - lengths_N
    starts_N = np.empty_like(lengths_N)
    pieces, place = [], 0
    for i in random.permutation(len(lengths_N)):
        gap = int(random.integers(0, 3))
        pieces += [np.full(gap, SENTINEL), np.arange(first_N[i], first_N[i] + lengths_N[i])]
        starts_N[i] = place + gap
        place += gap + int(lengths_N[i])
    tokens = np.concatenate(pieces).astype(np.uint32)
    return DocumentSet(tokens, starts_N, lengths_N, vocab_size=SENTINEL, checksum=f"{lengths}")


def places(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(index in its document, tokens after it in its document) of each token of `unique_documents`."""
    return [(index, length - 1 - index) for length in lengths for index in range(length)]


def write_jsonl(path: Path, texts: Sequence[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def data_config(tmp_path: Path, source: Path | str, **fields) -> DataConfig:
    fields = {"seq_len": 16, "path": str(tmp_path / "prepared")} | fields
    return DataConfig(source=str(source), **fields)
