"""Attention residuals in the persistent kernel: no pass over x of their own (`reference/attn_res`).

    p = delta if fresh else s_n + delta;  x = rms(softmax(a) . [s_1 .. s_(n-1), p]) * norm

A CTA owns columns of every stream (`sizes`), and has their delta. With m = max of the finished
streams' a_i, what does not need p is made while others are waited for:

    prefix = sum_i e^(a_i - m) s_i                 i over finished streams, by each owner

Then  x = (alpha prefix + beta p) rstd norm,  alpha, beta, rstd from five numbers a row:

    Z = sum_i e^(a_i - m);  a_p from p . score and p . p;  the mean square of the mix from
    prefix . prefix, prefix . p, p . p

step            what                                          words         read by
`score_ahead`   a_i of the next op, a (row, stream) a CTA     scores        `prepare`, `stage`
`score_last`    that of p, if its stream is finished with it  scores        `prepare`, `stage`
`prepare`       prefix of the next op, own columns
`update`        p, and the sums over own columns              mixed, stats  `stage`
`stage`         x of a K slice, to shared memory, by the product that reads x

Waits    none: who reads words looks at them until they are there (`role`).
Rounding p to bf16; prefix and sums to 16 bits of mantissa, where words carry a tag; the normalised
         mix to bf16, then its product with norm. Sums in float32: columns of a CTA, then CTAs in
         the order of lanes.
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
    ld_global_u32x4,
    ld_shared_f32,
    ld_shared_f32x4,
    ld_shared_u32x2,
    pack_bf16,
    rcp_approx,
    rsqrt_approx,
    select_f32,
    st_global_u16,
    st_relaxed_u32,
    st_relaxed_u32x2,
    st_relaxed_u32x4,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32x2,
    tree,
    warp_sum,
)
from nanok3.kernels.mega.linear import THREADS, rounded, x_stride
from nanok3.kernels.mega.role import Traced, tagged, untagged
from nanok3.kernels.mega.sizes import MOST_STREAMS, TILE, WARPS, Sizes

LOG2_E = 1.4426950408889634
LOWEST = -1e30  # below any score, and finite: no inf - inf
MOST_FINISHED = MOST_STREAMS // 2
MOST_LOADS = 8  # groups of 4 columns of x that a thread keeps in flight


class AttnRes(Traced):
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.rows = sizes.pass_rows
        self.values = sizes.own_tiles * self.rows * TILE  # of a CTA, in [own tile, T, 16]

    def stream(self, r, index):
        """Address of stream `index` [T, C] bf16."""
        return r.streams + Int64(index) * Int64(2 * r.stream_stride)

    def scores(self, r, row):
        """Words of a row's a_i, [MOST_FINISHED], of finished streams. Two halves, used in turn: a
        fast CTA writes the next op's while a slow one still reads this one's."""
        half = r.half * (self.rows * MOST_FINISHED * 4)
        return r.buffer("scores") + Int64(half + row * (MOST_FINISHED * 4))

    def column(self, r, index):
        """Column of C of an own value, and whether there is one."""
        tile = r.cta + index // (self.rows * TILE) * self.sizes.sms
        return tile * TILE + index % TILE, tile < self.sizes.hidden // TILE

    # ---- ahead of the op ----

    @cute.jit
    def score_ahead(self, r, score: Int64, end: Int32, finished: Int32, count: Int32):
        """a of rows and streams 0 .. end - 1 for the next op, to which `finished` count; pair i by
        CTA SMs - 1 - i: the last CTAs have the fewest tiles."""
        hidden = self.sizes.hidden
        first, sms = self.sizes.sms - 1 - r.cta, self.sizes.sms
        for pair in cutlass.range(first, count * end, sms, unroll=1):
            row, index = pair % count, pair // count
            at = self.stream(r, index) + Int64(row * (2 * hidden))
            loaded = []
            for i in cutlass.range_constexpr(-(-hidden // (8 * THREADS))):  # all in flight
                first = cutlass.min((i * THREADS + r.tid) * 8, hidden - 8)
                low = ld_global_f32x4(score + Int64(first * 4))
                high = ld_global_f32x4(score + Int64(first * 4 + 16))
                loaded.append((ld_global_u32x4(at + Int64(first * 2)), (*low, *high)))
            dots, squares = [], []
            for i in cutlass.range_constexpr(len(loaded)):
                words, s = loaded[i]
                v = [f(w) for w in words for f in (bf16_low, bf16_high)]
                there = Uint32((i * THREADS + r.tid) * 8 < hidden)
                dot = tree([v[k] * s[k] for k in range(8)])
                square = tree([v[k] * v[k] for k in range(8)])
                dots.append(select_f32(there, dot, Float32(0.0)))
                squares.append(select_f32(there, square, Float32(0.0)))
            self.write_score(r, [tree(dots), tree(squares)], row, index, finished)

    @cute.jit
    def score_last(self, r, score: Int64, last: Int32, count: Int32, tag: Uint32):
        """The same of p, when its stream is finished with it: from its words, a row a CTA."""
        hidden = self.sizes.hidden
        for row in cutlass.range(self.sizes.sms - 1 - r.cta, count, self.sizes.sms, unroll=1):
            dot, square = Float32(0.0), Float32(0.0)
            for first in cutlass.range(0, hidden, 4 * THREADS, unroll=1):
                column = cutlass.min(first + r.tid * 4, hidden - 4)
                at = r.buffer("mixed") + Int64(row * hidden + column) * 8
                words = r.words([at, at + 16], tag)
                s = ld_global_f32x4(score + Int64(column * 4))
                there = Uint32(first + r.tid * 4 < hidden)
                v = [select_f32(there, untagged(words[2 * k]), Float32(0.0)) for k in range(4)]
                dot = dot + tree([v[k] * s[k] for k in range(4)])
                square = square + tree([v[k] * v[k] for k in range(4)])
            self.write_score(r, [dot, square], row, last, last + 1)

    @cute.jit
    def write_score(self, r, sums: list, row: Int32, index: Int32, finished: Int32):
        """a, from each thread's part of p . score and p . p. The words that no stream has are
        written with the first one's."""
        sums = warp_sum(sums)
        small = r.shared("mix")  # free between two AttnRes; `small` may still be read
        if r.lane == 0:
            st_shared_f32(small + r.warp * 8, sums[0])
            st_shared_f32(small + r.warp * 8 + 4, sums[1])
        r.bar()
        scores, tag = self.scores(r, row), r.score_tag[0]
        if r.tid == 0:
            dot = tree([ld_shared_f32(small + w * 8) for w in range(WARPS)])
            square = tree([ld_shared_f32(small + w * 8 + 4) for w in range(WARPS)])
            st_relaxed_u32(scores + Int64(index * 4), tagged(dot * self.rstd(square), tag))
        if (index == 0) & (r.tid >= finished) & (r.tid < MOST_FINISHED):
            st_relaxed_u32(scores + Int64(r.tid * 4), tagged(Float32(0.0), tag))
        r.bar()

    @cute.jit
    def read_scores(self, r, row: Int32, finished: Int32):
        """-> a row's a_i [MOST_FINISHED]; of streams not finished LOWEST. By whole warps."""
        scores = cute.make_rmem_tensor((MOST_FINISHED,), Float32)
        for i in cutlass.range_constexpr(MOST_FINISHED):
            scores[i] = Float32(LOWEST)
        at, tag = self.scores(r, row), r.score_tag[0]
        if finished > 0:
            words = r.words([at + 16 * i for i in range(MOST_FINISHED // 4)], tag)
            for i in cutlass.range_constexpr(MOST_FINISHED):
                there = Uint32(i < finished)
                scores[i] = select_f32(there, untagged(words[i]), Float32(LOWEST))
        return scores

    def rstd(self, square):
        mean = square * Float32(1.0 / self.sizes.hidden)
        return rsqrt_approx(mean + Float32(self.sizes.eps))

    @cute.jit
    def prepare(self, r, score: Int64, finished: Int32):
        """prefix and score vector of the own columns for the next op, before p is there."""
        for i in cutlass.range(r.tid, self.sizes.own_tiles * TILE, THREADS, unroll=1):
            column, there = self.column(r, i // TILE * (self.rows * TILE) + i % TILE)
            value = Float32(0.0)
            if there:
                value = ld_global_f32(score + Int64(column * 4))
            st_shared_f32(r.shared("score") + i * 4, value)
        for base in cutlass.range(0, self.values, THREADS, unroll=1):
            index = cutlass.min(base + r.tid, self.values - 1)
            row = cutlass.min(index // TILE % self.rows, r.num_tokens - 1)
            column, there = self.column(r, index)
            values = cute.make_rmem_tensor((MOST_FINISHED,), Float32)
            for i in cutlass.range_constexpr(MOST_FINISHED):
                values[i] = Float32(0.0)
            if there & (finished > 0):
                for i in cutlass.range_constexpr(MOST_FINISHED):  # this CTA's own; all in flight
                    stream = self.stream(r, cutlass.min(Int32(i), finished - 1))
                    at = stream + Int64((row * self.sizes.hidden + column) * 2)
                    values[i] = bf16_low(ld_global_u16(at))
            scores = self.read_scores(r, row, finished)
            top = tree([scores[i] for i in range(MOST_FINISHED)], cute.arch.fmax)
            terms = []
            for i in cutlass.range_constexpr(MOST_FINISHED):
                weight = ex2_approx((scores[i] - top) * Float32(LOG2_E))
                terms.append(select_f32(Uint32(i < finished), weight * values[i], Float32(0.0)))
            if base + r.tid < self.values:
                st_shared_f32(r.shared("prefix") + index * 4, tree(terms))

    # ---- the op ----

    @cute.jit
    def update(self, r, last: Int32, fresh: Int32, count: Int32, tap: Int32, tag: Uint32):
        """p = delta, or the stream plus delta, of the own columns; what the mix needs of them.

        last: index of the stream that p becomes; tap: the first column of the taps that p is
        written to as well, -1 for none. The own areas are [own tile, T, 16] f32. Words of all rows
        are written, of those from `count` on with zeros.
        """
        small = r.shared("small")
        stream, mixed = self.stream(r, last), r.buffer("mixed")
        r.bar()  # delta, prefix and score are there
        for base in cutlass.range(0, self.values, THREADS, unroll=1):
            live = base + r.tid < self.values
            index = cutlass.min(base + r.tid, self.values - 1)
            row, place = index // TILE % self.rows, index // (self.rows * TILE) * TILE
            column, there = self.column(r, index)
            own = Uint32(live & there & (row < count))
            p = Float32(0.0)
            if own != 0:
                p = ld_shared_f32(r.shared("delta") + index * 4)
                if fresh == 0:
                    p = rounded(p + ld_shared_f32(r.shared("current") + index * 4))
                st_shared_f32(r.shared("current") + index * 4, p)
                at = stream + Int64((row * self.sizes.hidden + column) * 2)
                st_global_u16(at, pack_bf16(p, Float32(0.0)))
            prefix = select_f32(own, ld_shared_f32(r.shared("prefix") + index * 4), Float32(0.0))
            if live & there:
                at = mixed + Int64((row * self.sizes.hidden + column) * 8)
                st_relaxed_u32x2(at, (tagged(p, tag), tagged(prefix, tag)))
            if const_expr(r.program.tapped):  # noqa: SIM102 - one is decided here, one on the GPU
                if (own != 0) & (tap >= 0):
                    at = r.taps + (Int64(row) * Int64(r.tap_stride) + Int64(tap + column)) * 2
                    st_global_u16(at, pack_bf16(p, Float32(0.0)))
            score = ld_shared_f32(r.shared("score") + (place + index % TILE) * 4)
            sums = [p * score, p * p, prefix * p, prefix * prefix]
            for distance in (8, 4, 2, 1):  # over the 16 columns of a tile
                sums = [v + cute.arch.shuffle_sync_bfly(v, distance) for v in sums]
            if live & (index % TILE == 0):
                st_shared_f32x4(small + index, tuple(sums))  # [own tile, T, 4]: 16 bytes each
        r.bar()
        if r.tid < self.rows:
            tiles = [
                ld_shared_f32x4(small + (i * self.rows + r.tid) * 16)
                for i in range(self.sizes.own_tiles)
            ]
            sums = [tagged(tree([t[k] for t in tiles]), tag) for k in range(4)]
            at = r.buffer("stats") + Int64((r.cta * self.rows + r.tid) * 16)
            st_relaxed_u32x4(at, tuple(sums))

    @cute.jit
    def stage(
        self,
        r,
        norm: Int64,
        last: Int32,
        first: Int32,
        width: Constexpr[int],
        count: Int32,
        x: Int32,
        tag: Uint32,
    ):
        """Columns first .. first + width - 1 of x, bf16, to shared memory, when their words and
        everybody's stats are there."""
        for piece in cutlass.range(r.tid, width // 8, THREADS, unroll=1):
            cp_async_16(r.shared("norm") + piece * 16, norm + Int64((first + piece * 8) * 2))
        cute.arch.cp_async_commit_group()
        loads = -(-self.rows * width // (4 * THREADS))
        batch = min(loads, MOST_LOADS)
        self.weigh(r, last, count, tag)
        columns = self.fetch(r, first, width, count, 0, batch, tag)
        cute.arch.cp_async_wait_group(0)
        r.bar()
        for begin in cutlass.range_constexpr(0, loads, batch):
            number = min(batch, loads - begin)
            if const_expr(begin > 0):
                columns = self.fetch(r, first, width, count, begin, number, tag)
            for i in cutlass.range_constexpr(number):
                self.mix(r, x, width, count, begin + i, [columns[8 * i + k] for k in range(8)])

    def group(self, r, width, count, i):
        """-> row, column (of the slice) of the 4 columns of x that are a thread's i-th; past the
        end the last ones."""
        group = cutlass.min(r.tid + i * THREADS, count * (width // 4) - 1)
        if self.rows == 1:
            return Int32(0), group * 4
        return group // (width // 4), group % (width // 4) * 4

    def fetch(self, r, first, width, count, begin, number, tag):
        """The words of `number` groups of columns, 8 each."""
        addresses = []
        for i in range(begin, begin + number):
            row, column = self.group(r, width, count, i)
            at = r.buffer("mixed") + Int64(row * self.sizes.hidden + first + column) * 8
            addresses += [at, at + 16]
        return r.words(addresses, tag)

    def mix(self, r, x, width, count, i, words):
        row, column = self.group(r, width, count, i)
        new, old = [untagged(w) for w in words[0::2]], [untagged(w) for w in words[1::2]]
        alpha = ld_shared_f32(r.shared("mix") + row * 8)
        beta = ld_shared_f32(r.shared("mix") + row * 8 + 4)
        norms = ld_shared_u32x2(r.shared("norm") + column * 2)
        scale = [f(w) for w in norms for f in (bf16_low, bf16_high)]
        v = [rounded(alpha * old[k] + beta * new[k]) * scale[k] for k in range(4)]
        at = x + row * x_stride(width) + column * 2
        st_shared_u32x2(at, (pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])))

    @cute.jit
    def weigh(self, r, last: Int32, count: Int32, tag: Uint32):
        """alpha rstd and beta rstd of each row, a warp a row."""
        for row in cutlass.range(r.warp, count, WARPS, unroll=1):
            steps = -(-self.sizes.sms // 32)
            addresses = []
            for i in cutlass.range_constexpr(steps):
                cta = cutlass.min(r.lane + 32 * i, self.sizes.sms - 1)
                addresses.append(r.buffer("stats") + Int64((cta * self.rows + row) * 16))
            words = r.words(addresses, tag)
            parts = []
            for i in cutlass.range_constexpr(steps):
                here = Uint32(r.lane + 32 * i < self.sizes.sms)
                four = [untagged(words[4 * i + k]) for k in range(4)]
                parts.append([select_f32(here, v, Float32(0.0)) for v in four])
            scores = self.read_scores(r, row, last)
            top = tree([scores[i] for i in range(MOST_FINISHED)], cute.arch.fmax)
            differences = [(scores[i] - top) * Float32(LOG2_E) for i in range(MOST_FINISHED)]
            weights = [ex2_approx(d) for d in differences]
            z = tree(
                [
                    select_f32(Uint32(i < last), weights[i], Float32(0.0))
                    for i in range(MOST_FINISHED)
                ]
            )
            sums = warp_sum([tree([p[k] for p in parts]) for k in range(4)])
            p_score, p_p, prefix_p, prefix_prefix = sums
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
