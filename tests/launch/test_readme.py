"""The commands that the README and a finished run show are legal as they stand."""

import re
import shlex
from pathlib import Path

import pytest

from cpmoe.config.resolve import load_run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _training_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip() for line in lines if "recipes/pretrain.py" in line]


def _run_of(command: str, more: tuple[str, ...] = ()):
    words = shlex.split(command)
    processes = int(words[words.index("--num_accelerators") + 1])
    after = words[words.index("recipes/pretrain.py") + 1 :]
    options = {after[i]: after[i + 1] for i in range(len(after) - 1) if after[i].startswith("--")}
    overrides = [w for w in after if "=" in w and not w.startswith("--")]
    return load_run(
        ROOT / options["--recipe"], ROOT / options["--deepspeed_config"], (*overrides, *more), processes
    )


def test_the_readme_shows_training_commands():
    assert _training_commands()


@pytest.mark.parametrize("command", _training_commands())
def test_readme_commands_resolve_and_keep_the_batch(command):
    plain = _run_of(command.partition(" cpmoe.")[0])
    changed = _run_of(command)
    assert changed.batch.global_batch_size == plain.batch.global_batch_size
    assert changed.cpmoe != plain.cpmoe


def test_the_hint_of_a_finished_run_resolves():
    source = (ROOT / "recipes" / "pretrain.py").read_text(encoding="utf-8")
    hint = re.search(r"add to the command: (.*?)\\n", source)
    assert hint is not None
    for command in _training_commands():
        plain = command.partition(" cpmoe.")[0]
        assert _run_of(plain, tuple(hint[1].split())).cpmoe.context_parallel_size == 1


def test_every_file_that_the_readme_names_is_there():
    names = re.findall(r"`((?:recipes|ds_configs|launch|cpmoe|tests)/[\w./*-]+)`", README)
    missing = [name for name in names if not list(ROOT.glob(name.rstrip("/")))]
    assert names and not missing
