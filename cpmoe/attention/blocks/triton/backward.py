"""Backward kernels: delta once, then per hop dQ over query tiles and dK, dV over key tiles.

FlashAttention-2 (arXiv 2307.08691, algorithm 2) split in two, so that every sum is kept by one program in
one order: no atomics, and two runs give the same bits. The global logsumexp and delta make the gradient of
one hop exact by itself; the float32 sums continue those of earlier hops.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.attention.blocks.triton.common import (
    add_product,
    load_bounds,
    load_rows,
    product,
    sees,
    tanh,
    wide,
)


@triton.jit
def delta_kernel(
    grad_out_ptr,
    out_ptr,
    delta_ptr,
    grad_out_stride_b,
    grad_out_stride_t,
    grad_out_stride_h,
    out_stride_b,
    out_stride_t,
    out_stride_h,
    num_queries,
    num_heads,
    BLOCK_M: tl.constexpr,
    SIZE_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
):
    """delta [B, T, H] = rowsum(dO · O); a program takes BLOCK_M tokens of one head."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    valid = token < num_queries
    column = tl.arange(0, WIDTH_V)
    rows = token.to(tl.int64)
    PADDED: tl.constexpr = WIDTH_V != SIZE_V
    grad_out_base = grad_out_ptr + batch * grad_out_stride_b + head * grad_out_stride_h
    out_base = out_ptr + batch * out_stride_b + head * out_stride_h
    grad_out = load_rows(grad_out_base, rows * grad_out_stride_t, column, valid, PADDED, True, SIZE_V)
    out = load_rows(out_base, rows * out_stride_t, column, valid, PADDED, True, SIZE_V)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + (batch * num_queries + rows) * num_heads + head, delta, mask=valid)


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
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
    num_heads,
    tiles_per_row,
    bounds_size,
    scale,
    softcap,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
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
):
    """dQ of one query tile, laid out as in the forward kernel."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.load(order_ptr + tl.program_id(0))
    batch = (tile // tiles_per_row).to(tl.int64)
    first_head = tl.program_id(1) * PACK
    kv_head = (first_head // GROUP).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    token = (tile % tiles_per_row) * (BLOCK_M // PACK) + row // PACK
    head = first_head + row % PACK
    valid = token < num_queries
    column_qk = tl.arange(0, WIDTH_QK)
    column_v = tl.arange(0, WIDTH_V)
    PADDED_QK: tl.constexpr = WIDTH_QK != SIZE_QK
    PADDED_V: tl.constexpr = WIDTH_V != SIZE_V

    token_64 = token.to(tl.int64)
    head_64 = head.to(tl.int64)
    q_rows = token_64 * q_stride_t + head_64 * q_stride_h
    q = load_rows(q_ptr + batch * q_stride_b, q_rows, column_qk, valid, PADDED_QK, True, SIZE_QK)
    grad_out_rows = token_64 * grad_out_stride_t + head_64 * grad_out_stride_h
    grad_out_base = grad_out_ptr + batch * grad_out_stride_b
    grad_out = load_rows(grad_out_base, grad_out_rows, column_v, valid, PADDED_V, True, SIZE_V)
    index = batch * num_queries + token
    start, stop, sink_start, sink_stop = load_bounds(bounds_ptr, index, valid, bounds_size, SINKS)

    state_rows = index * num_heads + head
    lse = tl.load(lse_ptr + state_rows, mask=valid, other=float("-inf"))
    # exp2(s − shift) is p · scale, which every term of dQ carries; 0 for queries that saw nothing.
    shift = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E - tl.log2(scale))
    delta = tl.load(delta_ptr + state_rows, mask=valid, other=0.0)
    dq_pointers = dq_ptr + state_rows[:, None] * SIZE_QK + column_qk[None, :]
    if CONTINUES:
        dq = tl.load(dq_pointers, mask=valid[:, None] & (column_qk < SIZE_QK)[None, :], other=0.0)
    else:
        dq = tl.zeros([BLOCK_M, WIDTH_QK], tl.float32)

    k_base = k_ptr + batch * k_stride_b + kv_head * k_stride_g
    v_base = v_ptr + batch * v_stride_b + kv_head * v_stride_g
    factor = scale / softcap if SOFTCAP else scale * LOG2_E
    cap = softcap * LOG2_E
    first_full = tl.load(offsets_ptr + 2 * tile)
    first_masked = tl.load(offsets_ptr + 2 * tile + 1)
    end = tl.load(offsets_ptr + 2 * tile + 2)
    for MASKED in tl.static_range(2):
        for run in range(first_masked if MASKED else first_full, end if MASKED else first_masked):
            for key_tile in range(tl.load(runs_ptr + 2 * run), tl.load(runs_ptr + 2 * run + 1)):
                key = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                has_key = key < num_keys
                offset = tl.arange(0, BLOCK_N)
                tile_start = wide(key_tile * BLOCK_N)
                k_tile = k_base + tile_start * k_stride_t
                v_tile = v_base + tile_start * v_stride_t
                k = load_rows(k_tile, offset * k_stride_t, column_qk, has_key, PADDED_QK, MASKED, SIZE_QK)
                scores = product(q, tl.trans(k), PRECISION, UPCAST) * factor
                if SOFTCAP:
                    bent = tanh(scores)
                    scores = bent * cap
                probs = tl.exp2(scores - shift[:, None])
                if MASKED:
                    visible = sees(
                        key[None, :],
                        start[:, None],
                        stop[:, None],
                        sink_start[:, None],
                        sink_stop[:, None],
                        SINKS,
                    )
                    probs = tl.where(visible, probs, 0.0)
                v = load_rows(v_tile, offset * v_stride_t, column_v, has_key, PADDED_V, MASKED, SIZE_V)
                dprobs = product(grad_out, tl.trans(v), PRECISION, UPCAST)
                dscores = probs * (dprobs - delta[:, None])
                if SOFTCAP:
                    dscores *= 1.0 - bent * bent
                dq = add_product(dq, dscores.to(k.dtype), k, PRECISION, UPCAST)
    # Read again, so that the addresses of the sums occupy no registers during the loop.
    tile = tl.load(order_ptr + tl.program_id(0), volatile=True)
    token = (tile % tiles_per_row) * (BLOCK_M // PACK) + row // PACK
    valid = token < num_queries
    state_rows = ((tile // tiles_per_row).to(tl.int64) * num_queries + token) * num_heads + head
    dq_pointers = dq_ptr + state_rows[:, None] * SIZE_QK + column_qk[None, :]
    tl.store(dq_pointers, dq, mask=valid[:, None] & (column_qk < SIZE_QK)[None, :])


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
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
):
    """dK and dV of one key tile: BLOCK_N keys of one KV head, summed over its query heads in turn.

    places [U]: where a key's sums stand in dk and dv, which hold `num_sums` tokens, or -1 for nowhere.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.load(order_ptr + tl.program_id(0))
    batch = (tile // tiles_per_row).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    key = (tile % tiles_per_row) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_key = key < num_keys
    column_qk = tl.arange(0, WIDTH_QK)
    column_v = tl.arange(0, WIDTH_V)
    PADDED_QK: tl.constexpr = WIDTH_QK != SIZE_QK
    PADDED_V: tl.constexpr = WIDTH_V != SIZE_V

    key_64 = key.to(tl.int64)
    k_base = k_ptr + batch * k_stride_b + kv_head * k_stride_g
    v_base = v_ptr + batch * v_stride_b + kv_head * v_stride_g
    k = load_rows(k_base, key_64 * k_stride_t, column_qk, has_key, PADDED_QK, True, SIZE_QK)
    v = load_rows(v_base, key_64 * v_stride_t, column_v, has_key, PADDED_V, True, SIZE_V)
    place = tl.load(places_ptr + key, mask=has_key, other=-1)
    sum_rows = ((batch * num_sums + place) * num_kv_heads + kv_head)[:, None]
    dv_pointers = dv_ptr + sum_rows * SIZE_V + column_v[None, :]
    dv_mask = (place >= 0)[:, None] & (column_v < SIZE_V)[None, :]
    dk = tl.zeros([BLOCK_N, WIDTH_QK], tl.float32)
    if CONTINUES:
        dv = tl.load(dv_pointers, mask=dv_mask, other=0.0)
    else:
        dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)

    factor = scale / softcap if SOFTCAP else scale * LOG2_E
    cap = softcap * LOG2_E
    offset = tl.arange(0, BLOCK_M)
    first_full = tl.load(offsets_ptr + 2 * tile)
    first_masked = tl.load(offsets_ptr + 2 * tile + 1)
    end = tl.load(offsets_ptr + 2 * tile + 2)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        q_base = q_ptr + batch * q_stride_b + head * q_stride_h
        grad_out_base = grad_out_ptr + batch * grad_out_stride_b + head * grad_out_stride_h
        for MASKED in tl.static_range(2):
            for run in range(first_masked if MASKED else first_full, end if MASKED else first_masked):
                for query_tile in range(tl.load(runs_ptr + 2 * run), tl.load(runs_ptr + 2 * run + 1)):
                    token = query_tile * BLOCK_M + offset
                    valid = token < num_queries
                    tile_start = wide(query_tile * BLOCK_M)
                    q_tile = q_base + tile_start * q_stride_t
                    grad_out_tile = grad_out_base + tile_start * grad_out_stride_t
                    state_rows = (batch * num_queries + token) * num_heads + head
                    if MASKED:
                        lse = tl.load(lse_ptr + state_rows, mask=valid, other=float("-inf"))
                        delta = tl.load(delta_ptr + state_rows, mask=valid, other=0.0)
                    else:
                        lse = tl.load(lse_ptr + state_rows)
                        delta = tl.load(delta_ptr + state_rows)
                    shift = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
                    q = load_rows(q_tile, offset * q_stride_t, column_qk, valid, PADDED_QK, MASKED, SIZE_QK)
                    scores = product(k, tl.trans(q), PRECISION, UPCAST) * factor
                    if SOFTCAP:
                        bent = tanh(scores)
                        scores = bent * cap
                    probs = tl.exp2(scores - shift[None, :])
                    if MASKED:
                        start, stop, sink_start, sink_stop = load_bounds(
                            bounds_ptr, batch * num_queries + token, valid, bounds_size, SINKS
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
                    grad_out = load_rows(
                        grad_out_tile,
                        offset * grad_out_stride_t,
                        column_v,
                        valid,
                        PADDED_V,
                        MASKED,
                        SIZE_V,
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
    batch = (tile // tiles_per_row).to(tl.int64)
    sum_rows = ((batch * num_sums + place) * num_kv_heads + kv_head)[:, None]
    dv_pointers = dv_ptr + sum_rows * SIZE_V + column_v[None, :]
    tl.store(dv_pointers, dv, mask=(place >= 0)[:, None] & (column_v < SIZE_V)[None, :])
    dk_pointers = dk_ptr + sum_rows * SIZE_QK + column_qk[None, :]
    dk_mask = (place >= 0)[:, None] & (column_qk < SIZE_QK)[None, :]
    dk *= scale
    if CONTINUES:
        dk += tl.load(dk_pointers, mask=dk_mask, other=0.0)
    tl.store(dk_pointers, dk, mask=dk_mask)
