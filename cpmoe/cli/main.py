"""Chooses the command of `python -m cpmoe`; each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys

from cpmoe.config.errors import Problem, unknown_key

COMMANDS = {
    "validate": ("cpmoe.cli.validate", "check a recipe and a DeepSpeed JSON together, start nothing"),
    "prepare": ("cpmoe.cli.prepare", "tokenise a recipe's data once, into memory-mapped files"),
    "compare": ("cpmoe.cli.compare", "whether two runs, on other layouts say, computed the same"),
    "env": ("cpmoe.cli.env", "versions, devices and optional packages of this machine"),
    "bench": ("cpmoe.cli.run_bench", "measure, print a table, write figures to a JSON file"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 where the arguments or a configuration are refused."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        return refuse(unknown_key(command, COMMANDS, kind="command"))
    module = importlib.import_module(COMMANDS[command][0])
    try:
        return module.main(rest)
    except ValueError as error:
        return refuse(error)


def refuse(reason: ValueError | Problem) -> int:
    """Says why on stderr; returns the exit code for it."""
    print(f"error: {reason}".replace("\n", "\nerror: "), file=sys.stderr)
    return 2


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m cpmoe COMMAND [--help]", "", *lines])
