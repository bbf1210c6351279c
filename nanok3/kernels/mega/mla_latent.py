"""What latent attention makes of in_proj's sums in the persistent kernel, before q_b.

    q_latent = rms(q_a) q_norm;  cache[slot] = [rms(kv_a[:L]) kv_norm | kv_a[L:]]
    mla_gate = sigmoid(gate)

Waits    "mla_in", in every CTA; of one row its words, where they are needed.
Cut      A row of the cache, and with several rows one of q's latent, a CTA, from the last CTA on:
         the first ones have tiles of q_b. The gate over those that have neither.
Signals  what it writes is handed over by the op's "q_latent"; of one row the gate is words.
Aliases  a slot outside 0 .. slots - 1 (-1: padding) writes no cache row.
Rounding as `kernels/mla_latent`, after rounding in_proj's sums to bf16.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    cp_async_16,
    fence_async,
    ld_global_f32x4,
    ld_global_i64,
    ld_shared_f32,
    ld_shared_u32x2,
    pack_bf16,
    rsqrt_approx,
    select_f32,
    sigmoid,
    st_global_f32x4,
    st_global_u32x2,
    st_relaxed_u32x4,
    st_shared_f32,
    st_shared_u32x2,
    tree,
    warp_sum,
)
from nanok3.kernels.mega.linear import THREADS, rounded, stage_rows, x_stride
from nanok3.kernels.mega.role import Traced, tagged, untagged
from nanok3.kernels.mega.sizes import WARPS, Sizes
from nanok3.kernels.rms_norm import normed, square_sum


class Latent(Traced):
    def __init__(self, sizes: Sizes) -> None:
        s = self.sizes = sizes
        self.product, self.width = s.products["mla.in_proj"], s.mla_width
        self.norms_at = s.pass_rows * x_stride(s.q_rank)  # after what `stage_q` writes
        self.scratch_bytes = self.norms_at + 2 * (s.q_rank + s.kv_rank)

    def compute(self, r):
        weights = r.field("mla.q_norm"), r.field("mla.kv_norm")
        cache = r.field("mla.cache")
        self.ask_norms(r, *weights)
        if not self.sizes.is_words("mla_in"):
            r.wait("mla_in")
        self.rows(r, cache)
        self.gates(r)

    @cute.jit
    def ask_norms(self, r, q_norm: Int64, kv_norm: Int64):
        """Both weights to shared memory; there when the wait is over."""
        norms, q_pieces = r.shared("scratch") + self.norms_at, self.sizes.q_rank // 8
        for piece in cutlass.range(r.tid, q_pieces, THREADS, unroll=1):
            cp_async_16(norms + piece * 16, q_norm + Int64(piece * 16))
        for piece in cutlass.range(r.tid, self.sizes.kv_rank // 8, THREADS, unroll=1):
            cp_async_16(norms + (q_pieces + piece) * 16, kv_norm + Int64(piece * 16))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def rows(self, r, cache: Int64):
        """Unit 2 t: the cache row of row t; 2 t + 1: q's latent of it, if not made by `stage_q`.
        From the last CTA on: the first ones have tiles of q_b."""
        s = self.sizes
        r.bar()  # the norms' weights are there
        kinds = 1 if s.pass_rows == 1 else 2
        for unit in cutlass.range(s.sms - 1 - r.cta, kinds * r.num_tokens, s.sms, unroll=1):
            row = unit // kinds
            if unit % kinds == 0:
                slot = ld_global_i64(r.slot_mapping + Int64(row) * 8)
                there = (slot >= 0) & (slot < Int64(r.num_blocks) * s.block_size)
                to = cache + slot * (2 * (s.kv_rank + s.rope_dim))
                values, rstd = self.norm(r, row, s.q_rank, s.kv_rank, s.rope_dim)
                self.store_row(r, values, rstd, s.q_rank, s.kv_rank, to, Int32(there))
                fence_async()  # the row is read by bulk copies
            else:
                to = r.buffer("q_latent") + Int64(row * (2 * s.q_rank))
                values, rstd = self.norm(r, row, 0, s.q_rank, 0)
                self.store_row(r, values, rstd, 0, s.q_rank, to, Int32(1))
            r.bar()  # `small` is free

    @cute.jit
    def stage_q(self, r, staged: Int32):
        """q's latent [T, q_rank] bf16 to shared memory, for q_b. One row is normalised here by each
        CTA that needs it, which costs less than a hand-off; several come from their CTAs."""
        s = self.sizes
        if const_expr(s.pass_rows > 1):
            r.wait("q_latent")
            source = r.buffer("q_latent")
            stage_rows(r, source, Int32(2 * s.q_rank), s.q_rank, r.num_tokens, staged)
        else:
            if r.cta < s.products["mla.q_b"].tiles:
                values, rstd = self.norm(r, Int32(0), 0, s.q_rank, 0)
                for i in cutlass.range_constexpr(len(values)):
                    quad = r.tid + i * THREADS
                    if quad < s.q_rank // 4:
                        scale = ld_shared_u32x2(r.shared("scratch") + self.norms_at + quad * 8)
                        st_shared_u32x2(staged + quad * 8, normed(values[i], rstd, scale))

    def norm(self, r, row, first, width, copied):
        """This thread's columns of first .. first + width + copied - 1 of a row of mla_in, in
        fours, and 1 / rms of the first `width`. By all compute warps."""
        quads = (width + copied) // 4
        mine = [cutlass.min(r.tid + i * THREADS, quads - 1) for i in range(-(-quads // THREADS))]
        values = self.sums(r, row, [first + quad * 4 for quad in mine])
        square = Float32(0.0)
        for i, v in enumerate(values):
            here = Uint32(r.tid + i * THREADS < width // 4)
            square = square + select_f32(here, square_sum(v), Float32(0.0))
        return values, self.rstd(r, square, width)

    @cute.jit
    def store_row(
        self,
        r,
        values,
        rstd,
        first: Constexpr[int],
        width: Constexpr[int],
        to: Int64,
        wanted: Int32,
    ):
        """What `norm` gave: `width` columns normalised, the rest as they are."""
        weights = r.shared("scratch") + self.norms_at + 2 * first  # as the columns lie
        for i in cutlass.range_constexpr(len(values)):
            quad, v = r.tid + i * THREADS, values[i]
            at = to + Int64(quad * 8)
            if (wanted != 0) & (quad < width // 4):
                st_global_u32x2(at, normed(v, rstd, ld_shared_u32x2(weights + quad * 8)))
            if (wanted != 0) & (quad >= width // 4) & (quad < self.row_quads(first)):
                st_global_u32x2(at, (pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])))

    def row_quads(self, first: int) -> int:
        """Of q's latent, which begins at column 0, or of a cache row."""
        s = self.sizes
        return (s.q_rank if first == 0 else s.kv_rank + s.rope_dim) // 4

    def sums(self, r, row, columns):
        """Of mla_in 4 columns from each of these on, their K slices summed. By whole warps."""
        step, slices = self.sizes.pass_rows * self.product.rows * 4, self.product.slices
        starts = [r.buffer("mla_in") + Int64(row * self.product.rows + c) * 4 for c in columns]
        addresses = [start + Int64(i * step) for start in starts for i in range(slices)]
        if self.sizes.is_words("mla_in"):
            words = r.words(addresses, r.tag_of["mla_in"])
            loaded = [[untagged(words[4 * i + c]) for c in range(4)] for i in range(len(addresses))]
        else:
            loaded = [ld_global_f32x4(address) for address in addresses]
        groups = [loaded[i : i + slices] for i in range(0, len(loaded), slices)]
        return [[rounded(tree([p[c] for p in parts])) for c in range(4)] for parts in groups]

    @cute.jit
    def rstd(self, r, square: Float32, width: Constexpr[int]):
        """Of the CTA's sum of squares."""
        small = r.shared("small")
        (square,) = warp_sum([square])
        if r.lane == 0:
            st_shared_f32(small + r.warp * 4, square)
        r.bar()
        total = tree([ld_shared_f32(small + w * 4) for w in range(WARPS)])
        return rsqrt_approx(total * Float32(1.0 / width) + Float32(self.sizes.eps))

    @cute.jit
    def gates(self, r):
        """The gate's sigmoid, by CTAs with no row and no tile of q_b, as far as there are such."""
        s = self.sizes
        rows = 1 if s.pass_rows == 1 else 2 * s.pass_rows  # the last CTAs, see `rows`
        end = max(s.sms - rows, 1)
        first = s.products["mla.q_b"].tiles  # the first CTAs
        first = first if first < end else 0
        quads = r.num_tokens * (self.width // 4)
        if (r.cta >= first) & (r.cta < end):
            step = end - first
            own = r.warp * 32 * step + r.cta - first  # of the warp's first lane
            for base in cutlass.range(own, quads, THREADS * step, unroll=1):
                i = base + r.lane * step
                there = cutlass.min(i, quads - 1)
                row, column = there // (self.width // 4), there % (self.width // 4) * 4
                (sums,) = self.sums(r, row, [s.q_rank + s.kv_rank + s.rope_dim + column])
                if i < quads:
                    at = r.buffer("mla_gate") + Int64((row * self.width + column) * 4)
                    self.store_gate(r, at, [sigmoid(v) for v in sums])

    def store_gate(self, r, at, gate):
        if self.sizes.is_words("mla_gate"):
            st_relaxed_u32x4(at, tuple(tagged(v, r.tag_of["mla_in"]) for v in gate))
        else:
            st_global_f32x4(at, tuple(gate))
