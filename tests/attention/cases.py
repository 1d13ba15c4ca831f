"""Attention cases that run on gloo processes, and their whole-sequence float64 answer.

Shape letters: B batch, S full sequence, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cpmoe.attention import phases, ulysses
from cpmoe.attention.dropout import Dropout, head_names, query_names
from cpmoe.attention.layout import padded_length, token_indices
from cpmoe.attention.mask import CAUSAL, Mask
from cpmoe.attention.plan import AttentionPlan, deal_batch
from cpmoe.attention.scores import Scores
from cpmoe.attention.slicing import shard_slices
from cpmoe.attention.ulysses import sharded_attention
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import create_groups
from tests.attention.dense import dense_gradients
from tests.attention.dropout_twin import twin_mask


@dataclass(frozen=True)
class Case:
    """`rows` holds one sequence per batch row as run lengths: n > 0 a document, n < 0 padding."""

    name: str
    rows: tuple[tuple[int, ...], ...]
    layout: str = "zigzag"
    mask: Mask = CAUSAL
    strategy: str = "ring"
    backend: str = "sdpa"
    dtype: torch.dtype = torch.float64
    ulysses_size: int = 1
    dkv_dtype: str = "float32"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 4
    # Of V, where it is another.
    size_v: int | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    contiguous: bool = True
    # Two causal slices, whose phases alternate.
    num_slices: int = 1
    # The scores of every run of `gap_tokens` keys are lifted by another multiple of 100.
    gap_tokens: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        name = f"{self.name}-{self.layout}-{self.strategy}-{self.backend}-{kind}"
        name += f"-ulysses{self.ulysses_size}" if self.ulysses_size > 1 else ""
        return f"{name}-slices" if self.num_slices > 1 else name


# What names the masks of dropout.
SEED, LAYER = 7, 3


def sequences(case: Case) -> Tensor:
    return 5 + 3 * torch.arange(len(case.rows))


def documents(case: Case) -> Tensor:
    rows = []
    for runs in case.rows:
        ids = [torch.full((abs(n),), index if n > 0 else -1) for index, n in enumerate(runs)]
        rows.append(torch.cat(ids))
    return torch.stack(rows)


def inputs(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """((q, k, v), grad_out) of the whole sequence: float64 values that the case's dtype holds exactly."""
    documents_BS = documents(case)
    generator = torch.Generator().manual_seed(documents_BS.numel())
    size_v = case.size_v or case.head_dim
    heads = (
        (case.num_heads, case.head_dim),
        (case.num_kv_heads, case.head_dim),
        (case.num_kv_heads, size_v),
        (case.num_heads, size_v),
    )
    q, k, v, grad_out = (
        torch.randn(*documents_BS.shape, *head, generator=generator).to(case.dtype).to(torch.float64)
        for head in heads
    )
    if case.gap_tokens:
        run_S = torch.arange(documents_BS.shape[1]) // case.gap_tokens
        q[..., 0] = case.head_dim**0.5
        k[..., 0] = (100.0 * (run_S * 5 % 7))[None, :, None]
    return (q, k, v), grad_out


def expected(case: Case) -> list[Tensor]:
    """[out, dq, dk, dv] of the whole sequence in float64."""
    leaves, grad_out = inputs(case)
    documents_BS, weights = documents(case), None
    if case.dropout:
        numbers, seq_len = sequences(case).tolist(), documents_BS.shape[1]
        kept = twin_mask(case.dropout, SEED, LAYER, numbers, case.num_heads, seq_len)
        weights = kept.double() / (1 - case.dropout)
    return list(dense_gradients(leaves, grad_out, documents_BS, case.mask, case.softcap, weights))


def padded_to(case: Case, world_size: int) -> int:
    seq_len = documents(case).shape[1]
    return padded_length(seq_len, world_size, case.num_slices, case.layout, case.ulysses_size)


def local_indices(case: Case, world_size: int) -> list[Tensor]:
    """Place of every rank's tokens in the padded sequence, slice after slice."""
    documents_BS = documents(case)
    missing = padded_to(case, world_size) - documents_BS.shape[1]
    documents_BS = F.pad(documents_BS, (0, missing), value=-1)
    ring_size = world_size // case.ulysses_size
    segments = deal_batch(documents_BS, ring_size, case.layout, case.num_slices, (case.mask,))
    places = [torch.from_numpy(token_indices(own)) for own in segments]
    shape = case.num_slices, case.ulysses_size, -1
    return [part.flatten() for index in places for part in index.view(shape).unbind(1)]


def _local(x_BSHD: Tensor, index_T: Tensor, case: Case) -> Tensor:
    """This rank's tokens; where the sequence was padded, values that would show if anything read them."""
    missing = int(index_T.max()) + 1 - x_BSHD.shape[1]
    if missing > 0:
        padding = torch.full_like(x_BSHD[:, :1], 1e3).expand(-1, missing, -1, -1)
        x_BSHD = torch.cat((x_BSHD, padding), dim=1)
    x_BTHD = x_BSHD[:, index_T].to(case.dtype)
    if not case.contiguous:
        x_BTHD = x_BTHD.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
        assert not x_BTHD.is_contiguous() and x_BTHD.stride(-1) != 1
    return x_BTHD


def run_case(case: Case, rank: int, world_size: int, groups, given=None) -> list[Tensor]:
    """[out, dq, dk, dv] of this rank's tokens, in the dtypes the product returns."""
    (q, k, v), grad_out = inputs(case) if given is None else given
    documents_BS = documents(case)
    slices = shard_slices(
        *[documents_BS] * 4,
        world_size,
        rank,
        case.layout,
        "causal" if case.num_slices > 1 else "none",
        {"layer": case.mask},
        case.ulysses_size,
    )
    index_T = local_indices(case, world_size)[rank]
    leaves = [_local(x, index_T, case).requires_grad_() for x in (q, k, v)]
    given_plans = [shard.plan for shard in slices]
    if len(slices) == 1:
        out = sharded_attention(*leaves, *given_plans, *groups, *_choices(case, *given_plans))
    else:
        out = _alternating(case, leaves, given_plans, groups)
    grads = torch.autograd.grad(out, leaves, _local(grad_out, index_T, case))
    return [out.detach(), *grads]


def _choices(case: Case, plan: AttentionPlan) -> tuple[str, str, Scores | None, str]:
    """strategy, backend, scores and dkv_dtype"""
    scores = None
    if case.softcap or case.dropout:
        heads_2H = head_names(LAYER, case.num_heads, torch.device("cpu"))
        names = query_names(SEED, sequences(case), plan), heads_2H
        dropout = Dropout(case.dropout, *names) if case.dropout else None
        scores = Scores(case.head_dim**-0.5, case.softcap, dropout)
    return case.strategy, case.backend, scores, case.dkv_dtype


def _alternating(case: Case, leaves, plans, groups) -> Tensor:
    """Both slices' keys travel before the first slice attends, as an overlapping schedule has them."""
    (q, q_2), (k, k_2), (v, v_2) = (x.chunk(2, dim=1) for x in leaves)
    first = ulysses.start(q, k, v, plans[0], *groups, *_choices(case, plans[0]))
    second = ulysses.start(q_2, k_2, v_2, plans[1], *groups, *_choices(case, plans[1]), first)
    outputs = []
    for state in (first, second):
        phases.attend_own(state)
        phases.wait(state)
        outputs.append(ulysses.attend(state, groups[2]))
    first.release()
    second.release()
    return torch.cat(outputs, dim=1)


def make_groups(world_size: int, ulysses_size: int = 1):
    """(ring, ring_grad, ulysses)"""
    groups = create_groups(RankGrid(world_size, world_size, ulysses_size=ulysses_size))
    return groups.ring, groups.ring_grad, groups.ulysses


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[list[Tensor]]:
    groups = {size: make_groups(world_size, size) for size in sorted({case.ulysses_size for case in cases})}
    return [run_case(case, rank, world_size, groups[case.ulysses_size]) for case in cases]


def gathered(case: Case, parts: list[list[Tensor]]) -> list[Tensor]:
    """Whole-sequence [out, dq, dk, dv] from every rank's; padding beyond the sequence must be exactly 0."""
    world_size = len(parts)
    seq_len = documents(case).shape[1]
    whole = []
    indices = local_indices(case, world_size)
    for tensors in zip(*parts, strict=True):
        full = torch.full(
            (tensors[0].shape[0], padded_to(case, world_size), *tensors[0].shape[2:]),
            torch.nan,
            dtype=tensors[0].dtype,
        )
        for index_T, tensor in zip(indices, tensors, strict=True):
            full[:, index_T] = tensor
        assert torch.equal(full[:, seq_len:], torch.zeros_like(full[:, seq_len:]))
        whole.append(full[:, :seq_len])
    return whole


def everywhere(cases: list[Case]) -> list[Case]:
    """Each case in every layout, with every pair of strategy and backend."""
    return [
        replace(case, layout=layout, strategy=strategy, backend=backend)
        for case in cases
        for layout, strategy, backend in (
            ("zigzag", "ring", "sdpa"),
            ("zigzag", "allgather", "reference"),
            ("contiguous", "ring", "reference"),
            ("contiguous", "allgather", "sdpa"),
            ("striped", "ring", "sdpa"),
            ("balanced", "ring", "reference"),
        )
    ]


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """‖actual − reference‖ / ‖reference‖; the absolute error where the reference is 0."""
    return ((actual.double() - reference).norm() / (reference.norm() or 1.0)).item()
