"""Kernels whose programs own a tile of output rows: rows times their expert's weight.

A tile holds rows of one expert alone. Which, programs read from `starts`, int32 [2, E + 1]: the first row of
each expert, and the first of each expert's tiles; last what follows all of them.

Shape letters: R rows sorted by expert, E experts, I expert width; K inner and N outer size of a product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpmoe.kernels.products import add_product, rounded, wide


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def place(
    starts_ptr,
    COLUMN_TILES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    """(expert, first row, one past the expert's last row, column tile) of this program.

    Programs go over SWIZZLE row tiles before the next column tile, so that both operands stay in L2.
    EXPERTS: the power of 2 that holds NUM_EXPERTS.
    """
    tile_starts_ptr = starts_ptr + NUM_EXPERTS + 1
    num_tiles = tl.load(tile_starts_ptr + NUM_EXPERTS)
    program = tl.program_id(0)
    first_tile = program // (SWIZZLE * COLUMN_TILES) * SWIZZLE
    size = tl.minimum(num_tiles - first_tile, SWIZZLE)
    inside = program % (SWIZZLE * COLUMN_TILES)
    tile = first_tile + inside % size

    index = tl.arange(0, EXPERTS)
    ends = tl.load(tile_starts_ptr + 1 + index, mask=index < NUM_EXPERTS, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    row = tl.load(starts_ptr + expert) + (tile - tl.load(tile_starts_ptr + expert)) * BLOCK_M
    return expert, row, tl.load(starts_ptr + expert + 1), inside // size


@triton.jit
def rows_product(
    a_ptr,
    weight,
    first_row,
    end_row,
    outer,
    K: tl.constexpr,
    WEIGHT_STRIDE_K: tl.constexpr,
    WEIGHT_STRIDE_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] in float32: rows of a [R, K] times the `outer` columns of one expert's weight.

    Rows past the end repeat the last one, so that nothing in the loop is masked where BLOCK_K divides K.
    """
    row = tl.minimum(first_row + tl.arange(0, BLOCK_M), end_row - 1)
    inner = tl.arange(0, BLOCK_K)
    a_pointers = a_ptr + row.to(tl.int64)[:, None] * K + inner[None, :]
    weight_pointers = weight + inner[:, None] * WEIGHT_STRIDE_K + outer[None, :] * WEIGHT_STRIDE_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_pointers)
            b = tl.load(weight_pointers)
        else:
            a = tl.load(a_pointers, mask=(inner < K - start)[None, :], other=0.0)
            b = tl.load(weight_pointers, mask=(inner < K - start)[:, None], other=0.0)
        total = add_product(total, a, b, PRECISION, UPCAST)
        a_pointers += BLOCK_K
        weight_pointers += BLOCK_K * WEIGHT_STRIDE_K
    return total


@triton.jit
def product_kernel(
    a_ptr,
    weight_ptr,
    out_ptr,
    starts_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out [R, N] = a [R, K] times weight [E, K, N], or where TRANSPOSED [E, N, K]."""
    expert, first_row, end_row, column_tile = place(
        starts_ptr, tl.cdiv(N, BLOCK_N), NUM_EXPERTS, EXPERTS, BLOCK_M, SWIZZLE
    )
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = rows_product(
        a_ptr,
        weight_ptr + wide(expert) * (K * N),
        first_row,
        end_row,
        column % N,
        K,
        1 if TRANSPOSED else N,
        K if TRANSPOSED else 1,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
        UPCAST,
    )
    row = tl.arange(0, BLOCK_M)
    exists = (row < end_row - first_row)[:, None] & (column < N)[None, :]
    pointers = out_ptr + wide(first_row) * N + (row[:, None] * N + column[None, :])
    tl.store(pointers, rounded(total, out_ptr.dtype.element_ty, UPCAST), mask=exists)


@triton.jit
def gate_up_kernel(
    x_ptr,
    gate_up_weight_ptr,
    gate_up_ptr,
    hidden_ptr,
    starts_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """gate_up [R, 2 I] = x [R, K] times weight [E, 2 I, K], and hidden [R, I] = silu(gate) · up.

    A tile's columns are gate and up in turn, so that both of a pair lie in one thread.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    expert, first_row, end_row, column_tile = place(
        starts_ptr, tl.cdiv(WIDTH, HALF), NUM_EXPERTS, EXPERTS, BLOCK_M, SWIZZLE
    )
    pair = tl.arange(0, BLOCK_N)
    total = rows_product(
        x_ptr,
        gate_up_weight_ptr + wide(expert) * (2 * WIDTH * K),
        first_row,
        end_row,
        (column_tile * HALF + pair // 2) % WIDTH + pair % 2 * WIDTH,
        K,
        1,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
        UPCAST,
    )
    gate, up = tl.split(tl.reshape(total, [BLOCK_M, HALF, 2]))
    row = tl.arange(0, BLOCK_M)
    column = column_tile * HALF + tl.arange(0, HALF)
    exists = (row < end_row - first_row)[:, None] & (column < WIDTH)[None, :]
    gate_places = row[:, None] * (2 * WIDTH) + column[None, :]
    gate_pointers = gate_up_ptr + wide(first_row) * (2 * WIDTH) + gate_places
    hidden_pointers = hidden_ptr + wide(first_row) * WIDTH + (row[:, None] * WIDTH + column[None, :])
    dtype = hidden_ptr.dtype.element_ty
    tl.store(gate_pointers, rounded(gate, dtype, UPCAST), mask=exists)
    tl.store(gate_pointers + WIDTH, rounded(up, dtype, UPCAST), mask=exists)
    tl.store(hidden_pointers, rounded(gate * sigmoid(gate) * up, dtype, UPCAST), mask=exists)


@triton.jit
def gate_up_gradient_kernel(
    grad_ptr,
    down_weight_ptr,
    gate_up_ptr,
    hidden_ptr,
    grad_gate_up_ptr,
    starts_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The gradient of gate_up [R, 2 I] from that of the output, grad [R, K], and weight [E, K, I].

    Also hidden [R, I] again: the gradient of hidden itself is never written.
    """
    expert, first_row, end_row, column_tile = place(
        starts_ptr, tl.cdiv(WIDTH, BLOCK_N), NUM_EXPERTS, EXPERTS, BLOCK_M, SWIZZLE
    )
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    grad_hidden = rows_product(
        grad_ptr,
        down_weight_ptr + wide(expert) * (K * WIDTH),
        first_row,
        end_row,
        column % WIDTH,
        K,
        WIDTH,
        1,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
        UPCAST,
    )
    row = tl.arange(0, BLOCK_M)
    exists = (row < end_row - first_row)[:, None] & (column < WIDTH)[None, :]
    places = row[:, None] * (2 * WIDTH) + column[None, :]
    first_place = wide(first_row) * (2 * WIDTH)
    gate = tl.load(gate_up_ptr + first_place + places, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + first_place + WIDTH + places, mask=exists, other=0.0).to(tl.float32)
    dtype = hidden_ptr.dtype.element_ty
    share = sigmoid(gate)
    silu = gate * share
    grad_up_ptr = grad_gate_up_ptr + first_place + WIDTH
    tl.store(grad_up_ptr + places, rounded(grad_hidden * silu, dtype, UPCAST), mask=exists)
    hidden_pointers = hidden_ptr + wide(first_row) * WIDTH + (row[:, None] * WIDTH + column[None, :])
    tl.store(hidden_pointers, rounded(silu * up, dtype, UPCAST), mask=exists)
    grad_gate = grad_hidden * up * (share + silu * (1.0 - share))
    tl.store(grad_gate_up_ptr + first_place + places, rounded(grad_gate, dtype, UPCAST), mask=exists)
