"""Attention residuals: add the pending delta to its stream, mix the streams, normalise.

    p    = delta if fresh else streams[n - 1] + delta, rounded to bf16; written to streams[n - 1]
    V    = [streams[0], .., streams[n - 2], p]                                        [n, T, C]
    a    = (V . score) * rsqrt(mean(V^2) + eps)                                       [n, T]
    out  = rms(softmax(a) . V) * norm

Shapes   delta [T, C] bf16, streams [n, T, C] bf16 (distance of streams given), score [C] f32, norm
         [C] bf16 -> out [T, C] bf16. n (1 .. 16), C (a multiple of 8, at most 16384), fresh and eps
         are static, any T >= 1.
Bytes    2 T C (n + 3) + 6 C, less 2 T C if fresh. n = 9, C = 7168, T = 8: 1.4 MB, 0.3 us at
         4.64 TB/s: launch and barriers (0.2 us each) are what it takes.
Grid     a cluster of 1, 2, 4 or 8 CTAs a token (8 for C = 7168); a thread keeps the same 8 columns
         of all streams in registers.
Waits    score, norm: none (constant); delta and streams, finished ones too since earlier kernels
         wrote them: the grid dependency.
Signals  launch_dependents at once. In the cluster:
         box           written by                       read by              order
         sums [P, 2n]  lanes 0 .. 2n - 1 of each warp,  every warp of every  first cluster barrier
                       in every CTA                     CTA
         mix [P]       lane 0 of each warp, in every    as above             second cluster barrier
                       CTA
         P = CTAs * warps, a place a warp. A third barrier, first in time, says that all CTAs of the
         cluster run, so that their boxes may be written. Each box is written once; after the last
         barrier a CTA looks only at its own, so it may end before the others.
Aliases  none.
Archs    sm_90a, sm_100a, sm_103a. sm_90a has run.
Rounding float32 sums: columns, lanes, then the P warps, by pairs; the same in every CTA. bf16: p,
         then the normalised mix, then its product with norm. The mix itself is not rounded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    compile_kernel,
    ex2_approx,
    launch,
    ld_global_f32x4,
    ld_global_u32x4,
    ld_shared_f32,
    mapa_shared,
    pack_bf16,
    rcp_approx,
    rsqrt_approx,
    st_cluster_f32,
    st_global_u32x4,
    tree,
    warp_sums,
)
from nanok3.kernels.rms_norm import PIECE, floats, normed, square_sum
from nanok3.reference.attn_res import attn_res_ref as attn_res_ref

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Shape:
    """Static sizes, and how the columns lie over a cluster: CTA r has pieces r * per_cta, .."""

    width: int  # C
    num_streams: int  # n
    fresh: bool
    eps: float

    def __post_init__(self) -> None:
        assert self.width % PIECE == 0 and self.width <= 16384, f"{self.width} columns"
        assert 1 <= self.num_streams <= 16, f"{self.num_streams} streams"

    @property
    def pieces(self) -> int:
        return self.width // PIECE

    @property
    def cluster(self) -> int:
        """CTAs, as many as have two warps of columns each: 8 is the most that every GPU allows."""
        return next(n for n in (8, 4, 2, 1) if self.pieces >= 64 * n or n == 1)

    @property
    def per_cta(self) -> int:
        return -(-self.pieces // self.cluster)

    @property
    def warps(self) -> int:
        return -(-self.per_cta // 32)

    @property
    def parts(self) -> int:
        return self.cluster * self.warps


# ---- device ----


class AttnRes:
    def __init__(self, shape: Shape):
        self.shape = shape
        # sum of squares and score of each stream; a power of two for `warp_sums`
        self.num_sums = 2 * shape.num_streams
        self.padded_sums = 1 << (self.num_sums - 1).bit_length()

    @cute.jit
    def __call__(
        self,
        delta: Int64,
        streams: Int64,
        stream_stride: Int64,
        score: Int64,
        norm: Int64,
        out: Int64,
        num_tokens: Int32,
        stream,
    ):
        self.kernel(delta, streams, stream_stride, score, norm, out).launch(
            grid=(num_tokens * self.shape.cluster, 1, 1),
            block=(32 * self.shape.warps, 1, 1),
            cluster=(self.shape.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        delta: Int64,
        streams: Int64,
        stream_stride: Int64,
        score: Int64,
        norm: Int64,
        out: Int64,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive()
        shape = self.shape
        n = shape.num_streams
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        rank = cute.arch.block_idx_in_cluster()
        token = cta // shape.cluster
        piece = rank * shape.per_cta + tid
        live = (tid < shape.per_cta) & (piece < shape.pieces)
        smem = SmemAllocator()
        sums_box = Int32(smem.allocate(shape.parts * self.num_sums * 4, byte_alignment=16).toint())
        mix_box = Int32(smem.allocate(shape.parts * 4, byte_alignment=16).toint())

        # 1. the weights, then all streams of this thread's columns, zero where it has none
        scores = cute.make_rmem_tensor((PIECE,), Float32)
        weights = cute.make_rmem_tensor((4,), Uint32)
        rows = cute.make_rmem_tensor((4 * n,), Uint32)
        for i in cutlass.range_constexpr(PIECE):
            scores[i] = Float32(0.0)
        for i in cutlass.range_constexpr(4):
            weights[i] = Uint32(0)
        for i in cutlass.range_constexpr(4 * n):
            rows[i] = Uint32(0)
        if live:
            low = ld_global_f32x4(score + Int64(piece * 32))
            high = ld_global_f32x4(score + Int64(piece * 32 + 16))
            words = ld_global_u32x4(norm + Int64(piece * 16))
            for i in cutlass.range_constexpr(4):
                scores[i] = low[i]
                scores[4 + i] = high[i]
                weights[i] = words[i]
        cute.arch.griddepcontrol_wait()
        column = Int64(token) * (2 * shape.width) + Int64(piece * 16)  # bytes from a row of token 0
        if live:
            self.load(delta + column, streams + column, stream_stride * 2, rows)

        # 2. each stream's sum of squares and score over the cluster; lane l has sum l
        values = [floats([rows[4 * i + j] for j in range(4)]) for i in range(n)]
        score_list = [scores[i] for i in range(PIECE)]
        sums = [square_sum(v) for v in values]
        sums += [tree([x * s for x, s in zip(v, score_list, strict=True)]) for v in values]
        sums += [Float32(0.0)] * (self.padded_sums - self.num_sums)
        cute.arch.cluster_wait()
        total = self.cluster_sums(sums, self.num_sums, sums_box, rank)

        # 3. softmax and mix: every thread for its columns
        mixed = self.mix(values, total)

        # 4. normalise
        total = self.cluster_sums([square_sum(mixed)], 1, mix_box, rank)
        rstd = rsqrt_approx(total * Float32(1.0 / shape.width) + Float32(shape.eps))
        if live:
            st_global_u32x4(out + column, normed(mixed, rstd, [weights[i] for i in range(4)]))

    @cute.jit
    def load(self, delta: Int64, streams: Int64, stride: Int64, rows):
        """16 bytes of each stream to `rows` (the last with delta added, and stored)."""
        n = self.shape.num_streams
        last = 4 * (n - 1)
        added = ld_global_u32x4(delta)
        for i in cutlass.range_constexpr(n - 1 if self.shape.fresh else n):
            words = ld_global_u32x4(streams + stride * i)
            for j in cutlass.range_constexpr(4):
                rows[4 * i + j] = words[j]
        if const_expr(self.shape.fresh):
            for j in cutlass.range_constexpr(4):
                rows[last + j] = added[j]
        else:
            old, new = floats([rows[last + j] for j in range(4)]), floats(added)
            for j in cutlass.range_constexpr(4):
                low, high = old[2 * j] + new[2 * j], old[2 * j + 1] + new[2 * j + 1]
                rows[last + j] = pack_bf16(low, high)
        st_global_u32x4(streams + stride * (n - 1), [rows[last + j] for j in range(4)])

    @cute.jit
    def cluster_sums(self, values, count: cutlass.Constexpr[int], box: Int32, rank: Int32):
        """Lane l < count of every warp gets the sum of values[l] over the cluster; count 1: all
        lanes. box [parts, count] f32, one use each. By all threads."""
        shape = self.shape
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        mine = warp_sums(values, lane)
        if lane < count:
            place = box + ((rank * shape.warps + warp) * count + lane) * 4
            for r in cutlass.range_constexpr(shape.cluster):
                st_cluster_f32(mapa_shared(place, Int32(r)), mine)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        at = box + cutlass.min(lane, count - 1) * 4
        return tree([ld_shared_f32(at + part * (count * 4)) for part in range(shape.parts)])

    def mix(self, values, total):
        """values n x 8 columns; lane i has stream i's sum of squares, lane n + i its score."""
        shape = self.shape
        n = shape.num_streams
        sums = [cute.arch.shuffle_sync(total, i) for i in range(2 * n)]
        scale, eps = Float32(1.0 / shape.width), Float32(shape.eps)
        a = [sums[n + i] * rsqrt_approx(sums[i] * scale + eps) for i in range(n)]
        top = tree(list(a), cutlass.max)
        e = [ex2_approx((x - top) * Float32(LOG2_E)) for x in a]
        share = rcp_approx(tree(list(e)))
        return [
            tree([w * v[c] for w, v in zip(e, values, strict=True)]) * share for c in range(PIECE)
        ]


# ---- host ----


@functools.cache
def compile_attn_res(shape: Shape, arch: str):
    args = (Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int32(1))
    return compile_kernel(AttnRes(shape), (*args, make_fake_stream()), arch)


def attn_res(
    delta: torch.Tensor,
    streams: torch.Tensor,
    score: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    fresh: bool,
    *,
    out: torch.Tensor,
) -> None:
    """delta [T, C], streams [n, T, C] bf16, score [C] f32, norm [C] bf16 -> streams[-1], out."""
    num_streams, tokens, width = streams.shape
    assert tokens >= 1 and score.dtype == torch.float32
    assert all(t.dtype == torch.bfloat16 for t in (delta, streams, norm, out))
    assert delta.shape == out.shape == (tokens, width) and score.shape == norm.shape == (width,)
    assert all(t.is_contiguous() for t in (delta, streams[0], score, norm, out))
    assert streams.stride(0) % PIECE == 0 and streams.data_ptr() % 16 == 0
    shape = Shape(width, num_streams, fresh, eps)
    kernel = compile_attn_res(shape, arch_of(out.device.index))
    launch(
        kernel,
        address(delta),
        address(streams),
        streams.stride(0),
        address(score),
        address(norm),
        address(out),
        tokens,
    )
