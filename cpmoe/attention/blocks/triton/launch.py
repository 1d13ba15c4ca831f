"""From tensors to kernel calls: arguments, grid and configuration, for running and for compiling ahead.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cpmoe.attention.blocks.triton.configs import ROWS, KernelName, Tiles, tiles_for
from cpmoe.attention.blocks.triton.forward import forward_kernel
from cpmoe.attention.blocks.triton.key_gradient import dkv_kernel
from cpmoe.attention.blocks.triton.query_gradient import dq_kernel, rows_kernel
from cpmoe.attention.blocks.triton.tiles import TileLists, bounds_tensor, tile_lists
from cpmoe.attention.scores import Scores
from cpmoe.attention.spans import KeySpans
from cpmoe.kernels.architectures import Architecture
from cpmoe.kernels.launch import Launch

# Which query heads of one KV head share a tile: enough for the tiles of short documents to be full.
MAX_PACK = 4


@dataclass(frozen=True)
class Problem:
    """What all kernels of one hop share.

    q [B, T, H, D], k [B, U, G, D], v [B, U, G, Dv], last stride 1. `precision`: how float32 is multiplied,
    ieee or tf32. `descriptors`: loops load through tensor descriptors (TMA); the tensors must fit
    (`fits_descriptor`). `key_names`: int32 [U] of `dropout.key_names`, where `scores` have dropout.
    """

    q_BTHD: Tensor
    k_BUGD: Tensor
    v_BUGD: Tensor
    spans: KeySpans
    scores: Scores
    precision: str
    architecture: Architecture
    descriptors: bool
    key_names: Tensor | None = None

    def forward(self, out_BTHD: Tensor, lse_BTH: Tensor, continues: bool) -> Launch:
        """Continues `out` and `lse` (float32, contiguous), or writes all of them."""
        tiles, pack = self._tiles("forward"), self._pack()
        lists = self._lists(tiles, pack, by_key=False)
        arguments = {
            "q_ptr": self.q_BTHD,
            **self._keys(tiles),
            "out_ptr": out_BTHD,
            "lse_ptr": lse_BTH,
            **self._visits(lists),
            **self._strides(),
            **self._sizes(lists),
        }
        grid = self._grid_of_queries(lists, pack, continues)
        return Launch(forward_kernel, grid, arguments, self._constants(tiles, continues, pack), tiles)

    def dq(self, grad_out_BTHD: Tensor, rows_2BHT: Tensor, dq: Tensor, continues: bool) -> Launch:
        """Adds to `dq` (float32, contiguous), or writes all of it."""
        tiles, pack = self._tiles("dq"), self._pack()
        lists = self._lists(tiles, pack, by_key=False)
        arguments = {
            "q_ptr": self.q_BTHD,
            **self._keys(tiles),
            "grad_out_ptr": grad_out_BTHD,
            "shift_ptr": rows_2BHT[0],
            "delta_ptr": rows_2BHT[1],
            "dq_ptr": dq,
            **self._visits(lists),
            **self._strides(),
            "grad_out_strides": _strides(grad_out_BTHD),
            **self._sizes(lists),
        }
        grid = self._grid_of_queries(lists, pack, continues)
        return Launch(dq_kernel, grid, arguments, self._constants(tiles, continues, pack), tiles)

    def dkv(
        self,
        grad_out_BTHD: Tensor,
        rows_2BHT: Tensor,
        dk: Tensor,
        dv: Tensor,
        places_U: Tensor,
        continues: bool,
    ) -> Launch:
        """Adds to `dk`, `dv` (float32, contiguous) at the tokens `places`, or writes all of those."""
        tiles = self._tiles("dkv")
        lists = self._lists(tiles, 1, by_key=True)
        arguments = {
            "q_ptr": self._source(self.q_BTHD, tiles.block_m),
            "k_ptr": self.k_BUGD,
            "v_ptr": self.v_BUGD,
            "grad_out_ptr": self._source(grad_out_BTHD, tiles.block_m),
            "shift_ptr": rows_2BHT[0],
            "delta_ptr": rows_2BHT[1],
            "dk_ptr": dk,
            "dv_ptr": dv,
            "places_ptr": places_U,
            **self._visits(lists),
            **self._strides(),
            "grad_out_strides": _strides(grad_out_BTHD),
            **self._sizes(lists),
            "num_sums": dk.shape[1],
            "num_kv_heads": self.k_BUGD.shape[2],
        }
        num_tiles = lists.num_active if continues else len(lists.order)
        grid = (num_tiles, self.k_BUGD.shape[2])
        return Launch(dkv_kernel, grid, arguments, self._constants(tiles, continues), tiles)

    def _tiles(self, kernel: KernelName) -> Tiles:
        width = max(_width(self.q_BTHD), _width(self.v_BUGD))
        dtype = self.q_BTHD.dtype
        has_softcap = self.scores.softcap > 0
        return tiles_for(
            kernel, self.architecture, width, dtype, self.precision, self.descriptors, has_softcap
        )

    def _pack(self) -> int:
        group = self._group()
        return min(group & -group, MAX_PACK)

    def _group(self) -> int:
        return self.q_BTHD.shape[2] // self.k_BUGD.shape[2]

    def _lists(self, tiles: Tiles, pack: int, by_key: bool) -> TileLists:
        return tile_lists(self.spans, tiles.block_m // pack, tiles.block_n, by_key, self.q_BTHD.device)

    def _grid_of_queries(self, lists: TileLists, pack: int, continues: bool) -> tuple[int, int]:
        return lists.num_active if continues else len(lists.order), self.q_BTHD.shape[2] // pack

    def _keys(self, tiles: Tiles) -> dict[str, Tensor | TensorDescriptor]:
        return {
            name: self._source(x, tiles.block_n)
            for name, x in (("k_ptr", self.k_BUGD), ("v_ptr", self.v_BUGD))
        }

    def _source(self, x: Tensor, num_rows: int) -> Tensor | TensorDescriptor:
        """What a loop loads [num_rows, D] tiles from."""
        if not self.descriptors:
            return x
        return TensorDescriptor.from_tensor(x, [1, num_rows, 1, _width(x)])

    def _visits(self, lists: TileLists) -> dict[str, Tensor]:
        return {
            "bounds_ptr": bounds_tensor(self.spans, self.q_BTHD.device),
            "order_ptr": lists.order,
            "offsets_ptr": lists.offsets,
            "runs_ptr": lists.runs,
        }

    def _strides(self) -> dict[str, tuple[int, ...]]:
        return {
            "q_strides": _strides(self.q_BTHD),
            "k_strides": _strides(self.k_BUGD),
            "v_strides": _strides(self.v_BUGD),
        }

    def _sizes(self, lists: TileLists) -> dict[str, Any]:
        batch_size, num_queries, num_heads, _ = self.q_BTHD.shape
        return {
            "num_queries": num_queries,
            "num_keys": self.k_BUGD.shape[1],
            "num_heads": num_heads,
            "tiles_per_row": lists.tiles_per_row,
            "bounds_size": batch_size * num_queries,
            "scale": self.scores.scale,
            "softcap": self.scores.softcap,
            "names": self._names(),
        }

    def _names(self) -> tuple[Tensor, ...] | None:
        """Names of queries [2, B, T], query heads [2, H] and keys [U]."""
        if self.scores.dropout is None or self.key_names is None:
            return None
        return self.scores.dropout.queries_2BT, self.scores.dropout.heads_2H, self.key_names

    def _constants(self, tiles: Tiles, continues: bool, pack: int | None = None) -> dict[str, Any]:
        packing = {} if pack is None else {"PACK": pack}
        return {
            "GROUP": self._group(),
            **packing,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "SIZE_QK": self.q_BTHD.shape[3],
            "SIZE_V": self.v_BUGD.shape[3],
            "WIDTH_QK": _width(self.q_BTHD),
            "WIDTH_V": _width(self.v_BUGD),
            "CONTINUES": continues,
            "SINKS": self.spans.sink_start_BT is not None,
            "SOFTCAP": self.scores.softcap > 0,
            "DROPOUT": 0 if self.scores.dropout is None else self.scores.dropout.threshold,
            "PRECISION": self.precision,
            "DESCRIPTORS": self.descriptors,
            "UPCAST": self.architecture == "interpreter" and self.q_BTHD.dtype == torch.bfloat16,
        }


def query_rows(grad_out_BTHD: Tensor, out_BTHD: Tensor, lse_BTH: Tensor, rows_2BHT: Tensor) -> Launch:
    """Writes what `dq` and `dkv` want of each row to `rows` (float32, contiguous)."""
    batch_size, num_queries, num_heads, size = out_BTHD.shape
    arguments = {
        "grad_out_ptr": grad_out_BTHD,
        "out_ptr": out_BTHD,
        "lse_ptr": lse_BTH,
        "shift_ptr": rows_2BHT[0],
        "delta_ptr": rows_2BHT[1],
        "grad_out_strides": _strides(grad_out_BTHD),
        "out_strides": _strides(out_BTHD),
        "num_queries": num_queries,
        "num_heads": num_heads,
    }
    constants = {"BLOCK_M": ROWS.block_m, "SIZE_V": size, "WIDTH_V": _width(out_BTHD)}
    grid = (triton.cdiv(num_queries, ROWS.block_m), batch_size * num_heads)
    return Launch(rows_kernel, grid, arguments, constants, ROWS)


def fits_descriptor(*tensors: Tensor) -> bool:
    """Whether TMA can load them: 16-bit, and rows that start at multiples of 16 bytes."""
    return all(
        x.dtype != torch.float32
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def _width(x: Tensor) -> int:
    """The head size as the power of 2 that a product wants, at least 16."""
    return max(16, triton.next_power_of_2(x.shape[3]))


def _strides(x: Tensor) -> tuple[int, ...]:
    """Of batch row, token and head; that of the head dim is 1."""
    return x.stride()[:3]
