"""What the ring really sends, counted at torch.distributed, against numbers worked out by hand."""

import torch
import torch.distributed as dist

from cpmoe.attention.mask import Mask
from tests.attention.cases import Case, make_groups, run_case
from tests.distributed import run_distributed

# Per token: K and V of 2 heads of size 4.
WIDTH = 2 * 2 * 4


def _count(rank: int, world_size: int, cases: list[Case]):
    """Per case, {group: [(elements, dtype) of each send]}; every batch must hold one send and one receive."""
    groups = make_groups(world_size)
    exchange = dist.batch_isend_irecv
    sent: dict[str, list] = {}

    def recorded(operations):
        # In this order a ring of two has both directions of its link at once on gloo (0.48 of it otherwise).
        assert [operation.op for operation in operations] == [dist.irecv, dist.isend]
        receive, send = operations
        assert send.group is receive.group
        kind = "ring" if send.group is groups[0] else "ring_grad"
        assert send.group is groups[0] or send.group is groups[1]
        sent[kind].append((send.tensor.numel(), send.tensor.dtype))
        return exchange(operations)

    results = []
    dist.batch_isend_irecv = recorded
    try:
        for case in cases:
            sent.update(ring=[], ring_grad=[])
            run_case(case, rank, world_size, groups)
            results.append({kind: list(sends) for kind, sends in sent.items()})
    finally:
        dist.batch_isend_irecv = exchange
    return results


def _tokens(sends) -> list[int]:
    return [elements // WIDTH for elements, _ in sends]


def test_two_ranks():
    """Zigzag: rank 1 needs only the first chunk of rank 0. KV goes once in all: it is kept for backward."""
    cases = [
        Case("whole", ((32,),)),
        Case("half", ((32,),), dtype=torch.bfloat16),
        Case("in-chunks", ((8, 8, 8, 8),)),
        Case("tail", ((6, 4, 22),)),
        Case("contiguous", ((32,),), layout="contiguous"),
        Case("half-dkv", ((32,),), dtype=torch.bfloat16, dkv_dtype="bfloat16"),
    ]
    first, second = run_distributed(_count, 2, cases)
    assert _tokens(first[0]["ring"]) == [8] and _tokens(second[0]["ring"]) == [16]
    assert _tokens(first[0]["ring_grad"]) == [16] and _tokens(second[0]["ring_grad"]) == [8]
    assert first[1]["ring"] == [(8 * WIDTH, torch.bfloat16)]
    assert first[1]["ring_grad"] == [(16 * WIDTH, torch.float32)]
    assert first[5]["ring_grad"] == [(16 * WIDTH, torch.bfloat16)]
    assert first[2] == second[2] == {"ring": [], "ring_grad": []}
    # Document [6, 10) goes over the edge from rank 0 to rank 1, [10, 32) over that from rank 1 to rank 0.
    assert _tokens(first[3]["ring"]) == [2] and _tokens(second[3]["ring"]) == [14]
    assert _tokens(first[3]["ring_grad"]) == [14] and _tokens(second[3]["ring_grad"]) == [2]
    # Nobody needs the later rank: it sends the one token that keeps the exchange symmetric.
    assert _tokens(first[4]["ring"]) == [16] and _tokens(second[4]["ring"]) == [1]
    assert _tokens(first[4]["ring_grad"]) == [1] and _tokens(second[4]["ring_grad"]) == [16]


def test_a_window_sends_what_it_reaches():
    """Four tokens over each edge between ranks, to the rank behind it alone, and dKV of them back."""
    cases = [
        Case("window", ((32,),), mask=Mask(window=(4, None))),
        Case("sinks", ((32,),), mask=Mask(window=(4, None), num_sinks=2)),
        Case("two-sided", ((32,),), mask=Mask(causal=False, window=(4, 3)), layout="contiguous"),
    ]
    first, second = run_distributed(_count, 2, cases)
    assert _tokens(first[0]["ring"]) == _tokens(second[0]["ring"]) == [4]
    assert _tokens(first[0]["ring_grad"]) == _tokens(second[0]["ring_grad"]) == [4]
    # The first two tokens are rank 0's.
    assert _tokens(first[1]["ring"]) == [6] and _tokens(second[1]["ring"]) == [4]
    assert _tokens(first[2]["ring"]) == [4] and _tokens(second[2]["ring"]) == [3]
    # Chunks 0 to 7 of zigzag lie on ranks 0 1 2 3 3 2 1 0: up to rank 3 at distance 1, down from it at 3.
    counts = run_distributed(_count, 4, [Case("window", ((64,),), mask=Mask(window=(4, None)))])
    assert [_tokens(window["ring"]) for (window,) in counts] == [[4, 1, 1], [4, 4, 4], [4, 4, 4], [1, 4, 4]]
    assert [_tokens(window["ring_grad"]) for (window,) in counts] == [[1, 4], [4, 4], [4, 4], [4, 1]]


def test_four_ranks():
    """Three KV transfers forward, two backward, three of dKV; source 0 never sends its second chunk."""
    counts = run_distributed(_count, 4, [Case("whole", ((64,),)), Case("neighbours", ((13,) * 4 + (12,),))])
    sizes = {0: 8, 1: 16, 2: 16, 3: 16}
    for rank, (whole, neighbours) in enumerate(counts):
        passed_on = [sizes[(rank - hop) % 4] for hop in range(3)]
        assert _tokens(whole["ring"]) == passed_on + passed_on[1:]
        # After hop h it holds dKV of source rank − h: the first chunk, until a rank before the source adds.
        assert _tokens(whole["ring_grad"]) == [
            8 if hop <= rank else sizes[rank - hop + 4] for hop in (1, 2, 3)
        ]
        assert sum(_tokens(neighbours["ring"])) < sum(_tokens(whole["ring"]))
