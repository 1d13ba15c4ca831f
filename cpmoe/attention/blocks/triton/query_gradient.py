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
    LOG2_E,
    keeps,
    load_bounds,
    load_head_rows,
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
def rows_kernel(
    grad_out_ptr,
    grad_out_strides,
    out_ptr,
    out_strides,
    lse_ptr,
    shift_ptr,
    delta_ptr,
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
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1) % num_heads
    batch = tl.program_id(1) // num_heads
    valid = token < num_queries
    grad_out = load_head_rows(grad_out_ptr, grad_out_strides, batch, token, head, valid, SIZE_V, WIDTH_V)
    out = load_head_rows(out_ptr, out_strides, batch, token, head, valid, SIZE_V, WIDTH_V)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    index = wide(batch) * num_queries + token
    lse = tl.load(lse_ptr + index * num_heads + head, mask=valid, other=0.0)
    shift = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    place = (wide(batch) * num_heads + head) * num_queries + token
    tl.store(delta_ptr + place, delta, mask=valid)
    tl.store(shift_ptr + place, shift, mask=valid)


@triton.jit
def dq_kernel(
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
    dq_ptr,
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
    """dQ of one query tile, laid out as in the forward kernel."""
    tile = tl.load(order_ptr + tl.program_id(0))
    batch, token, valid = tile_tokens(tile, tiles_per_row, num_queries, BLOCK_M, PACK)
    kv_head = tl.program_id(1) * PACK // GROUP
    head = tl.program_id(1) * PACK + tl.arange(0, BLOCK_M) % PACK
    q = load_head_rows(q_ptr, q_strides, batch, token, head, valid, SIZE_QK, WIDTH_QK)
    grad_out = load_head_rows(grad_out_ptr, grad_out_strides, batch, token, head, valid, SIZE_V, WIDTH_V)
    index = wide(batch) * num_queries + token
    bounds = load_bounds(bounds_ptr, index, valid, bounds_size, SINKS)

    place = (wide(batch) * num_heads + head) * num_queries + token
    KEPT: tl.constexpr = 1.0 - DROPOUT / 4294967296.0
    # exp2(s − shift) is now p · scale / KEPT, which every term of dQ carries.
    shift = tl.load(shift_ptr + place, mask=valid, other=float("inf")) - tl.log2(scale / KEPT)
    delta = tl.load(delta_ptr + place, mask=valid, other=0.0) * KEPT
    if DROPOUT:
        hashes = query_hashes(names, index, head, valid, bounds_size, num_heads)
    if CONTINUES:
        dq_pointers, dq_mask = sums_at(dq_ptr, index * num_heads + head, valid, SIZE_QK, WIDTH_QK)
        dq = tl.load(dq_pointers, mask=dq_mask, other=0.0)
    else:
        dq = tl.zeros([BLOCK_M, WIDTH_QK], tl.float32)

    factors = score_factors(scale, softcap, SOFTCAP)
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
                probs, slope = probabilities(q, k, factors, shift[:, None], SOFTCAP, PRECISION, UPCAST)
                if MASKED:
                    visible = sees(bounds, first + tl.arange(0, BLOCK_N), 0, SINKS)
                    probs = tl.where(visible, probs, 0.0)
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
                dprobs = product(grad_out, tl.trans(v), PRECISION, UPCAST)
                if DROPOUT:
                    key_names = load_key_names(names, first + tl.arange(0, BLOCK_N), num_keys)
                    dprobs = tl.where(keeps(hashes, key_names, 0, DROPOUT), dprobs, 0.0)
                dscores = score_gradient(probs, slope, dprobs, delta[:, None], SOFTCAP)
                dq = add_product(dq, dscores.to(k.dtype), k, PRECISION, UPCAST)
    # Read again, so that the addresses of the sums occupy no registers during the loop.
    tile = tl.load(order_ptr + tl.program_id(0), volatile=True)
    batch, token, valid = tile_tokens(tile, tiles_per_row, num_queries, BLOCK_M, PACK)
    state_rows = (wide(batch) * num_queries + token) * num_heads + head
    dq_pointers, dq_mask = sums_at(dq_ptr, state_rows, valid, SIZE_QK, WIDTH_QK)
    tl.store(dq_pointers, dq, mask=dq_mask)
