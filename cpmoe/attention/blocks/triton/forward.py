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
    LN_2,
    LOG2_E,
    keeps,
    load_bounds,
    load_head_rows,
    load_key_names,
    load_tile,
    query_hashes,
    score_factors,
    sees,
    sums_at,
    tanh,
    tile_tokens,
    tile_visits,
)
from cpmoe.kernels.products import add_product, product, wide


@triton.jit
def forward_kernel(
    q_ptr,
    q_strides,
    k_ptr,
    k_strides,
    v_ptr,
    v_strides,
    out_ptr,
    lse_ptr,
    bounds_ptr,
    order_ptr,
    offsets_ptr,
    runs_ptr,
    num_queries,
    num_keys,
    num_heads,
    tiles_per_row,
    bounds_size,
    scale,
    softcap,
    names,
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
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    HEADROOM: tl.constexpr = 40.0
    WEIGHT: tl.constexpr = 1099511627776.0  # 2^HEADROOM
    tile = tl.load(order_ptr + tl.program_id(0))
    batch, token, valid = tile_tokens(tile, tiles_per_row, num_queries, BLOCK_M, PACK)
    kv_head = tl.program_id(1) * PACK // GROUP
    head = tl.program_id(1) * PACK + tl.arange(0, BLOCK_M) % PACK
    q = load_head_rows(q_ptr, q_strides, batch, token, head, valid, SIZE_QK, WIDTH_QK)
    index = wide(batch) * num_queries + token
    bounds = load_bounds(bounds_ptr, index, valid, bounds_size, SINKS)
    # Of the probabilities, the normaliser counts all and the output those kept.
    KEPT: tl.constexpr = 1.0 - DROPOUT / 4294967296.0
    if DROPOUT:
        hashes = query_hashes(names, index, head, valid, bounds_size, num_heads)

    if CONTINUES:
        # Weighed far above their peak, so that this hop's own largest probability is 1 and rounds to itself,
        # as in a single hop: with the logsumexp as peak the error would grow with the number of hops.
        lse = tl.load(lse_ptr + index * num_heads + head, mask=valid, other=float("-inf"))
        peak = lse * LOG2_E - HEADROOM
        total = tl.where(peak == float("-inf"), 0.0, WEIGHT)
        out_pointers, out_mask = sums_at(out_ptr, index * num_heads + head, valid, SIZE_V, WIDTH_V)
        acc = tl.load(out_pointers, mask=out_mask, other=0.0) * (WEIGHT * KEPT)
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)

    factor, cap = score_factors(scale, softcap, SOFTCAP)
    first_full, first_masked, end = tile_visits(offsets_ptr, tile)
    for MASKED in tl.static_range(2):
        for run in range(first_masked if MASKED else first_full, end if MASKED else first_masked):
            for key_tile in range(tl.load(runs_ptr + 2 * run), tl.load(runs_ptr + 2 * run + 1)):
                first = key_tile * BLOCK_N
                k = load_tile(
                    k_ptr,
                    k_strides,
                    batch,
                    first,
                    kv_head,
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
                    visible = sees(bounds, first + tl.arange(0, BLOCK_N), 0, SINKS)
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
                if DROPOUT:
                    key_names = load_key_names(names, first + tl.arange(0, BLOCK_N), num_keys)
                    probs = tl.where(keeps(hashes, key_names, 0, DROPOUT), probs, 0.0)
                v = load_tile(
                    v_ptr,
                    v_strides,
                    batch,
                    first,
                    kv_head,
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
    batch, token, valid = tile_tokens(tile, tiles_per_row, num_queries, BLOCK_M, PACK)
    state_rows = (wide(batch) * num_queries + token) * num_heads + head
    out_pointers, out_mask = sums_at(out_ptr, state_rows, valid, SIZE_V, WIDTH_V)
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total * KEPT)[:, None]
    lse = tl.where(is_empty, float("-inf"), (peak + tl.log2(tl.where(is_empty, 1.0, total))) * LN_2)
    tl.store(out_pointers, acc, mask=out_mask)
    tl.store(lse_ptr + state_rows, lse, mask=valid)
