"""Multi-head latent attention in the persistent kernel (`reference/mla`), in the latent.

step       what, by whom                                                    signals
`latent`   q's latent, normalised; the cache row; the gate's sigmoid        (the op) q_latent
           (q_b is a product like others)                                   (the op) q
`compute`  absorb: q_n of each head to the latent, 16 x 4 rows a unit       q_absorbed
           `mla_attend`: a unit (request, rows, split of the context)       mla_partial
           value: a unit (head, 64 columns of the latent): the splits'      mla_heads
           sum of these columns, and its product with the value rows
`stage`    the heads, summed over columns of the latent and gated, to shared memory, by the
           product that reads them

So merging the splits costs no hand-off, and `stage` adds up L / 64 parts of the heads.
Rounding  as the chain of kernels: in_proj's sums, both norms, q_absorbed, the merged context and the
          heads before the gate are rounded to bf16 (`kernels/mla_latent`, `mla_merge`, `gemv`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    cp_async_16,
    ex2_approx,
    fence_async,
    float_of,
    ld_global_f32x4,
    ld_global_i64,
    ld_global_u32x2,
    ld_global_u32x4,
    ld_shared_f32,
    ld_shared_f32x4,
    ld_shared_u32,
    ld_shared_u32x2,
    ld_shared_u32x4,
    mma_bf16,
    pack_bf16,
    rcp_approx,
    rsqrt_approx,
    select_f32,
    sigmoid,
    st_global_f32,
    st_global_f32x4,
    st_global_u16,
    st_global_u32x2,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32,
    st_shared_u32x2,
    tree,
    warp_sum,
)
from nanok3.kernels.mega.linear import THREADS, rounded, stage_rows, x_stride
from nanok3.kernels.mega.mla_attend import ROWS, Attend
from nanok3.kernels.mega.role import Traced
from nanok3.kernels.mega.sizes import BLOCK, BLOCK_BYTES, SLOT_BLOCKS, TILE, WARPS, Sizes
from nanok3.kernels.mla_tile import LOWEST, filled, quad_of, set_quad
from nanok3.kernels.rms_norm import normed, square_sum

SLICE = 64  # columns of the latent that a unit of the value product takes
QUADS = SLICE // 4
SHARES = THREADS // QUADS  # of the splits, each for a thread a quad


class MLA(Traced):
    def __init__(self, sizes: Sizes) -> None:
        s = self.sizes = sizes
        assert s.nope_dim % BLOCK == 0 and s.value_dim % TILE == 0 and s.kv_rank % SLICE == 0
        self.attention = Attend(s)
        self.width = s.mla_heads * s.value_dim  # of the heads
        self.product = s.products["mla.in_proj"]
        # absorb: tiles of 16 rows of the latent, of a unit: few, so that many CTAs have one
        tiles = s.mla_heads * s.kv_rank // TILE
        self.absorb_blocks = s.nope_dim // BLOCK
        self.absorb_tiles = next((n for n in (1, 2) if tiles <= n * s.sms), 4)
        self.absorb_units = tiles // self.absorb_tiles
        assert self.absorb_tiles * self.absorb_blocks <= SLOT_BLOCKS
        # value
        self.slices = s.kv_rank // SLICE
        self.value_units = s.mla_heads * self.slices
        self.value_tiles = s.value_dim // TILE
        assert self.value_tiles * (SLICE // BLOCK) <= SLOT_BLOCKS and self.value_tiles <= 32
        self.most_splits = 32 * -(-s.sms // 32)
        self.batch = -(-s.sms // SHARES) if s.pass_rows == 1 else 3  # splits' loads in flight
        self.sums_at = 4 * s.pass_rows * self.most_splits  # after weights [T, split] f32
        self.x_at = self.sums_at + 16 * s.pass_rows * THREADS  # after sums [T, share, SLICE] f32
        self.norms_at = s.pass_rows * x_stride(s.q_rank)  # after what `stage_q` writes
        self.scratch_bytes = max(
            self.x_at + s.pass_rows * x_stride(SLICE),
            self.attention.scratch_bytes,
            self.norms_at + 2 * (s.q_rank + s.kv_rank),
        )

    # ---- the loader warp ----

    def load(self, r):
        r.begin("mla")
        self.load_absorb(r, r.field("mla.absorb"))
        r.signal("q_absorbed")
        self.attention.load(r, r.field("mla.cache"))
        r.signal("mla_partial")
        self.load_value(r, r.field("mla.value"))
        r.signal("mla_heads")

    @cute.jit
    def load_absorb(self, r, base: Int64):
        unit_bytes = self.absorb_tiles * self.absorb_blocks * BLOCK_BYTES
        for unit in cutlass.range(r.cta, self.absorb_units, self.sizes.sms, unroll=1):
            r.fill(base + Int64(unit) * unit_bytes, Int32(unit_bytes))

    @cute.jit
    def load_value(self, r, base: Int64):
        """A unit's columns of each tile of its head."""
        blocks, part = self.sizes.kv_rank // BLOCK, SLICE // BLOCK
        for unit in cutlass.range(r.cta, self.value_units, self.sizes.sms, unroll=1):
            slot = r.claim(Int32(self.value_tiles * part * BLOCK_BYTES))
            if r.lane < self.value_tiles:
                tile = unit // self.slices * self.value_tiles + r.lane
                block = Int64(tile) * blocks + Int64(unit % self.slices * part)
                offset = r.lane * (part * BLOCK_BYTES)
                r.ask(slot, offset, base + block * BLOCK_BYTES, Int32(part * BLOCK_BYTES))

    # ---- latent ----

    def latent(self, r):
        weights = r.field("mla.q_norm"), r.field("mla.kv_norm")
        cache = r.field("mla.cache")
        self.ask_norms(r, *weights)
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
        loaded = []
        for i in range(-(-quads // THREADS)):
            quad = cutlass.min(r.tid + i * THREADS, quads - 1)
            loaded.append(self.ask_parts(r, row, first + quad * 4))
        values = [[rounded(tree([p[c] for p in parts])) for c in range(4)] for parts in loaded]
        square = Float32(0.0)
        for i, v in enumerate(values):
            here = Uint32(r.tid + i * THREADS < width // 4)
            square = square + select_f32(here, square_sum(v), Float32(0.0))
        return values, self.rstd(r, square, width)

    @cute.jit
    def store_row(
        self, r, values, rstd, first: Constexpr[int], width: Constexpr[int], to: Int64, wanted: Int32
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

    def ask_parts(self, r, row, column):
        """4 columns of the K slices' sums of mla_in."""
        base = r.buffer("mla_in") + Int64(row * self.product.rows + column) * 4
        step = self.sizes.pass_rows * self.product.rows * 4
        return [ld_global_f32x4(base + Int64(i * step)) for i in range(self.product.slices)]

    @cute.jit
    def rstd(self, r, square: Float32, width: Constexpr[int]):
        """Of the CTA's sum of squares."""
        small = r.shared("small")
        (square,) = warp_sum([square])
        if r.lane == 0:
            st_shared_f32(small + r.warp * 4, square)
        r.bar()
        total = tree([ld_shared_f32(small + w * 4) for w in range(WARPS)])
        r.bar()  # for the next row
        return rsqrt_approx(total * Float32(1.0 / width) + Float32(self.sizes.eps))

    @cute.jit
    def gates(self, r):
        """The gate's sigmoid, by CTAs that have no row, as far as there are such."""
        s = self.sizes
        busy = 1 if s.pass_rows == 1 else 2 * s.pass_rows  # the last CTAs, see `rows`
        ctas, quads = max(s.sms - busy, 1), r.num_tokens * (self.width // 4)
        if r.cta < ctas:
            own = r.tid * ctas + ctas - 1 - r.cta
            for i in cutlass.range(own, quads, THREADS * ctas, unroll=1):
                row, column = i // (self.width // 4), i % (self.width // 4) * 4
                parts = self.ask_parts(r, row, s.q_rank + s.kv_rank + s.rope_dim + column)
                gate = [sigmoid(rounded(tree([p[c] for p in parts]))) for c in range(4)]
                to = r.buffer("mla_gate") + Int64((row * self.width + column) * 4)
                st_global_f32x4(to, tuple(gate))

    # ---- attention ----

    def compute(self, r):
        self.absorb(r)
        r.signal("q_absorbed")
        self.attention.compute(r)
        r.signal("mla_partial")
        self.value(r)
        r.signal("mla_heads")

    @cute.jit
    def absorb(self, r):
        """A tile a warp: [16 rows of the latent, T]."""
        s = self.sizes
        if r.cta < self.absorb_units:
            r.wait("q")
        for unit in cutlass.range(r.cta, self.absorb_units, s.sms, unroll=1):
            chunk = r.take()
            if r.warp < self.absorb_tiles:
                tile = unit * self.absorb_tiles + r.warp
                head = tile // (s.kv_rank // TILE)
                token = cutlass.min(r.lane // 4, r.num_tokens - 1)
                query = (token * s.mla_heads + head) * (2 * (s.nope_dim + s.rope_dim))
                at = r.buffer("q") + Int64(query + r.lane % 4 * 16)
                x = [ld_global_u32x4(at + i * (2 * BLOCK)) for i in range(self.absorb_blocks)]
                weights = chunk + r.warp * (self.absorb_blocks * BLOCK_BYTES) + r.lane * 16
                c = self.multiply(weights, x)
                base = r.buffer("q_absorbed") + Int64((tile * TILE + r.lane // 4) * 2)
                for i in cutlass.range_constexpr(1 if s.pass_rows == 1 else 2):
                    token = r.lane % 4 * 2 + i
                    if token < r.num_tokens:
                        to = base + Int64(token * (2 * s.mla_heads * s.kv_rank))
                        st_global_u16(to, pack_bf16(c[i], Float32(0.0)))
                        st_global_u16(to + 16, pack_bf16(c[2 + i], Float32(0.0)))
            r.release()

    def multiply(self, weights, x):
        """A tile's blocks at a shared address, this lane's 16 bytes of each on -> [16, 8] as an
        mma leaves it; x: words of the lane's token."""
        c = filled(8, 0.0)  # two chains of accumulators
        for i, v in enumerate(x):
            w = ld_shared_u32x4(weights + i * BLOCK_BYTES)  # row lane // 4, 8 columns
            u = ld_shared_u32x4(weights + i * BLOCK_BYTES + 8 * BLOCK * 2)  # 8 rows on
            set_quad(c, 0, mma_bf16((w[0], u[0], w[1], u[1]), v[:2], quad_of(c, 0)))
            set_quad(c, 1, mma_bf16((w[2], u[2], w[3], u[3]), v[2:], quad_of(c, 1)))
        return [c[i] + c[4 + i] for i in range(4)]

    # ---- merging, values ----

    @cute.jit
    def value(self, r):
        s = self.sizes
        queries, groups, splits, _ = self.attention.cut(r)
        row = cutlass.min(r.warp, r.num_tokens - 1)
        limit, _ = self.attention.reach(r, row // queries, queries)
        used = self.attention.used_splits(limit, splits)
        if (r.warp < r.num_tokens) & (r.lane == 0):
            st_shared_u32(r.shared("small") + r.warp * 4, used)
        if r.cta < self.value_units:
            r.wait("mla_partial")
        for unit in cutlass.range(r.cta, self.value_units, s.sms, unroll=1):
            head, part = unit // self.slices, unit % self.slices
            self.merge(r, head, part * SLICE, used)
            token = cutlass.min(r.lane // 4, r.num_tokens - 1)
            x_at = r.shared("scratch") + self.x_at + token * x_stride(SLICE) + r.lane % 4 * 16
            x = [ld_shared_u32x4(x_at + i * (2 * BLOCK)) for i in range(SLICE // BLOCK)]
            weights = r.take() + r.lane * 16
            for i in cutlass.range_constexpr(-(-self.value_tiles // WARPS)):
                tile = r.warp + i * WARPS
                if tile < self.value_tiles:
                    c = self.multiply(weights + tile * (SLICE // BLOCK * BLOCK_BYTES), x)
                    row = head * s.value_dim + tile * TILE + r.lane // 4
                    for j in cutlass.range_constexpr(1 if s.pass_rows == 1 else 2):
                        token = r.lane % 4 * 2 + j
                        if token < r.num_tokens:
                            index = (part * s.pass_rows + token) * self.width + row
                            to = r.buffer("mla_heads") + Int64(index * 4)
                            st_global_f32(to, c[j])
                            st_global_f32(to + 32, c[2 + j])
            r.release()

    @cute.jit
    def merge(self, r, head: Int32, column: Int32, used: Int32):
        """The splits' sum of 64 columns of a head's context, [T, 64] bf16, to shared memory. used:
        splits of the row whose number is the warp's; of all rows also in `small`."""
        queries, groups, splits, _ = self.attention.cut(r)
        scratch = r.shared("scratch")
        column = column + r.tid % QUADS * 4
        if const_expr(self.sizes.pass_rows == 1):
            first, place = head // ROWS * splits, head % ROWS
            at = self.partial(r, first, place, column)
            values = self.ask_splits(r, at, r.tid // QUADS, used)  # all in one go
            if r.warp == 0:
                self.weigh(r, first, place, used, scratch)
            r.bar()
            total = filled(4, 0.0)
            self.add(values, r.tid // QUADS, used, scratch, total)
            st_shared_f32x4(scratch + self.sums_at + r.tid * 16, quad_of(total, 0))
        else:
            if r.warp < r.num_tokens:
                first, place = self.place_of(r.warp, head, queries, groups, splits)
                self.weigh(r, first, place, used, scratch + r.warp * (4 * self.most_splits))
            r.bar()
            for row in cutlass.range(r.num_tokens, unroll=1):
                row_used = Int32(ld_shared_u32(r.shared("small") + row * 4))
                first, place = self.place_of(row, head, queries, groups, splits)
                at = self.partial(r, first, place, column)
                total = filled(4, 0.0)
                weights = scratch + row * (4 * self.most_splits)
                for i in cutlass.range(r.tid // QUADS, row_used, SHARES * self.batch, unroll=1):
                    values = self.ask_splits(r, at, i, row_used)
                    self.add(values, i, row_used, weights, total)
                to = scratch + self.sums_at + (row * THREADS + r.tid) * 16
                st_shared_f32x4(to, quad_of(total, 0))
        r.bar()
        if r.tid < r.num_tokens * QUADS:
            row, quad = r.tid // QUADS, r.tid % QUADS
            sums = scratch + self.sums_at + (row * THREADS + quad) * 16
            parts = [ld_shared_f32x4(sums + i * (16 * QUADS)) for i in range(SHARES)]
            v = [tree([p[c] for p in parts]) for c in range(4)]
            to = scratch + self.x_at + row * x_stride(SLICE) + quad * 8
            st_shared_u32x2(to, (pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])))
        r.bar()

    def place_of(self, row, head, queries, groups, splits):
        """-> first unit of the splits of a row's head, its row in them."""
        own = row % queries * self.sizes.mla_heads + head
        return (row // queries * groups + own // ROWS) * splits, own % ROWS

    def partial(self, r, first, place, column):
        index = (first * ROWS + place) * self.sizes.kv_rank + column
        return r.buffer("mla_partial") + Int64(index * 4)

    def ask_splits(self, r, at, first, used):
        """4 columns of splits first, first + SHARES, ..; instead of one that is not there, 0."""
        step = 4 * ROWS * self.sizes.kv_rank
        splits = [first + i * SHARES for i in range(self.batch)]
        there = [cutlass.max(cutlass.min(s, used - 1), 0) for s in splits]
        return [ld_global_f32x4(at + Int64(s * step)) for s in there]

    def add(self, values, first, used, weights, total):
        for i, value in enumerate(values):
            split = first + i * SHARES
            there = cutlass.max(cutlass.min(split, used - 1), 0)
            share = ld_shared_f32(weights + there * 4)
            share = select_f32(Uint32(split < used), share, Float32(0.0))
            nothing = Uint32(share == Float32(0.0))  # then the value may be garbage
            for c in range(4):
                total[c] = total[c] + select_f32(nothing, Float32(0.0), share * value[c])

    @cute.jit
    def weigh(self, r, first: Int32, place: Int32, used: Int32, weights: Int32):
        """What each split of a row weighs, to shared memory. By a warp."""
        tops, sums = [], []
        for i in cutlass.range_constexpr(self.most_splits // 32):
            split = r.lane + 32 * i
            unit = first + cutlass.max(cutlass.min(split, used - 1), 0)
            words = ld_global_u32x2(r.buffer("mla_stats") + Int64((unit * ROWS + place) * 8))
            here = Uint32(split < used)
            tops.append(select_f32(here, float_of(words[0]), Float32(float("-inf"))))
            sums.append(select_f32(here, float_of(words[1]), Float32(0.0)))
        top = tree([Float32(LOWEST), *tops], cute.arch.fmax)
        for i in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << i))
        shares = [ex2_approx(t - top) for t in tops]
        total = tree([a * b for a, b in zip(shares, sums, strict=True)])
        (total,) = warp_sum([total])
        inverse = select_f32(Uint32(total == Float32(0.0)), Float32(0.0), rcp_approx(total))
        for i in cutlass.range_constexpr(self.most_splits // 32):
            st_shared_f32(weights + (r.lane + 32 * i) * 4, shares[i] * inverse)

    # ---- the heads ----

    @cute.jit
    def stage(self, r, staged: Int32):
        """[T, H * Dv] bf16 to shared memory: sums over the latent's columns, gated."""
        s, per_row = self.sizes, self.width // 4
        for i in cutlass.range(r.tid, r.num_tokens * per_row, THREADS, unroll=1):
            row, column = i // per_row, i % per_row * 4
            at = r.buffer("mla_heads") + Int64((row * self.width + column) * 4)
            step = 4 * s.pass_rows * self.width
            parts = [ld_global_f32x4(at + j * step) for j in range(self.slices)]
            gate = ld_global_f32x4(r.buffer("mla_gate") + Int64((row * self.width + column) * 4))
            v = [rounded(tree([p[c] for p in parts])) * gate[c] for c in range(4)]
            to = staged + row * x_stride(self.width) + column * 2
            st_shared_u32x2(to, (pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])))
