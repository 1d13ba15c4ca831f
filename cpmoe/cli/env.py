"""`python -m cpmoe env`: versions, devices and optional packages, for a bug report or a first look."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpmoe.training.run_folder import git_commit

REQUIRED = (
    "torch",
    "deepspeed",
    "pydantic",
    "pyyaml",
    "numpy",
    "datasets",
    "tokenizers",
    "tensorboard",
    "rich",
)
OPTIONAL = {
    "triton": ("triton", "kernels on GPUs"),
    "flash-attn": ("flash_attn", "attention backend that is not there yet; nothing uses it"),
    "megablocks": ("megablocks", "expert backend that is not there yet; nothing uses it"),
    "transformers": ("transformers", "the baseline of `bench train`; pip install cpmoe[dev]"),
    "wandb": ("wandb", "the wandb block of the JSON"),
    "comet_ml": ("comet_ml", "the comet block of the JSON"),
}
TOOLS = {"g++": "DeepSpeed's compiled operations", "ninja": "DeepSpeed's compiled operations"}


def main(arguments: list[str]) -> int:
    """Prints the table; returns 1 where a required package is missing."""
    argparse.ArgumentParser(prog="python -m cpmoe env", description=__doc__).parse_args(arguments)
    table = Table("what", title="cpmoe environment", title_justify="left")
    for column in ("found", "used for"):
        table.add_column(column, overflow="fold")
    missing = False
    table.add_row("python", platform.python_version(), sys.executable)
    table.add_row("platform", platform.platform(), "")
    table.add_row("git commit", git_commit() or "no repository", "")
    for name in REQUIRED:
        version = _version(name)
        missing |= version is None
        table.add_row(name, version or "[red]missing[/red]", "" if version else "run ./launch/setup.sh")
    for name, (module, purpose) in OPTIONAL.items():
        present = importlib.util.find_spec(module) is not None
        found = (_version(name) or "present") if present else "not installed"
        table.add_row(name, found, escape(purpose))
    for name, purpose in TOOLS.items():
        table.add_row(name, shutil.which(name) or "not found", purpose)
    for row in _devices():
        table.add_row(*row)
    Console().print(table)
    return int(missing)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[tuple[str, str, str]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [("CPU cores", str(cores), "gloo")]
    if importlib.util.find_spec("torch") is None:
        return rows
    import torch

    if not torch.cuda.is_available():
        return [*rows, ("GPUs", "none", f"torch is built for {torch.version.cuda or 'CPU only'}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        rows.append((f"GPU {index}", properties.name, memory))
    return [
        *rows,
        ("CUDA", torch.version.cuda or "none", "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))),
    ]
