"""What the routed experts' two products have in common: a block times x, and sums over warps.

Inputs x carry a factor X_FACTOR, a power of two, and so do all sums; whoever rounds a sum takes it
out. Weights are multiplied as they are unpacked, 2^-126 times their values: subnormal numbers,
which the mma takes, and the factor keeps the products normal ones. A block is one scale group, so
its sums are multiplied by the scales, not its weights: 4 multiplications instead of 8. Right for x
and sums from 2^-60 to 2^60.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from nanok3.dsl import (
    float_of,
    ld_shared_f32,
    ld_shared_u8,
    ld_shared_u32x2,
    mma_bf16,
    mul_bf16x2,
    st_shared_f32,
    tree,
)
from nanok3.kernels.mega.role import Frozen
from nanok3.kernels.mega.sizes import TILE, WARPS
from nanok3.kernels.mxfp4 import VALUE_BYTES, unpack

SUMS = 4  # a lane's accumulators of a tile
FACTOR_BITS = 64
X_FACTOR = 2.0**FACTOR_BITS


def scaled(word):
    """A pair of x with its factor. Exact."""
    return mul_bf16x2(word, Uint32((127 + FACTOR_BITS << 7) * 0x10001))


def unscaled(value):
    """A sum without the factor. Exact."""
    return value * Float32(1 / X_FACTOR)


def multiply_block(at, lane, x, c):
    """c, SUMS accumulators, plus the block at shared address `at` times x; returns the new ones.

    x: four words, columns 8q .. 8q + 7 of the lane's row g of x, `scaled`.
    """
    top, bottom = ld_shared_u32x2(at + lane * 8)
    scales_at = at + VALUE_BYTES + lane // 4 * 2
    upper = float_of(ld_shared_u8(scales_at) << 23)  # 2^(scale - 1), of row g
    lower = float_of(ld_shared_u8(scales_at + 1) << 23)  # of row g + 8
    a, b = unpack(top), unpack(bottom)
    sums = mma_bf16((a[0], b[0], a[1], b[1]), x[:2], (Float32(0.0),) * 4)
    sums = mma_bf16((a[2], b[2], a[3], b[3]), x[2:], sums)
    return tuple(c[j] + (upper, lower)[j // 2] * sums[j] for j in range(SUMS))


class Parts(Frozen):
    """The warps' parts of a tile in shared memory, [warp, T, 16] f32."""

    def __init__(self, pass_rows: int) -> None:
        self.rows = pass_rows
        self.tile_bytes = WARPS * pass_rows * TILE * 4

    def put(self, r, tile, sums):
        """A warp's part of a tile: sums 0 and 1 are row g of tokens 2q, 2q + 1,
        sums 2 and 3 row g + 8."""
        row, quad = r.lane // 4, r.lane % 4
        self.put_lanes(tile + (r.warp * self.rows * TILE + row) * 4, quad, *sums)

    @cute.jit
    def put_lanes(self, to: Int32, quad: Int32, s0: Float32, s1: Float32, s2: Float32, s3: Float32):
        if const_expr(self.rows == 1):
            if quad == 0:
                st_shared_f32(to, s0)
                st_shared_f32(to + 32, s2)
        else:
            to = to + quad * (2 * TILE * 4)
            st_shared_f32(to, s0)
            st_shared_f32(to + TILE * 4, s1)
            st_shared_f32(to + 32, s2)
            st_shared_f32(to + TILE * 4 + 32, s3)

    def total(self, tile, token, row):
        """The warps' parts of a value, by pairs."""
        at = tile + (token * TILE + row) * 4
        step = self.rows * TILE * 4
        return tree([ld_shared_f32(at + w * step) for w in range(WARPS)])
