"""What MLA keeps of a token, and its query's latent:  out[t] = rms(x[t, :Q]) q_norm
    cache[slot[t]] = [rms(x[t, Q : Q + L]) kv_norm | x[t, Q + L : Q + L + Dr]]

Shapes   x [T, >= Q + L + Dr] bf16 (row stride given), q_norm [Q], kv_norm [L] bf16, slot_mapping
         [T] i64 -> out [T, Q] bf16, cache [slots, L + Dr] bf16. Q, L, Dr (multiples of 8), eps
         are static, any T >= 1. A slot outside 0 .. slots - 1 (-1: padding) writes no cache row.
Bytes    4 T (Q + L + Dr) + 2 (Q + L). K3, T = 8: 72 KB, 0.02 us at 4.64 TB/s.
Grid     a CTA a token; the pieces of 16 bytes of q_a, kv_a and its last Dr columns lie end to end
         over its threads, two each.
Waits    q_norm, kv_norm: none (constant); x, slot_mapping: the grid dependency.
Signals  launch_dependents at once. One CTA barrier, between the warps' sums and their totals.
Aliases  none. Tokens of one slot (only padding shares the trash block) leave either's row.
Archs    sm_90a, sm_100a, sm_103a.
Rounding as `rms_norm`, twice; the last Dr columns are copied bit by bit.
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
    compile_kernel,
    launch,
    ld_global_i64,
    ld_global_u32x4,
    rsqrt_approx,
    select_f32,
    st_global_u32x4,
)
from nanok3.kernels.rms_norm import (
    PIECE,
    Pieces,
    cta_sums,
    floats,
    load_pieces,
    normed,
    piece_of,
    square_sum,
)
from nanok3.reference.mla import mla_latent_ref as mla_latent_ref


@dataclass(frozen=True)
class Shape:
    """Static sizes, in columns."""

    q_rank: int  # Q
    rank: int  # L
    rope: int  # Dr
    eps: float

    def __post_init__(self) -> None:
        assert all(n % PIECE == 0 for n in (self.q_rank, self.rank, self.rope)), self

    @property
    def cache_width(self) -> int:
        return self.rank + self.rope


# ---- device ----


class MLALatent:
    def __init__(self, shape: Shape):
        self.shape = shape
        self.q_end = shape.q_rank // PIECE  # pieces
        self.kv_end = self.q_end + shape.rank // PIECE
        self.pieces = Pieces(self.q_end + shape.cache_width // PIECE)

    @cute.jit
    def __call__(
        self,
        x: Int64,
        x_stride: Int32,
        q_norm: Int64,
        kv_norm: Int64,
        cache: Int64,
        num_slots: Int64,
        slot_mapping: Int64,
        out: Int64,
        num_tokens: Int32,
        stream,
    ):
        self.kernel(x, x_stride, q_norm, kv_norm, cache, num_slots, slot_mapping, out).launch(
            grid=(num_tokens, 1, 1),
            block=(self.pieces.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        x_stride: Int32,
        q_norm: Int64,
        kv_norm: Int64,
        cache: Int64,
        num_slots: Int64,
        slot_mapping: Int64,
        out: Int64,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        shape, pieces = self.shape, self.pieces
        token, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        partial = Int32(SmemAllocator().allocate(pieces.warps * 8, byte_alignment=16).toint())

        # 1. the weights, then the row and its slot
        weights = self.load_weights(q_norm, kv_norm, tid)
        cute.arch.griddepcontrol_wait()
        row = load_pieces(x + Int64(token) * Int64(x_stride) * 2, tid, pieces)
        slot = ld_global_i64(slot_mapping + Int64(token) * 8)

        # 2. CTA totals of both ranges; a piece that is not there is zero
        q_sum, kv_sum = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(pieces.per_thread):
            piece = i * pieces.threads + tid
            in_q, in_kv = self.ranges_of(piece)
            squares = square_sum(floats(piece_of(row, i)))
            q_sum = q_sum + select_f32(in_q, squares, Float32(0.0))
            kv_sum = kv_sum + select_f32(in_kv, squares, Float32(0.0))
        q_sum, kv_sum = cta_sums([q_sum, kv_sum], partial, pieces.warps)

        # 3. scale and store; the last Dr columns are copied
        q_rstd = rsqrt_approx(q_sum * Float32(1.0 / shape.q_rank) + Float32(shape.eps))
        kv_rstd = rsqrt_approx(kv_sum * Float32(1.0 / shape.rank) + Float32(shape.eps))
        q_row = out + Int64(token) * (2 * shape.q_rank)
        cache_row = cache + slot * (2 * shape.cache_width)
        has_slot = (slot >= 0) & (slot < num_slots)
        for i in cutlass.range_constexpr(pieces.per_thread):
            piece = i * pieces.threads + tid
            in_q, _ = self.ranges_of(piece)
            words = piece_of(row, i)
            rstd = select_f32(in_q, q_rstd, kv_rstd)
            scaled = normed(floats(words), rstd, piece_of(weights, i))
            at = Int64((piece - self.q_end) * 16)
            if piece < self.q_end:
                st_global_u32x4(q_row + Int64(piece * 16), scaled)
            if has_slot & (piece >= self.q_end) & (piece < self.kv_end):
                st_global_u32x4(cache_row + at, scaled)
            if has_slot & (piece >= self.kv_end) & (piece < pieces.count):
                st_global_u32x4(cache_row + at, words)

    def ranges_of(self, piece):
        """Whether a piece is one of q_a, of the normalised part of kv_a: words, 1 or 0."""
        in_q = piece < self.q_end
        return Uint32(in_q), Uint32((piece >= self.q_end) & (piece < self.kv_end))

    @cute.jit
    def load_weights(self, q_norm: Int64, kv_norm: Int64, tid: Int32):
        """The weights of this thread's pieces; zero where a piece has none."""
        words = cute.make_rmem_tensor((4 * self.pieces.per_thread,), Uint32)
        for i in cutlass.range_constexpr(self.pieces.per_thread):
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = Uint32(0)
            piece = i * self.pieces.threads + tid
            if piece < self.kv_end:
                at = q_norm + Int64(piece * 16)
                if piece >= self.q_end:
                    at = kv_norm + Int64((piece - self.q_end) * 16)
                loaded = ld_global_u32x4(at)
                for j in cutlass.range_constexpr(4):
                    words[4 * i + j] = loaded[j]
        return words


# ---- host ----


@functools.cache
def compile_mla_latent(shape: Shape, arch: str):
    pointers = (Int64(0), Int32(0), Int64(0), Int64(0), Int64(0), Int64(1), Int64(0), Int64(0))
    return compile_kernel(MLALatent(shape), (*pointers, Int32(1), make_fake_stream()), arch)


def mla_latent(
    x: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """x [T, q_a | kv_a | gate] bf16 -> out [T, Q]; cache [slots, L + Dr] at slot_mapping [T]."""
    tokens = x.shape[0]
    q_rank, rank = q_norm.shape[0], kv_norm.shape[0]
    tensors = (x, q_norm, kv_norm, cache, out)
    assert tokens >= 1 and all(t.dtype == torch.bfloat16 for t in tensors)
    assert x.shape[1] >= q_rank + cache.shape[1] and cache.shape[1] >= rank
    assert x.stride(1) == 1 and x.stride(0) % PIECE == 0 and x.data_ptr() % 16 == 0
    assert all(t.is_contiguous() for t in (q_norm, kv_norm, cache, slot_mapping, out))
    assert slot_mapping.shape == (tokens,) and slot_mapping.dtype == torch.int64
    assert out.shape == (tokens, q_rank)
    shape = Shape(q_rank, rank, cache.shape[1] - rank, eps)
    kernel = compile_mla_latent(shape, arch_of(x.device.index))
    launch(
        kernel,
        address(x),
        x.stride(0),
        address(q_norm),
        address(kv_norm),
        address(cache),
        cache.shape[0],
        address(slot_mapping),
        address(out),
        tokens,
    )
