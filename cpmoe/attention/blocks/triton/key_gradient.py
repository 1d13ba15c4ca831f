"""Backward kernel of dK and dV, over key tiles; see query_gradient.py.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.attention.blocks.triton.common import (
    load_bounds,
    load_tile,
    sees,
    tanh,
)
from cpmoe.kernels.products import add_product, product, wide


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    shift_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    places_ptr,
    bounds_ptr,
    order_ptr,
    offsets_ptr,
    runs_ptr,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_g,
    v_stride_b,
    v_stride_t,
    v_stride_g,
    grad_out_stride_b,
    grad_out_stride_t,
    grad_out_stride_h,
    num_queries,
    num_keys,
    num_sums,
    num_heads,
    num_kv_heads,
    tiles_per_row,
    bounds_size,
    scale,
    softcap,
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
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """dK and dV of one key tile: BLOCK_N keys of one KV head, summed over its query heads in turn.

    places [U]: where a key's sums stand in dk and dv, which hold `num_sums` tokens, or -1 for nowhere.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.load(order_ptr + tl.program_id(0))
    batch = tile // tiles_per_row
    kv_head = tl.program_id(1)
    key = (tile % tiles_per_row) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_key = key < num_keys
    column_qk = tl.arange(0, WIDTH_QK)
    column_v = tl.arange(0, WIDTH_V)
    first_key = (tile % tiles_per_row) * BLOCK_N
    k = load_tile(
        k_ptr,
        batch,
        first_key,
        kv_head,
        k_stride_b,
        k_stride_t,
        k_stride_g,
        num_keys,
        BLOCK_N,
        SIZE_QK,
        WIDTH_QK,
        True,
        False,
    )
    v = load_tile(
        v_ptr,
        batch,
        first_key,
        kv_head,
        v_stride_b,
        v_stride_t,
        v_stride_g,
        num_keys,
        BLOCK_N,
        SIZE_V,
        WIDTH_V,
        True,
        False,
    )
    place = tl.load(places_ptr + key, mask=has_key, other=-1)
    sum_rows = ((wide(batch) * num_sums + place) * num_kv_heads + kv_head)[:, None]
    dv_pointers = dv_ptr + sum_rows * SIZE_V + column_v[None, :]
    dv_mask = (place >= 0)[:, None] & (column_v < SIZE_V)[None, :]
    dk = tl.zeros([BLOCK_N, WIDTH_QK], tl.float32)
    if CONTINUES:
        dv = tl.load(dv_pointers, mask=dv_mask, other=0.0)
    else:
        dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)

    factor = scale / softcap if SOFTCAP else scale * LOG2_E
    cap = softcap * LOG2_E
    first_full = tl.load(offsets_ptr + 2 * tile)
    first_masked = tl.load(offsets_ptr + 2 * tile + 1)
    end = tl.load(offsets_ptr + 2 * tile + 2)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for MASKED in tl.static_range(2):
            for run in range(first_masked if MASKED else first_full, end if MASKED else first_masked):
                for query_tile in range(tl.load(runs_ptr + 2 * run), tl.load(runs_ptr + 2 * run + 1)):
                    token = query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
                    valid = token < num_queries
                    first_row = (wide(batch) * num_heads + head) * num_queries + query_tile * BLOCK_M
                    row = tl.arange(0, BLOCK_M)
                    if MASKED:
                        shift = tl.load(shift_ptr + first_row + row, mask=valid, other=float("inf"))
                        delta = tl.load(delta_ptr + first_row + row, mask=valid, other=0.0)
                    else:
                        shift = tl.load(shift_ptr + first_row + row)
                        delta = tl.load(delta_ptr + first_row + row)
                    q = load_tile(
                        q_ptr,
                        batch,
                        query_tile * BLOCK_M,
                        head,
                        q_stride_b,
                        q_stride_t,
                        q_stride_h,
                        num_queries,
                        BLOCK_M,
                        SIZE_QK,
                        WIDTH_QK,
                        MASKED,
                        DESCRIPTORS,
                    )
                    scores = product(k, tl.trans(q), PRECISION, UPCAST) * factor
                    if SOFTCAP:
                        bent = tanh(scores)
                        scores = bent * cap
                    probs = tl.exp2(scores - shift[None, :])
                    if MASKED:
                        start, stop, sink_start, sink_stop = load_bounds(
                            bounds_ptr, wide(batch) * num_queries + token, valid, bounds_size, SINKS
                        )
                        visible = sees(
                            key[:, None],
                            start[None, :],
                            stop[None, :],
                            sink_start[None, :],
                            sink_stop[None, :],
                            SINKS,
                        )
                        probs = tl.where(visible, probs, 0.0)
                    grad_out = load_tile(
                        grad_out_ptr,
                        batch,
                        query_tile * BLOCK_M,
                        head,
                        grad_out_stride_b,
                        grad_out_stride_t,
                        grad_out_stride_h,
                        num_queries,
                        BLOCK_M,
                        SIZE_V,
                        WIDTH_V,
                        MASKED,
                        DESCRIPTORS,
                    )
                    dv = add_product(dv, probs.to(grad_out.dtype), grad_out, PRECISION, UPCAST)
                    dprobs = product(v, tl.trans(grad_out), PRECISION, UPCAST)
                    dscores = probs * (dprobs - delta[None, :])
                    if SOFTCAP:
                        dscores *= 1.0 - bent * bent
                    dk = add_product(dk, dscores.to(q.dtype), q, PRECISION, UPCAST)

    # Read again, so that the addresses of the sums occupy no registers during the loop.
    tile = tl.load(order_ptr + tl.program_id(0), volatile=True)
    key = (tile % tiles_per_row) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.load(places_ptr + key, mask=key < num_keys, other=-1)
    batch = tile // tiles_per_row
    sum_rows = ((wide(batch) * num_sums + place) * num_kv_heads + kv_head)[:, None]
    dv_pointers = dv_ptr + sum_rows * SIZE_V + column_v[None, :]
    tl.store(dv_pointers, dv, mask=(place >= 0)[:, None] & (column_v < SIZE_V)[None, :])
    dk_pointers = dk_ptr + sum_rows * SIZE_QK + column_qk[None, :]
    dk_mask = (place >= 0)[:, None] & (column_qk < SIZE_QK)[None, :]
    dk *= scale
    if CONTINUES:
        dk += tl.load(dk_pointers, mask=dk_mask, other=0.0)
    tl.store(dk_pointers, dk, mask=dk_mask)
