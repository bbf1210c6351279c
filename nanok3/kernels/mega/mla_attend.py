"""Latent attention over the paged cache in the persistent kernel, split over the context.

    score[t, h, s] = softmax_scale (q_absorbed[t, h] . row[s, :L] + q_rope[t, h] . row[s, L:])
    partial[unit, row] = sum_s 2^(c score - max) row[s, :L];  c = log2 e
    stats[unit, row] = the largest c score, sum_s 2^(c score - max)

Cut      A request's Q H (query, head) rows in groups of 16, its context in tiles of 48 tokens, the
         tiles evenly in splits: as many as give each CTA one unit (request, group, split), from the
         last CTA on: the first ones have tiles of other products. A unit without tiles writes
         nothing (words of nothing, for its tag), `used_splits` says how many have some.
Ring     A tile is two slots of 24 tokens in padded rows. Tokens beyond the context are zero there.
         Rows that this step writes are asked for once "q_latent" is signalled, older ones at once.
Warps    Of scores a warp adds up every 8th 16 columns, for all rows and tokens; then it softens
         two rows, and adds up L / 8 columns of values for all rows. Two barriers a tile.
Rounding as `kernels/mla_decode`: float32 scores, probabilities in bf16 and added up as rounded.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    bits_of,
    ex2_approx,
    fence_async,
    ld_global_i64,
    ld_global_u32,
    ld_shared_f32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_bf16,
    pack_bf16,
    select_f32,
    st_global_f32x2,
    st_relaxed_u32x2,
    st_shared_f32,
    st_shared_u32,
    st_shared_u32x2,
    st_shared_u32x4,
    tree,
)
from nanok3.kernels.mega.linear import rounded
from nanok3.kernels.mega.role import Traced, bf16_pair, tagged
from nanok3.kernels.mega.sizes import SLOT_BYTES, WARPS, Sizes
from nanok3.kernels.mla_tile import LOG2_E, LOWEST, filled, quad_of, set_quad

ROWS = 16  # of a group: the M of an mma
CHUNK = 24  # tokens of a ring slot
TILE = 2 * CHUNK
STEPS = TILE // 16  # of 16 tokens
P_STRIDE = 2 * TILE + 16  # bytes of a row of probabilities, padded for ldmatrix
PART_BYTES = ROWS * TILE * 4  # a warp's part of the scores
NOBODY = 1 << 30  # a position that no row of this step has


class Attend(Traced):
    def __init__(self, sizes: Sizes) -> None:
        assert sizes.kv_rank % 128 == 0 and sizes.rope_dim % 16 == 0, "columns of a warp, of an mma"
        self.sizes = sizes
        self.row_bytes = 2 * (sizes.kv_rank + sizes.rope_dim)
        self.stride = self.row_bytes + 16  # an odd number of 16 bytes: 8 rows, 8 bank groups
        assert CHUNK * self.stride <= SLOT_BYTES
        self.steps = self.row_bytes // 32  # of 16 columns
        self.warp_steps = -(-self.steps // WARPS)
        self.value_tiles = sizes.kv_rank // (8 * WARPS)  # of 8 columns, of a warp
        # scratch: the warps' parts of the scores [warp, row, token] f32, then
        self.p_at = WARPS * PART_BYTES  # probabilities [row, token] bf16
        self.shrink_at = self.p_at + ROWS * P_STRIDE  # [row] f32
        self.scratch_bytes = self.shrink_at + ROWS * 4

    # ---- the cut ----

    def cut(self, r):
        """-> rows of a request, its groups of (row, head) pairs, splits of a group, units."""
        if self.sizes.pass_rows == 1:
            groups = -(-self.sizes.mla_heads // ROWS)
            splits = max(self.sizes.sms // groups, 1)
            return Int32(1), Int32(groups), Int32(splits), Int32(groups * splits)
        queries = r.num_tokens // r.num_reqs
        groups = (queries * self.sizes.mla_heads + ROWS - 1) // ROWS
        splits = cutlass.max(self.sizes.sms // (r.num_reqs * groups), 1)
        return queries, groups, splits, r.num_reqs * groups * splits

    @cute.jit
    def reach(self, r, request: Int32, queries: Int32):
        """-> how many tokens a request sees, the oldest position of this step. By whole warps."""
        row = request * queries + cutlass.min(r.lane % 8, queries - 1)
        longest = Int32(ld_global_i64(r.positions + Int64(row) * 8))
        oldest = longest
        if longest < 0:
            oldest = Int32(NOBODY)
        for i in cutlass.range_constexpr(3):
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, 1 << i))
            oldest = cutlass.min(oldest, cute.arch.shuffle_sync_bfly(oldest, 1 << i))
        return cutlass.min(longest + 1, r.max_blocks * self.sizes.block_size), oldest

    def tiles_of(self, limit, splits):
        """-> tiles of a context, of a split."""
        tiles = (limit + TILE - 1) // TILE
        return tiles, (tiles + splits - 1) // splits

    def used_splits(self, limit, splits):
        tiles, a_split = self.tiles_of(limit, splits)
        a_split = cutlass.max(a_split, 1)
        return (tiles + a_split - 1) // a_split

    def range_of(self, unit, limit, splits):
        """-> first tile of a unit, end."""
        tiles, a_split = self.tiles_of(limit, splits)
        begin = cutlass.min(unit % splits * a_split, tiles)
        return begin, cutlass.min(begin + a_split, tiles)

    # ---- the loader warp ----

    @cute.jit
    def load(self, r, cache: Int64):
        queries, groups, splits, units = self.cut(r)
        fresh = Int32(0)  # whether this step's rows are known to be written
        for unit in cutlass.range(self.sizes.sms - 1 - r.cta, units, self.sizes.sms, unroll=1):
            request = unit // (splits * groups)
            limit, oldest = self.reach(r, request, queries)
            begin, end = self.range_of(unit, limit, splits)
            table = r.block_table + Int64(request) * Int64(r.max_blocks) * 8
            for chunk in cutlass.range(2 * begin, 2 * end, unroll=1):
                first = chunk * CHUNK
                valid = cutlass.max(cutlass.min(limit - first, CHUNK), 0)
                # looked up before the slot is free; a lane without a token looks up the last one
                token = cutlass.min(first + r.lane, limit - 1)
                block = ld_global_i64(table + Int64(token // self.sizes.block_size) * 8)
                if (first + valid > oldest) & (fresh == 0):
                    self.await_rows(r)
                    fresh = Int32(1)
                if valid < CHUNK:
                    self.clear(r, valid)
                slot = r.claim(valid * self.row_bytes)
                source = cache + self.row_of(r, block, token) * self.row_bytes
                if r.lane < valid:
                    r.ask(slot, r.lane * self.stride, source, Int32(self.row_bytes))

    def row_of(self, r, block, token):
        """Of the cache."""
        size = self.sizes.block_size
        block = cutlass.max(cutlass.min(block, Int64(r.num_blocks - 1)), Int64(0))
        return block * size + Int64(token % size)

    @cute.jit
    def await_rows(self, r):
        """Until this step's cache rows are written, and bulk copies see them."""
        number = r.signal_of("q_latent")
        if r.lane == 0:
            r.look(r.counter(number), number, r.goal_of(number))
        cute.arch.sync_warp()
        fence_async()

    @cute.jit
    def clear(self, r, valid: Int32):
        """Rows of the next slot without a token, which may hold NaN, and 0 x NaN is NaN."""
        slot = r.position[0]
        cute.arch.mbarrier_wait(r.barriers + r.slots + slot, r.position[1] ^ 1)
        pieces = self.row_bytes // 16
        base = r.ring + slot * SLOT_BYTES
        for piece in cutlass.range(r.lane, (CHUNK - valid) * pieces, 32, unroll=1):
            at = base + (valid + piece // pieces) * self.stride + piece % pieces * 16
            st_shared_u32x4(at, (Uint32(0), Uint32(0), Uint32(0), Uint32(0)))
        cute.arch.fence_view_async_shared()  # later copies to this place come after
        cute.arch.sync_warp()

    # ---- the compute warps ----

    @cute.jit
    def compute(self, r):
        queries, groups, splits, units = self.cut(r)
        for unit in cutlass.range(self.sizes.sms - 1 - r.cta, units, self.sizes.sms, unroll=1):
            request = unit // (splits * groups)
            limit, _ = self.reach(r, request, queries)
            begin, end = self.range_of(unit, limit, splits)
            first = unit // splits % groups * ROWS  # row of the request
            count = cutlass.min(queries * self.sizes.mla_heads - first, ROWS)
            if begin < end:
                self.attend(r, unit, request * queries, first, count, limit, begin, end)
            elif self.sizes.is_words("mla_partial"):
                zeros = filled(4 * self.value_tiles, 0.0)
                self.store(r, unit, count, filled(2, 0.0), zeros)

    @cute.jit
    def attend(
        self,
        r,
        unit: Int32,
        first_token: Int32,
        first: Int32,
        count: Int32,
        limit: Int32,
        begin: Int32,
        end: Int32,
    ):
        """Tiles begin .. end - 1 for rows first .. first + count - 1 of the request that begins at
        row `first_token` of the step."""
        # rows of which this lane softens its tokens, and the last token that they see
        row = 2 * r.warp + r.lane // 16
        query = (first + cutlass.min(row, count - 1)) // self.sizes.mla_heads
        seen = Int32(ld_global_i64(r.positions + Int64(first_token + query) * 8))
        seen = cutlass.min(seen, limit - 1)
        if row >= count:
            seen = Int32(-1)
        if const_expr(not self.sizes.is_words("q_absorbed")):
            r.wait("q_absorbed")
        queries = self.queries(r, first_token * self.sizes.mla_heads + first, count)
        state = filled(2, 0.0)  # of that row: the largest score so far, sum of own probabilities
        state[0] = Float32(LOWEST)
        context = filled(4 * self.value_tiles, 0.0)
        for tile in cutlass.range(begin, end, unroll=1):
            rows_at = self.take(r)
            self.score(r, rows_at, queries)
            r.bar()
            self.soften(r, tile * TILE, seen, state)
            r.bar()
            self.add_values(r, rows_at, context)
            r.release()
            r.release()
        self.store(r, unit, count, state, context)

    @cute.jit
    def queries(self, r, row: Int32, count: Int32):
        """The warp's columns of the group's rows, as mma take them; rows that are not there repeat
        the last."""
        s, size = self.sizes, 4 if self.sizes.is_words("q") else 2  # bytes of a value
        words = cute.make_rmem_tensor((4 * self.warp_steps,), Uint32)
        rows = (
            row + cutlass.min(r.lane // 4, count - 1),
            row + cutlass.min(r.lane // 4 + 8, count - 1),
        )
        addresses = []
        for i in cutlass.range_constexpr(self.warp_steps):
            step = cutlass.min(r.warp + WARPS * i, self.steps - 1)
            base = r.buffer("q_absorbed") + Int64(step * (16 * size))
            width = Int32(size * s.kv_rank)
            if step >= s.kv_rank // 16:
                base = r.buffer("q") + Int64((s.nope_dim + step * 16 - s.kv_rank) * size)
                width = Int32(size * (s.nope_dim + s.rope_dim))
            for j in cutlass.range_constexpr(4):
                offset = rows[j % 2] * width + (r.lane % 4 * 2 + j // 2 * 8) * size
                addresses.append(base + Int64(offset))
        if const_expr(s.is_words("q")):
            found = r.words(addresses, r.tag_of["mla_in"], 2)
            for i in cutlass.range_constexpr(len(addresses)):
                words[i] = bf16_pair(found[2 * i], found[2 * i + 1])
        else:
            for i in cutlass.range_constexpr(len(addresses)):
                words[i] = ld_global_u32(addresses[i])
        return words

    @cute.jit
    def take(self, r):
        """The two slots of a tile, when they have arrived: of each 16 tokens the address of this
        lane's row, lanes 16 to 31 8 columns on."""
        low = r.take()
        wraps = Int32(r.position[0] + 1 == r.slots)
        slot = r.position[0] + 1 - wraps * r.slots
        cute.arch.mbarrier_wait(r.barriers + slot, r.position[1] ^ wraps)
        high = r.ring + slot * SLOT_BYTES
        made = []
        for i in cutlass.range_constexpr(STEPS):
            token = 16 * i + r.lane % 16
            at = low + token * self.stride
            if token >= CHUNK:
                at = high + (token - CHUNK) * self.stride
            made.append(at + r.lane // 16 * 16)
        return made

    @cute.jit
    def score(self, r, rows_at, queries):
        """[rows, tokens] of the warp's columns, to its part."""
        c = filled(8 * STEPS, 0.0)
        for i in cutlass.range_constexpr(self.warp_steps):
            step = r.warp + WARPS * i
            if const_expr((i + 1) * WARPS <= self.steps):  # noqa: SIM114 - decided here
                self.multiply(rows_at, step, quad_of(queries, i), c)
            elif step < self.steps:  # decided on the GPU
                self.multiply(rows_at, step, quad_of(queries, i), c)
        # 8 tokens and the next 8 change places in every second pair of rows: no bank conflicts
        row, swap = r.lane // 4, r.lane // 8 % 2 * 32
        at = r.shared("scratch") + r.warp * PART_BYTES + row * (TILE * 4) + r.lane % 4 * 8
        for n in cutlass.range_constexpr(2 * STEPS):
            to = at + n * 32 + (1 - n % 2 * 2) * swap
            st_shared_u32x2(to, (bits_of(c[4 * n]), bits_of(c[4 * n + 1])))
            st_shared_u32x2(to + 8 * TILE * 4, (bits_of(c[4 * n + 2]), bits_of(c[4 * n + 3])))

    def multiply(self, rows_at, step, a, c):
        """16 columns of queries [rows, 16] and keys [tokens, 16]."""
        for i in range(STEPS):
            k = ldmatrix_x4(rows_at[i] + step * 32)  # tokens 0..7, 8..15; the same, 8 columns on
            set_quad(c, 2 * i, mma_bf16(a, (k[0], k[2]), quad_of(c, 2 * i)))
            set_quad(c, 2 * i + 1, mma_bf16(a, (k[1], k[3]), quad_of(c, 2 * i + 1)))

    @cute.jit
    def soften(self, r, first: Int32, seen: Int32, state):
        """Probabilities of a row's tokens, every 16th a lane; the row's maximum may rise."""
        scratch, row, own = r.shared("scratch"), 2 * r.warp + r.lane // 16, r.lane % 16
        at = scratch + row * (TILE * 4) + (own ^ (r.warp % 2 * 8)) * 4
        scale = Float32(self.sizes.softmax_scale * LOG2_E)
        scores = []
        for i in cutlass.range_constexpr(STEPS):
            parts = [ld_shared_f32(at + i * 64 + w * PART_BYTES) for w in range(WARPS)]
            visible = Uint32(first + 16 * i + own <= seen)
            scores.append(select_f32(visible, tree(parts) * scale, Float32(float("-inf"))))
        top = tree(list(scores), cute.arch.fmax)
        for i in cutlass.range_constexpr(4):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << i))
        top = cute.arch.fmax(state[0], top)
        shrink = ex2_approx(state[0] - top)
        p = [rounded(ex2_approx(s - top)) for s in scores]
        pairs = [pack_bf16(v, cute.arch.shuffle_sync_bfly(v, 1)) for v in p]
        state[0] = top
        state[1] = state[1] * shrink + tree(list(p))
        if own % 2 == 0:
            for i in cutlass.range_constexpr(STEPS):
                to = scratch + self.p_at + row * P_STRIDE + (16 * i + own) * 2
                st_shared_u32(to, pairs[i])
        if own == 0:
            st_shared_f32(scratch + self.shrink_at + row * 4, shrink)

    def add_values(self, r, rows_at, context):
        """context [rows, the warp's columns] += probabilities @ values, under the new maximum."""
        scratch = r.shared("scratch")
        shrink_at = scratch + self.shrink_at + r.lane // 4 * 4
        shrink = [ld_shared_f32(shrink_at), ld_shared_f32(shrink_at + 32)]
        p_at = scratch + self.p_at + r.lane % 16 * P_STRIDE + r.lane // 16 * 16
        p = [ldmatrix_x4(p_at + i * 32) for i in range(STEPS)]
        for i in range(4 * self.value_tiles):
            context[i] = context[i] * shrink[i // 2 % 2]
        for i in range(STEPS):
            at = rows_at[i] + r.warp * (16 * self.value_tiles)
            for n in range(0, self.value_tiles, 2):
                v = ldmatrix_x4_trans(at + n * 16)
                set_quad(context, n, mma_bf16(p[i], v[:2], quad_of(context, n)))
                set_quad(context, n + 1, mma_bf16(p[i], v[2:], quad_of(context, n + 1)))

    @cute.jit
    def store(self, r, unit: Int32, count: Int32, state, context):
        """partial [unit, 16, L] f32, stats [unit, 16, 2] f32."""
        total = state[1]
        for i in cutlass.range_constexpr(4):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << i)
        row = 2 * r.warp + r.lane // 16
        if (row < count) & (r.lane % 16 == 0):
            nothing = Uint32(total == Float32(0.0))  # not `> 0`: a sum that is NaN must stay one
            largest = select_f32(nothing, Float32(float("-inf")), state[0])
            self.publish(r, r.buffer("mla_stats") + Int64((unit * ROWS + row) * 8), largest, total)
        rank = self.sizes.kv_rank
        column = r.warp * (8 * self.value_tiles) + r.lane % 4 * 2
        for half in cutlass.range_constexpr(2):
            row = r.lane // 4 + 8 * half
            if row < count:
                at = r.buffer("mla_partial") + Int64(((unit * ROWS + row) * rank + column) * 4)
                for n in cutlass.range_constexpr(self.value_tiles):
                    c = 4 * n + 2 * half
                    self.publish(r, at + n * 32, context[c], context[c + 1])

    def publish(self, r, at, low, high):
        if self.sizes.is_words("mla_partial"):
            tag = r.tag_of["mla_in"]
            st_relaxed_u32x2(at, (tagged(low, tag), tagged(high, tag)))
        else:
            st_global_f32x2(at, (low, high))
