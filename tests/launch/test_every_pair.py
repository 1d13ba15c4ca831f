"""Every recipe with every JSON trains two shrunk steps, and the loss does not depend on the JSON."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.launch.support import JSONS, RECIPES, records, tiny, train

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@cache
def losses(folder: Path, recipe: Path, deepspeed: Path | None) -> tuple[str, list[float]]:
    name = f"{recipe.stem}-{deepspeed.stem if deepspeed else 'default'}"
    overrides = tiny(folder, name, steps=2)
    if deepspeed is not None:
        overrides += ["cpmoe.context_parallel_size=2", "cpmoe.expert_parallel_size=2"]
    # The load-balancing loss is that of a micro-step: both sequences of a step are in one, on either layout.
    overrides.append(f"train.micro_batch_size={1 if deepspeed is None else 2}")
    dtypes = run_distributed(train, WORLD_SIZE, recipe, deepspeed, overrides)
    assert (folder / name / "checkpoints" / "step_00000002" / "manifest.json").is_file()
    return dtypes[0], [record["loss"] for record in records(folder / name, "train")]


@pytest.mark.parametrize("deepspeed", JSONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_two_steps(folder: Path, recipe: Path, deepspeed: Path) -> None:
    dtype, found = losses(folder, recipe, deepspeed)
    # Without a JSON: float32, ZeRO-1, the two ranks each with sequences and all experts of their own.
    _, expected = losses(folder, recipe, None)
    # Twice the bound of exactness for one run, since neither is the float64 one; bfloat16's own resolution.
    relative = 2e-6 if dtype == "float32" else 2**-8
    assert len(found) == 2
    assert found == pytest.approx(expected, rel=relative)


def test_there_is_something_to_train() -> None:
    assert RECIPES
    assert JSONS
