"""Dropout of attention probabilities that follows from names instead of a generator's state.

Whether a query keeps a key is a hash of (seed, layer, query head, sequence, place of the query in it, place
of the key in it). So layout, slices, CP degree, order of hops, Ulysses and recomputation leave the mask as
it is, and nothing about it is kept for backward.

    r_i = mix32(query name_i ^ head name_i), i = 1, 2           once for each query and head: 64 bits
    x = r_1 ^ key name;  x = (x ^ x >> 16) · A + r_2;  x = (x ^ x >> 15) · B          modulo 2^32

Kept where x ≥ rate · 2^32: 8 integer operations for each pair, the same in torch and in the Triton kernels. A
and B are those of `counter_random.mix32`.

The normaliser of the softmax counts dropped probabilities too: out = Σ keep · p · v / (1 − rate).

Shape letters: B batch, T local queries, U keys, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cpmoe.attention.layout import token_indices
from cpmoe.attention.plan import AttentionPlan
from cpmoe.attention.ranges import TokenRanges
from cpmoe.attention.reach import Reach
from cpmoe.parallel.counter_random import FACTORS32, derive, mix32_, shifted, signed, token_keys


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which probabilities one call of attention drops, and with what share.

    rate         in (0, 1)
    queries_2BT  names of the queries of this rank's plan (`query_names`), int32
    heads_2H     names of the query heads in this layer (`head_names`), int32

    Raises ValueError for another rate.
    """

    rate: float
    queries_2BT: Tensor
    heads_2H: Tensor

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"dropout rate = {self.rate}: must be between 0 and 1")

    @property
    def threshold(self) -> int:
        """Of 2^32 hashes, how many drop."""
        return min(round(self.rate * 2**32), 2**32 - 1)

    def of_heads(self, first: int, count: int) -> Dropout:
        """For these query heads only."""
        return replace(self, heads_2H=self.heads_2H[:, first : first + count].contiguous())


def query_names(seed: int, sequences_B: Tensor, plan: AttentionPlan) -> Tensor:
    """Names of the plan's queries, int32 [2, B, T] on the device of `sequences_B`.

    `sequences_B` int64 [B]: the number of each sequence in the whole run.
    """
    index = token_indices(plan.segments[plan.cp_rank])[plan.num_tokens - plan.num_queries : plan.num_tokens]
    return _words(token_keys(seed, sequences_B, torch.from_numpy(index).to(sequences_B.device)))


@lru_cache(maxsize=1024)
def head_names(layer: int, num_heads: int, device: torch.device) -> Tensor:
    """Names of the query heads of a layer, int32 [2, H] on `device`."""
    return _words(derive(torch.tensor(layer), torch.arange(num_heads))).to(device)


_key_names: WeakKeyDictionary[Reach, dict[tuple[TokenRanges, torch.device], Tensor]] = WeakKeyDictionary()


def key_names(reach: Reach, tokens: TokenRanges, device: torch.device) -> Tensor:
    """Names of the keys in a buffer that holds the source's tokens `tokens`, int32 [U] on `device`.

    One tensor per reach and buffer, shared by all layers.
    """
    known = _key_names.setdefault(reach, {})
    if (tokens, device) not in known:
        index_U = torch.from_numpy(token_indices(reach.source)).to(torch.int32)
        parts = [index_U[start:stop] for start, stop in tokens.ranges]
        # A buffer has at least one token, which nobody sees where none is needed.
        names_U = mix32_(torch.cat(parts)) if parts else torch.zeros(1, dtype=torch.int32)
        known[tokens, device] = names_U.to(device)
    return known[tokens, device]


def kept(dropout: Dropout, queries_2BT: Tensor, keys_BU: Tensor) -> Tensor:
    """Whether each query of each head keeps each key: bool [B, H, T, U].

    `queries_2BT` are names out of `dropout.queries_2BT`, `keys_BU` out of `key_names`.
    """
    rows_2BHT1 = mix32_(queries_2BT[:, :, None] ^ dropout.heads_2H[:, None, :, None])[..., None]
    x_BHTU = rows_2BHT1[0] ^ keys_BU[:, None, None]
    x_BHTU.bitwise_xor_(shifted(x_BHTU, 16, 32)).mul_(signed(FACTORS32[0], 32)).add_(rows_2BHT1[1])
    x_BHTU.bitwise_xor_(shifted(x_BHTU, 15, 32)).mul_(signed(FACTORS32[1], 32))
    # The order of unsigned numbers is that of signed ones with the highest bit turned.
    return x_BHTU.bitwise_xor_(signed(1 << 31, 32)) >= dropout.threshold - (1 << 31)


def _words(keys: Tensor) -> Tensor:
    """The low and the high half of int64, int32 [2, ...]."""
    return torch.stack((keys.to(torch.int32), (keys >> 32).to(torch.int32)))
