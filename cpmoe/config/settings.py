"""Settings as a person gave them: two files and a command line, each value with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cpmoe.config.deepspeed import DeepSpeedConfig
from cpmoe.config.errors import UNSET, ConfigError, Problem, join_path, unknown_key
from cpmoe.config.recipe import Recipe

COMMAND_LINE = "command line"
TOO_DEEP = "is nested too deeply"


@dataclass
class Settings:
    """One file's tree. `places` names, for single paths, another origin than the file."""

    source: str
    tree: dict
    prefix: str = ""
    """What an override puts before a path of this tree."""
    places: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The value at a dotted path, or UNSET."""
        value: Any = self.tree
        for part in path.split("."):
            if not isinstance(value, dict) or part not in value:
                return UNSET
            value = value[part]
        return value

    def block(self, path: str) -> dict:
        """The block at `path`, empty where it is not given or no block."""
        value = self.get(path)
        return value if isinstance(value, dict) else {}

    def gives(self, path: str) -> bool:
        """True where a person chose the value: neither absent, nor null, nor "auto"."""
        value = self.get(path)
        return value is not UNSET and value is not None and value != "auto"

    def put(self, path: str, value: Any, place: str) -> None:
        """Sets `path`; raises ConfigError where one of its parents is a value instead of a block."""
        *parents, key = path.split(".")
        block = self.tree
        for depth, part in enumerate(parents):
            block = block.setdefault(part, {})
            if not isinstance(block, dict):
                parent = join_path(*parents[: depth + 1])
                raise ConfigError([Problem(path, f"{parent} is a value, not a block", value, "", place)])
        block[key] = value
        self.places[path] = place

    def place(self, path: str) -> str:
        """The origin of the value at `path`: of the nearest enclosing setting that has its own."""
        while path:
            if path in self.places:
                return self.places[path]
            path = path.rpartition(".")[0]
        return self.source

    def located(self, problem: Problem) -> Problem:
        """The problem with its origin, its path as a person would write it there."""
        place = self.place(problem.path)
        prefix = self.prefix if place == COMMAND_LINE and not problem.path.startswith("cpmoe") else ""
        return replace(problem, source=place, path=f"{prefix}{problem.path}")


def read_recipe(path: str | Path) -> Settings:
    """Reads a recipe. Raises ConfigError where it is missing, no YAML mapping, or repeats a key."""
    text = _read_text(path, "--recipe", "recipes/*.yaml")
    return Settings(str(path), _mapping(_parse_yaml(text, str(path)), path))


def read_deepspeed(path: str | Path) -> Settings:
    """Reads a DeepSpeed JSON. Raises ConfigError where it is missing, no JSON object, or repeats a key."""
    text = _read_text(path, "--deepspeed_config", "ds_configs/*.json")

    def unique(pairs: list[tuple[str, Any]]) -> dict:
        for key in {key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1}:
            raise ConfigError([Problem(key, "is given twice in one block", source=str(path))])
        return dict(pairs)

    def no_number(constant: str) -> NoReturn:
        raise ConfigError([Problem("a number", "must be finite", constant, source=str(path))])

    try:
        tree = json.loads(text, object_pairs_hook=unique, parse_constant=no_number)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise ConfigError([Problem(place, f"is not JSON: {error.msg}", source=str(path))]) from None
    except RecursionError:
        raise ConfigError([Problem("the text", TOO_DEEP, source=str(path))]) from None
    return Settings(str(path), _mapping(tree, path), prefix="deepspeed.")


def apply_overrides(recipe: Settings, deepspeed: Settings, overrides: list[str]) -> None:
    """Puts `section.key=value` over the files; values are YAML.

    `deepspeed.KEY` addresses the JSON, `cpmoe.KEY` its "cpmoe" block. Raises ConfigError for a text
    without "=", an unknown section, a value that is not YAML, and a key given twice with two values.
    """
    problems: list[Problem] = []
    seen: dict[str, Any] = {}
    for text in overrides:
        try:
            path, value = _parse_override(text)
            if path in seen and seen[path] != value:
                constraint = f"is given twice, the other value is {seen[path]}"
                raise ConfigError([Problem(path, constraint, value, "one value", COMMAND_LINE)])
            seen[path] = value
            target = recipe if path.partition(".")[0] in Recipe.model_fields else deepspeed
            target.put(path.removeprefix("deepspeed."), deepcopy(value), COMMAND_LINE)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted path, value) whose value is not a block."""
    for key, value in tree.items():
        path = join_path(prefix, key)
        if isinstance(value, dict):
            yield from leaves(value, path)
        else:
            yield path, value


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    section = key.partition(".")[0]
    sections = [*Recipe.model_fields, "deepspeed", "cpmoe"]
    if not equals:
        raise ConfigError([Problem(text, "is no override", legal="section.key=value", source=COMMAND_LINE)])
    if section not in sections:
        problem = unknown_key(section, sections, source=COMMAND_LINE)
        if section in DeepSpeedConfig.model_fields:
            problem = replace(problem, constraint=f'is a key of the JSON, did you mean "deepspeed.{key}"?')
        raise ConfigError([replace(problem, path=key)])
    if section == key or "" in key.split("."):
        raise ConfigError([Problem(key, "is no key", legal="section.key=value", source=COMMAND_LINE)])
    return key.removeprefix("deepspeed."), _parse_yaml(value, f"{COMMAND_LINE}: {key}")


def _read_text(path: str | Path, flag: str, legal: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError([Problem(flag, reason.lower(), str(path), f"a file, such as {legal}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(flag, f"is not text in UTF-8: {error.reason}", str(path))]) from None


def _mapping(tree: Any, path: str | Path) -> dict:
    if isinstance(tree, dict):
        return tree
    raise ConfigError([Problem("the file", "must hold a block of settings", tree, source=str(path))])


class _UniqueKeys(yaml.SafeLoader):
    """YAML's loader lets the last of two equal keys win; this one refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            # Two spellings of one key, such as yes and true, are not equal here.
            twice = next((f'"{key}"' for key in keys if keys.count(key) > 1), "a key")
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice} is given twice in one block", node.start_mark
            )
        return mapping


def _parse_yaml(text: str, source: str) -> Any:
    try:
        tree = yaml.load(text, _UniqueKeys)
        _check_keys(tree, source)
        return tree
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1} column {mark.column + 1}" if mark else "the text"
        raise ConfigError([Problem(place, f"is not YAML: {error.problem}", source=source)]) from None
    # A character that YAML does not allow; a number that Python does not read.
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError([Problem("the text", f"is not YAML: {reason}", source=source)]) from None
    # Also what holds itself, by an alias inside its anchor.
    except RecursionError:
        raise ConfigError([Problem("the text", TOO_DEEP, source=source)]) from None


def _check_keys(tree: Any, source: str, prefix: str = "") -> None:
    if isinstance(tree, list):
        for item in tree:
            _check_keys(item, source, prefix)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            path = join_path(prefix, key)
            if not isinstance(key, str):
                raise ConfigError([Problem(path, "a key must be text", key, source=source)])
            _check_keys(value, source, path)
