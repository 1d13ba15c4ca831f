"""What the attention kernels share: products, scores, masks and tile loads.

Importing this module needs Triton, and fixes whether the kernels are compiled or interpreted
(TRITON_INTERPRET=1 beforehand).

Scores are in units of log2: s = (q · k) · scale · log2(e), so that exp2 gives probabilities.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def product(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a · b in float32. UPCAST: the interpreter's bfloat16 product is wrong."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """total + a · b in float32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def wide(x):
    """A scalar in 64 bits; in the interpreter a loop's variable is a plain number."""
    return tl.full([], 1, tl.int64) * x


@triton.jit
def tanh(x):
    """(1 − e^−2|x|) / (1 + e^−2|x|) with the sign of x: nothing overflows."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def load_rows(
    base, offsets, columns, valid_rows, PADDED: tl.constexpr, MASKED: tl.constexpr, SIZE: tl.constexpr
):
    """[rows, columns] at base + offsets[:, None] + columns, 0 outside. PADDED: columns reach past SIZE."""
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED and PADDED:
        return tl.load(pointers, mask=valid_rows[:, None] & (columns[None, :] < SIZE), other=0.0)
    if MASKED:
        return tl.load(pointers, mask=valid_rows[:, None], other=0.0)
    if PADDED:
        return tl.load(pointers, mask=columns[None, :] < SIZE, other=0.0)
    return tl.load(pointers)


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
