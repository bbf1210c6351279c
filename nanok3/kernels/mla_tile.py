"""One tile of latent attention by eight warps: scores, a step of the softmax, values.

         scores [rows, 64] = queries [rows, L + Dr] @ keys [64, L + Dr]^T
         context [rows, L] = 2^(top - new top) context + probabilities [rows, 64] @ keys[:, :L]

Queries, keys and what the warps exchange lie in shared memory; who fills them, and who waits for
whom between tiles, is the kernel's. A warp scores 8 tokens and adds up L / 8 columns. Of rows
8 i + lane // 4 a lane keeps in registers

    top [2 row tiles]                   the largest score so far, times log2 e; all lanes alike
    total [2 row tiles]                 sum of the probabilities of its own tokens
    context [row tiles, L / 64, 4]      mma accumulators

Two barriers a tile for all warps (barrier 1): between the warps' maxima and their use, and between
the probabilities and theirs; and one for each two warps that share 16 tokens (barriers 2 to 5).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from nanok3.dsl import (
    bf16_high,
    bf16_low,
    ex2_approx,
    ld_shared_f32x4,
    ld_shared_u32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_bf16,
    pack_bf16,
    select_f32,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32,
    tree,
)

WARPS = 8
TILE = 8 * WARPS  # tokens
P_STRIDE = 2 * TILE + 16  # bytes of a row of probabilities, padded for ldmatrix
LOG2_E = 1.4426950408889634
LOWEST = -1e30  # `top` before anything is seen: finite, so that there is no inf - inf


class MLATile:
    """Static sizes, and offsets in shared memory from `work`, where the queries lie first."""

    def __init__(self, rank: int, rope_dim: int, softmax_scale: float, row_tiles: int):
        assert rank % 64 == 0, f"L must be a multiple of 64, not {rank}"
        assert rope_dim % 16 == 0, f"Dr must be a multiple of 16, not {rope_dim}"
        self.softmax_scale, self.row_tiles = softmax_scale, row_tiles
        self.rows = 16 * row_tiles
        self.row_bytes = 2 * (rank + rope_dim)  # of a query and of a key
        self.row_stride = self.row_bytes + 16  # an odd number of 16 bytes: 8 rows, 8 bank groups
        self.value_tiles = rank // (8 * WARPS)  # of 8 columns, of a warp
        self.p_at = self.rows * self.row_stride  # [row, token] bf16, rows of P_STRIDE
        self.exchange_at = self.p_at + self.rows * P_STRIDE  # [warp, row tile, lane, 4] f32
        self.maxima_at = self.exchange_at + WARPS * row_tiles * 512  # [row, warp] f32
        self.seen_at = self.maxima_at + self.rows * WARPS * 4  # [row] i32: last token it sees
        self.work_bytes = self.seen_at + self.rows * 4

    @cute.jit
    def attend(
        self, at: Int32, first: Int32, top, total, context, work: Int32, warp: Int32, lane: Int32
    ):
        """The tile at shared address `at`, whose tokens are first .. first + 63."""
        scores = self.score(at, work, warp, lane)
        self.mask(scores, first, work, warp, lane)
        self.share_maxima(scores, work, warp, lane)
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
        self.soften(scores, top, total, context, work, warp, lane)
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
        self.add_values(at, context, work, warp, lane)

    @cute.jit
    def score(self, at: Int32, work: Int32, warp: Int32, lane: Int32):
        """[row tiles, 4] scores of the warp's tokens 8 warp .. 8 warp + 7.

        Two warps share 16 tokens: each takes every other 16 columns of all of them, then the sums
        of the other's 8 tokens go to the other. So queries are read 4 times instead of 8.
        """
        stride = self.row_stride
        own = filled(4 * self.row_tiles, 0.0)
        other = filled(4 * self.row_tiles, 0.0)
        parity = warp % 2
        # Keys: lanes 0..15 give the rows of this warp's tokens, columns 0..7 and 8..15 of the 16,
        # lanes 16..31 those of the other's. Queries: rows 0..15, then the same 8 columns on.
        token = 8 * (warp ^ (lane // 16)) + lane % 8
        k_at = at + token * stride + lane // 8 % 2 * 16 + parity * 32
        q_at = work + lane % 16 * stride + lane // 16 * 16 + parity * 32
        steps = self.row_bytes // 32  # of 16 columns
        for i in cutlass.range_constexpr(steps // 2):
            self.multiply(k_at + i * 64, q_at + i * 64, own, other)
        if const_expr(steps % 2 == 1):  # noqa: SIM102 - one is decided here, one on the GPU
            if parity == 0:
                self.multiply(k_at + steps // 2 * 64, q_at + steps // 2 * 64, own, other)
        # barrier 1 lies between these reads and the next tile's writes
        exchange = work + self.exchange_at + lane * 16
        for m in cutlass.range_constexpr(self.row_tiles):
            st_shared_f32x4(exchange + (warp * self.row_tiles + m) * 512, quad_of(other, m))
        cute.arch.barrier(barrier_id=2 + warp // 2, number_of_threads=64)
        for m in cutlass.range_constexpr(self.row_tiles):
            half = ld_shared_f32x4(exchange + ((warp ^ 1) * self.row_tiles + m) * 512)
            for i in cutlass.range_constexpr(4):
                own[4 * m + i] = own[4 * m + i] + half[i]
        return own

    def multiply(self, k_at, q_at, own, other):
        """16 columns of queries [rows, 16] and keys [2 x 8 tokens, 16]."""
        keys = ldmatrix_x4(k_at)
        for m in range(self.row_tiles):
            queries = ldmatrix_x4(q_at + m * 16 * self.row_stride)
            set_quad(own, m, mma_bf16(queries, keys[:2], quad_of(own, m)))
            set_quad(other, m, mma_bf16(queries, keys[2:], quad_of(other, m)))

    def mask(self, scores, first, work, warp, lane):
        """Scales; -inf where a row does not see a token, whatever the score is."""
        token = first + 8 * warp + lane % 4 * 2
        seen_at = work + self.seen_at + lane // 4 * 4
        seen = [ld_shared_u32(seen_at + i * 32) for i in range(2 * self.row_tiles)]
        scale = Float32(self.softmax_scale * LOG2_E)
        for i in range(4 * self.row_tiles):
            visible = Uint32(token + i % 2 <= Int32(seen[i // 2]))
            scores[i] = select_f32(visible, scores[i] * scale, Float32(float("-inf")))

    @cute.jit
    def share_maxima(self, scores, work: Int32, warp: Int32, lane: Int32):
        """Each row's maximum over the warp's tokens, to [row, warp]."""
        at = work + self.maxima_at + lane // 4 * (WARPS * 4) + warp * 4
        tops = over_quad(pair_maxima(scores, 2 * self.row_tiles), cute.arch.fmax)
        if lane % 4 == 0:
            for i in cutlass.range_constexpr(2 * self.row_tiles):
                st_shared_f32(at + i * (8 * WARPS * 4), tops[i])

    def soften(self, scores, top, total, context, work, warp, lane):
        """Probabilities, as bf16 to [row, token]; rescales what was added under a lower maximum."""
        maxima = work + self.maxima_at + lane // 4 * (WARPS * 4)
        p_at = work + self.p_at + lane // 4 * P_STRIDE + warp * 16 + lane % 4 * 4
        for i in range(2 * self.row_tiles):
            at = maxima + i * (8 * WARPS * 4)
            parts = [top[i], *ld_shared_f32x4(at), *ld_shared_f32x4(at + 16)]
            new_top = tree(parts, cute.arch.fmax)
            shrink = ex2_approx(top[i] - new_top)
            p = pack_bf16(
                ex2_approx(scores[2 * i] - new_top), ex2_approx(scores[2 * i + 1] - new_top)
            )
            st_shared_u32(p_at + i * (8 * P_STRIDE), p)
            total[i] = total[i] * shrink + (bf16_low(p) + bf16_high(p))
            top[i] = new_top
            for n in range(self.value_tiles):  # c0, c1 are of row 8 i for even i, c2, c3 for odd
                c = 4 * (i // 2 * self.value_tiles + n) + i % 2 * 2
                context[c] = context[c] * shrink
                context[c + 1] = context[c + 1] * shrink

    def add_values(self, at, context, work, warp, lane):
        """context [rows, the warp's columns] += probabilities [rows, 64] @ values [64, columns]."""
        stride = self.row_stride
        p_at = work + self.p_at + lane % 16 * P_STRIDE + lane // 16 * 16
        v_at = at + lane * stride + warp * (16 * self.value_tiles)
        for half in range(2):  # 32 tokens, whose values one ldmatrix brings for 8 columns
            p = [
                [ldmatrix_x4(p_at + m * 16 * P_STRIDE + half * 64 + j * 32) for j in range(2)]
                for m in range(self.row_tiles)
            ]
            for n in range(self.value_tiles):
                v = ldmatrix_x4_trans(v_at + half * 32 * stride + n * 16)
                for m in range(self.row_tiles):
                    c = m * self.value_tiles + n
                    low = mma_bf16(p[m][0], v[:2], quad_of(context, c))
                    set_quad(context, c, mma_bf16(p[m][1], v[2:], low))

    @cute.jit
    def sums(self, total, work: Int32, warp: Int32, lane: Int32):
        """[2 row tiles] each row's total over all lanes and warps, in the order of the warps."""
        at = work + self.maxima_at + lane // 4 * (WARPS * 4)  # the maxima have been read by all
        totals = over_quad([total[i] for i in range(2 * self.row_tiles)], lambda x, y: x + y)
        if lane % 4 == 0:
            for i in cutlass.range_constexpr(2 * self.row_tiles):
                st_shared_f32(at + i * (8 * WARPS * 4) + warp * 4, totals[i])
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
        for i in cutlass.range_constexpr(2 * self.row_tiles):
            parts = at + i * (8 * WARPS * 4)
            total[i] = tree([*ld_shared_f32x4(parts), *ld_shared_f32x4(parts + 16)])
        return total


def quad_of(values, i):
    """Four of a register tensor, as an mma takes and gives them."""
    return tuple(values[4 * i + j] for j in range(4))


def set_quad(values, i, four):
    for j in range(4):
        values[4 * i + j] = four[j]


def pair_maxima(scores, count):
    """Of the two tokens that a lane has of each of its rows."""
    return [cute.arch.fmax(scores[2 * i], scores[2 * i + 1]) for i in range(count)]


def over_quad(values, combine):
    """Each value combined over the 4 lanes that share rows of an mma."""
    for distance in (1, 2):
        values = [combine(v, cute.arch.shuffle_sync_bfly(v, distance)) for v in values]
    return values


def filled(count, value):
    values = cute.make_rmem_tensor((count,), Float32)
    for i in range(count):
        values[i] = Float32(value)
    return values
