"""The last part of latent attention in the persistent kernel: splits merged, values, the gate.

    context[t, h] = sum_i 2^(max[i] - M) partial[i, t, h] / sum_i 2^(max[i] - M) sum[i]
    head[t, h] = value[h] context[t, h] * sigmoid(gate)

A unit is a head and 64 columns of the latent: it merges these columns for all rows, and multiplies
them with the same columns of the head's value rows. So merging costs no hand-off; `stage` adds up
the L / 64 products and applies the gate, for the product that reads the heads.

Waits    "mla_partial"; `stage` comes after the wait for "mla_heads". Of one row words, see `mla`.
Rounding as `kernels/mla_merge` and `gemv`: the context to bf16, the product's sum to bf16, its
         product with the gate. A split that a row saw nothing of is not used, whatever lies there.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    ex2_approx,
    float_of,
    ld_global_f32x4,
    ld_global_u32x2,
    ld_shared_f32,
    ld_shared_f32x4,
    ld_shared_u32,
    ld_shared_u32x4,
    mma_bf16,
    pack_bf16,
    rcp_approx,
    select_f32,
    st_global_f32,
    st_relaxed_u32,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32,
    st_shared_u32x2,
    tree,
    warp_sum,
)
from nanok3.kernels.mega.linear import THREADS, rounded, x_stride
from nanok3.kernels.mega.mla_attend import ROWS, Attend
from nanok3.kernels.mega.role import Traced, tagged, untagged
from nanok3.kernels.mega.sizes import BLOCK, BLOCK_BYTES, SLOT_BLOCKS, TILE, WARPS, Sizes
from nanok3.kernels.mla_tile import LOWEST, filled, quad_of, set_quad

SLICE = 64  # columns of the latent of a unit
PART = SLICE // BLOCK  # blocks of a tile
QUADS = SLICE // 4
SHARES = THREADS // QUADS  # of the splits, each for a thread a quad


def tile_product(weights, x):
    """A tile's blocks at a shared address, this lane's 16 bytes of each on -> [16, 8] as an mma
    leaves it; x: words of the lane's token, 4 a block."""
    c = filled(8, 0.0)  # two chains of accumulators
    for i, v in enumerate(x):
        w = ld_shared_u32x4(weights + i * BLOCK_BYTES)  # row lane // 4, 8 columns
        u = ld_shared_u32x4(weights + i * BLOCK_BYTES + 8 * BLOCK * 2)  # 8 rows on
        set_quad(c, 0, mma_bf16((w[0], u[0], w[1], u[1]), v[:2], quad_of(c, 0)))
        set_quad(c, 1, mma_bf16((w[2], u[2], w[3], u[3]), v[2:], quad_of(c, 1)))
    return [c[i] + c[4 + i] for i in range(4)]


class Values(Traced):
    def __init__(self, sizes: Sizes, attention: Attend) -> None:
        s = self.sizes = sizes
        assert s.value_dim % TILE == 0 and s.kv_rank % SLICE == 0
        self.attention, self.width = attention, s.mla_width
        self.slices = s.kv_rank // SLICE
        self.units = s.mla_heads * self.slices
        self.tiles = s.value_dim // TILE  # of a head
        assert self.tiles * PART <= SLOT_BLOCKS and self.tiles <= 32
        self.most_splits = 32 * -(-s.sms // 32)
        # splits that a thread asks for at once; for one row all that there can be
        self.batch = -(-s.sms // SHARES) if s.pass_rows == 1 else 3
        # scratch: weights [T, split] f32, then
        self.sums_at = 4 * s.pass_rows * self.most_splits  # sums [T, share, SLICE] f32
        self.x_at = self.sums_at + 16 * s.pass_rows * THREADS  # context [T, SLICE] bf16
        self.scratch_bytes = self.x_at + s.pass_rows * x_stride(SLICE)

    # ---- the loader warp ----

    @cute.jit
    def load(self, r, base: Int64):
        """A unit's columns of each tile of its head."""
        blocks = self.sizes.kv_rank // BLOCK
        for unit in cutlass.range(r.cta, self.units, self.sizes.sms, unroll=1):
            slot = r.claim(Int32(self.tiles * PART * BLOCK_BYTES))
            if r.lane < self.tiles:
                tile = unit // self.slices * self.tiles + r.lane
                block = Int64(tile) * blocks + Int64(unit % self.slices * PART)
                offset = r.lane * (PART * BLOCK_BYTES)
                r.ask(slot, offset, base + block * BLOCK_BYTES, Int32(PART * BLOCK_BYTES))

    # ---- the compute warps ----

    @cute.jit
    def compute(self, r):
        s = self.sizes
        queries, _, splits, _ = self.attention.cut(r)
        row = cutlass.min(r.warp, r.num_tokens - 1)
        limit, _ = self.attention.reach(r, row // queries, queries)
        used = self.attention.used_splits(limit, splits)
        if (r.warp < r.num_tokens) & (r.lane == 0):
            st_shared_u32(r.shared("small") + r.warp * 4, used)
        if r.cta < self.units:
            if const_expr(s.is_words("mla_partial")):
                r.bar()  # scratch is free
            else:
                r.wait("mla_partial")
        for unit in cutlass.range(r.cta, self.units, s.sms, unroll=1):
            head, part = unit // self.slices, unit % self.slices
            self.merge(r, head, part * SLICE, used)
            token = cutlass.min(r.lane // 4, r.num_tokens - 1)
            x_at = r.shared("scratch") + self.x_at + token * x_stride(SLICE) + r.lane % 4 * 16
            x = [ld_shared_u32x4(x_at + i * (2 * BLOCK)) for i in range(PART)]
            weights = r.take() + r.lane * 16
            for i in cutlass.range_constexpr(-(-self.tiles // WARPS)):
                tile = r.warp + i * WARPS
                if tile < self.tiles:
                    c = tile_product(weights + tile * (PART * BLOCK_BYTES), x)
                    row = head * s.value_dim + tile * TILE + r.lane // 4
                    for j in cutlass.range_constexpr(1 if s.pass_rows == 1 else 2):
                        token = r.lane % 4 * 2 + j
                        if token < r.num_tokens:
                            index = (part * s.pass_rows + token) * self.width + row
                            to = r.buffer("mla_heads") + Int64(index * 4)
                            self.publish(r, to, c[j])
                            self.publish(r, to + 32, c[2 + j])
            r.release()

    def publish(self, r, at, value):
        if self.sizes.is_words("mla_heads"):
            st_relaxed_u32(at, tagged(value, r.tag_of["mla_in"]))
        else:
            st_global_f32(at, value)

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
        return self.ask(r, [at + Int64(s * step) for s in there])

    def ask(self, r, addresses):
        """4 float32 at each address. By whole warps."""
        if not self.sizes.is_words("mla_partial"):
            return [ld_global_f32x4(address) for address in addresses]
        words = r.words(addresses, r.tag_of["mla_in"])
        return [[untagged(words[4 * i + c]) for c in range(4)] for i in range(len(addresses))]

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
        addresses = []
        for i in cutlass.range_constexpr(self.most_splits // 32):
            unit = first + cutlass.max(cutlass.min(r.lane + 32 * i, used - 1), 0)
            addresses.append(r.buffer("mla_stats") + Int64((unit * ROWS + place) * 8))
        stats = self.ask_pairs(r, addresses)
        tops, sums = [], []
        for i in cutlass.range_constexpr(self.most_splits // 32):
            here = Uint32(r.lane + 32 * i < used)
            tops.append(select_f32(here, stats[i][0], Float32(float("-inf"))))
            sums.append(select_f32(here, stats[i][1], Float32(0.0)))
        top = tree([Float32(LOWEST), *tops], cute.arch.fmax)
        for i in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << i))
        shares = [ex2_approx(t - top) for t in tops]
        total = tree([a * b for a, b in zip(shares, sums, strict=True)])
        (total,) = warp_sum([total])
        inverse = select_f32(Uint32(total == Float32(0.0)), Float32(0.0), rcp_approx(total))
        for i in cutlass.range_constexpr(self.most_splits // 32):
            st_shared_f32(weights + (r.lane + 32 * i) * 4, shares[i] * inverse)

    def ask_pairs(self, r, addresses):
        """2 float32 at each address. By whole warps."""
        if self.sizes.is_words("mla_stats"):
            words = r.words(addresses, r.tag_of["mla_in"], 2)
            pairs = range(len(addresses))
            return [(untagged(words[2 * i]), untagged(words[2 * i + 1])) for i in pairs]
        return [[float_of(w) for w in ld_global_u32x2(address)] for address in addresses]

    @cute.jit
    def stage(self, r, staged: Int32):
        """[T, H * Dv] bf16 to shared memory: sums over the latent's columns, gated."""
        s, per_row = self.sizes, self.width // 4
        quads = r.num_tokens * per_row
        for base in cutlass.range(r.warp * 32, quads, THREADS, unroll=1):
            i = cutlass.min(base + r.lane, quads - 1)
            row, column = i // per_row, i % per_row * 4
            at = r.buffer("mla_heads") + Int64((row * self.width + column) * 4)
            gate_at = r.buffer("mla_gate") + Int64((row * self.width + column) * 4)
            step = 4 * s.pass_rows * self.width
            *parts, gate = self.ask(r, [*(at + j * step for j in range(self.slices)), gate_at])
            v = [rounded(tree([p[c] for p in parts])) * gate[c] for c in range(4)]
            to = staged + row * x_stride(self.width) + column * 2
            st_shared_u32x2(to, (pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])))
