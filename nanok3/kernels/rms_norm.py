"""RMSNorm of each row:  out[t, c] = round(x[t, c] * rsqrt(mean_c(x[t]^2) + eps)) * weight[c]

Shapes   x [T, C] bf16 (row stride given: it may be a column range of a wider buffer), weight [C]
         bf16 -> out [T, C] bf16. C (a multiple of 8, at most 8192) and eps static, any T >= 1.
Bytes    4 T C + 2 C. T = 8, C = 3584: 0.12 MB, 0.03 us at 4.64 TB/s: the launch is what it takes.
Grid     a CTA a token; its threads keep the row in registers, two pieces of 16 bytes each.
Waits    weight: none (constant); x: the grid dependency.
Signals  launch_dependents at once. One CTA barrier, between the warps' sums and their total.
Aliases  out may be x: a thread reads its pieces before it writes them, and no others.
Archs    sm_90a, sm_100a, sm_103a.
Rounding sum of squares in float32: pieces, lanes and warps in a fixed order; the normalised value
         is rounded to bf16, then its product with the weight.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    bf16_high,
    bf16_low,
    compile_kernel,
    launch,
    ld_global_u32x4,
    ld_shared_f32,
    mul_bf16x2,
    pack_bf16,
    rsqrt_approx,
    st_global_u32x4,
    st_shared_f32,
    tree,
    warp_sums,
)
from nanok3.reference.numerics import rms_norm as rms_norm_ref  # noqa: F401 (the specification)

PIECE = 8  # columns of 16 bytes
PER_THREAD = 2  # pieces: enough loads in flight, and few warps at the barrier


@dataclass(frozen=True)
class Pieces:
    """How the 16-byte pieces of a row lie over a CTA: thread t has t, t + threads, .."""

    count: int

    @property
    def threads(self) -> int:
        return min(512, 32 * -(-self.count // (32 * PER_THREAD)))

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def per_thread(self) -> int:
        return -(-self.count // self.threads)


# ---- device ----


def floats(words):
    """The bf16 of some words, as float32."""
    return [half(word) for word in words for half in (bf16_low, bf16_high)]


def square_sum(values):
    return tree([v * v for v in values])


def normed(values, rstd, weights):
    """8 float32 and 4 words of weights -> 4 words of normalised, rounded, weighted values."""
    pairs = zip(values[::2], values[1::2], weights, strict=True)
    return [mul_bf16x2(pack_bf16(low * rstd, high * rstd), w) for low, high, w in pairs]


@cute.jit
def cta_sums(values, partial: Int32, warps: cutlass.Constexpr[int]):
    """Sums of 1 or 2 float32 over the CTA, in every thread. partial [warps, len(values)] f32.

    By all threads, once for the same `partial`.
    """
    count = len(values)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    mine = warp_sums(values, lane)
    if lane < count:
        st_shared_f32(partial + (warp * count + lane) * 4, mine)
    cute.arch.sync_threads()
    return [
        tree([ld_shared_f32(partial + (w * count + i) * 4) for w in range(warps)])
        for i in range(count)
    ]


class RMSNorm:
    def __init__(self, width: int, eps: float):
        assert width % PIECE == 0 and width <= 8192, f"{width} columns"
        self.width, self.eps, self.pieces = width, eps, Pieces(width // PIECE)

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int32, weight: Int64, out: Int64, num_tokens: Int32, stream
    ):
        self.kernel(x, x_stride, weight, out).launch(
            grid=(num_tokens, 1, 1),
            block=(self.pieces.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: Int64, x_stride: Int32, weight: Int64, out: Int64):
        cute.arch.griddepcontrol_launch_dependents()
        token, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        pieces = self.pieces
        partial = Int32(SmemAllocator().allocate(pieces.warps * 4, byte_alignment=16).toint())

        # 1. the weights, then the row; a piece that is not there is zero
        weights = load_pieces(weight, tid, pieces)
        cute.arch.griddepcontrol_wait()
        row = load_pieces(x + Int64(token) * Int64(x_stride) * 2, tid, pieces)

        # 2. CTA total
        (total,) = cta_sums([square_sum(floats(row_words(row, pieces)))], partial, pieces.warps)

        # 3. scale and store
        rstd = rsqrt_approx(total * Float32(1.0 / self.width) + Float32(self.eps))
        target = out + Int64(token) * (2 * self.width)
        for i in cutlass.range_constexpr(pieces.per_thread):
            piece = i * pieces.threads + tid
            if piece < pieces.count:
                words = normed(floats(piece_of(row, i)), rstd, piece_of(weights, i))
                st_global_u32x4(target + Int64(piece * 16), words)


@cute.jit
def load_pieces(base: Int64, tid: Int32, pieces: cutlass.Constexpr[Pieces]):
    """A thread's pieces of a row [count * 8] bf16, as words; zero beyond the row."""
    words = cute.make_rmem_tensor((4 * pieces.per_thread,), Uint32)
    for i in cutlass.range_constexpr(pieces.per_thread):
        for j in cutlass.range_constexpr(4):
            words[4 * i + j] = Uint32(0)
        piece = i * pieces.threads + tid
        if piece < pieces.count:
            loaded = ld_global_u32x4(base + Int64(piece * 16))
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = loaded[j]
    return words


def piece_of(words, i):
    return [words[4 * i + j] for j in range(4)]


def row_words(words, pieces):
    return [words[i] for i in range(4 * pieces.per_thread)]


# ---- host ----


@functools.cache
def compile_rms_norm(width: int, eps: float, arch: str):
    args = (Int64(0), Int32(0), Int64(0), Int64(0), Int32(1), make_fake_stream())
    return compile_kernel(RMSNorm(width, eps), args, arch)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor) -> None:
    """x [T, C] bf16 with any row stride, weight [C] bf16 -> out [T, C] bf16."""
    tokens, width = x.shape
    assert tokens >= 1 and all(t.dtype == torch.bfloat16 for t in (x, weight, out))
    assert x.stride(1) == 1 and x.stride(0) % PIECE == 0 and x.data_ptr() % 16 == 0
    assert weight.shape == (width,) and weight.is_contiguous()
    assert out.shape == x.shape and out.is_contiguous()
    kernel = compile_rms_norm(width, eps, arch_of(x.device.index))
    launch(
        kernel,
        address(x),
        x.stride(0),
        address(weight),
        address(out),
        tokens,
    )
