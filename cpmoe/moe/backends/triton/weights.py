"""The kernel of the gradients of weights: each program owns a tile of one expert's gradient.

Shape letters: R rows sorted by expert, E experts; N and K the sizes of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.kernels.products import add_product, rounded, wide


@triton.jit
def weight_gradient_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    starts_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out [E, N, K] = Σ over the rows of an expert of a [R, N] ⊗ b [R, K], in their order; 0 without rows."""
    COLUMN_TILES: tl.constexpr = tl.cdiv(K, BLOCK_N)
    ROW_TILES: tl.constexpr = tl.cdiv(N, BLOCK_M)
    expert = tl.program_id(1)
    program = tl.program_id(0)
    first_tile = program // (SWIZZLE * COLUMN_TILES) * SWIZZLE
    size = tl.minimum(ROW_TILES - first_tile, SWIZZLE)
    inside = program % (SWIZZLE * COLUMN_TILES)
    n = (first_tile + inside % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = inside // size * BLOCK_N + tl.arange(0, BLOCK_N)

    first_row = tl.load(starts_ptr + expert)
    num_rows = tl.load(starts_ptr + expert + 1) - first_row
    row = tl.arange(0, BLOCK_K)
    a_pointers = a_ptr + wide(first_row) * N + (row[None, :] * N + (n % N)[:, None])
    b_pointers = b_ptr + wide(first_row) * K + (row[:, None] * K + (k % K)[None, :])
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(num_rows // BLOCK_K):
        total = add_product(total, tl.load(a_pointers), tl.load(b_pointers), PRECISION, UPCAST)
        a_pointers += BLOCK_K * N
        b_pointers += BLOCK_K * K
    rest = num_rows % BLOCK_K
    if rest > 0:
        a = tl.load(a_pointers, mask=(row < rest)[None, :], other=0.0)
        b = tl.load(b_pointers, mask=(row < rest)[:, None], other=0.0)
        total = add_product(total, a, b, PRECISION, UPCAST)
    pointers = out_ptr + wide(expert) * (N * K) + (n[:, None] * K + k[None, :])
    exists = (n < N)[:, None] & (k < K)[None, :]
    tl.store(pointers, rounded(total, out_ptr.dtype.element_ty, UPCAST), mask=exists)
