"""The Start/Wait pair against a plain gather, with gradients, and the order of its backward."""

import torch
import torch.distributed as dist

from cpmoe.parallel.collectives import (
    PendingAllToAll,
    all_gather_start,
    all_to_all_start,
    all_to_all_wait,
    gather_wait,
    reduce_scatter_start,
)
from tests.distributed import run_distributed

WIDTH = 3


def _splits(world_size: int, seed: int) -> torch.Tensor:
    """splits[i, j] = rows from rank i to rank j; some pairs exchange nothing."""
    generator = torch.Generator().manual_seed(seed)
    splits = torch.randint(0, 4, (world_size, world_size), generator=generator)
    splits[-1] = 0
    return splits


def _rows(splits: torch.Tensor, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(int(splits[rank].sum()), WIDTH, generator=generator, dtype=torch.float64)


def _round_trip(rank: int, world_size: int, seed: int):
    splits = _splits(world_size, seed)
    rows = _rows(splits, rank).requires_grad_()
    pending = all_to_all_start(rows, splits[rank].tolist(), splits[:, rank].tolist(), dist.group.WORLD)
    received = all_to_all_wait(pending)
    (received * (rank + 1)).sum().backward()
    return received.detach(), rows.grad


def test_rows_and_gradients_reach_their_ranks():
    for world_size in (1, 2, 4):
        for seed in range(3):
            splits = _splits(world_size, seed)
            results = run_distributed(_round_trip, world_size, seed)
            pieces = [_rows(splits, rank).split(splits[rank].tolist()) for rank in range(world_size)]
            for rank, (received, grad) in enumerate(results):
                expected = torch.cat([pieces[source][rank] for source in range(world_size)])
                assert torch.equal(received, expected)
                receiver = torch.arange(world_size).repeat_interleave(splits[rank])
                assert torch.equal(grad, (receiver + 1.0).double()[:, None].expand(-1, WIDTH))


def _there_and_back(rank: int, world_size: int, dtype: torch.dtype):
    """Rows of this rank gathered, scaled by the rank, summed and scattered; and the gradient of it."""
    rows = torch.full((2, WIDTH), 256.0 if rank == 0 else 0.25, dtype=dtype, requires_grad=True)
    gathered = gather_wait(all_gather_start(rows, dist.group.WORLD))
    back = gather_wait(reduce_scatter_start(gathered * (rank + 1), dist.group.WORLD))
    (back * (rank + 1)).sum().backward()
    # As many different terms as ranks: lost one by one in bfloat16, were they summed in it.
    summed = gather_wait(reduce_scatter_start(rows.detach().repeat(world_size, 1), dist.group.WORLD))
    return gathered.detach(), back.detach(), rows.grad, summed


def test_gather_and_scatter_are_each_others_transpose():
    for world_size, dtype in ((2, torch.float64), (4, torch.float64), (4, torch.bfloat16)):
        ranks = torch.arange(1, world_size + 1)
        values = torch.full((world_size,), 0.25)
        values[0] = 256.0
        for rank, (gathered, back, grad, summed) in enumerate(
            run_distributed(_there_and_back, world_size, dtype)
        ):
            assert torch.equal(gathered[:, 0].float(), values.repeat_interleave(2))
            if dtype == torch.float64:
                assert torch.all(back == values[rank] * ranks.sum())
                assert torch.all(grad == (rank + 1) * ranks.sum())
            assert torch.all(summed.float() == values.sum().to(dtype).float())


def _interleaved(rank: int, world_size: int):
    """Two slices: start(a) start(b) wait(a) wait(b). Returns the order of launches and waits."""
    events = []
    launch, wait = PendingAllToAll.launch, PendingAllToAll.wait
    names = {}

    def recorded_launch(self, rows, *, transposed):
        events.append(("launch", names.setdefault(id(self), "a" if not names else "b")))
        return launch(self, rows, transposed=transposed)

    def recorded_wait(self):
        events.append(("wait", names[id(self)]))
        return wait(self)

    PendingAllToAll.launch, PendingAllToAll.wait = recorded_launch, recorded_wait
    try:
        even = [2] * world_size
        x = torch.randn(2 * world_size, WIDTH, dtype=torch.float64, requires_grad=True)
        pending_a = all_to_all_start(x * 2, even, even, dist.group.WORLD)
        pending_b = all_to_all_start(x * 3, even, even, dist.group.WORLD)
        a = all_to_all_wait(pending_a).square()
        b = all_to_all_wait(pending_b).square()
        events.append("backward")
        (a.sum() + b.sum()).backward()
    finally:
        PendingAllToAll.launch, PendingAllToAll.wait = launch, wait
    return events


def test_backward_mirrors_forward():
    for events in run_distributed(_interleaved, 2):
        middle = events.index("backward")
        forward, backward = events[:middle], events[middle + 1 :]
        mirrored = [({"launch": "wait", "wait": "launch"}[kind], name) for kind, name in reversed(forward)]
        assert backward == mirrored
