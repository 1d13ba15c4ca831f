"""What asks a rank to stop: signals to it, and the end of the command that started its launcher."""

import subprocess
import sys

import psutil
import pytest

RANK = """
import time
from cpmoe.training.stop import StopRequest
request = StopRequest(speaks=True)
assert not request.given()
print("trains", flush=True)
for _ in range(600):
    if request.given():
        break
    time.sleep(0.1)
print("stops" if request.given() else "trains on", flush=True)
"""
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}])"


def start(name: str) -> "subprocess.Popen[str]":
    """A command that starts a launcher of this name, which starts a rank; as `deepspeed` does."""
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LAUNCHER!r}, {name!r}])"
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "trains\n"
    return process


def test_a_rank_stops_when_the_command_of_its_launcher_is_gone():
    process = start("deepspeed.launcher.launch")
    process.terminate()
    output = process.communicate(timeout=100)[0]
    assert output == "the deepspeed command has ended: finishes a step, saves and exits\nstops\n"


@pytest.mark.parametrize("signalled", [False, True])
def test_a_rank_whose_output_is_closed_saves_and_stops(tmp_path, signalled):
    """As a launch on other hosts leaves its ranks: the output is gone, then, or never, a signal comes."""
    script = f"{RANK}\nprint('after that')\nopen({str(tmp_path / 'saved')!r}, 'w').close()"
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert rank.stdout is not None and rank.stderr is not None and rank.stdout.readline() == b"trains\n"
    rank.stdout.close()
    rank.stderr.close()
    if signalled:
        rank.terminate()
    assert rank.wait(timeout=30) == 0
    assert (tmp_path / "saved").exists()


def test_a_line_that_nobody_reads_is_no_error():
    script = "import os, time; from cpmoe.training.console import say; time.sleep(1); say('x'); os._exit(7)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=30) == 7


def test_signals_are_told_once():
    process = start("deepspeed.launcher.launch")
    rank = psutil.Process(process.pid).children(recursive=True)[-1]
    rank.terminate()
    output = process.communicate(timeout=100)[0]
    assert output == "SIGTERM: finishes a step, saves and exits\nstops\n"
