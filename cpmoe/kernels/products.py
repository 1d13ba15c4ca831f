"""Products of tiles. Importing this module needs Triton, and fixes whether kernels are interpreted."""

from __future__ import annotations

import triton
import triton.language as tl


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
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """float32 x to the nearest of `dtype`, ties to even. UPCAST: the interpreter truncates to bfloat16."""
    if UPCAST:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)
