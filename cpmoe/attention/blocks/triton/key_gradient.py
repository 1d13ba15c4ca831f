"""Backward kernel of dK and dV, over key tiles; see query_gradient.py.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.attention.blocks.triton.common import (
    keeps,
    load_bounds,
    load_key_names,
    load_tile,
    probabilities,
    query_hashes,
    score_factors,
    score_gradient,
    sees,
    sums_at,
    tile_tokens,
    tile_visits,
)
from cpmoe.kernels.products import add_product, product, wide


@triton.jit
def dkv_kernel(
    q_ptr,
    q_strides,
    k_ptr,
    k_strides,
    v_ptr,
    v_strides,
    grad_out_ptr,
    grad_out_strides,
    shift_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    places_ptr,
    bounds_ptr,
    order_ptr,
    offsets_ptr,
    runs_ptr,
    num_queries,
    num_keys,
    num_sums,
    num_heads,
    num_kv_heads,
    tiles_per_row,
    bounds_size,
    scale,
    softcap,
    names,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIZE_QK: tl.constexpr,
    SIZE_V: tl.constexpr,
    WIDTH_QK: tl.constexpr,
    WIDTH_V: tl.constexpr,
    CONTINUES: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """dK and dV of one key tile: BLOCK_N keys of one KV head, summed over its query heads in turn.

    places [U]: where a key's sums stand in dk and dv, which hold `num_sums` tokens, or -1 for nowhere.
    """
    tile = tl.load(order_ptr + tl.program_id(0))
    batch, key, has_key = tile_tokens(tile, tiles_per_row, num_keys, BLOCK_N, 1)
    kv_head = tl.program_id(1)
    first_key = (tile % tiles_per_row) * BLOCK_N
    k = load_tile(
        k_ptr, k_strides, batch, first_key, kv_head, num_keys, BLOCK_N, SIZE_QK, WIDTH_QK, True, False
    )
    v = load_tile(
        v_ptr, v_strides, batch, first_key, kv_head, num_keys, BLOCK_N, SIZE_V, WIDTH_V, True, False
    )
    dk = tl.zeros([BLOCK_N, WIDTH_QK], tl.float32)
    if CONTINUES:
        place = tl.load(places_ptr + key, mask=has_key, other=-1)
        sum_rows = (wide(batch) * num_sums + place) * num_kv_heads + kv_head
        dv_pointers, dv_mask = sums_at(dv_ptr, sum_rows, place >= 0, SIZE_V, WIDTH_V)
        dv = tl.load(dv_pointers, mask=dv_mask, other=0.0)
    else:
        dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)

    KEPT: tl.constexpr = 1.0 - DROPOUT / 4294967296.0
    if DROPOUT:
        key_names = load_key_names(names, key, num_keys)
    factors = score_factors(scale, softcap, SOFTCAP)
    first_full, first_masked, end = tile_visits(offsets_ptr, tile)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for MASKED in tl.static_range(2):
            for run in range(first_masked if MASKED else first_full, end if MASKED else first_masked):
                for query_tile in range(tl.load(runs_ptr + 2 * run), tl.load(runs_ptr + 2 * run + 1)):
                    first = query_tile * BLOCK_M
                    row = tl.arange(0, BLOCK_M)
                    valid = first + row < num_queries
                    first_row = (wide(batch) * num_heads + head) * num_queries + first
                    if MASKED:
                        shift = tl.load(shift_ptr + first_row + row, mask=valid, other=float("inf"))
                        delta = tl.load(delta_ptr + first_row + row, mask=valid, other=0.0)
                    else:
                        shift = tl.load(shift_ptr + first_row + row)
                        delta = tl.load(delta_ptr + first_row + row)
                    if DROPOUT:
                        # exp2(s − shift) is now p / KEPT, which every term carries.
                        shift += tl.log2(tl.full([], KEPT, tl.float32))
                        delta *= KEPT
                    q = load_tile(
                        q_ptr,
                        q_strides,
                        batch,
                        first,
                        head,
                        num_queries,
                        BLOCK_M,
                        SIZE_QK,
                        WIDTH_QK,
                        MASKED,
                        DESCRIPTORS,
                    )
                    probs, slope = probabilities(k, q, factors, shift[None, :], SOFTCAP, PRECISION, UPCAST)
                    if MASKED:
                        index = wide(batch) * num_queries + first + row
                        bounds = load_bounds(bounds_ptr, index, valid, bounds_size, SINKS)
                        probs = tl.where(sees(bounds, key, 1, SINKS), probs, 0.0)
                    grad_out = load_tile(
                        grad_out_ptr,
                        grad_out_strides,
                        batch,
                        first,
                        head,
                        num_queries,
                        BLOCK_M,
                        SIZE_V,
                        WIDTH_V,
                        MASKED,
                        DESCRIPTORS,
                    )
                    kept_probs = probs
                    if DROPOUT:
                        index = wide(batch) * num_queries + first + row
                        hashes = query_hashes(names, index, head, valid, bounds_size, num_heads)
                        keep = keeps(hashes, key_names, 1, DROPOUT)
                        kept_probs = tl.where(keep, probs, 0.0)
                    dv = add_product(dv, kept_probs.to(grad_out.dtype), grad_out, PRECISION, UPCAST)
                    dprobs = product(v, tl.trans(grad_out), PRECISION, UPCAST)
                    if DROPOUT:
                        dprobs = tl.where(keep, dprobs, 0.0)
                    dscores = score_gradient(probs, slope, dprobs, delta[None, :], SOFTCAP)
                    dk = add_product(dk, dscores.to(q.dtype), q, PRECISION, UPCAST)

    # Read again, so that the addresses of the sums occupy no registers during the loop.
    tile = tl.load(order_ptr + tl.program_id(0), volatile=True)
    batch, key, has_key = tile_tokens(tile, tiles_per_row, num_keys, BLOCK_N, 1)
    place = tl.load(places_ptr + key, mask=has_key, other=-1)
    sum_rows = (wide(batch) * num_sums + place) * num_kv_heads + kv_head
    dv_pointers, dv_mask = sums_at(dv_ptr, sum_rows, place >= 0, SIZE_V, WIDTH_V)
    tl.store(dv_pointers, dv, mask=dv_mask)
    dk_pointers, dk_mask = sums_at(dk_ptr, sum_rows, place >= 0, SIZE_QK, WIDTH_QK)
    dk *= scale
    if CONTINUES:
        dk += tl.load(dk_pointers, mask=dk_mask, other=0.0)
    tl.store(dk_pointers, dk, mask=dk_mask)
