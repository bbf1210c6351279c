"""Down of the routed experts in the persistent kernel, MXFP4 weights, and their weighted sum.

    routed[t] = sum_a weight[t, a] * w2[e] @ act[t, a],  e = the row's expert a, e ascending

Shapes   act [T, A, F] bf16, times X_FACTOR, in buffer "expert_act", w2 packed by
         `pack_expert_down` -> routed [T, Z] bf16 in buffer "routed". Z and F are multiples of 32.
Bytes    0.53 F Z for every expert of the step. TP16: 5.8 MB at T = 1, 40 MB with 110 experts.
Cut      tiles of 16 rows of Z; the last CTAs have one more. K = all experts end to end, so that the
         sum over experts stays in the CTA: a warp takes every eighth expert, and two tiles at once,
         for which it reads act once. A ring slot holds 8 experts' parts of both tiles. act lies in
         shared memory, a part of F at a time if not all of it fits.
Rounding as `kernels/expert_down`: the weight is applied to an expert's float32 product (or to that
         of a part of F), a warp adds its experts in their order, then warps by pairs; rounded once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    cp_async_16,
    float_of,
    ld_shared_u32x2,
    ld_shared_u32x4,
    pack_bf16,
    st_global_u16,
    st_relaxed_u32,
    st_shared_u32,
    st_shared_u32x4,
)
from nanok3.kernels.mega.expert_parts import SUMS, Parts, multiply_block, unscaled
from nanok3.kernels.mega.linear import THREADS, partial_bytes, rounded
from nanok3.kernels.mega.role import Frozen, bf16_pair, tagged
from nanok3.kernels.mega.route import Tables
from nanok3.kernels.mega.sizes import BLOCK, PASS, SLOT_BYTES, TILE, WARPS, Sizes
from nanok3.kernels.mega.sizes import EXPERT_BLOCK_BYTES as BLOCK_BYTES

PIECE = 8  # bf16 of 16 bytes
SIDE = 2  # tiles at once
MOST_BLOCKS = 6  # of an expert's F in a slot: 4 registers of act each
ACT_BYTES = 56 << 10  # of staged act, at most


class Down(Frozen):
    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.tables, self.rows = sizes, Tables(sizes), sizes.pass_rows
        self.tiles = sizes.latent // TILE
        self.blocks = sizes.expert_width // BLOCK
        able = [n for n in range(1, MOST_BLOCKS + 1) if self.blocks % n == 0]
        self.part_blocks = max(n for n in able if n == 1 or self.act_bytes(n) <= ACT_BYTES)
        self.num_parts = self.blocks // self.part_blocks  # of F
        self.part_bytes = self.part_blocks * BLOCK_BYTES
        assert WARPS * SIDE * self.part_bytes <= SLOT_BYTES
        self.act_stride = self.part_blocks * 2 * BLOCK + 16
        self.parts = Parts(self.rows)
        assert SIDE * self.parts.tile_bytes <= partial_bytes(self.rows)
        self.scratch_bytes = self.act_bytes(self.part_blocks)

    def act_bytes(self, blocks: int) -> int:
        """Of staged columns of act, and a row of zeros."""
        return (self.sizes.act_rows + 1) * (blocks * 2 * BLOCK + 16)

    def place(self, r):
        """-> this CTA's first tile, the one behind its last."""
        few, more = divmod(self.tiles, self.sizes.sms)
        extra = r.cta - (self.sizes.sms - more)  # the last `more` CTAs have one tile more
        first = r.cta * few + cutlass.max(extra, 0)
        return first, first + few + Int32(extra >= 0)

    @cute.jit
    def load(self, r):
        """The loader warp: a lane for each copy of a slot."""
        base = r.field("moe.w2")
        count = self.tables.num_experts_here(r.shared("routed"))
        first, end = self.place(r)
        tile_bytes = self.blocks * BLOCK_BYTES
        for tile in cutlass.range(first, end, SIDE, unroll=1):
            tiles = cutlass.min(end - tile, SIDE)
            for part in cutlass.range(self.num_parts, unroll=1):
                for group in cutlass.range(0, count, WARPS, unroll=1):
                    here = cutlass.min(count - group, WARPS)
                    slot = r.claim(here * tiles * self.part_bytes)
                    mine, side = r.lane % WARPS, r.lane // WARPS
                    if const_expr(self.num_parts == 1):
                        # an expert's tiles lie one behind the other
                        copies, num_bytes = Int32(1), tiles * self.part_bytes
                    else:
                        copies, num_bytes = tiles, Int32(self.part_bytes)
                    if (mine < here) & (side < copies):
                        expert = self.tables.expert(r.shared("routed"), group + mine)
                        at = Int64(expert) * self.tiles + Int64(tile + side)
                        source = base + at * tile_bytes + Int64(part * self.part_bytes)
                        offset = (mine * SIDE + side) * self.part_bytes
                        r.ask(slot, offset, source, num_bytes)
                    cute.arch.sync_warp()

    @cute.jit
    def compute(self, r):
        """By the compute warps; act is there."""
        act = r.shared("scratch")
        count = self.tables.num_experts_here(r.shared("routed"))
        first, end = self.place(r)
        for i in cutlass.range(r.tid, self.act_stride // 4, THREADS, unroll=1):
            st_shared_u32(act + self.sizes.act_rows * self.act_stride + i * 4, Uint32(0))
        if const_expr(self.num_parts == 1):
            self.stage(r, act, Int32(0))
            r.bar()
        total = cute.make_rmem_tensor((4 * SIDE,), Float32)
        x = cute.make_rmem_tensor((4 * self.part_blocks,), Uint32)
        weights = cute.make_rmem_tensor((2,), Float32)
        half = Int32(0)
        for tile in cutlass.range(first, end, SIDE, unroll=1):
            for j in cutlass.range_constexpr(4 * SIDE):
                total[j] = Float32(0.0)
            for part in cutlass.range(self.num_parts, unroll=1):
                if const_expr(self.num_parts > 1):
                    r.bar()  # the last part has been read
                    self.stage(r, act, part)
                    r.bar()
                for group in cutlass.range(0, count, WARPS, unroll=1):
                    mine = group + r.warp
                    index = cutlass.min(mine, count - 1)
                    self.inputs(r, act, index, x, weights)  # while the slot is on its way
                    at = r.take() + r.warp * (SIDE * self.part_bytes)
                    if mine < count:
                        self.expert(r, x, weights, at, total)
                    r.release()
            partial = r.shared("partial") + half * partial_bytes(self.rows)
            for side in cutlass.range_constexpr(SIDE):
                sums = [total[4 * side + j] for j in range(4)]
                self.parts.put(r, partial + side * self.parts.tile_bytes, sums)
            r.bar()
            if const_expr(self.sizes.ranks > 1):
                self.send(r, tile, cutlass.min(end - tile, SIDE), partial, r.tag_of["routed"])
            else:
                self.finish(r, tile, cutlass.min(end - tile, SIDE), partial)
            half = half ^ 1

    def stage(self, r, act, part):
        """A part of the columns of act [T, A, F] to [T * A, part + 8]."""
        if self.sizes.is_words("expert_act"):
            self.stage_words(r, act, part)
        else:
            self.stage_act(r, act, part)

    def stage_words(self, r, act, part):
        """Of one row, when they are there; all at once."""
        per_row = self.part_blocks * (BLOCK // PIECE)
        pieces = self.sizes.top_k * per_row
        source = r.buffer("expert_act")
        addresses, places = [], []
        for i in range(-(-pieces // THREADS)):
            piece = cutlass.min(r.tid + i * THREADS, pieces - 1)
            row, column = piece // per_row, piece % per_row * PIECE
            index = row * self.sizes.expert_width + part * (self.part_blocks * BLOCK) + column
            addresses += [source + Int64(index * 4), source + Int64(index * 4 + 16)]
            places.append(act + row * self.act_stride + column * 2)
        words = r.words(addresses, r.tag_of["expert_act"])
        for i, place in enumerate(places):
            eight = [words[8 * i + k] for k in range(PIECE)]
            st_shared_u32x4(place, [bf16_pair(*eight[k : k + 2]) for k in range(0, PIECE, 2)])

    @cute.jit
    def stage_act(self, r, act: Int32, part: Int32):
        per_row = self.part_blocks * (BLOCK // PIECE)
        pieces = r.num_tokens * (self.sizes.top_k * per_row)
        source = r.buffer("expert_act") + Int64(part * (self.part_blocks * 2 * BLOCK))
        for i in cutlass.range(r.tid, pieces, THREADS, unroll=2):
            row, at = i // per_row, i % per_row * 16
            from_ = source + Int64(row * (2 * self.sizes.expert_width) + at)
            cp_async_16(act + row * self.act_stride + at, from_)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def inputs(self, r, act: Int32, index: Int32, x, weights):
        """The lane's part of its row's act for an expert, zeros if the row does not have it; the
        weights of the rows that the lane has sums of."""
        row, quad, table = r.lane // 4, r.lane % 4, r.shared("routed")
        zeros = act + self.sizes.act_rows * self.act_stride
        place = self.tables.place(table, index, row)
        words = ld_shared_u32x2(table + self.tables.weight + (index * PASS + quad * 2) * 4)
        x_row = zeros
        if place >= 0:
            x_row = act + (row * self.sizes.top_k + place) * self.act_stride
        for i in cutlass.range_constexpr(self.part_blocks):
            four = ld_shared_u32x4(x_row + quad * 16 + i * (2 * BLOCK))
            for j in cutlass.range_constexpr(4):
                x[4 * i + j] = four[j]
        for j in cutlass.range_constexpr(2):
            weights[j] = float_of(words[j])

    @cute.jit
    def expert(self, r, x, weights, at: Int32, total):
        """Adds weight times product of an expert, of SIDE tiles (what a tile that is not there
        gives is not read)."""
        c = [(Float32(0.0),) * SUMS for _ in range(SIDE)]
        for i in cutlass.range_constexpr(self.part_blocks):
            words = tuple(x[4 * i + j] for j in range(4))
            for side in cutlass.range_constexpr(SIDE):
                block_at = at + side * self.part_bytes + i * BLOCK_BYTES
                c[side] = multiply_block(block_at, r.lane, words, c[side])
        for side in cutlass.range_constexpr(SIDE):
            for j in cutlass.range_constexpr(SUMS):
                own = SUMS * side + j
                total[own] = total[own] + weights[j % 2] * c[side][j]

    @cute.jit
    def finish(self, r, tile: Int32, tiles: Int32, partial: Int32):
        values = tiles * (self.rows * TILE)
        for i in cutlass.range(r.tid, values, THREADS, unroll=1):
            side, token, row = i // (self.rows * TILE), i // TILE % self.rows, i % TILE
            if token < r.num_tokens:
                value = self.parts.total(partial + side * self.parts.tile_bytes, token, row)
                value = unscaled(value)
                index = token * self.sizes.latent + (tile + side) * TILE + row
                self.store(r, index, value)

    def store(self, r, index, value):
        routed = r.buffer("routed")
        if self.sizes.is_words("routed"):
            word = tagged(rounded(value), r.tag_of["expert_act"])
            st_relaxed_u32(routed + Int64(index) * 4, word)
        else:
            st_global_u16(routed + Int64(index) * 2, pack_bf16(value, Float32(0.0)))

    @cute.jit
    def send(self, r, tile: Int32, tiles: Int32, partial: Int32, tag: Uint32):
        """The same to all ranks: a thread 4 rows of Z for one of them."""
        pieces = tiles * (self.rows * (TILE // 4))
        for i in cutlass.range(r.tid, pieces * self.sizes.ranks, THREADS, unroll=1):
            piece, to = i % pieces, i // pieces
            row, token = piece % (TILE // 4) * 4, piece // (TILE // 4) % self.rows
            side = piece // (TILE // 4 * self.rows)
            if token < r.num_tokens:
                at = partial + side * self.parts.tile_bytes
                values = [unscaled(self.parts.total(at, token, row + k)) for k in range(4)]
                column = (tile + side) * TILE + row
                r.program.exchange.send_routed(r, to, token, column, values, tag)
