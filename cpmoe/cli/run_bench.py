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
    listing = "\n".join(f"  {name:12} {summary}" for name, summary in names.items())
    parser = argparse.ArgumentParser(
        prog="python -m cpmoe bench",
        description=f"{__doc__}\n\nbenchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="a benchmark, see below")
    parser.add_argument("--json", type=Path, help="file for figures and conditions")
    options = parser.parse_args(arguments)
    if options.name not in names:
        raise ConfigError([unknown_key(options.name, names, kind="benchmark")])
    importlib.import_module(f"{PACKAGE}.{options.name}").run(options.json)
    return 0


def benchmarks() -> dict[str, str]:
    """Name -> first line of the docstring of every module of the package that defines `run`."""
    found = {}
    for path in sorted((Path(__file__).parent / "bench").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found
