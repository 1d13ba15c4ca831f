"""Where text comes from: an iterator of documents that never holds more than a batch of them.

| `data.source`                           | a document is                                          |
|-----------------------------------------|--------------------------------------------------------|
| `python-stdlib`                         | one file of the running Python's own standard library  |
| hub name, `owner/name[:configuration]`  | one row of its `train` split                           |
| local `.jsonl`, `.json`, `.parquet`     | one row                                                |
| local `.txt`, several files             | one file                                               |
| local `.txt`, one file                  | a passage, cut at blank lines                          |

A local source is a file, a folder (searched in depth) or a glob; all its files are of one kind.
"""

from __future__ import annotations

import glob
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpmoe.config.recipe import DataConfig

KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
LEGAL = (
    "legal: python-stdlib | a name on the Hugging Face hub, owner/name[:configuration] | "
    f"a local file, folder or glob of {', '.join(KINDS)}"
)
# Tests hold generated tables and deliberately broken text; site-packages differ between machines.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PASSAGE_CHARACTERS = 32_768
PASSAGES_OF_A_SMALL_FILE = 128
ROWS_PER_READ = 256


class DocumentSource:
    """Iterable of the texts of `data.source`, in one fixed order; iterate as often as needed.

    `count` is the number of documents where it is known beforehand (an upper bound). `skipped` counts, for
    the last iteration, documents left out as "undecodable" (standard library only) or "empty".

    Raises ValueError, when made or at the first document, for a missing file, an unknown kind of file,
    a missing text column, a source without documents, and a hub that cannot be reached.
    """

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self.skipped = {"undecodable": 0, "empty": 0}
        self._files = _stdlib_files() if data.source == "python-stdlib" else _local_files(data.source)
        self._kind = "stdlib" if data.source == "python-stdlib" else self._kind_of_files()
        self.count: int | None = None
        if self._kind == "stdlib" or (self._kind == "text" and len(self._files) > 1):
            self.count = len(self._files)
        if data.max_documents is not None and self._kind != "stdlib":
            self.count = min(self.count or data.max_documents, data.max_documents)

    def __iter__(self) -> Iterator[str]:
        self.skipped = dict.fromkeys(self.skipped, 0)
        found = 0
        for text in self._texts():
            if not text or text.isspace():
                self.skipped["empty"] += 1
                continue
            if found == self._data.max_documents:
                return
            found += 1
            yield text
        if not found:
            raise ValueError(f"data.source = {self._data.source!r}: has no document with text in it; {LEGAL}")

    def _texts(self) -> Iterator[str | None]:
        if self._kind == "stdlib":
            yield from self._stdlib_texts()
        elif self._kind == "text" and len(self._files) == 1:
            yield from self._passages()
        else:
            yield from self._rows()

    def _stdlib_texts(self) -> Iterator[str]:
        for file in self._files:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                self.skipped["undecodable"] += 1

    def _passages(self) -> Iterator[str]:
        """One large text: passages of about PASSAGE_CHARACTERS, or about 1/128 of a small file."""
        size = min(PASSAGE_CHARACTERS, self._files[0].stat().st_size // PASSAGES_OF_A_SMALL_FILE)
        lines: list[str] = []
        length = 0
        for line in self._column(self._load("text", sample_by="line", keep_linebreaks=True), "text"):
            lines.append(line)
            length += len(line)
            # A text without blank lines is cut at a line end at last.
            if (length >= size and not line.strip()) or length >= 2 * size + 80:
                yield "".join(lines)
                lines, length = [], 0
        yield "".join(lines)

    def _rows(self) -> Iterator[str | None]:
        column = "text" if self._kind == "text" else self._data.text_column
        options = {"sample_by": "document"} if self._kind == "text" else {}
        return self._column(self._load(self._kind, **options), column)

    def _load(self, kind: str, **options: Any) -> Any:
        """A streaming `datasets` data set: local files or the train split of a hub data set."""
        import datasets

        if kind != "hub":
            files = [str(file) for file in self._files]
            return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **options)
        name, _, configuration = self._data.source.partition(":")
        with self._naming_the_source(f"no such file or folder, and the hub did not give it ({LEGAL})"):
            return datasets.load_dataset(name, configuration or None, split="train", streaming=True)

    def _column(self, rows: Any, column: str) -> Iterator[Any]:
        batches = rows.iter(batch_size=ROWS_PER_READ)
        while True:
            with self._naming_the_source("reading it failed"):
                batch = next(batches, None)
            if batch is None:
                return
            self._check_column(batch, column)
            yield from batch[column]

    @contextmanager
    def _naming_the_source(self, problem: str) -> Iterator[None]:
        try:
            yield
        # Formats, file systems and the hub's client each raise their own; they share no base.
        except Exception as error:
            raise ValueError(
                f"data.source = {self._data.source!r}: {problem}: {type(error).__name__}: {error}"
            ) from error

    def _check_column(self, batch: dict[str, list[Any]], column: str) -> None:
        if column not in batch:
            raise ValueError(
                f"data.text_column = {column!r}: {self._data.source!r} has no such column; "
                f"legal: {', '.join(sorted(batch))}"
            )
        wrong = next((value for value in batch[column] if not isinstance(value, str | None)), None)
        if wrong is not None:
            raise ValueError(
                f"data.text_column = {column!r}: must hold text, in {self._data.source!r} it holds "
                f"{type(wrong).__name__}; its columns are {', '.join(sorted(batch))}"
            )

    def _kind_of_files(self) -> str:
        if not self._files:
            return "hub"
        kinds = {KINDS.get(_suffix(file)) for file in self._files}
        if len(kinds) > 1 or None in kinds:
            suffixes = sorted({_suffix(file) or "no suffix" for file in self._files})
            raise ValueError(
                f"data.source = {self._data.source!r}: its files must be of one kind, they are "
                f"{', '.join(suffixes)}; choose with a glob; {LEGAL}"
            )
        if not any(file.stat().st_size for file in self._files):
            raise ValueError(f"data.source = {self._data.source!r}: every file is empty; {LEGAL}")
        return str(kinds.pop())


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not STDLIB_EXCLUDED.intersection(f.relative_to(root).parts)]
    if not files:
        raise ValueError(
            f"data.source = 'python-stdlib': Python {sys.version.split()[0]} has no .py files in its "
            f"standard library folder {root}; {LEGAL}"
        )
    return sorted(files)


def _local_files(source: str) -> list[Path]:
    """Files of a local source, sorted; none where the name can only be one of the hub."""
    files = _find_files(source)
    if files:
        return files
    if Path(source).expanduser().is_dir():
        problem = f"the folder holds no {', '.join(KINDS)} file"
    elif glob.has_magic(source):
        problem = "the glob matches no file"
    elif source.startswith(("/", ".", "~")) or source.count("/") > 1 or _suffix(Path(source)) in KINDS:
        problem = "no such file or folder"
    else:
        return []
    raise ValueError(f"data.source = {source!r}: {problem}; {LEGAL}")


def _find_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(f for f in path.rglob("*") if f.is_file() and _suffix(f) in KINDS)
    names = glob.glob(str(path), recursive=True) if glob.has_magic(source) else [path]
    return sorted(f for f in map(Path, names) if f.is_file())


def _suffix(file: Path) -> str:
    """The suffix that tells the kind: `datasets` reads .gz files as what is in them."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def local_fingerprint(source: str) -> str | None:
    """Names and sizes of the files of a local source; None for another source and where no file is here.

    Not their times: a copied or freshly cloned source is the same source.
    """
    files = _find_files(source)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\n".encode())
    return digest.hexdigest()
