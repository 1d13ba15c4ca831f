"""What the attention kernels share: products, scores, masks and tile loads.

Importing this module needs Triton, and fixes whether the kernels are compiled or interpreted
(TRITON_INTERPRET=1 beforehand).

Scores are in units of log2: s = (q · k) · scale · log2(e), so that exp2 gives probabilities.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.kernels.products import product, wide
from cpmoe.parallel.counter_random import FACTORS32

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
FACTOR_1: tl.constexpr = tl.constexpr(FACTORS32[0])
FACTOR_2: tl.constexpr = tl.constexpr(FACTORS32[1])


@triton.jit
def tanh(x):
    """(1 − e^−2|x|) / (1 + e^−2|x|) with the sign of x: nothing overflows."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def tile_tokens(tile, tiles_per_row, num_tokens, ROWS: tl.constexpr, PACK: tl.constexpr):
    """(batch row, token of each of ROWS rows, whether it exists); PACK neighbouring rows share a token."""
    token = (tile % tiles_per_row) * (ROWS // PACK) + tl.arange(0, ROWS) // PACK
    return tile // tiles_per_row, token, token < num_tokens


@triton.jit
def tile_visits(offsets_ptr, tile):
    """(first full run, first masked run, one past the last) of a tile; see tiles.py."""
    offsets = offsets_ptr + 2 * tile
    return tl.load(offsets), tl.load(offsets + 1), tl.load(offsets + 2)


@triton.jit
def load_rows(pointers, columns, valid_rows, PADDED: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr):
    """[rows, columns] at pointers [rows, 1] + columns, 0 outside. PADDED: columns reach past SIZE."""
    pointers = pointers + columns[None, :]
    if MASKED and PADDED:
        tile = tl.load(pointers, mask=valid_rows[:, None] & (columns[None, :] < SIZE), other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=valid_rows[:, None], other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=columns[None, :] < SIZE, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_head_rows(pointer, strides, batch, token, head, valid, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] of [B, T, H, D]: the row of each token and head, 0 where it is not valid."""
    base = pointer + wide(batch) * strides[0]
    rows = base + token.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
    return load_rows(rows[:, None], tl.arange(0, WIDTH), valid, WIDTH != SIZE, True, SIZE)


@triton.jit
def load_tile(
    source,
    strides,
    batch,
    first,
    head,
    num_tokens,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """[ROWS, WIDTH]: the tokens of one head from `first` on, 0 outside; not MASKED: all of them exist.

    `source` is a pointer to [B, T, H, D], or a descriptor of it with blocks [1, ROWS, 1, WIDTH].
    """
    if DESCRIPTORS:
        tile = source.load([batch, first, head, 0]).reshape([ROWS, WIDTH])
    else:
        row = tl.arange(0, ROWS)
        base = source + wide(batch) * strides[0] + wide(head) * strides[2] + wide(first) * strides[1]
        pointers = base + (row * strides[1])[:, None]
        valid = first + row < num_tokens
        tile = load_rows(pointers, tl.arange(0, WIDTH), valid, WIDTH != SIZE, MASKED, SIZE)
    return tile


@triton.jit
def sums_at(pointer, rows, valid, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """(pointers, mask), both [rows, WIDTH], of rows of float32 sums [.., SIZE]."""
    column = tl.arange(0, WIDTH)
    return pointer + rows[:, None] * SIZE + column[None, :], valid[:, None] & (column < SIZE)[None, :]


@triton.jit
def load_bounds(bounds, index, valid, size, SINKS: tl.constexpr):
    """(start, stop, sink_start, sink_stop) of queries; bounds is [C, B, T] and `size` its B · T."""
    start = tl.load(bounds + index, mask=valid, other=0)
    stop = tl.load(bounds + size + index, mask=valid, other=0)
    if SINKS:
        sink_start = tl.load(bounds + 2 * size + index, mask=valid, other=0)
        sink_stop = tl.load(bounds + 3 * size + index, mask=valid, other=0)
    else:
        sink_start = start
        sink_stop = start
    return start, stop, sink_start, sink_stop


@triton.jit
def sees(bounds, key, QUERY_AXIS: tl.constexpr, SINKS: tl.constexpr):
    """Whether each query sees each key, queries along QUERY_AXIS and keys along the other."""
    key = tl.expand_dims(key, QUERY_AXIS)
    start = tl.expand_dims(bounds[0], 1 - QUERY_AXIS)
    stop = tl.expand_dims(bounds[1], 1 - QUERY_AXIS)
    visible = (key >= start) & (key < stop)
    if SINKS:
        sink_start = tl.expand_dims(bounds[2], 1 - QUERY_AXIS)
        sink_stop = tl.expand_dims(bounds[3], 1 - QUERY_AXIS)
        visible = visible | ((key >= sink_start) & (key < sink_stop))
    return visible


@triton.jit
def mix32(x):
    """`counter_random.mix32_`, as unsigned."""
    x = x.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * FACTOR_1
    x = (x ^ (x >> 15)) * FACTOR_2
    return x ^ (x >> 15)


@triton.jit
def query_hashes(names, index, head, valid, size, num_heads):
    """The two hashes of queries of one head, or each of its own; `names`: see `Problem`."""
    query_names, head_names = names[0] + index, names[1] + head
    first = tl.load(query_names, mask=valid, other=0) ^ tl.load(head_names)
    second = tl.load(query_names + size, mask=valid, other=0) ^ tl.load(head_names + num_heads)
    return mix32(first), mix32(second)


@triton.jit
def load_key_names(names, key, num_keys):
    return tl.load(names[2] + key, mask=key < num_keys, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def keeps(hashes, key_names, QUERY_AXIS: tl.constexpr, DROPOUT: tl.constexpr):
    """Whether each query keeps each key: `dropout.kept`, with axes as in `sees`."""
    x = tl.expand_dims(hashes[0], 1 - QUERY_AXIS) ^ tl.expand_dims(key_names, QUERY_AXIS)
    x = (x ^ (x >> 16)) * FACTOR_1 + tl.expand_dims(hashes[1], 1 - QUERY_AXIS)
    x = (x ^ (x >> 15)) * FACTOR_2
    return x >= DROPOUT


@triton.jit
def score_factors(scale, softcap, SOFTCAP: tl.constexpr):
    """(factor, cap): scores are (q · k) · factor, or with a softcap tanh of it · cap."""
    return scale / softcap if SOFTCAP else scale * LOG2_E, softcap * LOG2_E


@triton.jit
def probabilities(a, b, factors, shift, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """(exp2(s − shift), slope) of the scores s of a · bᵀ; slope: of the softcap, where there is one."""
    scores = product(a, tl.trans(b), PRECISION, UPCAST) * factors[0]
    slope = scores
    if SOFTCAP:
        bent = tanh(scores)
        scores = bent * factors[1]
        slope = 1.0 - bent * bent
    return tl.exp2(scores - shift), slope


@triton.jit
def score_gradient(probs, slope, dprobs, delta, SOFTCAP: tl.constexpr):
    """dS = P · (dP − delta) · slope."""
    dscores = probs * (dprobs - delta)
    if SOFTCAP:
        dscores *= slope
    return dscores
