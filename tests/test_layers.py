"""Imports point down only, heavy packages stay where they belong, and every imported package is declared."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]

# Bottom first; a package imports itself and what stands before it in another row.
LAYERS = (
    {"config"},
    {"parallel", "kernels"},
    {"attention", "moe", "data", "coschedule"},
    {"model"},
    {"checkpoint"},
    {"training"},
    {"cli"},
)
LEVEL = {package: level for level, row in enumerate(LAYERS) for package in row}

DEEPSPEED = ("cpmoe.training", "cpmoe.checkpoint", "cpmoe.cli.bench", "recipes.pretrain")
WITHOUT_TORCH = (
    "cpmoe",
    "cpmoe.config",
    "cpmoe.parallel",
    "cpmoe.parallel.grid",
    "cpmoe.coschedule.schedule",
    "cpmoe.coschedule.verify",
)
WITHOUT_PROCESSES = ("cpmoe.attention.layout", "cpmoe.attention.sharding", "cpmoe.attention.plan")
PROCESSES = ("torch.distributed", "cpmoe.parallel.groups", "cpmoe.parallel.collectives")

DISTRIBUTION_OF = {"yaml": "pyyaml"}


def python_files() -> list[Path]:
    return sorted([*ROOT.glob("cpmoe/**/*.py"), *ROOT.glob("recipes/*.py")])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, anywhere in the file; relative names made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            name = node.args[0]
            if function in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    found = []
    own = module.removeprefix("cpmoe.").split(".")[0]
    for line, name in imports(source, module, is_package):
        top, _, rest = name.partition(".")
        other = rest.split(".")[0]
        rule = None
        if top == "cpmoe" and module.startswith("cpmoe.") and own != "__main__":
            if other in LEVEL and own != other and LEVEL[other] >= LEVEL.get(own, 0):
                rule = f"{own} stands no higher than {other}"
        elif top in ("tests", "recipes"):
            rule = "the library does not import its users"
        elif top == "deepspeed" and not inside(module, DEEPSPEED):
            rule = f"deepspeed is imported in {', '.join(DEEPSPEED)} only"
        elif top == "torch" and (module in WITHOUT_TORCH or module.startswith("cpmoe.config.")):
            rule = "this module runs without torch"
        if inside(name, PROCESSES) and module in WITHOUT_PROCESSES:
            rule = "this module runs without process groups"
        if module == "cpmoe" and top == "cpmoe":
            rule = "importing the package loads none of its parts"
        if rule:
            found.append(f"{module} line {line} imports {name}: {rule}")
    return found


def test_imports_point_down() -> None:
    files = python_files()
    assert len(files) > 20, "found no library to look at"
    found = [
        fault
        for path in files
        for fault in faults(path.read_text(), module_name(path), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in ROOT.glob("cpmoe/*/__init__.py")}
    assert packages, "found no package"
    assert packages <= LEVEL.keys(), f"give {packages - LEVEL.keys()} a row in LAYERS"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cpmoe.model.layers", "from cpmoe.training.engine import build_model"),
        ("cpmoe.model.layers", "from cpmoe import training"),
        ("cpmoe.model.layers", "def f():\n    import cpmoe.cli.main as m"),
        ("cpmoe.model.layers", "if TYPE_CHECKING:\n    from ..training import engine"),
        ("cpmoe.model.layers", "from .. import checkpoint"),
        ("cpmoe.model.layers", "importlib.import_module('deepspeed.comm')"),
        ("cpmoe.attention.ring", "from cpmoe.moe.router import Router"),
        ("cpmoe.checkpoint.local", "from cpmoe.training.engine import TrainingEngine"),
        ("cpmoe.cli.main", "import deepspeed"),
        ("cpmoe.config.recipe", "import torch"),
        ("cpmoe.parallel.grid", "from torch import Tensor"),
        ("cpmoe.attention.plan", "from torch import distributed as dist"),
        ("cpmoe.attention.sharding", "from cpmoe.parallel.groups import Groups"),
        ("cpmoe.data.loader", "from tests.distributed import run_distributed"),
        ("cpmoe", "from cpmoe.training.trainer import Trainer"),
    ],
)
def test_a_fault_is_found(module: str, source: str) -> None:
    assert faults(source, module)


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    assert list(imports("from . import a\nfrom ..moe import b", "cpmoe.model", is_package=True)) == [
        (1, "cpmoe.model.a"),
        (2, "cpmoe.moe.b"),
    ]


def test_config_and_grid_load_without_torch() -> None:
    modules = [module_name(path) for path in ROOT.glob("cpmoe/config/*.py")] + ["cpmoe.parallel.grid"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_imported_package_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", text)[0].lower().replace("-", "_") for text in project["dependencies"]}
    # transformers: of the `dev` extra; triton: torch's CUDA builds bring it; flash_attn: behind its probe.
    optional = {"transformers", "triton", "flash_attn"}
    imported = {
        name.split(".")[0]
        for path in python_files()
        for _, name in imports(path.read_text(), module_name(path))
    }
    foreign = imported - set(sys.stdlib_module_names) - {"cpmoe"} - optional
    missing = {name for name in foreign if DISTRIBUTION_OF.get(name, name) not in declared}
    assert not missing, f"imported but not in pyproject.toml's dependencies: {sorted(missing)}"
