"""Lines for the person who watches, who may be gone: a closed pipe or connection must not cost a step."""

from __future__ import annotations

import contextlib
import os
import select


def say(text: str) -> None:
    """Prints a line; nothing where nobody can read it any more."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def silence_lost_output() -> bool:
    """Sends what nobody reads any more nowhere, so that later prints succeed; whether that was anything."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)  # errors only
    lost = [descriptor for descriptor, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for descriptor in lost:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return bool(lost)
