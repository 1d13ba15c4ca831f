"""What the clock of waits counts: transfers of every kind that no work hides, and nothing else."""

import time

import torch
import torch.distributed as dist

from cpmoe.attention.allgather import allgather_attention
from cpmoe.attention.plan import build_plan
from cpmoe.attention.ring import ring_attention
from cpmoe.moe.dispatch import CountExchange
from cpmoe.parallel.collectives import all_to_all_start, all_to_all_wait
from cpmoe.parallel.comm_clock import comm_clock
from tests.distributed import run_distributed

LATE = 0.4


def _exchange(rank: int, world_size: int) -> tuple[float, float]:
    """Waited for an all-to-all that rank 1 launches late: at once, and after work as long as that."""
    group = dist.new_group([0, 1])
    waited = []
    for work in (0.0, 2 * LATE):
        dist.barrier()
        comm_clock.take()
        time.sleep(LATE if rank == 1 else 0)
        pending = all_to_all_start(torch.ones(2, 3), [1, 1], [1, 1], group)
        time.sleep(work)
        all_to_all_wait(pending)
        waited.append(comm_clock.take())
    return waited[0], waited[1]


def test_a_wait_counts_where_no_work_hides_it():
    (idle, busy), (late, _) = run_distributed(_exchange, 2)
    assert idle > 0.8 * LATE
    assert busy < 0.5 * LATE
    assert late < 0.5 * LATE, "the rank that is waited for waits for none"


def _kinds(rank: int, world_size: int) -> dict[str, list[float]]:
    """What each kind of traffic adds, forward and backward, where rank 1 comes late to both."""
    group, grad_group = dist.new_group([0, 1]), dist.new_group([0, 1])
    plan = build_plan(torch.zeros(1, 8, dtype=torch.int64), world_size, rank)
    waited: dict[str, list[float]] = {}
    for name, attention in (("ring", ring_attention), ("allgather", allgather_attention)):
        q, k, v = (torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(3))
        out = torch.zeros(())
        waited[name] = []
        for phase in ("forward", "backward"):
            dist.barrier()
            comm_clock.take()
            time.sleep(LATE if rank == 1 else 0)
            if phase == "forward":
                out = attention(q, k, v, plan, group, grad_group, "reference")
            else:
                out.sum().backward()
            waited[name].append(comm_clock.take())
    dist.barrier()
    time.sleep(LATE if rank == 1 else 0)
    CountExchange(torch.ones(4, dtype=torch.int64), group).read()
    waited["counts"] = [comm_clock.take()]
    return waited


def test_every_kind_of_traffic_is_counted():
    first, _ = run_distributed(_kinds, 2)
    assert set(first) == {"ring", "allgather", "counts"}
    for name, seconds in first.items():
        assert min(seconds) > 0.8 * LATE, name
