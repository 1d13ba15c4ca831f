"""Which probabilities dropout keeps: the formulas of `cpmoe.attention.dropout` in integers that cannot wrap.

Shape letters: B batch, T queries, U keys, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
LOW = np.uint64(2**32 - 1)


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _derive(key: int, number: int) -> int:
    return _mix64((_mix64(key % 2**64) + number * GOLDEN) % 2**64)


def _mix32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x21F0AAAD) & LOW
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0xD35A2D97) & LOW
    return x ^ (x >> np.uint64(15))


def _unsigned(x: Tensor) -> np.ndarray:
    return x.numpy().astype(np.uint64) & LOW


def twin_kept(rate: float, queries_2BT: Tensor, heads_2H: Tensor, keys_U: Tensor) -> Tensor:
    """bool [B, H, T, U] from the names of queries, heads and keys."""
    queries, heads, keys = (_unsigned(x.cpu()) for x in (queries_2BT, heads_2H, keys_U))
    first, second = _mix32(queries[:, :, None] ^ heads[:, None, :, None])[..., None]
    x = first ^ keys
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x21F0AAAD) + second) & LOW
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0xD35A2D97) & LOW
    return torch.from_numpy(x >= np.uint64(round(rate * 2**32)))


def twin_mask(
    rate: float, seed: int, layer: int, sequences: Sequence[int], num_heads: int, seq_len: int
) -> Tensor:
    """bool [B, H, S, S]: which keys each query of whole sequences keeps."""

    def words(numbers: list) -> Tensor:
        keys = np.array(numbers, dtype=np.uint64)
        return torch.from_numpy(np.stack((keys & LOW, keys >> np.uint64(32))).astype(np.int64))

    rows = [_derive(sequence, seed) for sequence in sequences]
    queries = words([[_derive(row, place) for place in range(seq_len)] for row in rows])
    heads = words([_derive(layer, head) for head in range(num_heads)])
    keys = torch.from_numpy(_mix32(np.arange(seq_len, dtype=np.uint64)).astype(np.int64))
    return twin_kept(rate, queries, heads, keys)
