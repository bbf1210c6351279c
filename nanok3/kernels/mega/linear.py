"""Products of the persistent kernel: [rows, K] weights through the ring times staged rows of x.

    out[t, o] = sum_k weight[o, k] x[t, k]

Shapes   x [T, K slice] bf16 in shared memory (`stage_rows`, or an op's own way), weight in tiles of
         16 rows as `gemv_layout.pack_gemv` lays them, T = 1, or up to 8 (for a row that is not
         there the last one is read).
Bytes    2 K a weight row. A tile's K slice is one or two ring slots, or several tiles share one.
Cut      `sizes.Product`. Warps share a slot: as many tiles as lie in it side by side, each tile's
         blocks dealt to WARPS / tiles warps.
Sinks    what becomes of a sum: `Parts` (a K slice's, to the workspace, in float32), `Own` (columns
         of a stream, kept in this CTA), `Rounded` (bf16, to the workspace). Parts and Rounded may
         be words.
Rounding float32 accumulators in two chains, the warps' parts added by pairs: the same on every run,
         and a row's sum does not depend on the other rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from nanok3.dsl import (
    bf16_low,
    ld_global_u32x4,
    ld_shared_f32,
    ld_shared_u32x4,
    mma_bf16,
    pack_bf16,
    st_global_f32,
    st_global_u16,
    st_relaxed_u32,
    st_shared_f32,
    st_shared_u32x4,
    tree,
)
from nanok3.kernels.mega.role import Traced, tagged
from nanok3.kernels.mega.sizes import BLOCK, BLOCK_BYTES, TILE, WARPS, Product, Sizes

THREADS = 32 * WARPS
STAGE_LOADS = 4  # 16-byte loads that a thread keeps in flight


def batch_tiles(pass_rows: int) -> int:
    """Tiles between two meetings of the compute warps."""
    return 8 if pass_rows == 1 else 2


def partial_bytes(pass_rows: int) -> int:
    """Of one of the two halves of the warps' parts: [tile, part, T, 16] f32."""
    return batch_tiles(pass_rows) * WARPS * pass_rows * TILE * 4


def x_stride(width: int) -> int:
    """Bytes of a staged row; 64 more, so that 8 lanes hit 8 bank groups."""
    return 2 * width + 64


def rounded(value):
    """The nearest bf16, as float32."""
    return bf16_low(pack_bf16(value, Float32(0.0)))


@cute.jit
def stage_rows(
    r, source: Int64, row_bytes: Int32, width: Constexpr[int], count: Int32, target: Int32
):
    """`width` columns of bf16 rows in global memory, from `source` on, to shared memory."""
    per_row = width // 8  # 16-byte pieces
    pieces = count * per_row
    for base in cutlass.range(r.tid, pieces, STAGE_LOADS * THREADS, unroll=1):
        words = []
        for i in cutlass.range_constexpr(STAGE_LOADS):  # all in flight; past the end, the last
            piece = cutlass.min(base + i * THREADS, pieces - 1)
            at = source + Int64(piece // per_row) * row_bytes + Int64(piece % per_row * 16)
            words.append(ld_global_u32x4(at))
        for i in cutlass.range_constexpr(STAGE_LOADS):
            piece = cutlass.min(base + i * THREADS, pieces - 1)
            at = target + piece // per_row * x_stride(width) + piece % per_row * 16
            st_shared_u32x4(at, words[i])


# ---- sinks ----


class Parts(Traced):
    """A K slice's sums [slice, T, rows] f32; with a tag, words of all rows."""

    def __init__(self, r, buffer: str, product: Product, tag=None) -> None:
        self.product, self.pass_rows, self.tag = product, r.sizes.pass_rows, tag
        self.all_rows = tag is not None
        part = r.cta % product.slices * (self.pass_rows * product.rows)
        self.at = r.buffer(buffer) + Int64(part) * 4

    def store(self, local, tile, token, row, value):
        at = self.at + Int64(token * self.product.rows + tile * TILE + row) * 4
        if self.all_rows:
            st_relaxed_u32(at, tagged(value, self.tag))
        else:
            st_global_f32(at, value)


class Own(Traced):
    """Columns of a stream [own tile, T, 16] f32 of bf16 values, in this CTA's shared memory."""

    all_rows = False

    def __init__(self, r, area: str) -> None:
        self.pass_rows, self.at = r.sizes.pass_rows, r.shared(area)

    def store(self, local, tile, token, row, value):
        index = (local * self.pass_rows + token) * TILE + row
        st_shared_f32(self.at + index * 4, rounded(value))


class Rounded(Traced):
    """[T, rows] bf16; with a tag, words."""

    all_rows = False

    def __init__(self, r, buffer: str, product: Product, tag=None) -> None:
        self.width, self.at, self.tag = product.rows, r.buffer(buffer), tag

    def store(self, local, tile, token, row, value):
        index = token * self.width + tile * TILE + row
        if self.tag is None:
            st_global_u16(self.at + Int64(index) * 2, pack_bf16(value, Float32(0.0)))
        else:
            st_relaxed_u32(self.at + Int64(index) * 4, tagged(rounded(value), self.tag))


# ---- the product ----


class Linear(Traced):
    def __init__(self, sizes: Sizes, product: Product) -> None:
        self.sizes, self.product = sizes, product
        self.side = 1  # tiles of a slot that are worked on side by side
        while self.side * 2 <= min(product.tiles_per_slot, WARPS):
            self.side *= 2
        self.parts = WARPS // self.side  # warps that share a tile
        self.batch = max(batch_tiles(sizes.pass_rows), self.side)
        assert self.batch * self.parts <= batch_tiles(sizes.pass_rows) * WARPS
        self.stride = x_stride(product.part_width)

    def place(self, r):
        """-> slice, first tile, end of tiles (none for CTAs that are left over), step."""
        product, groups = self.product, self.product.groups(self.sizes.sms)
        part, group = r.cta % product.slices, r.cta // product.slices
        end = Int32(group < groups) * product.tiles
        return part, group, end, groups

    @cute.jit
    def load(self, r, base: Int64):
        """The loader warp."""
        product = self.product
        part, group, end, groups = self.place(r)
        source = base + Int64(part * (product.part_blocks * BLOCK_BYTES))
        if const_expr(self.side == 1):
            for tile in cutlass.range(group, end, groups, unroll=1):
                at = source + Int64(tile) * (product.blocks * BLOCK_BYTES)
                for chunk in cutlass.range_constexpr(product.chunks):
                    first = chunk * product.chunk_blocks
                    blocks = min(product.part_blocks - first, product.chunk_blocks)
                    r.fill(at + Int64(first * BLOCK_BYTES), Int32(blocks * BLOCK_BYTES))
        else:
            part_bytes = product.part_blocks * BLOCK_BYTES
            for first in cutlass.range(group, end, groups * self.side, unroll=1):
                count = cutlass.min((end - first + groups - 1) // groups, self.side)
                slot = r.claim(count * part_bytes)
                if r.lane < count:
                    tile = first + r.lane * groups
                    at = source + Int64(tile) * (product.blocks * BLOCK_BYTES)
                    r.ask(slot, r.lane * part_bytes, at, Int32(part_bytes))

    @cute.jit
    def multiply(self, r, x: Int32, count: Int32, sink):
        """The compute warps; x is staged, and a barrier has followed."""
        _, group, end, groups = self.place(r)
        half = Int32(0)
        tiles = (end - group + groups - 1) // groups
        for first in cutlass.range(0, tiles, self.batch, unroll=1):
            here = cutlass.min(tiles - first, self.batch)
            partial = r.shared("partial") + half * partial_bytes(self.sizes.pass_rows)
            for local in cutlass.range(0, here, self.side, unroll=1):
                self.slot(r, x, count, partial + local * self.tile_bytes())
            r.bar()
            values = here * (self.sizes.pass_rows * TILE)
            for index in cutlass.range(r.tid, values, THREADS, unroll=1):
                row = index % TILE
                token = index // TILE % self.sizes.pass_rows
                local = index // (TILE * self.sizes.pass_rows)
                if const_expr(sink.all_rows) or token < count:
                    at = partial + local * self.tile_bytes() + (token * TILE + row) * 4
                    step = self.sizes.pass_rows * TILE * 4
                    total = tree([ld_shared_f32(at + p * step) for p in range(self.parts)])
                    tile = group + (first + local) * groups
                    sink.store(first + local, tile, token, row, total)
            half = half ^ 1
        r.bar()  # the parts have been read, x and its place are free

    def tile_bytes(self) -> int:
        return self.parts * self.sizes.pass_rows * TILE * 4

    @cute.jit
    def slot(self, r, x: Int32, count: Int32, partial: Int32):
        """What lies side by side in a slot (or one tile over several slots): this warp's share."""
        product = self.product
        mine, part = r.warp // self.parts, r.warp % self.parts
        row, quad = r.lane // 4, r.lane % 4
        token = cutlass.min(row, count - 1)
        x_at = x + token * self.stride + quad * 16
        c = cute.make_rmem_tensor((8,), Float32)  # two chains of accumulators
        for i in cutlass.range_constexpr(8):
            c[i] = Float32(0.0)
        for chunk in cutlass.range_constexpr(product.chunks):
            first = chunk * product.chunk_blocks
            blocks = min(product.part_blocks - first, product.chunk_blocks)
            at = r.take() + mine * (product.part_blocks * BLOCK_BYTES) + r.lane * 16
            for i in cutlass.range_constexpr(-(-blocks // self.parts)):
                block = part + i * self.parts
                if const_expr((i + 1) * self.parts <= blocks) or block < blocks:
                    self.block(at + block * BLOCK_BYTES, x_at + (first + block) * (2 * BLOCK), c)
            r.release()
        to = partial + ((mine * self.parts + part) * self.sizes.pass_rows * TILE + row) * 4
        if const_expr(self.sizes.pass_rows == 1):
            if quad == 0:
                st_shared_f32(to, c[0] + c[4])
                st_shared_f32(to + 32, c[2] + c[6])
        else:
            to = to + quad * (2 * TILE * 4)
            st_shared_f32(to, c[0] + c[4])
            st_shared_f32(to + TILE * 4, c[1] + c[5])
            st_shared_f32(to + 32, c[2] + c[6])
            st_shared_f32(to + TILE * 4 + 32, c[3] + c[7])

    def block(self, weights, x_at, c):
        """16 rows x 32 columns at a shared address, this lane's 16 bytes of it on."""
        w = ld_shared_u32x4(weights)  # row `row`, 8 columns
        s = ld_shared_u32x4(weights + 8 * BLOCK * 2)  # row `row` + 8
        v = ld_shared_u32x4(x_at)
        low = mma_bf16((w[0], s[0], w[1], s[1]), v[:2], tuple(c[i] for i in range(4)))
        high = mma_bf16((w[2], s[2], w[3], s[3]), v[2:], tuple(c[4 + i] for i in range(4)))
        for i in range(4):
            c[i] = low[i]
            c[4 + i] = high[i]
