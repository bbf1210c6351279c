"""What instructions compute, over 32 lanes of numpy. Approximations are rounded results here."""

from __future__ import annotations

from typing import Any

import numpy as np

Lanes = np.ndarray[Any, np.dtype[Any]]

TYPES = {
    **{"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.float32},
    **{"u16": np.uint16, "u32": np.uint32, "u64": np.uint64},
    **{"s16": np.int16, "s32": np.int32, "s64": np.int64},
}
APPROXIMATE = {
    "ex2.approx.ftz.f32": "ex2",
    "rcp.approx.ftz.f32": "rcp",
    "rsqrt.approx.ftz.f32": "rsqrt",
}
LANE = np.arange(32, dtype=np.uint32)
RANK_SHIFT = 24  # a cluster address: rank + 1 above the shared address


def doubles(x: Lanes) -> Lanes:
    return x.astype(np.float64)


def flush(x: Lanes) -> Lanes:
    """Subnormal float32 to zero."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0) * x, x)


def ex2(x: Lanes) -> Lanes:
    return flush(np.exp2(doubles(flush(x))).astype(np.float32))


def rcp(x: Lanes) -> Lanes:
    return flush((1 / doubles(flush(x))).astype(np.float32))


def rsqrt(x: Lanes) -> Lanes:
    return flush((1 / np.sqrt(doubles(flush(x)))).astype(np.float32))


def fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return (doubles(a) * b + c).astype(np.float32)


def bf16_bits(x: Lanes) -> Lanes:
    """float32 to the nearest bf16, ties to even, in the low half of a word."""
    u = x.view(np.uint32)
    near = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), near)


def low(word: Lanes) -> Lanes:
    """The low bf16 of a word as float32."""
    return (word << np.uint32(16)).view(np.float32)


def high(word: Lanes) -> Lanes:
    return (word & np.uint32(0xFFFF0000)).view(np.float32)


def pack_bf16(upper: Lanes, lower: Lanes) -> Lanes:
    return (bf16_bits(upper) << np.uint32(16)) | bf16_bits(lower)


def multiply_bf16x2(a: Lanes, b: Lanes) -> Lanes:
    return pack_bf16(high(a) * high(b), low(a) * low(b))


def divide(a: Lanes, b: Lanes) -> Lanes:
    """Of integers, towards zero."""
    quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) == (b < 0), quotient, -quotient).astype(a.dtype)


def remainder(a: Lanes, b: Lanes) -> Lanes:
    """Of `divide`."""
    return (a - divide(a, b) * b).astype(a.dtype)


def bits_of(word: Lanes) -> Lanes:
    """[32 lanes, 32 bits], the lowest first."""
    return np.unpackbits(np.ascontiguousarray(word).view(np.uint8), bitorder="little").reshape(
        32, 32
    )


def popc(word: Lanes) -> Lanes:
    return bits_of(word).sum(1, dtype=np.uint32)


def clz(word: Lanes) -> Lanes:
    return (32 - np.frexp(doubles(word))[1]).astype(np.uint32)


def brev(word: Lanes) -> Lanes:
    return np.packbits(bits_of(word)[:, ::-1], bitorder="little").view(np.uint32)


def parts_of(word: Lanes, count: int) -> Lanes:
    """[count, 32]: the lowest bits first."""
    size = word.dtype.itemsize // count
    return np.ascontiguousarray(np.ascontiguousarray(word).view(f"u{size}").reshape(32, count).T)


def joined(parts: list[Lanes], kind: str) -> Lanes:
    return np.ascontiguousarray(np.stack(parts, axis=1)).view(kind)[:, 0]


def ballot(flag: Lanes) -> Lanes:
    return np.full(32, np.packbits(flag, bitorder="little").view(np.uint32)[0])


def shuffle_bfly(word: Lanes, distance: Lanes) -> Lanes:
    return word[LANE ^ distance]


def shuffle_idx(word: Lanes, lane: Lanes) -> Lanes:
    return word[lane & np.uint32(31)]


def map_to_rank(address: Lanes, rank: Lanes) -> Lanes:
    return address | ((rank + np.uint32(1)) << np.uint32(RANK_SHIFT))


# ---- mma m16n8k16: which lane holds what, from the PTX manual ----

G, Q = np.arange(32) // 4, np.arange(32) % 4
A_AT = np.zeros((4, 32, 2), np.int64)  # where element h of word i of a lane is in [16, 16]
B_AT = np.zeros((2, 32, 2), np.int64)  # in [16, 8]
C_AT = np.zeros((4, 32), np.int64)  # in [16, 8]
for i in range(4):
    C_AT[i] = (G + 8 * (i // 2)) * 8 + 2 * Q + i % 2
    for h in range(2):
        A_AT[i, :, h] = (G + 8 * (i % 2)) * 16 + 2 * Q + h + 8 * (i // 2)
        if i < 2:
            B_AT[i, :, h] = (2 * Q + h + 8 * i) * 8 + G


def matrix(words: list[Lanes], at: Lanes, shape: tuple[int, int]) -> Lanes:
    out = np.empty(shape)
    stacked = np.stack(words)
    out.reshape(-1)[at] = np.stack([low(stacked), high(stacked)], axis=-1)
    return out


def mma(a: list[Lanes], b: list[Lanes], c: list[Lanes]) -> Lanes:
    """The four accumulators [4, 32]; sums in float64."""
    sums = np.empty((16, 8))
    sums.reshape(-1)[C_AT] = np.stack(c).view(np.float32)
    sums += matrix(a, A_AT, (16, 16)) @ matrix(b, B_AT, (16, 8))
    return sums.astype(np.float32).reshape(-1)[C_AT]
