"""How a warp multiplies by MXFP4 weights of experts, which lie as `mxfp4_layout.py` says."""

from __future__ import annotations

from cutlass import Uint32

from nanok3.dsl import ld_shared_u16, ld_shared_u32x2, mma_bf16, mul_bf16x2, mul_wide_u32
from nanok3.kernels.mxfp4_layout import VALUE_BYTES


def unpack(word):
    """A word -> four bf16x2: columns 2i and 2i + 1 of its eight, times 2^-126."""
    mask = Uint32(0x81C081C0)
    low, high = mul_wide_u32(word & Uint32(0x6C006C00), Uint32(1 << 2 | 1 << 24 | 1 << 29))
    return word & mask, (word << 3) & mask, (word << 6) & mask, (low | high) & mask


def load_block(at, lane):
    """The block at shared address `at` as the lane's two mma operands: its columns 8q .. 8q + 3
    and 8q + 4 .. 8q + 7 of rows g and g + 8."""
    top, bottom = ld_shared_u32x2(at + lane * 8)
    scales = ld_shared_u16(at + VALUE_BYTES + lane // 4 * 2)
    factor = (scales & Uint32(0xFF)) * Uint32(0x00800080)
    upper = [mul_bf16x2(pair, factor) for pair in unpack(top)]  # row g
    factor = (scales >> 8) * Uint32(0x00800080)
    lower = [mul_bf16x2(pair, factor) for pair in unpack(bottom)]  # row g + 8
    first = (upper[0], lower[0], upper[1], lower[1])
    return first, (upper[2], lower[2], upper[3], lower[3])


def multiply_block(at, lane, x, c):
    """c [16, 8] plus the block at shared address `at` times x [32, 8]; returns the new c.

    x: four words, columns 8q .. 8q + 7 of the lane's row g of x. c: two chains of four
    accumulators, of which the sum counts.
    """
    first, second = load_block(at, lane)
    return (*mma_bf16(first, x[:2], c[:4]), *mma_bf16(second, x[2:], c[4:]))
