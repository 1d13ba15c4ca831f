"""Tokenise a source once, into memory-mapped files, for every process and every later run.

Held-out documents are chosen by a hash of their text, so identical texts are all on one side.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cpmoe.config.recipe import DataConfig
from cpmoe.data.documents import DocumentSource, local_fingerprint
from cpmoe.data.store import (
    FORMAT_VERSION,
    META_FILE,
    OFFSETS_FILE,
    SPLITS,
    TOKENS_FILE,
    Meta,
    PreparedData,
    open_prepared,
    token_digest,
)
from cpmoe.data.tokenizer import (
    Tokenizer,
    bpe_vocab_size,
    load_tokenizer,
    train_bpe,
)

BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1 << 22
# Merges no longer change noticeably beyond this much text, and the trainer holds all its distinct words.
BPE_TRAINING_CHARACTERS = 1 << 28
# The fields of DataConfig that decide what the folder holds; seq_len only decides how it is packed.
SETTINGS = ("source", "tokenizer", "heldout_fraction", "seed", "text_column", "max_documents")


def prepare(data: DataConfig, *, force: bool = False) -> Path:
    """Makes the prepared folder `data.path` (see store.py for its files) and returns it.

    Returns at once where it was already made with the same settings. Any number of processes may call
    it together: one does the work, the others wait for it. The folder appears complete or not at all.
    `force` replaces a folder that was prepared with other settings, once the new one is complete.

    Raises ValueError where the folder was prepared with other settings or from another content of the
    source, where it holds something else, and for everything that DocumentSource and load_tokenizer refuse.
    """
    folder = Path(data.path)
    # No lock: a folder that is there is complete, and may lie on a read-only file system.
    if find_prepared(data, force=force) is not None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data.path = {data.path!r}: its parent can not be made: {error}") from error
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if find_prepared(data, force=force) is not None:
            return folder
        for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
            shutil.rmtree(leftover)
        partial = folder.with_name(f".{folder.name}.partial-{uuid.uuid4().hex}")
        partial.mkdir()
        try:
            _write(data, partial)
            _sync(partial)
            if folder.exists():
                # The name of a leftover, so that the next call clears it away if this one is killed here.
                replaced = partial.with_name(f"{partial.name}-replaced")
                folder.rename(replaced)
                partial.rename(folder)
                shutil.rmtree(replaced)
            else:
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def find_prepared(data: DataConfig, *, force: bool = False) -> PreparedData | None:
    """What `data.path` holds of these settings; None where it is not there yet, or `force` replaces it.

    Raises ValueError where the folder holds something else.
    """
    folder = Path(data.path)
    _check_place(data, folder)
    if force or not (folder / META_FILE).exists():
        return None
    prepared = open_prepared(folder)
    _check_same(data, prepared.meta)
    return prepared


def _check_place(data: DataConfig, folder: Path) -> None:
    """Raises ValueError where writing to `folder` would destroy or read something else than prepared data."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"data.path = {data.path!r}: is a file; it must be a folder or not exist yet")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / META_FILE).exists():
        raise ValueError(
            f"data.path = {data.path!r}: the folder holds something else than prepared data; "
            "choose a path that does not exist yet"
        )
    source = Path(data.source).expanduser()
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"data.path = {data.path!r}: lies inside data.source = {data.source!r} and would be read as "
            "documents; choose a path outside"
        )


def _write(data: DataConfig, folder: Path) -> None:
    source = DocumentSource(data)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} documents  {task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        size = bpe_vocab_size(data.tokenizer)
        if size is None:
            tokenizer = load_tokenizer(data.tokenizer)
        else:
            task = progress.add_task(f"training a BPE of {size}", total=source.count, amount="")
            tokenizer = train_bpe(_bpe_texts(data, _watched(source, progress, task)), size)
        tokenizer.save(folder)
        task = progress.add_task("tokenising documents", total=source.count, amount="")
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        with (folder / TOKENS_FILE).open("wb") as file:
            lengths_N, hashes_N, checksum = _tokenise(
                _watched(source, progress, task), tokenizer, dtype, data.seed, file
            )
    splits = dict(zip(SPLITS, split_documents(hashes_N, data.heldout_fraction), strict=True))
    np.save(folder / OFFSETS_FILE, np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int64))))
    for split, chosen_N in splits.items():
        np.save(folder / f"{split}.npy", chosen_N)
    Meta(
        format_version=FORMAT_VERSION,
        settings=data.model_dump(include=set(SETTINGS)),
        source_fingerprint=local_fingerprint(data.source),
        tokenizer_fingerprint=_tokenizer_fingerprint(data.tokenizer),
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype=dtype.str,
        documents={split: len(chosen_N) for split, chosen_N in splits.items()},
        tokens={split: int(lengths_N[chosen_N].sum()) for split, chosen_N in splits.items()},
        skipped=source.skipped,
        checksum=checksum,
    ).save(folder)


def _sync(folder: Path) -> None:
    """Brings every file to the disk, so that a crash after the rename finds them whole."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _tokenise(
    texts: Iterator[str], tokenizer: Tokenizer, dtype: np.dtype, seed: int, file: BinaryIO
) -> tuple[np.ndarray, np.ndarray, str]:
    """Appends all tokens to `file`. Returns lengths (int64) and hashes (uint64) of documents, a checksum."""
    lengths, hashes, digest = array("q"), array("Q"), token_digest()
    for batch in _batches(texts):
        encoded = tokenizer.encode_batch(batch)
        content = np.concatenate(encoded).astype(dtype).tobytes()
        file.write(content)
        digest.update(content)
        lengths.extend(len(ids) for ids in encoded)
        hashes.extend(document_hash(text, seed) for text in batch)
    return np.array(lengths, dtype=np.int64), np.array(hashes, dtype=np.uint64), digest.hexdigest()


def split_documents(hashes_N: np.ndarray, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (int64, ascending) of the training and of the held-out documents.

    Held out is a document whose hash lies in the lowest `heldout_fraction` of all possible hashes. The
    lowest hash of all is always held out and the highest never, so that no side is empty. Raises
    ValueError where all documents have one and the same text.
    """
    lowest, highest = hashes_N.min(), hashes_N.max()
    if lowest == highest:
        raise ValueError(
            "data.source: needs at least 2 documents of different text, one to train on and one held out; "
            f"it has {len(hashes_N)} document(s), all of the same text"
        )
    heldout_N = (hashes_N < np.uint64(_threshold(heldout_fraction))) | (hashes_N == lowest)
    heldout_N &= hashes_N != highest
    return np.flatnonzero(~heldout_N), np.flatnonzero(heldout_N)


def document_hash(text: str, seed: int) -> int:
    """64 bits of the text and the seed, the same on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, salt=str(seed).encode()[:16])
    return int.from_bytes(digest.digest(), "little")


def _threshold(heldout_fraction: float) -> int:
    return int(heldout_fraction * 2**64)


def _bpe_texts(data: DataConfig, texts: Iterable[str]) -> Iterator[str]:
    """Training documents only, by the rule of `split_documents` applied to what has been read so far."""
    lowest, withheld = 1 << 64, ""
    characters = 0
    for text in texts:
        number = document_hash(text, data.seed)
        if number < lowest:
            lowest, previous = number, lowest
            text, withheld = withheld, text
            number = previous
        elif number == lowest:
            continue
        if number >= _threshold(data.heldout_fraction) and text:
            yield text
            characters += len(text)
        if characters >= BPE_TRAINING_CHARACTERS:
            return


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _watched(texts: Iterable[str], progress: Progress, task: TaskID) -> Iterator[str]:
    documents = characters = 0
    shown = 0.0
    for text in texts:
        documents, characters = documents + 1, characters + len(text)
        # An update costs more than a short document.
        if time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            progress.update(task, completed=documents, amount=f"{characters / 1e6:,.1f} M characters")
        yield text
    amount = f"{characters / 1e6:,.1f} M characters"
    progress.update(task, completed=documents, total=documents, amount=amount)


def _check_same(data: DataConfig, meta: Meta) -> None:
    """Raises ValueError, naming each difference, where the folder holds something else than asked for."""
    asked = data.model_dump(include=set(SETTINGS))
    differences = [
        f"data.{name} = {value!r}, prepared with {meta.settings.get(name)!r}"
        for name, value in asked.items()
        if meta.settings.get(name) != value
    ]
    if not differences:
        found = {
            f"the files of data.source = {data.source!r}": (
                local_fingerprint(data.source),
                meta.source_fingerprint,
            ),
            f"data.tokenizer = {data.tokenizer!r}": (
                _tokenizer_fingerprint(data.tokenizer),
                meta.tokenizer_fingerprint,
            ),
        }
        # A prepared folder is complete in itself: its source need not be on this machine.
        differences = [
            f"{name} changed since" for name, (now, then) in found.items() if now is not None and now != then
        ]
    if differences:
        raise ValueError(
            f"data.path = {data.path!r}: already holds other prepared data: {'; '.join(differences)}. "
            "Choose another data.path, or replace it with `python -m cpmoe prepare --force`"
        )


def _tokenizer_fingerprint(name: str) -> str | None:
    """Of the file that `data.tokenizer` names; None where it names none, or one that is not here."""
    path = Path(name).expanduser()
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else None
