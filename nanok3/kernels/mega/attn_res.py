"""Attention residuals in the persistent kernel: no pass over x of their own (`reference/attn_res`).

    p = delta if fresh else s_n + delta;  x = rms(softmax(a) . [s_1 .. s_(n-1), p]) * norm

A CTA owns columns of every stream (`sizes`), and has their delta. With m = max of the finished
streams' a_i, what does not need p is made while others are waited for:

    prefix = sum_i e^(a_i - m) s_i                 i over finished streams, by each owner

Then  x = (alpha prefix + beta p) rstd norm,  alpha, beta, rstd from five numbers a row:

    Z = sum_i e^(a_i - m);  a_p from p . score and p . p;  the mean square of the mix from
    prefix . prefix, prefix . p, p . p

step                what                                             published        read by
`score_ahead`       a_i of the next op, a (row, stream) pair a CTA   scores           `prepare`, `stage`
`prepare`           prefix of the next op, own columns               prefix           `stage`
`update`            p, and the sums over own columns                 streams, stats   `stage`
`stage`             x of a K slice, to shared memory, by the product that reads x

Waits    `stage` for all `update`; `prepare` comes after a signal that follows `score_ahead`.
Rounding p to bf16; normalised mix to bf16, then its product with norm. Sums in float32, columns of
         a CTA, then CTAs in the order of lanes. scores has two halves, used in turn: a fast CTA
         writes the next op's while a slow one still reads this one's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    bf16_high,
    bf16_low,
    cp_async_16,
    ex2_approx,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_u16,
    ld_global_u32x2,
    ld_global_u32x4,
    ld_shared_f32,
    ld_shared_f32x4,
    ld_shared_u32x2,
    pack_bf16,
    rcp_approx,
    rsqrt_approx,
    select_f32,
    st_global_f32,
    st_global_f32x4,
    st_global_u16,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32x2,
    tree,
    warp_sum,
)
from nanok3.kernels.mega.linear import THREADS, rounded, x_stride
from nanok3.kernels.mega.role import Traced
from nanok3.kernels.mega.sizes import MOST_STREAMS, TILE, WARPS, Sizes

LOG2_E = 1.4426950408889634
LOWEST = -1e30  # below any score, and finite: no inf - inf
MOST_LOADS = 8  # groups of 4 columns of x that a thread keeps in flight


class AttnRes(Traced):
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.rows = sizes.pass_rows
        self.values = sizes.own_tiles * self.rows * TILE  # of a CTA, in [own tile, T, 16]

    def stream(self, r, index):
        """Address of stream `index` [T, C] bf16."""
        return r.streams + Int64(index) * Int64(2 * r.stream_stride)

    def scores(self, r, half):
        """a_i of the finished streams, [n, T] f32, of the attention's (0) or the MLP's op (1)."""
        return r.buffer("scores") + Int64(half * (MOST_STREAMS // 2 * self.rows * 4))

    def column(self, r, index):
        """Column of C of an own value, and whether there is one."""
        tile = r.cta + index // (self.rows * TILE) * self.sizes.sms
        return tile * TILE + index % TILE, tile < self.sizes.hidden // TILE

    # ---- ahead of the op ----

    @cute.jit
    def score_ahead(self, r, score: Int64, finished: Int32, half: Constexpr[int], count: Int32):
        """a of (row, finished stream) pairs for the next op; pair i by CTA SMs - 1 - i: the last
        CTAs have the fewest tiles."""
        pairs = count * finished
        for pair in cutlass.range(self.sizes.sms - 1 - r.cta, pairs, self.sizes.sms, unroll=1):
            row, index = pair % count, pair // count
            at = self.stream(r, index) + Int64(row * (2 * self.sizes.hidden))
            dot, square = Float32(0.0), Float32(0.0)
            for first in cutlass.range(r.tid * 8, self.sizes.hidden, THREADS * 8, unroll=1):
                words = ld_global_u32x4(at + Int64(first * 2))
                low = ld_global_f32x4(score + Int64(first * 4))
                high = ld_global_f32x4(score + Int64(first * 4 + 16))
                v = [f(w) for w in words for f in (bf16_low, bf16_high)]
                s = [*low, *high]
                dot = dot + tree([v[i] * s[i] for i in range(8)])
                square = square + tree([v[i] * v[i] for i in range(8)])
            sums = warp_sum([dot, square])
            small = r.shared("small")
            if r.lane == 0:
                st_shared_f32(small + r.warp * 8, sums[0])
                st_shared_f32(small + r.warp * 8 + 4, sums[1])
            r.bar()
            if r.tid == 0:
                dot = tree([ld_shared_f32(small + w * 8) for w in range(WARPS)])
                square = tree([ld_shared_f32(small + w * 8 + 4) for w in range(WARPS)])
                a = dot * self.rstd(square)
                st_global_f32(self.scores(r, half) + Int64((index * self.rows + row) * 4), a)
            r.bar()

    def rstd(self, square):
        mean = square * Float32(1.0 / self.sizes.hidden)
        return rsqrt_approx(mean + Float32(self.sizes.eps))

    @cute.jit
    def prepare(self, r, score: Int64, finished: Int32, half: Constexpr[int]):
        """prefix of the own columns for the next op, and their scores, ready before p is."""
        scores = self.scores(r, half)
        for i in cutlass.range(r.tid, self.sizes.own_tiles * TILE, THREADS, unroll=1):
            column, there = self.column(r, i // TILE * (self.rows * TILE) + i % TILE)
            value = Float32(0.0)
            if there:
                value = ld_global_f32(score + Int64(column * 4))
            st_shared_f32(r.shared("score") + i * 4, value)
        for index in cutlass.range(r.tid, self.values, THREADS, unroll=1):
            row = index // TILE % self.rows
            column, there = self.column(r, index)
            top = self.top(scores, row, finished)
            total = Float32(0.0)
            if there & (row < r.num_tokens):
                for i in cutlass.range(finished, unroll=1):
                    a = ld_global_f32(scores + Int64((i * self.rows + row) * 4))
                    at = self.stream(r, i) + Int64((row * self.sizes.hidden + column) * 2)
                    weight = ex2_approx((a - top) * Float32(LOG2_E))
                    total = total + weight * bf16_low(ld_global_u16(at))
                at = r.buffer("prefix") + Int64((row * self.sizes.hidden + column) * 4)
                st_global_f32(at, total)
            st_shared_f32(r.shared("prefix") + index * 4, total)

    @cute.jit
    def top(self, scores: Int64, row: Int32, finished: Int32):
        """The largest a of a row's finished streams."""
        top = Float32(LOWEST)
        for i in cutlass.range(finished, unroll=1):
            a = ld_global_f32(scores + Int64((i * self.rows + row) * 4))
            top = cute.arch.fmax(top, a)
        return top

    # ---- the op ----

    @cute.jit
    def update(self, r, last: Int32, fresh: Int32, count: Int32):
        """p = delta, or the stream plus delta, of the own columns; what the mix needs of them.

        last: index of the stream that p becomes. The own areas are [own tile, T, 16] f32.
        """
        small = r.shared("small")
        stream = self.stream(r, last)
        r.bar()  # delta, prefix and score are there
        for base in cutlass.range(0, self.values, THREADS, unroll=1):
            index = base + r.tid
            live = index < self.values
            index = cutlass.min(index, self.values - 1)
            row, place = index // TILE % self.rows, index // (self.rows * TILE) * TILE
            column, there = self.column(r, index)
            p = ld_shared_f32(r.shared("delta") + index * 4)
            if live & (fresh == 0):  # the others' last value may be in writing
                p = rounded(p + ld_shared_f32(r.shared("current") + index * 4))
            if live & there & (row < count):
                st_shared_f32(r.shared("current") + index * 4, p)
                at = stream + Int64((row * self.sizes.hidden + column) * 2)
                st_global_u16(at, pack_bf16(p, Float32(0.0)))
            p = select_f32(Uint32(live & there), p, Float32(0.0))
            prefix = ld_shared_f32(r.shared("prefix") + index * 4)
            score = ld_shared_f32(r.shared("score") + (place + index % TILE) * 4)
            sums = [p * score, p * p, prefix * p, prefix * prefix]
            sums[3] = select_f32(Uint32(live & there), sums[3], Float32(0.0))
            for distance in (8, 4, 2, 1):  # over the 16 columns of a tile
                sums = [v + cute.arch.shuffle_sync_bfly(v, distance) for v in sums]
            if live & (index % TILE == 0):
                st_shared_f32x4(small + index, tuple(sums))  # [own tile, T, 4]: 16 bytes each
        r.bar()
        if r.tid < count:
            tiles = [
                ld_shared_f32x4(small + (i * self.rows + r.tid) * 16)
                for i in range(self.sizes.own_tiles)
            ]
            sums = [tree([t[k] for t in tiles]) for k in range(4)]
            at = r.buffer("stats") + Int64((r.cta * self.rows + r.tid) * 16)
            st_global_f32x4(at, tuple(sums))

    @cute.jit
    def stage(
        self,
        r,
        norm: Int64,
        last: Int32,
        half: Constexpr[int],
        first: Int32,
        width: Constexpr[int],
        count: Int32,
        x: Int32,
    ):
        """Columns first .. first + width - 1 of x, bf16, to shared memory. Waits for "stats"."""
        for piece in cutlass.range(r.tid, width // 8, THREADS, unroll=1):
            cp_async_16(r.shared("norm") + piece * 16, norm + Int64((first + piece * 8) * 2))
        cute.arch.cp_async_commit_group()
        r.wait("stats")
        loads = -(-self.rows * width // (4 * THREADS))
        batch = min(loads, MOST_LOADS)
        columns = self.fetch(
            r, last, first, width, count, 0, batch
        )  # they come while rows are weighed
        self.weigh(r, last, half, count)
        cute.arch.cp_async_wait_group(0)
        r.bar()
        for begin in cutlass.range_constexpr(0, loads, batch):
            if const_expr(begin > 0):
                columns = self.fetch(r, last, first, width, count, begin, min(batch, loads - begin))
            for i in cutlass.range_constexpr(min(batch, loads - begin)):
                self.mix(r, x, width, count, begin + i, *columns[i])

    def group(self, r, width, count, i):
        """-> row, column (of the slice) of the 4 columns of x that are a thread's i-th; past the
        end the last ones."""
        group = cutlass.min(r.tid + i * THREADS, count * (width // 4) - 1)
        if self.rows == 1:
            return Int32(0), group * 4
        return group // (width // 4), group % (width // 4) * 4

    def fetch(self, r, last, first, width, count, begin, number):
        """Four columns each of the prefix and of the stream that p is."""
        prefix, stream, columns = r.buffer("prefix"), self.stream(r, last), []
        for i in range(begin, begin + number):
            row, column = self.group(r, width, count, i)
            at = Int64(row * self.sizes.hidden + first + column)
            columns.append((ld_global_f32x4(prefix + at * 4), ld_global_u32x2(stream + at * 2)))
        return columns

    def mix(self, r, x, width, count, i, old, words):
        row, column = self.group(r, width, count, i)
        new = [f(w) for w in words for f in (bf16_low, bf16_high)]
        alpha = ld_shared_f32(r.shared("mix") + row * 8)
        beta = ld_shared_f32(r.shared("mix") + row * 8 + 4)
        norms = ld_shared_u32x2(r.shared("norm") + column * 2)
        scale = [f(w) for w in norms for f in (bf16_low, bf16_high)]
        v = [rounded(alpha * old[k] + beta * new[k]) * scale[k] for k in range(4)]
        at = x + row * x_stride(width) + column * 2
        st_shared_u32x2(at, (pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])))

    @cute.jit
    def weigh(self, r, last: Int32, half: Constexpr[int], count: Int32):
        """alpha rstd and beta rstd of each row, a warp a row."""
        for row in cutlass.range(r.warp, count, WARPS, unroll=1):
            steps = -(-self.sizes.sms // 32)
            parts = []
            for i in cutlass.range_constexpr(steps):
                cta = cutlass.min(r.lane + 32 * i, self.sizes.sms - 1)
                four = ld_global_f32x4(r.buffer("stats") + Int64((cta * self.rows + row) * 16))
                here = Uint32(r.lane + 32 * i < self.sizes.sms)
                parts.append([select_f32(here, v, Float32(0.0)) for v in four])
            scores = self.scores(r, half)
            a = Float32(LOWEST)
            if r.lane < last:
                a = ld_global_f32(scores + Int64((r.lane * self.rows + row) * 4))
            top = a
            for distance in cutlass.range_constexpr(5):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << distance))
            z = select_f32(
                Uint32(r.lane < last), ex2_approx((a - top) * Float32(LOG2_E)), Float32(0.0)
            )
            sums = warp_sum([*(tree([p[k] for p in parts]) for k in range(4)), z])
            p_score, p_p, prefix_p, prefix_prefix, z = sums
            a_p = p_score * self.rstd(p_p)
            most = cute.arch.fmax(top, a_p)
            alpha = ex2_approx((top - most) * Float32(LOG2_E))
            beta = ex2_approx((a_p - most) * Float32(LOG2_E))
            inverse = rcp_approx(alpha * z + beta)
            alpha = alpha * inverse
            beta = beta * inverse
            square = alpha * alpha * prefix_prefix + beta * beta * p_p
            rstd = self.rstd(square + Float32(2.0) * alpha * beta * prefix_p)
            if r.lane == 0:
                st_shared_f32(r.shared("mix") + row * 8, alpha * rstd)
                st_shared_f32(r.shared("mix") + row * 8 + 4, beta * rstd)
