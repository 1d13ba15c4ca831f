"""Triton kernels: compiled ahead for every architecture (--compile), or timed on a GPU (--device cuda).

--compile needs no GPU: every default configuration is compiled for sm_80, sm_90, sm_100 and gfx942, and
registers, shared memory, spills and the matrix instruction are read from the binary.

Shape letters: B batch, T tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cpmoe.attention.blocks.triton import catalog as attention
from cpmoe.cli.bench.report import conditions, report
from cpmoe.kernels.architectures import Compiled
from cpmoe.moe.backends.triton import catalog as experts

if TYPE_CHECKING:
    from cpmoe.kernels.compile import Resources
    from cpmoe.kernels.launch import Launch

PROCESSES = 2
CATALOGS = (attention, experts)
MATRIX_UNIT: dict[Compiled, str] = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}


class Entry(Protocol):
    """A kernel in a default configuration; a catalog is a module whose `entries()` yields these."""

    @property
    def architecture(self) -> Any: ...
    @property
    def needs_matrix_unit(self) -> bool: ...
    def launch(self) -> Launch: ...


def entries() -> Iterator[Entry]:
    for catalog in CATALOGS:
        yield from catalog.entries()


def add_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile", action="store_true", help="compile ahead; needs no GPU")
    what.add_argument("--device", choices=("cuda",), help="time the kernels on a GPU")


def run(json_path: str | Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Compiles or times, prints, and returns {"figures", "conditions"}."""
    if options.compile:
        return report_compiled(compile_all(entries()), json_path)
    return importlib.import_module("cpmoe.cli.bench.kernel_times").run(json_path)


def compile_all(wanted: Iterable[Entry]) -> dict[Entry, Resources]:
    """The resources of each entry, compiled in a few processes of their own."""
    wanted = list(wanted)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context, initializer=_leave_the_interpreter) as pool:
        return dict(zip(wanted, pool.map(_compile, wanted), strict=True))


def report_compiled(compiled: dict[Entry, Resources], json_path: str | Path | None) -> dict[str, Any]:
    """Prints one row an entry. A figure of 0 is what is wanted of both."""
    figures = {
        "kernels.spill_bytes_max": float(max(used.spill for used in compiled.values())),
        "kernels.tensor_core_missing": float(
            sum(_misses_tensor_core(entry, used) for entry, used in compiled.items())
        ),
    }
    rows = [
        (str(entry), str(used.registers), f"{used.shared:,}", str(used.spill), used.matrix_instruction)
        for entry, used in compiled.items()
    ]
    return report(
        "kernels, compiled ahead in their default configurations",
        figures,
        conditions(triton=metadata.version("triton")),
        rows,
        ("", "registers a thread", "shared bytes", "spilled bytes a thread", "matrix instruction"),
        json_path,
    )


def _misses_tensor_core(entry: Entry, used: Resources) -> bool:
    return entry.needs_matrix_unit and used.matrix_instruction != MATRIX_UNIT[entry.architecture]


def _leave_the_interpreter() -> None:
    """Before the kernels are imported: they are to be compiled."""
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(entry: Entry) -> Resources:
    from cpmoe.kernels.compile import compile_launch

    return compile_launch(entry.launch(), entry.architecture)
