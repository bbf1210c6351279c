"""MXFP4 weights of experts: how they lie in memory. What a warp does with them: `mxfp4.py`.

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
    3       13     11 10, 14    << 2 (sign), >> 3 (bits 11, 10), >> 8 (bit 14)

The three shifts of pair 3 are one product of these bits alone with 2^2 + 2^29 + 2^24, low and high
word or-ed: in no place that counts do two of its terms or a carry meet.

Such a bf16 is the value times 2^-126 (0.5 as a subnormal number), and a product with
2^(scale - 1), a bf16 with the exponent field scale + 126, makes it exactly value * 2^(scale - 127).
That holds for scale bytes 0 to 128; packing refuses others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16  # rows of a tile: the M of an mma
BLOCK = 32  # columns of a block: a scale group, two mma
VALUE_BYTES = TILE * BLOCK // 2
BLOCK_BYTES = VALUE_BYTES + TILE
LARGEST_SCALE = 128  # 2^(scale - 1) must be a finite bf16
SCALE_OFFSET = 126
AT_ONCE = 32  # experts that are packed together: about 20 times their bytes are in use
UP_LAYOUT = "mxfp4 tiles of 8 gate and 8 up rows"
DOWN_LAYOUT = "mxfp4 tiles of 16 rows"


@dataclass(frozen=True)
class PackedExperts:
    """Tiles of every expert. `layout` says which rows share a tile; every consumer asserts it."""

    tiles: Tensor  # [E, tiles, K / 32, 272] u8
    layout: str


def half_word(pair: int, code: int) -> int:
    """Where the four bits of a value of pair `pair` lie in its half of the word."""
    sign, value = code >> 3, code & 7
    if pair < 3:
        return (sign << 15 | value << 6) >> (3 * pair)
    return sign << 13 | (value >> 1) << 10 | (value & 1) << 14


@functools.cache
def byte_table(device: str) -> Tensor:
    """[4, 256] i32: what byte i of the four that make a word (two values each) adds to it."""
    words = [
        [half_word(i, byte & 15) | half_word(i, byte >> 4) << 16 for byte in range(256)]
        for i in range(4)
    ]
    return torch.tensor(words, dtype=torch.int64, device=device).to(torch.int32)  # wraps


def check_scales(scale: Tensor) -> None:
    worst = int(scale.max())
    if worst > LARGEST_SCALE:
        raise ValueError(
            f"MXFP4 scale byte {worst} found where the kernels take 0 to {LARGEST_SCALE} (factors "
            f"up to 2): requantise the experts, or run this checkpoint with the reference ops"
        )


def words_of(packed: Tensor) -> Tensor:
    """packed [R, K / 2] u8 -> [R, K / 32, 4] i32: the words of lanes q = 0 .. 3, row by row."""
    table = byte_table(str(packed.device))
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
    target.copy_((scale + SCALE_OFFSET).reshape(target.shape))


def empty_experts(experts: int, rows: int, k: int, layout: str, device: str) -> PackedExperts:
    assert rows % TILE == 0, f"rows must be a multiple of {TILE}, not {rows}"
    shape = (experts, rows // TILE, k // BLOCK, BLOCK_BYTES)
    return PackedExperts(torch.empty(shape, dtype=torch.uint8, device=device), layout)


def place_experts(
    tiles: Tensor, rows: Tensor, pairs: bool, place: Callable[[Tensor, Tensor, int | None], None]
) -> None:
    """Whole experts, rows [E, R, ...] by `place_values` or `place_scales` into tiles
    [E, tiles, ...], some at a time. `pairs`: the halves of R have half of every tile each."""
    half_rows = rows.shape[1] // 2
    for first in range(0, len(tiles), AT_ONCE):
        target, some = tiles[first : first + AT_ONCE].flatten(0, 1), rows[first : first + AT_ONCE]
        if pairs:
            place(target, some[:, :half_rows].flatten(0, 1), 0)
            place(target, some[:, half_rows:].flatten(0, 1), 1)
        else:
            place(target, some.flatten(0, 1), None)


def pack_experts(packed: Tensor, scale: Tensor, layout: str, pairs: bool) -> PackedExperts:
    """packed [E, R, K / 2] u8, scale [E, R, K / 32] u8.

    Tile i holds rows 16i .. 16i + 15; with `pairs` rows 8i .. 8i + 7 of the first half of the
    matrix and the same rows of the second half.
    """
    experts, rows, blocks = scale.shape
    assert packed.shape == (experts, rows, blocks * BLOCK // 2), f"{packed.shape}, {scale.shape}"
    made = empty_experts(experts, rows, blocks * BLOCK, layout, str(packed.device))
    place_experts(made.tiles, packed, pairs, place_values)
    place_experts(made.tiles, scale, pairs, place_scales)
    return made
