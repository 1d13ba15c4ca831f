"""Whether this process was asked to stop."""

from __future__ import annotations

import os
import signal

import psutil

from cpmoe.training.console import silence_lost_output

LAUNCHER = "deepspeed.launcher.launch"


class StopRequest:
    """Notes SIGTERM and SIGINT, the end of the command that started the launcher, and that of the output.

    On one machine the `deepspeed` command passes no signal on: what ends it (`kill`, a container's stop)
    would leave its ranks to train on. On several, the connections that carry the output are closed before
    ranks are signalled. With `speaks` the first request is told on the terminal.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._given = False
        self._launcher: psutil.Process | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        parent = psutil.Process(os.getppid())
        try:
            if LAUNCHER in parent.cmdline():
                self._launcher, self._command = parent, parent.ppid()
        except psutil.Error:  # not ours to look at
            self._launcher = None

    def given(self) -> bool:
        if not self._given and self._launcher is not None and self._is_orphan(self._launcher):
            self._give("the deepspeed command has ended")
        if silence_lost_output() and not self._given:
            self._give("nobody reads the output")
        return self._given

    def _is_orphan(self, launcher: psutil.Process) -> bool:
        try:
            return launcher.ppid() != self._command
        except psutil.Error:
            return True

    def _note(self, number: int, frame: object) -> None:
        if not self._given:
            self._give(signal.Signals(number).name)

    def _give(self, reason: str) -> None:
        self._given = True
        silence_lost_output()
        if self._speaks:
            # Not print: a signal may come in the middle of one.
            os.write(1, f"{reason}: finishes a step, saves and exits\n".encode())
