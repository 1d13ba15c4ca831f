"""launch/setup.sh on a small project: real pip and environments, packages from a local folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "cpmoe"
version = "0.1.0"
"""

BACKEND = """
import shutil

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    shutil.copy("cpmoe-0.1.0-py3-none-any.whl", wheel_directory)
    return "cpmoe-0.1.0-py3-none-any.whl"
"""


def write_wheel(folder: Path, name: str, version: str, metadata: str = "", script: str | None = None) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}.py", "")
        if script is not None:
            executable = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{name}")
            executable.external_attr = 0o100755 << 16
            wheel.writestr(executable, script)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class Project:
    """A checkout of the set-up's files in `folder`, whose packages come from `folder`/wheels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "launch").mkdir(parents=True)
        (folder / "wheels").mkdir()
        shutil.copy(ROOT / "launch" / "setup.sh", folder / "launch")
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "backend.py").write_text(BACKEND)
        (folder / "constraints.txt").write_text("torch==2.13.0\n")
        write_wheel(
            folder, "cpmoe", "0.1.0", "Requires-Dist: torch\nRequires-Dist: deepspeed\nProvides-Extra: dev\n"
        )
        write_wheel(folder / "wheels", "torch", "2.13.0")
        write_wheel(folder / "wheels", "torch", "2.13.0+cpu")
        write_wheel(folder / "wheels", "torch", "2.14.0")
        write_wheel(folder / "wheels", "deepspeed", "1.0", script="#!python\nprint('started')\n")

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (self.folder / "wheels").as_uri()}
        return subprocess.run(
            ["bash", str(self.folder / "launch" / "setup.sh")],
            env={**environment, **variables},
            cwd="/",
            capture_output=True,
            text=True,
        )

    def torch_version(self) -> str:
        code = "from importlib.metadata import version; print(version('torch'))"
        python = self.folder / ".venv" / "bin" / "python"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def state(self) -> dict[str, int]:
        return {str(p): p.lstat().st_mtime_ns for p in self.folder.rglob("*") if p.suffix != ".pyc"}


def has_nvidia_driver() -> bool:
    files = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
    return any(file.exists() for file in files) or shutil.which("nvidia-smi") is not None


def test_setup_from_nothing_to_a_moved_folder(tmp_path: Path) -> None:
    project = Project(tmp_path / "a folder")

    first = project.setup()
    assert first.returncode == 0, first.stderr
    assert "making .venv" in first.stdout
    if not has_nvidia_driver():
        assert project.torch_version() == "2.13.0+cpu"
    path = {**os.environ, "PATH": f"{project.folder}/.venv/bin:{os.environ['PATH']}"}
    assert subprocess.run(["deepspeed"], env=path, capture_output=True, text=True).stdout == "started\n"

    before = project.state()
    second = project.setup()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert project.state() == before

    (project.folder / "constraints.txt").write_text("torch==9.9.9\n")
    failed = project.setup()
    assert failed.returncode != 0
    assert "torch==9.9.9" in failed.stderr, "shows pip's own words"
    assert str(project.folder / ".venv" / "setup.log") in failed.stderr

    (project.folder / "constraints.txt").write_text("torch==2.14.0\n")
    again = project.setup()
    assert again.returncode == 0, again.stderr
    assert "making .venv" in again.stdout, "what a failed set-up left is not trusted"
    assert project.torch_version() == "2.14.0"

    (project.folder / "constraints.txt").write_text("torch==2.13.0\n")
    changed = project.setup()
    assert changed.returncode == 0, changed.stderr
    assert "making .venv" not in changed.stdout
    assert project.torch_version().startswith("2.13.0")

    moved = tmp_path / "elsewhere"
    project.folder.rename(moved)
    project.folder = moved
    assert "making .venv" in project.setup().stdout, "scripts hold the path of their environment"


def test_an_interrupted_setup_starts_afresh_and_a_driver_rules_out_a_cpu_build(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    leftover = project.folder / ".venv" / "lib" / "leftover"
    leftover.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").touch(0o755)
    done = project.setup(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert not leftover.exists()
    assert project.torch_version() == "2.13.0"


@pytest.mark.parametrize(
    ("script", "version"), [("case $2 in *exit*) exit 1 ;; esac; echo 3.8.2", "3.8.2"), (None, "not there")]
)
def test_an_old_or_missing_python_is_named(tmp_path: Path, script: str | None, version: str) -> None:
    project = Project(tmp_path / "project")
    python = tmp_path / "python3"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    failed = project.setup(PYTHON=str(python))
    assert failed.returncode == 1
    assert f"Python 3.10 or newer is needed; {python} is {version}." in failed.stderr
    assert not (project.folder / ".venv").exists()
