"""Which tiles of the score matrix a kernel visits, and which of them need no mask.

Built once per hop and tile size, shared by all layers and heads. All numpy, no loop over tiles.

Shape letters: B batch, T queries, C bounds of a span, M query tiles and N key tiles of one batch row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cpmoe.attention.spans import KeySpans

EMPTY, FULL, MASKED = 0, 1, 2


@dataclass(frozen=True)
class TileLists:
    """For each tile of one side ("own"), the runs of neighbouring tiles of the other side to visit.

    Own tiles are numbered batch row by batch row. int32, on the device of the kernels:

    order    [B · own]          own tiles: those with anything to visit first, in order of batch row and, in
                                it, longest first
    offsets  [2 · B · own + 1]  runs[offsets[2i] : offsets[2i + 1]] are the full runs of tile i,
                                runs[offsets[2i + 1] : offsets[2i + 2]] the masked ones
    runs     [runs, 2]          first tile, and one past the last
    """

    order: Tensor
    offsets: Tensor
    runs: Tensor
    num_active: int
    tiles_per_row: int


def bounds_tensor(spans: KeySpans, device: torch.device) -> Tensor:
    """int32 [C, B, T] on `device`: start, stop, and where there are sinks their start and stop."""
    key = ("bounds", device)
    if key not in spans.derived:
        spans.derived[key] = torch.stack(spans.bounds()).to(device)
    return spans.derived[key]


def tile_lists(
    spans: KeySpans, query_tile: int, key_tile: int, by_key: bool, device: torch.device
) -> TileLists:
    """The lists of tiles of `query_tile` queries and `key_tile` keys, per query tile or per key tile.

    A full tile needs no mask: every query that exists sees every key. Per key tile, the last query tile is
    full only if all its queries exist, so that a kernel that walks over full tiles checks no edge.
    """
    key = ("tiles", query_tile, key_tile, by_key, device)
    if key not in spans.derived:
        kind_BMN = tile_kinds(spans, query_tile, key_tile)
        if by_key:
            if spans.start_BT.shape[1] % query_tile:
                kind_BMN[:, -1][kind_BMN[:, -1] == FULL] = MASKED
            kind_BMN = np.ascontiguousarray(kind_BMN.transpose(0, 2, 1))
        spans.derived[key] = _lists(kind_BMN, device)
    return spans.derived[key]


def tile_kinds(spans: KeySpans, query_tile: int, key_tile: int) -> np.ndarray:
    """int8 [B, M, N]: EMPTY, FULL or MASKED."""
    batch_size, num_queries = spans.start_BT.shape
    num_rows, num_key_tiles = -(-num_queries // query_tile), -(-spans.num_keys // key_tile)
    tile_BT = np.arange(batch_size)[:, None] * num_rows + np.arange(num_queries) // query_tile
    bounds = [bound_BT.numpy() for bound_BT in spans.bounds()]
    change = np.zeros((batch_size * num_rows, num_key_tiles + 1), dtype=np.int16)
    kind = np.zeros((batch_size * num_rows, num_key_tiles), dtype=np.int8)
    position_N = np.arange(num_key_tiles)
    for start_BT, stop_BT in zip(bounds[::2], bounds[1::2], strict=True):
        seen_BT = start_BT < stop_BT
        rows = tile_BT[seen_BT]
        np.add.at(change, (rows, start_BT[seen_BT] // key_tile), 1)
        np.add.at(change, (rows, -(-stop_BT[seen_BT] // key_tile)), -1)
        first = np.zeros(len(kind), dtype=np.int64)
        last = np.full(len(kind), num_key_tiles)
        np.maximum.at(first, tile_BT.ravel(), -(-start_BT.ravel() // key_tile))
        np.minimum.at(last, tile_BT.ravel(), stop_BT.ravel() // key_tile)
        kind |= (position_N >= first[:, None]) & (position_N < last[:, None])
    visited = change[:, :-1].cumsum(axis=1, dtype=np.int16) > 0
    kind[visited & (kind == EMPTY)] = MASKED
    return kind.reshape(batch_size, num_rows, num_key_tiles)


def _lists(kind: np.ndarray, device: torch.device) -> TileLists:
    batch_size, tiles_per_row, width = kind.shape
    num_tiles = batch_size * tiles_per_row
    # A run starts and ends where the kind changes; a border of EMPTY closes each row.
    bordered = np.zeros((num_tiles, width + 2), dtype=np.int8)
    bordered[:, 1:-1] = kind.reshape(num_tiles, width)
    flat = bordered.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    starts, stops = edges[flat[edges] != EMPTY], edges[flat[edges - 1] != EMPTY]
    list_of_run = starts // (width + 2) * 2 + (flat[starts] == MASKED)
    by_list = np.argsort(list_of_run, kind="stable")
    runs = (np.stack((starts, stops), axis=1) % (width + 2) - 1)[by_list]
    offsets = np.concatenate(([0], np.bincount(list_of_run, minlength=2 * num_tiles).cumsum()))
    work = (bordered != EMPTY).sum(axis=1)
    row = np.arange(num_tiles) // tiles_per_row
    order = np.lexsort((-work, row, work == 0))

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device)

    return TileLists(
        on_device(order), on_device(offsets), on_device(runs), int((work > 0).sum()), tiles_per_row
    )
