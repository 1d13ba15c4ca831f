"""Random numbers as pure functions of counters: no layout, order of layers or recomputation changes a draw.

A generator that advances gives a token another number wherever its rank, slice or place in memory is
another. Here a number follows from a seed and from which token of which sequence it is for.

Shape letters: B sequences, T local tokens, C numbers for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
# Of the 32-bit finaliser: Wellons, "hash prospector", 2018.
FACTORS32 = (0x21F0AAAD, 0xD35A2D97)


def token_keys(seed: int, sequences_B: Tensor, index_T: Tensor) -> Tensor:
    """A 64-bit key for each token, int64 [B, T].

    `sequences_B` int64 [B]: the number of each sequence in the data; `index_T` int64 [T]: the place of each
    local token in its whole sequence.
    """
    rows_B1 = derive(sequences_B[:, None], seed)
    return derive(rows_B1, index_T[None])


def derive(keys: Tensor, number: int | Tensor) -> Tensor:
    """New keys int64 of the same shape, independent for each `number`: one for each layer and use, say."""
    return _mix64(_mix64(keys) + torch.as_tensor(number) * signed(_GOLDEN))


def uniform(keys_T: Tensor, count: int) -> Tensor:
    """`count` numbers for each key, uniform in [0, 1) with 24 bits: float32 [T, C].

    Two rounds of a 32-bit finaliser over (key, column).
    """
    low_T1, high_T1 = keys_T[:, None].to(torch.int32), (keys_T[:, None] >> 32).to(torch.int32)
    columns_C = torch.arange(count, dtype=torch.int32, device=keys_T.device)
    bits_TC = mix32_(low_T1 ^ (columns_C * signed(_GOLDEN >> 32, 32)))
    bits_TC = mix32_(bits_TC.add_(high_T1))
    return bits_TC.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al., 2014), a bijection of the 64-bit integers."""
    x = (x ^ shifted(x, 30, 64)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27, 64)) * signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31, 64)


def mix32_(x: Tensor) -> Tensor:
    """A finaliser, a bijection of the 32-bit integers: in place, int32."""
    for shift, factor in zip((16, 15), FACTORS32, strict=True):
        x.bitwise_xor_(shifted(x, shift, 32)).mul_(signed(factor, 32))
    return x.bitwise_xor_(shifted(x, 15, 32))


def shifted(x: Tensor, shift: int, bits: int) -> Tensor:
    """x >> shift as of an unsigned number; torch shifts the sign in."""
    return (x >> shift).bitwise_and_((1 << (bits - shift)) - 1)


def signed(value: int, bits: int = 64) -> int:
    """The signed number of the same low bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
