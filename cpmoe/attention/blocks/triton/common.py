"""What the attention kernels share: products, scores, masks and tile loads.

Importing this module needs Triton, and fixes whether the kernels are compiled or interpreted
(TRITON_INTERPRET=1 beforehand).

Scores are in units of log2: s = (q · k) · scale · log2(e), so that exp2 gives probabilities.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.kernels.products import wide

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def tanh(x):
    """(1 − e^−2|x|) / (1 + e^−2|x|) with the sign of x: nothing overflows."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


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
def load_tile(
    source,
    batch,
    first,
    head,
    stride_b,
    stride_t,
    stride_h,
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
        base = source + wide(batch) * stride_b + wide(head) * stride_h + wide(first) * stride_t
        pointers = base + (row * stride_t)[:, None]
        valid = first + row < num_tokens
        tile = load_rows(pointers, tl.arange(0, WIDTH), valid, WIDTH != SIZE, MASKED, SIZE)
    return tile


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
def sees(key, start, stop, sink_start, sink_stop, SINKS: tl.constexpr):
    """Whether a query sees a key; the arguments broadcast."""
    visible = (key >= start) & (key < stop)
    if SINKS:
        visible = visible | ((key >= sink_start) & (key < sink_stop))
    return visible
