"""What a person reads when a configuration is refused: field path, value, constraint, legal choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Unset(Enum):
    """The type of `UNSET`, which stands for "no value" where null is one."""

    TOKEN = "unset"


UNSET = Unset.TOKEN


@dataclass(frozen=True)
class Problem:
    """One refused setting. `source` is the file or "command line" it came from, where that is known."""

    path: str
    constraint: str
    value: object = UNSET
    legal: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        value = "" if self.value is UNSET else f" = {show(self.value)}"
        legal = f"; legal: {self.legal}" if self.legal else ""
        return f"{where}{self.path}{value}: {self.constraint}{legal}"

    def below(self, prefix: str) -> Problem:
        """The same problem seen from the parent block `prefix`."""
        return replace(self, path=join_path(prefix, self.path))


class ConfigError(ValueError):
    """One or more refused settings; the message has one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        assert self.problems
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def raise_if_any(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def join_path(*parts: object) -> str:
    return ".".join(str(part) for part in parts if part != "")


def show(value: object) -> str:
    """A value as the person wrote it in YAML or JSON, as nearly as one can."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{show(key)}: {show(item)}' for key, item in value.items())}}}"
    return str(value)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending; none of 0."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def join_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def unknown_key(
    path: str, names: Iterable[str], value: object = UNSET, source: str = "", kind: str = "key"
) -> Problem:
    """Problem for the last part of `path`, which is none of `names`: nearest name first."""
    legal = sorted(names)
    key = path.rpartition(".")[2]
    nearest = difflib.get_close_matches(key.lower(), legal, n=1, cutoff=0.6)
    hint = f'unknown {kind}, did you mean "{nearest[0]}"?' if nearest else f"unknown {kind}"
    return Problem(path, hint, value, ", ".join(legal), source)
