"""What the blocks of one attention add up to: the running softmax and the gradients of q, k and v.

The only place where partial results are merged, whatever backend computed them.

Shape letters: B batch, T queries or keys of a block, P rectangles of a stack, H query heads, G KV heads, D
head dim; the heads of V, of dV and of the output may have another size than those of Q and K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cpmoe.attention.ranges import TokenRanges
from cpmoe.attention.scores import Scores
from cpmoe.attention.stacks import Stack, TokenRuns


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: what partial results are kept and sent in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class KeyValueSizes(NamedTuple):
    """What K and V of some tokens, or their gradients, measure, but for the number of tokens.

    They travel as one flat buffer: all of K [B, T, G, D], then all of V, both contiguous.
    """

    batch_size: int
    num_kv_heads: int
    size_qk: int
    size_v: int

    @classmethod
    def of(cls, k_BTGD: Tensor, v_BTGD: Tensor) -> KeyValueSizes:
        batch_size, _, num_kv_heads, size_qk = k_BTGD.shape
        return cls(batch_size, num_kv_heads, size_qk, v_BTGD.shape[3])

    def elements(self, num_tokens: int) -> int:
        """Of a packed buffer of so many tokens."""
        return self.batch_size * num_tokens * self.num_kv_heads * (self.size_qk + self.size_v)

    def views(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The packed buffer as (k_BTGD, v_BTGD)."""
        rows = (self.batch_size, packed.numel() // self.elements(1), self.num_kv_heads)
        k, v = packed.split([math.prod(rows) * size for size in (self.size_qk, self.size_v)])
        return k.view(*rows, self.size_qk), v.view(*rows, self.size_v)


@dataclass(frozen=True)
class KeyValueBlock:
    """KV of one rank: k_BTGD, v_BTGD hold the source's local tokens `tokens`, in order.

    `packed`, if there is one, is the buffer (`KeyValueSizes`) that they are views of.
    """

    k_BTGD: Tensor
    v_BTGD: Tensor
    tokens: TokenRanges
    packed: Tensor | None = None

    @classmethod
    def from_packed(cls, packed: Tensor, sizes: KeyValueSizes, tokens: TokenRanges) -> KeyValueBlock:
        return cls(*sizes.views(packed), tokens, packed)

    @property
    def sizes(self) -> KeyValueSizes:
        return KeyValueSizes.of(self.k_BTGD, self.v_BTGD)

    def like(self) -> tuple[Tensor, Tensor]:
        """(k, v) of no tokens: what `KeyValueGradient` and `KeyValueSizes` are told."""
        empty_k, empty_v = (x.new_empty((x.shape[0], 0, *x.shape[2:])) for x in (self.k_BTGD, self.v_BTGD))
        return empty_k, empty_v

    def keys_values(self, keys: TokenRuns) -> tuple[Tensor, Tensor]:
        """Keys and values [P, T, G, D] of local tokens `keys`."""
        keys = keys.within(self.tokens)
        return keys.take(self.k_BTGD), keys.take(self.v_BTGD)


def pack(blocks: Sequence[KeyValueBlock], tokens: TokenRanges) -> Tensor:
    """A flat buffer (`KeyValueSizes`) of tokens that `blocks` of one rank hold: one's own where that fits."""
    for block in blocks:
        if block.packed is not None and tokens == block.tokens:
            return block.packed
    sizes = blocks[0].sizes
    packed = blocks[0].k_BTGD.new_empty(sizes.elements(tokens.wire_tokens))
    places = sizes.views(packed)
    for block in blocks:
        for to, start, length in tokens.common(block.tokens):
            for place_BTGD, x_BTGD in zip(places, (block.k_BTGD, block.v_BTGD), strict=True):
                place_BTGD[:, to : to + length] = x_BTGD[:, start : start + length]
    return packed


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Adds the attention over further keys to `out` [..., D] and `lse` [...], in place.

    The log-sum-exp rule of blockwise attention (Liu et al., arXiv 2310.01889): a new part of weight
    w = exp(lse_new − logaddexp(lse, lse_new)) moves the output by w · (out_new − out).
    """
    # A sigmoid cannot overflow; its NaN, from −inf − −inf, is a query that still sees nothing.
    weight = torch.sigmoid(new_lse - lse).nan_to_num_(nan=0.0)
    out.lerp_(new_out, weight[..., None])
    lse.copy_(torch.logaddexp(lse, new_lse))


class RunningSoftmax:
    """Output and logsumexp over the keys seen so far; queries that saw none have 0 and −inf.

    Both are kept in `accumulation_dtype`. `size_v` is the head size of V.
    """

    def __init__(self, q_BTHD: Tensor, size_v: int) -> None:
        self._shape = torch.Size((*q_BTHD.shape[:3], size_v))
        self._dtype, self._device = accumulation_dtype(q_BTHD.dtype), q_BTHD.device
        self._out_BTHD: Tensor | None = None
        self._lse_BTH: Tensor | None = None

    def merge(self, stack: Stack, out_PTHD: Tensor, lse_PTH: Tensor) -> None:
        """Adds the own attention of a stack of rectangles; may keep the tensors it is given."""
        out_PTHD, lse_PTH = out_PTHD.to(self._dtype), lse_PTH.to(self._dtype)
        rows = stack.rows
        if self._out_BTHD is None and rows.covers(self._shape):
            self._out_BTHD, self._lse_BTH = out_PTHD.reshape(self._shape), lse_PTH.reshape(self._shape[:-1])
            return
        running_out_BTHD, running_lse_BTH = self._tensors()
        if stack.opens:
            rows.put(running_out_BTHD, out_PTHD)
            rows.put(running_lse_BTH, lse_PTH)
            return
        running_out_PTHD, running_lse_PTH = rows.take(running_out_BTHD), rows.take(running_lse_BTH)
        merge_(running_out_PTHD, running_lse_PTH, out_PTHD, lse_PTH)
        if not rows.are_view:
            rows.put(running_out_BTHD, running_out_PTHD)
            rows.put(running_lse_BTH, running_lse_PTH)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out_BTHD, lse_BTH), in the accumulation dtype."""
        return self._tensors()

    def storage(self) -> tuple[Tensor, Tensor, bool]:
        """(out_BTHD, lse_BTH, continues) for a backend that merges in place.

        Both contiguous. Where `continues` is False they are uninitialised, and the backend writes every row.
        """
        if self._out_BTHD is not None and self._lse_BTH is not None:
            return self._out_BTHD, self._lse_BTH, True
        self._out_BTHD = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._lse_BTH = torch.empty(self._shape[:-1], dtype=self._dtype, device=self._device)
        return self._out_BTHD, self._lse_BTH, False

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self._out_BTHD is None or self._lse_BTH is None:
            self._out_BTHD = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            self._lse_BTH = torch.full(self._shape[:-1], -torch.inf, dtype=self._dtype, device=self._device)
        return self._out_BTHD, self._lse_BTH


@dataclass(frozen=True)
class SavedForward:
    """What every block of a backward pass reads.

    q_BTHD, grad_out_BTHD, out_BTHD in the input dtype, lse_BTH in the accumulation dtype, all *global*: over
    every key the query saw, so that a block's own gradient is exact by itself.
    """

    q_BTHD: Tensor
    grad_out_BTHD: Tensor
    out_BTHD: Tensor
    lse_BTH: Tensor
    scores: Scores

    @cached_property
    def delta_BTH(self) -> Tensor:
        """rowsum(dO · O), once for all blocks (FlashAttention-2, arXiv 2307.08691, algorithm 2)."""
        dtype = self.lse_BTH.dtype
        return (self.grad_out_BTHD.to(dtype) * self.out_BTHD.to(dtype)).sum(dim=-1)


class QueryGradient:
    """dQ of all local queries, [B, T, H, D] in the accumulation dtype.

    rows  what a backend derived from the query rows (delta and the like), kept for the next block
    """

    def __init__(self, q_BTHD: Tensor) -> None:
        self._shape = q_BTHD.shape
        self._dtype, self._device = accumulation_dtype(q_BTHD.dtype), q_BTHD.device
        self._sum_BTHD: Tensor | None = None
        self.rows: Tensor | None = None

    def add(self, rows: TokenRuns, dq_PTHD: Tensor) -> None:
        """Adds the dQ of a stack of rectangles; may keep the tensor it is given."""
        if self._sum_BTHD is None and rows.covers(self._shape):
            self._sum_BTHD = dq_PTHD.to(self._dtype).reshape(self._shape)
        else:
            rows.add(self.result(), dq_PTHD)

    def result(self) -> Tensor:
        if self._sum_BTHD is None:
            self._sum_BTHD = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._sum_BTHD

    def storage(self) -> tuple[Tensor, bool]:
        """(dq_BTHD, continues) for a backend that adds in place; as in `RunningSoftmax.storage`."""
        if self._sum_BTHD is not None:
            return self._sum_BTHD, True
        self._sum_BTHD = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._sum_BTHD, False


class KeyValueGradient:
    """dK and dV of one block in the accumulation dtype; `tokens` are the source's local tokens it holds."""

    def __init__(self, tokens: TokenRanges, k_BTGD: Tensor, v_BTGD: Tensor) -> None:
        self.tokens = tokens
        self._sizes = KeyValueSizes.of(k_BTGD, v_BTGD)
        self.dtype, self._device = accumulation_dtype(k_BTGD.dtype), k_BTGD.device
        self._sums: tuple[Tensor, Tensor] | None = None
        self._packed: Tensor | None = None

    def add(self, keys: TokenRuns, dk_PTGD: Tensor, dv_PTGD: Tensor) -> None:
        """Adds the dK and dV of a stack of rectangles; may keep the tensors it is given."""
        keys = keys.within(self.tokens)
        shape = self._sizes.batch_size, self.tokens.wire_tokens
        if self._sums is None and keys.covers(shape):
            dk_BTGD, dv_BTGD = (x.to(self.dtype).reshape(*shape, *x.shape[2:]) for x in (dk_PTGD, dv_PTGD))
            self._sums = dk_BTGD, dv_BTGD
            return
        for total, part in zip(self.result(), (dk_PTGD, dv_PTGD), strict=True):
            keys.add(total, part)

    def add_packed(self, tokens: TokenRanges, packed: Tensor) -> None:
        """Adds the packed gradient (`KeyValueSizes`) of those of `tokens` that it holds; may keep it."""
        if self._sums is None and tokens == self.tokens:
            self._packed = packed.to(self.dtype)
            self._sums = self._sizes.views(self._packed)
            return
        arrived = self._sizes.views(packed)
        for start, place, length in tokens.common(self.tokens):
            for total, part in zip(self.result(), arrived, strict=True):
                total[:, place : place + length].add_(part[:, start : start + length])

    def result(self) -> tuple[Tensor, Tensor]:
        """(dk_BTGD, dv_BTGD)"""
        if self._sums is None:
            self._sums = self._allocate(torch.zeros)
        return self._sums

    def storage(self, covers_all: bool) -> tuple[Tensor, Tensor, bool]:
        """(dk_BTGD, dv_BTGD, continues) for a backend that adds in place.

        As in `RunningSoftmax.storage`, but zeros instead of uninitialised unless the backend `covers_all`
        tokens.
        """
        if self._sums is not None:
            return *self._sums, True
        if not covers_all:
            return *self.result(), True
        self._sums = self._allocate(torch.empty)
        return *self._sums, False

    def packed(self) -> Tensor:
        """Both in one flat buffer (`KeyValueSizes`)."""
        sums = self.result()
        return torch.cat([x_BTGD.flatten() for x_BTGD in sums]) if self._packed is None else self._packed

    def _allocate(self, make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        size = self._sizes.elements(self.tokens.wire_tokens)
        self._packed = make(size, dtype=self.dtype, device=self._device)
        return self._sizes.views(self._packed)
