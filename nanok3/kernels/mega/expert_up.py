"""Gate and up of the routed experts in the persistent kernel, with MXFP4 weights.

    act[t, a] = situ(w1[e] @ z[t], w3[e] @ z[t]),  e = the row's expert a

Shapes   z [T, Z] bf16: this rank's columns are sums of K slices of buffer "moe_in", the others lie
         in `latent`; where ranks exchange, all are words (`exchange`). w1 | w3 packed by
         `pack_expert_up` -> act [T, A, F] bf16, times X_FACTOR, in buffer "expert_act". Z and F are
         multiples of 32.
Bytes    1.0625 F Z for every expert of the step. TP16: 11.7 MB at T = 1, 80 MB with 110 experts.
Cut      items (expert, tile of 8 gate and 8 up rows), an equal share of consecutive ones a CTA. The
         warps share an item's Z; their parts of z stay in registers over all items. An item is one
         ring slot, or several if Z > 3584 (then parts of z are read anew for each).
Rounding as `kernels/expert_up`: float32 accumulators, warps' parts by pairs, rounded once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    bf16_low,
    cp_async_16,
    ld_global_f32,
    ld_global_u16,
    ld_shared_u32x4,
    pack_bf16,
    select_f32,
    situ,
    st_global_u16,
    st_relaxed_u32,
    st_shared_u32,
    st_shared_u32x2,
    tree,
)
from nanok3.kernels.mega.expert_parts import (
    SUMS,
    X_FACTOR,
    Parts,
    multiply_block,
    scaled,
    unscaled,
)
from nanok3.kernels.mega.linear import THREADS, batch_tiles, partial_bytes, rounded, x_stride
from nanok3.kernels.mega.role import Frozen, tagged
from nanok3.kernels.mega.route import Tables
from nanok3.kernels.mega.sizes import BLOCK, SLOT_BYTES, TILE, WARPS, Sizes
from nanok3.kernels.mega.sizes import EXPERT_BLOCK_BYTES as BLOCK_BYTES

PIECE = 8  # bf16 of 16 bytes
MOST_BLOCKS = SLOT_BYTES // BLOCK_BYTES // WARPS * WARPS  # of a chunk
STAGE_PAIRS = 4  # of columns of our own that a thread sums at once, from all K slices


class Up(Frozen):
    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.tables, self.rows = sizes, Tables(sizes), sizes.pass_rows
        self.tiles = sizes.expert_width // 8
        self.blocks = sizes.latent // BLOCK
        self.chunks = [
            min(MOST_BLOCKS, self.blocks - first) for first in range(0, self.blocks, MOST_BLOCKS)
        ]  # blocks of each, a ring slot
        self.steps = -(-self.chunks[0] // WARPS)  # blocks of a warp, of a chunk
        self.z_stride = x_stride(sizes.latent)
        self.parts = Parts(self.rows)
        self.batch = batch_tiles(self.rows)  # items between two meetings of the warps
        assert self.batch * self.parts.tile_bytes <= partial_bytes(self.rows)
        self.scratch_bytes = self.rows * self.z_stride

    def items(self, r):
        """-> this CTA's first item, the one behind its last."""
        items = self.tables.num_experts_here(r.shared("routed")) * self.tiles
        return r.cta * items // self.sizes.sms, (r.cta + 1) * items // self.sizes.sms

    @cute.jit
    def load(self, r):
        """The loader warp: waits for the list of experts first."""
        phase = r.routed_phase
        base = r.field("moe.w13")
        cute.arch.mbarrier_wait(r.routed, phase[0])
        phase[0] = phase[0] ^ 1
        begin, end = self.items(r)
        for item in cutlass.range(begin, end, unroll=1):
            expert = self.tables.expert(r.shared("routed"), item // self.tiles)
            tile = Int64(expert) * self.tiles + Int64(item % self.tiles)
            source = base + tile * (self.blocks * BLOCK_BYTES)
            for i in cutlass.range_constexpr(len(self.chunks)):
                at = source + Int64(i * MOST_BLOCKS * BLOCK_BYTES)
                r.fill(at, Int32(self.chunks[i] * BLOCK_BYTES))

    # ---- z ----

    @cute.jit
    def stage(self, r, z: Int32):
        """z [T, Z] to shared memory: 16 bytes at a time what others have made, values of our own
        (and of the pieces that these share). The caller waits for the cp.async."""
        if const_expr(self.sizes.ranks > 1):
            self.stage_sent(r, z, r.tag_of["moe"])
        else:
            self.stage_parts(r, z)

    @cute.jit
    def stage_sent(self, r, z: Int32, tag: Uint32):
        """z as words of all ranks, 4 columns at a time."""
        per_row = self.sizes.latent // 4
        pieces = r.num_tokens * per_row
        at_once = min(STAGE_PAIRS, -(-self.rows * per_row // THREADS))
        for base in cutlass.range(0, pieces, at_once * THREADS, unroll=1):
            mine = [
                cutlass.min(base + j * THREADS + r.tid, pieces - 1) for j in range(at_once)
            ]  # past the end, the last
            places = [r.program.exchange.latent_at(r, i // per_row, i % per_row * 4) for i in mine]
            addresses, sources = map(list, zip(*places, strict=True))
            found = r.peer_words(addresses, sources, tag, name="all_gather of latent")
            for j in cutlass.range_constexpr(at_once):
                at = z + mine[j] // per_row * self.z_stride + mine[j] % per_row * 8
                st_shared_u32x2(at, (found[4 * j], found[4 * j + 2]))

    @cute.jit
    def stage_parts(self, r, z: Int32):
        sizes, width = self.sizes, self.sizes.latent
        low = sizes.latent_first // PIECE * PIECE
        high = -(-(sizes.latent_first + sizes.latent_rows) // PIECE) * PIECE
        per_row = (width - (high - low)) // PIECE
        if const_expr(per_row > 0):
            for i in cutlass.range(r.tid, r.num_tokens * per_row, THREADS, unroll=2):
                row, column = i // per_row, i % per_row * PIECE
                column = column + Int32(column >= low) * (high - low)
                source = r.latent + Int64(row * width + column) * 2
                cp_async_16(z + row * self.z_stride + column * 2, source)
        cute.arch.cp_async_commit_group()
        pairs = (high - low) // 2
        count = r.num_tokens * pairs
        at_once = min(STAGE_PAIRS, -(-self.rows * pairs // THREADS))
        for base in cutlass.range(r.tid, count, at_once * THREADS, unroll=1):
            words = []
            for j in cutlass.range_constexpr(at_once):  # all in flight; past the end, the last
                i = cutlass.min(base + j * THREADS, count - 1)
                row, column = i // pairs, low + i % pairs * 2
                words.append(pack_bf16(self.own_z(r, row, column), self.own_z(r, row, column + 1)))
            for j in cutlass.range_constexpr(at_once):
                i = base + j * THREADS
                if i < count:
                    at = z + i // pairs * self.z_stride + (low + i % pairs * 2) * 2
                    st_shared_u32(at, words[j])

    @cute.jit
    def own_z(self, r, row: Int32, column: Int32):
        """A column of z that is this rank's, or shares a piece with one that is."""
        sizes, product = self.sizes, self.sizes.products["moe_in"]
        own = cutlass.min(cutlass.max(column - sizes.latent_first, 0), sizes.latent_rows - 1)
        at = row * product.rows + sizes.router_tiles * TILE + own
        base = r.buffer("moe_in") + Int64(at) * 4
        step = self.rows * product.rows * 4
        value = tree([ld_global_f32(base + Int64(s * step)) for s in range(product.slices)])
        if const_expr(sizes.latent_first % PIECE != 0 or sizes.latent_rows % PIECE != 0):
            word = ld_global_u16(r.latent + Int64(row * sizes.latent + column) * 2)
            foreign = Uint32(own != column - sizes.latent_first)
            value = select_f32(foreign, bf16_low(word), value)
        return value

    # ---- items ----

    @cute.jit
    def fragments(self, r, z: Int32, chunk: Constexpr[int], x):
        """The lane's part of z for its blocks of a chunk: four words each, zeros past the end."""
        row = cutlass.min(r.lane // 4, r.num_tokens - 1)
        base = z + row * self.z_stride + r.lane % 4 * 16
        for i in cutlass.range_constexpr(self.steps):
            block = chunk * MOST_BLOCKS + i * WARPS + r.warp
            words = ld_shared_u32x4(base + cutlass.min(block, self.blocks - 1) * (2 * BLOCK))
            for j in cutlass.range_constexpr(4):
                x[4 * i + j] = scaled(words[j])
                if const_expr(chunk * MOST_BLOCKS + (i + 1) * WARPS > self.blocks):
                    x[4 * i + j] = x[4 * i + j] * Uint32(block < self.blocks)

    @cute.jit
    def compute(self, r, z: Int32):
        """By the compute warps; z is staged, and a barrier has followed."""
        x = cute.make_rmem_tensor((4 * self.steps,), Uint32)
        self.fragments(r, z, 0, x)
        r.bar()  # the list of experts is there
        begin, end = self.items(r)
        half = Int32(0)
        for first in cutlass.range(begin, end, self.batch, unroll=1):
            here = cutlass.min(end - first, self.batch)
            partial = r.shared("partial") + half * partial_bytes(self.rows)
            for local in cutlass.range(here, unroll=1):
                self.item(r, z, x, partial + local * self.parts.tile_bytes)
            r.bar()
            self.finish(r, first, here, partial)
            half = half ^ 1

    @cute.jit
    def item(self, r, z: Int32, x, partial: Int32):
        """16 weight rows times the rows of the pass, this warp's share of Z."""
        c = cute.make_rmem_tensor((SUMS,), Float32)
        for j in cutlass.range_constexpr(SUMS):
            c[j] = Float32(0.0)
        for chunk in cutlass.range_constexpr(len(self.chunks)):
            blocks = self.chunks[chunk]
            if const_expr(len(self.chunks) > 1):
                self.fragments(r, z, chunk, x)
            slot = r.take()
            for i in cutlass.range_constexpr(-(-blocks // WARPS)):
                block = i * WARPS + r.warp
                if const_expr((i + 1) * WARPS > blocks):  # past the end x is 0
                    block = cutlass.min(block, blocks - 1)
                words = tuple(x[4 * i + j] for j in range(4))
                old = tuple(c[j] for j in range(SUMS))
                sums = multiply_block(slot + block * BLOCK_BYTES, r.lane, words, old)
                for j in cutlass.range_constexpr(SUMS):
                    c[j] = sums[j]
            r.release()
        self.parts.put(r, partial, [c[j] for j in range(SUMS)])

    @cute.jit
    def finish(self, r, first: Int32, here: Int32, partial: Int32):
        """act of a batch of items: a thread an (item, token, row), if the token has the expert."""
        width, table = self.sizes.expert_width, r.shared("routed")
        for i in cutlass.range(r.tid, here * (self.rows * 8), THREADS, unroll=1):
            local, token, row = i // (self.rows * 8), i // 8 % self.rows, i % 8
            item = first + local
            place = self.tables.place(table, item // self.tiles, token)
            if place >= 0:
                at = partial + local * self.parts.tile_bytes
                gate = unscaled(self.parts.total(at, token, row))
                up = unscaled(self.parts.total(at, token, row + 8))
                value = situ(gate, up, self.sizes.beta, self.sizes.linear_beta)
                value = value * Float32(X_FACTOR)  # as down wants it; rounds to the same bits
                to = (token * self.sizes.top_k + place) * width + item % self.tiles * 8 + row
                self.store(r, to, value)

    def store(self, r, index, value):
        act = r.buffer("expert_act")
        if self.sizes.is_words("expert_act"):
            word = tagged(rounded(value), r.tag_of["expert_act"])
            st_relaxed_u32(act + Int64(index) * 4, word)
        else:
            st_global_u16(act + Int64(index) * 2, pack_bf16(value, Float32(0.0)))
