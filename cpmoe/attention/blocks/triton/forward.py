"""Forward kernel: continues the running softmax of earlier hops over the keys of one more.

FlashAttention-2 (arXiv 2307.08691, algorithm 1), with the running state (float32 output and logsumexp)
as its start instead of zeros: one read, one write, and no merge afterwards.

A query tile holds BLOCK_M rows: BLOCK_M / PACK tokens of PACK query heads that share a KV head.

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
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
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
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    HEADROOM: tl.constexpr = 40.0
    WEIGHT: tl.constexpr = 1099511627776.0  # 2^HEADROOM
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

    q_rows = (
        q_ptr + wide(batch) * q_stride_b + token.to(tl.int64) * q_stride_t + head.to(tl.int64) * q_stride_h
    )
    q = load_rows(q_rows[:, None], column_qk, valid, WIDTH_QK != SIZE_QK, True, SIZE_QK)
    index = wide(batch) * num_queries + token
    start, stop, sink_start, sink_stop = load_bounds(bounds_ptr, index, valid, bounds_size, SINKS)

    state_rows = index * num_heads + head
    out_pointers = out_ptr + state_rows[:, None] * SIZE_V + column_v[None, :]
    out_mask = valid[:, None] & (column_v < SIZE_V)[None, :]
    if CONTINUES:
        # Weighed far above their peak, so that this hop's own largest probability is 1 and rounds to itself,
        # as in a single hop: with the logsumexp as peak the error would grow with the number of hops.
        peak = tl.load(lse_ptr + state_rows, mask=valid, other=float("-inf")) * LOG2_E - HEADROOM
        total = tl.where(peak == float("-inf"), 0.0, WEIGHT)
        acc = tl.load(out_pointers, mask=out_mask, other=0.0) * WEIGHT
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)

    # Scores come in units of log2(e) from the factor, or from the cap where there is one.
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
                scores = product(q, tl.trans(k), PRECISION, UPCAST)
                if SOFTCAP:
                    scores = tanh(scores * factor) * cap
                if MASKED:
                    if not SOFTCAP:
                        scores = scores * factor
                    visible = sees(
                        key[None, :],
                        start[:, None],
                        stop[:, None],
                        sink_start[:, None],
                        sink_stop[:, None],
                        SINKS,
                    )
                    scores = tl.where(visible, scores, float("-inf"))
                    new_peak = tl.maximum(peak, tl.max(scores, 1))
                    # A row that has seen nothing yet: -inf − -inf would be NaN.
                    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                    probs = tl.exp2(scores - shift[:, None])
                    decay = tl.exp2(peak - shift)
                elif SOFTCAP:
                    new_peak = tl.maximum(peak, tl.max(scores, 1))
                    probs = tl.exp2(scores - new_peak[:, None])
                    decay = tl.exp2(peak - new_peak)
                else:
                    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
                    probs = tl.exp2(scores * factor - new_peak[:, None])
                    decay = tl.exp2(peak - new_peak)
                peak = new_peak
                total = total * decay + tl.sum(probs, 1)
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
                acc = add_product(acc * decay[:, None], probs.to(v.dtype), v, PRECISION, UPCAST)

    # Read again, so that the addresses of the output occupy no registers during the loop.
    tile = tl.load(order_ptr + tl.program_id(0), volatile=True)
    token = (tile % tiles_per_row) * (BLOCK_M // PACK) + row // PACK
    valid = token < num_queries
    state_rows = (wide(tile // tiles_per_row) * num_queries + token) * num_heads + head
    out_pointers = out_ptr + state_rows[:, None] * SIZE_V + column_v[None, :]
    out_mask = valid[:, None] & (column_v < SIZE_V)[None, :]
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), (peak + tl.log2(tl.where(is_empty, 1.0, total))) * LN_2)
    tl.store(out_pointers, acc, mask=out_mask)
    tl.store(lse_ptr + state_rows, lse, mask=valid)
