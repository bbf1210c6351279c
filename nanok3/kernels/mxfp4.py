"""MXFP4 weights of experts: how they lie in memory, and how a warp multiplies by them.

A tile is 16 rows, a block 32 columns of them (one scale group), 272 bytes:

    bytes 8 l + 4 h .. + 3   lane l = 4g + q: columns 8q .. 8q + 7 of row g + 8h, one word
    bytes 256 + 2g + h       the scale byte of row g + 8h, plus 126

so a lane reads 8 bytes and a pair of scales and has its part of two mma (`dsl.mma_bf16`). In a word
the bits of columns 2i (low half) and 2i + 1 (high half) lie where a shift and a mask bring them to
sign (bit 15), low exponent (8, 7) and top mantissa bit (6) of a bf16:

    pair    sign   value bits   to their places by
    0       15     8 7 6        nothing
    1       12     5 4 3        << 3
    2       9      2 1 0        << 6
    3       14     13, 11 10    << 1 (sign), >> 5 (bit 13), >> 4 (bits 11, 10)

Such a bf16 is the value times 2^-126 (0.5 as a subnormal number), and a product with
2^(scale - 1), a bf16 with the exponent field scale + 126, makes it exactly value * 2^(scale - 127).
That holds for scale bytes 0 to 128; packing refuses others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cutlass import Uint32
from torch import Tensor

from nanok3.dsl import ld_shared_u16, ld_shared_u32x2, mma_bf16, mul_bf16x2

TILE = 16  # rows of a tile: the M of an mma
BLOCK = 32  # columns of a block: a scale group, two mma
VALUE_BYTES = TILE * BLOCK // 2
BLOCK_BYTES = VALUE_BYTES + TILE
LARGEST_SCALE = 128  # 2^(scale - 1) must be a finite bf16
SCALE_OFFSET = 126
AT_ONCE = 32  # experts that are packed together: about 20 times their bytes are in use


@dataclass(frozen=True)
class PackedExperts:
    """Tiles of every expert. `layout` says which rows share a tile; every consumer asserts it."""

    tiles: Tensor  # [E, tiles, K / 32, 272] u8
    layout: str


# ---- device ----


def unpack(word):
    """A word -> four bf16x2: columns 2i and 2i + 1 of its eight, times 2^-126."""
    mask = Uint32(0x81C081C0)
    last = (word << 1) & Uint32(0x80008000)
    last = last | ((word >> 5) & Uint32(0x01000100)) | ((word >> 4) & Uint32(0x00C000C0))
    return word & mask, (word << 3) & mask, (word << 6) & mask, last


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


# ---- host ----


def half_word(pair: int, code: int) -> int:
    """Where the four bits of a value of pair `pair` lie in its half of the word."""
    sign, value = code >> 3, code & 7
    if pair < 3:
        return (sign << 15 | value << 6) >> (3 * pair)
    return sign << 14 | (value >> 2) << 13 | (value & 3) << 10


def byte_table() -> Tensor:
    """[4, 256] i32: what byte i of the four that make a word (two values each) adds to it."""
    words = [
        [half_word(i, byte & 15) | half_word(i, byte >> 4) << 16 for byte in range(256)]
        for i in range(4)
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)  # wraps


def check_scales(scale: Tensor) -> None:
    worst = int(scale.max())
    if worst > LARGEST_SCALE:
        raise ValueError(
            f"MXFP4 scale byte {worst} found where the kernels take 0 to {LARGEST_SCALE} (factors "
            f"up to 2): requantise the experts, or run this checkpoint with the reference ops"
        )


def words_of(packed: Tensor) -> Tensor:
    """packed [R, K / 2] u8 -> [R, K / 32, 4] i32: the words of lanes q = 0 .. 3, row by row."""
    table = byte_table().to(packed.device)
    parts = packed.to(torch.int32).unflatten(-1, (-1, 4, 4))  # a word's bytes
    words = table[0][parts[..., 0]]
    for i in range(1, 4):
        words = words | table[i][parts[..., i]]
    return words


def rows_of(tiles: Tensor, half: int | None) -> tuple[Tensor, Tensor]:
    """Views of tiles [n, K / 32, 272] u8: the words [n, h, 8, K / 32, 4] i32 and the scale bytes
    [n, h, 8, K / 32] of their rows; h is 2, or 1 for a `half` (0: rows g, 1: rows g + 8)."""
    words = tiles.view(torch.int32)[..., : VALUE_BYTES // 4].unflatten(-1, (8, 4, 2))
    scales = tiles[..., VALUE_BYTES:].unflatten(-1, (8, 2))
    words, scales = words.permute(0, 4, 2, 1, 3), scales.permute(0, 3, 2, 1)
    which = slice(None) if half is None else slice(half, half + 1)
    return words[:, which], scales[:, which]


def place_values(tiles: Tensor, packed: Tensor, half: int | None) -> None:
    """packed [R, K / 2] u8 into tiles [n, K / 32, 272] u8: with `half` the rows of one half of
    every tile (R = 8n), else all (R = 16n)."""
    target, _ = rows_of(tiles, half)
    assert packed.dtype == torch.uint8
    target.copy_(words_of(packed).view(target.shape))


def place_scales(tiles: Tensor, scale: Tensor, half: int | None) -> None:
    """The same for scale [R, K / 32] u8."""
    check_scales(scale)
    _, target = rows_of(tiles, half)
    target.copy_((scale + SCALE_OFFSET).view(target.shape))


def empty_experts(experts: int, rows: int, k: int, layout: str, device: str) -> PackedExperts:
    assert rows % TILE == 0, f"rows must be a multiple of {TILE}, not {rows}"
    shape = (experts, rows // TILE, k // BLOCK, BLOCK_BYTES)
    return PackedExperts(torch.empty(shape, dtype=torch.uint8, device=device), layout)


def pack_experts(packed: Tensor, scale: Tensor, layout: str, pairs: bool) -> PackedExperts:
    """packed [E, R, K / 2] u8, scale [E, R, K / 32] u8, expert by expert.

    Tile i holds rows 16i .. 16i + 15; with `pairs` rows 8i .. 8i + 7 of the first half of the
    matrix and the same rows of the second half.
    """
    experts, rows, blocks = scale.shape
    assert packed.shape == (experts, rows, blocks * BLOCK // 2), f"{packed.shape}, {scale.shape}"
    made = empty_experts(experts, rows, blocks * BLOCK, layout, str(packed.device))
    for first in range(0, experts, AT_ONCE):
        some = slice(first, first + AT_ONCE)
        tiles = made.tiles[some].flatten(0, 1)
        for half in (0, 1) if pairs else (None,):
            own = slice(None) if half is None else slice(half * rows // 2, (half + 1) * rows // 2)
            place_values(tiles, packed[some, own].flatten(0, 1), half)
            place_scales(tiles, scale[some, own].flatten(0, 1), half)
    return made
