"""What the routed experts' two products have in common: blocks two by two, and sums over warps.

A lane reads 16 bytes of weights at once: half of a quad's lanes work on one block of 32 columns,
half on another one, best 4 blocks on, where no banks clash. The order of K within an mma is free,
if weights and inputs agree on it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from nanok3.dsl import (
    ld_shared_f32,
    ld_shared_u16,
    ld_shared_u32x4,
    mma_bf16,
    mul_bf16x2,
    st_shared_f32,
    tree,
)
from nanok3.kernels.mega.role import Frozen
from nanok3.kernels.mega.sizes import TILE, WARPS
from nanok3.kernels.mxfp4 import unpack


def multiply_pair(at, scales_at, x, c):
    """c, two chains of [16, 8], plus a quad's two blocks times x; returns the new chains.

    at: of the lane's 16 bytes, 16 columns of rows g and g + 8 of its own block; scales_at: of the
    scales of these rows. x: eight words, the same columns of the lane's row g of x.
    """
    w = ld_shared_u32x4(at)  # columns 0 .. 7 of row g, of row g + 8, columns 8 .. 15 of these
    scales = ld_shared_u16(scales_at)
    upper, lower = (scales & Uint32(0xFF)) * Uint32(0x00800080), (scales >> 8) * Uint32(0x00800080)
    for half in range(2):
        a = [mul_bf16x2(pair, upper) for pair in unpack(w[2 * half])]
        b = [mul_bf16x2(pair, lower) for pair in unpack(w[2 * half + 1])]
        v = x[4 * half : 4 * half + 4]
        first = mma_bf16((a[0], b[0], a[1], b[1]), v[:2], c[:4])
        second = mma_bf16((a[2], b[2], a[3], b[3]), v[2:], c[4:])
        c = (*first, *second)
    return c


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
