"""A step that fails on one rank fails on all of them, so that none waits for another in a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fail_together(kind: type[Exception]) -> Iterator[None]:
    """Around what every rank does on its own: a ValueError or OSError in it is raised on all, as `kind`.

    Collective on the default group, at the end of the block. The message names the ranks, unless the error
    is the same on all of them.
    """
    error: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as caught:
        error = caught
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if not failed:
        return
    if len(failed) == len(texts) and len(set(failed.values())) == 1:
        raise kind(failed[0]) from error
    raise kind("\n".join(f"rank {rank}: {text}" for rank, text in failed.items())) from error
