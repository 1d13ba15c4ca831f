"""`python -m cpmoe bench NAME --json F`: runs one benchmark; the table goes to stdout, figures to F."""

from __future__ import annotations

import argparse
import ast
import importlib
from pathlib import Path

from cpmoe.config.errors import ConfigError, unknown_key

PACKAGE = "cpmoe.cli.bench"


def main(arguments: list[str]) -> int:
    """Runs the benchmark. Raises ConfigError for a name that is none."""
    names = benchmarks()
    listing = "\n".join(f"  {name:12} {doc.partition(chr(10))[0]}" for name, doc in names.items())
    chosen = next((argument for argument in arguments if argument in names), None)
    parser = argparse.ArgumentParser(
        prog="python -m cpmoe bench",
        description=names[chosen] if chosen else f"{__doc__}\n\nbenchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="a benchmark, see below")
    parser.add_argument("--json", type=Path, help="file for figures and conditions")
    name = parser.parse_known_args(arguments)[0].name
    if name not in names:
        raise ConfigError([unknown_key(name, names, kind="benchmark")])
    benchmark = importlib.import_module(f"{PACKAGE}.{name}")
    if not hasattr(benchmark, "add_options"):
        benchmark.run(parser.parse_args(arguments).json)
        return 0
    benchmark.add_options(parser)
    options = parser.parse_args(arguments)
    benchmark.run(options.json, options)
    return 0


def benchmarks() -> dict[str, str]:
    """Name -> docstring of every module here that defines `run`: what it measures, and how."""
    found = {}
    for path in sorted((Path(__file__).parent / "bench").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = ast.get_docstring(tree) or ""
    return found
