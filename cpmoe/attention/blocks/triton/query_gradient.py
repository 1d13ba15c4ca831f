"""Backward kernels: delta once, then per hop dQ over query tiles; dK and dV stand in key_gradient.py.

FlashAttention-2 (arXiv 2307.08691, algorithm 2) split in two, so that every sum is kept by one program in
one order: no atomics, and two runs give the same bits. The global logsumexp and delta make the gradient of
one hop exact by itself; the float32 sums continue those of earlier hops.

Shape letters: B batch, T queries, U keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.attention.blocks.triton.common import (
    load_bounds,
    load_rows,
    load_tile,
    sees,
    tanh,
)
from cpmoe.kernels.products import add_product, product, wide


@triton.jit
def rows_kernel(
    grad_out_ptr,
    out_ptr,
    lse_ptr,
    shift_ptr,
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
    """What the gradients want of each query row, [B, H, T]; a program takes BLOCK_M tokens of one head.

    shift  logsumexp in units of log2(e), so that exp2(s − shift) is the probability; +inf where the query saw
           nothing, which makes it 0
    delta  rowsum(dO · O)
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    valid = token < num_queries
    column = tl.arange(0, WIDTH_V)
    row = token.to(tl.int64)
    grad_out_rows = (
        grad_out_ptr + batch * grad_out_stride_b + head * grad_out_stride_h + row * grad_out_stride_t
    )
    out_rows = out_ptr + batch * out_stride_b + head * out_stride_h + row * out_stride_t
    grad_out = load_rows(grad_out_rows[:, None], column, valid, WIDTH_V != SIZE_V, True, SIZE_V)
    out = load_rows(out_rows[:, None], column, valid, WIDTH_V != SIZE_V, True, SIZE_V)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + (batch * num_queries + row) * num_heads + head, mask=valid, other=0.0)
    shift = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    place = (batch * num_heads + head) * num_queries + row
    tl.store(delta_ptr + place, delta, mask=valid)
    tl.store(shift_ptr + place, shift, mask=valid)


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    shift_ptr,
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
    DESCRIPTORS: tl.constexpr,
):
    """dQ of one query tile, laid out as in the forward kernel."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.load(order_ptr + tl.program_id(0))
    batch = tile // tiles_per_row
    first_head = tl.program_id(1) * PACK
    kv_head = first_head // GROUP
    row = tl.arange(0, BLOCK_M)
    token = (tile % tiles_per_row) * (BLOCK_M // PACK) + row // PACK
    head = first_head + row % PACK
    valid = token < num_queries
    column_qk = tl.arange(0, WIDTH_QK)
    column_v = tl.arange(0, WIDTH_V)

    batch_64 = wide(batch)
    token_64 = token.to(tl.int64)
    head_64 = head.to(tl.int64)
    q_rows = q_ptr + batch_64 * q_stride_b + token_64 * q_stride_t + head_64 * q_stride_h
    q = load_rows(q_rows[:, None], column_qk, valid, WIDTH_QK != SIZE_QK, True, SIZE_QK)
    grad_out_rows = grad_out_ptr + batch_64 * grad_out_stride_b + token_64 * grad_out_stride_t
    grad_out_rows += head_64 * grad_out_stride_h
    grad_out = load_rows(grad_out_rows[:, None], column_v, valid, WIDTH_V != SIZE_V, True, SIZE_V)
    index = batch_64 * num_queries + token
    start, stop, sink_start, sink_stop = load_bounds(bounds_ptr, index, valid, bounds_size, SINKS)

    state_rows = index * num_heads + head
    place = (batch_64 * num_heads + head) * num_queries + token
    # exp2(s − shift) is now p · scale, which every term of dQ carries.
    shift = tl.load(shift_ptr + place, mask=valid, other=float("inf")) - tl.log2(scale)
    delta = tl.load(delta_ptr + place, mask=valid, other=0.0)
    dq_pointers = dq_ptr + state_rows[:, None] * SIZE_QK + column_qk[None, :]
    if CONTINUES:
        dq = tl.load(dq_pointers, mask=valid[:, None] & (column_qk < SIZE_QK)[None, :], other=0.0)
    else:
        dq = tl.zeros([BLOCK_M, WIDTH_QK], tl.float32)

    factor = scale / softcap if SOFTCAP else scale * LOG2_E
    cap = softcap * LOG2_E
    first_full = tl.load(offsets_ptr + 2 * tile)
    first_masked = tl.load(offsets_ptr + 2 * tile + 1)
    end = tl.load(offsets_ptr + 2 * tile + 2)
    for MASKED in tl.static_range(2):
        for run in range(first_masked if MASKED else first_full, end if MASKED else first_masked):
            for key_tile in range(tl.load(runs_ptr + 2 * run), tl.load(runs_ptr + 2 * run + 1)):
                key = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                k = load_tile(
                    k_ptr,
                    batch,
                    key_tile * BLOCK_N,
                    kv_head,
                    k_stride_b,
                    k_stride_t,
                    k_stride_g,
                    num_keys,
                    BLOCK_N,
                    SIZE_QK,
                    WIDTH_QK,
                    MASKED,
                    DESCRIPTORS,
                )
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
                v = load_tile(
                    v_ptr,
                    batch,
                    key_tile * BLOCK_N,
                    kv_head,
                    v_stride_b,
                    v_stride_t,
                    v_stride_g,
                    num_keys,
                    BLOCK_N,
                    SIZE_V,
                    WIDTH_V,
                    MASKED,
                    DESCRIPTORS,
                )
                dprobs = product(grad_out, tl.trans(v), PRECISION, UPCAST)
                dscores = probs * (dprobs - delta[:, None])
                if SOFTCAP:
                    dscores *= 1.0 - bent * bent
                dq = add_product(dq, dscores.to(k.dtype), k, PRECISION, UPCAST)
    # Read again, so that the addresses of the sums occupy no registers during the loop.
    tile = tl.load(order_ptr + tl.program_id(0), volatile=True)
    token = (tile % tiles_per_row) * (BLOCK_M // PACK) + row // PACK
    valid = token < num_queries
    state_rows = (wide(tile // tiles_per_row) * num_queries + token) * num_heads + head
    dq_pointers = dq_ptr + state_rows[:, None] * SIZE_QK + column_qk[None, :]
    tl.store(dq_pointers, dq, mask=valid[:, None] & (column_qk < SIZE_QK)[None, :])
