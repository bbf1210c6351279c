"""Latent attention of few rows over a paged cache, split over the context; `mla_merge` adds up.

         score[t, h, s] = softmax_scale (q_latent[t, h] . row[s, :L] + q_rope[t, h] . row[s, L:])
         partial[i, t, h] = sum_s 2^(c score - max) row[s, :L],  s of split i and <= positions[t]
         stats[i, t, h] = max of c score and sum of 2^(c score - max), c = log2 e
Shapes   q_latent [T, H * L], q [T, H * (Dn + Dr)] (the last Dr columns of each head are read),
         cache [slots, L + Dr], all bf16; block_table [R, blocks] i64, positions [T] i64; T = R * Q,
         row t belongs to request t // Q. Position s of request r lies in slot
         block_table[r, s // block_size] * block_size + s % block_size. A negative position sees
         nothing. -> partial [splits, T, H, L] f32, stats [splits, T, H, 2] f32. Where a row sees
         nothing in a split, stats are (-inf, 0) and partial may be left unwritten.
         H, L, Dn, Dr, block_size static; R, Q, splits, blocks are read at launch.
Bytes    2 (L + Dr) for each cached row and head group, + 8 L splits T H written and read again.
         S = 131072, H = 6, T = 1, 132 splits: 151 MB, 33 us at 4.64 TB/s, and 3.2 MB.
Grid     (splits, head groups, R). A request's Q * H rows are cut into groups of up to 48, its
         context into tiles of 64 tokens, the tiles evenly into splits. 8 warps compute, as
         mla_tile.py says, 1 loads.
Waits    everything that it reads: the grid dependency. Cache rows beyond the largest position of
         the group are not read; their place in shared memory is zero.
Signals  launch_dependents at once. Inside the CTA the barriers of ring.py and mla_tile.py, and
         barrier 1 once the queries are staged.
Aliases  none.
Archs    sm_90a, sm_100a, sm_103a (warp-level mma, ldmatrix, bulk copy).
Rounding float32 scores, as the sum of two halves of L + Dr; probabilities are rounded to bf16 for
         the second product and added up as rounded. Tiles in order, sums in the order of the warps.
         The split borders follow the longest row of the group, so a row's last bits may too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    bulk_copy_g2s,
    compile_kernel,
    evict_first_policy,
    launch,
    ld_global_i64,
    ld_global_u32x4,
    select_f32,
    st_global_f32x2,
    st_shared_u32,
    st_shared_u32x4,
)
from nanok3.kernels.mla_tile import LOWEST, TILE, WARPS, MLATile, filled
from nanok3.kernels.ring import Ring
from nanok3.reference.mla import mla_absorbed_value as mla_absorbed_value

THREADS = 32 * (WARPS + 1)  # 8 warps compute, 1 loads
SLOTS = 2  # one tile streams while one is worked on: 72 KB in flight, 64 KB saturate HBM
MAX_ROW_TILES = 3  # 48 rows: 96 accumulators a lane, and what else fits into shared memory


@dataclass(frozen=True)
class Shape:
    """Static sizes; H is this rank's, L a multiple of 64, Dr of 16."""

    heads: int
    rank: int  # L
    nope_dim: int  # Dn
    rope_dim: int  # Dr
    block_size: int
    softmax_scale: float

    def __post_init__(self) -> None:
        assert self.heads >= 1 and self.block_size >= 1
        assert self.nope_dim % 8 == 0, f"Dn must be a multiple of 8, not {self.nope_dim}"


# ---- device ----


class MLADecode:
    def __init__(self, shape: Shape, row_tiles: int):
        assert 1 <= row_tiles <= MAX_ROW_TILES
        self.shape, self.row_tiles = shape, row_tiles
        self.rows = 16 * row_tiles  # of a head group
        self.tile = MLATile(shape.rank, shape.rope_dim, shape.softmax_scale, row_tiles)
        self.ring = Ring(SLOTS, TILE * self.tile.row_stride, WARPS)

    @cute.jit
    def __call__(
        self,
        q_latent: Int64,
        q: Int64,
        cache: Int64,
        num_blocks: Int64,
        block_table: Int64,
        max_blocks: Int32,
        positions: Int64,
        partial: Int64,
        stats: Int64,
        num_queries: Int32,
        splits: Int32,
        groups: Int32,
        num_reqs: Int32,
        stream,
    ):
        self.kernel(
            q_latent,
            q,
            cache,
            num_blocks,
            block_table,
            max_blocks,
            positions,
            partial,
            stats,
            num_queries,
        ).launch(
            grid=(splits, groups, num_reqs),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,  # or ptxas may settle for 32 registers and spill the rest
        )

    @cute.kernel
    def kernel(
        self,
        q_latent: Int64,
        q: Int64,
        cache: Int64,
        num_blocks: Int64,
        block_table: Int64,
        max_blocks: Int32,
        positions: Int64,
        partial: Int64,
        stats: Int64,
        num_queries: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        split, group, request = cute.arch.block_idx()
        splits, _, num_reqs = cute.arch.grid_dim()
        smem = SmemAllocator()
        barriers, ring_base = self.ring.allocate(smem)
        work = Int32(smem.allocate(self.tile.work_bytes, byte_alignment=128).toint())
        self.ring.init(barriers, tid)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        # 1. this CTA's rows, and its tiles of what they see: begin .. end - 1
        request_rows = num_queries * self.shape.heads
        first_row = group * self.rows  # in the request
        num_rows = cutlass.min(request_rows - first_row, self.rows)
        positions = positions + Int64(request) * Int64(num_queries) * 8
        limit = self.visible_limit(positions, first_row, num_rows, max_blocks)
        tiles = (limit + TILE - 1) // TILE
        a_split = (tiles + splits - 1) // splits
        begin = cutlass.min(split * a_split, tiles)
        end = cutlass.min(begin + a_split, tiles)

        # 2. the tiles; a row's number in the outputs is its place in [split, T, H]
        warp = cute.arch.make_warp_uniform(tid // 32)
        if warp == WARPS:
            table = block_table + Int64(request) * Int64(max_blocks) * 8
            self.load(cache, num_blocks, table, limit, begin, end, barriers, ring_base)
        else:
            row = Int64(request) * Int64(request_rows) + Int64(first_row)
            out_row = Int64(split) * Int64(num_reqs) * Int64(request_rows) + row
            if begin < end:
                self.stage_positions(positions, first_row, num_rows, limit, work, tid)
                self.stage_queries(q_latent, q, row, num_rows, work, tid)
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
                self.attend(
                    begin, end, barriers, ring_base, num_rows, work, partial, stats, out_row, tid
                )
            else:
                if tid < num_rows:
                    nothing = (Float32(float("-inf")), Float32(0.0))
                    st_global_f32x2(stats + (out_row + Int64(tid)) * 8, nothing)

    @cute.jit
    def visible_limit(self, positions: Int64, first_row: Int32, num_rows: Int32, max_blocks: Int32):
        """How many tokens the group's longest row sees; by whole warps."""
        lane = cute.arch.lane_idx()
        first = first_row // self.shape.heads
        last = (first_row + num_rows - 1) // self.shape.heads
        longest = Int32(-1)
        for some in cutlass.range(first, last + 1, 32, unroll=1):
            at = cutlass.min(some + lane, last)
            longest = cutlass.max(longest, Int32(ld_global_i64(positions + Int64(at) * 8)))
        for distance in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(longest, 1 << distance)
            longest = cutlass.max(longest, other)
        return cutlass.min(longest + 1, max_blocks * self.shape.block_size)

    @cute.jit
    def load(
        self,
        cache: Int64,
        num_blocks: Int64,
        table: Int64,
        limit: Int32,
        begin: Int32,
        end: Int32,
        barriers,
        ring_base: Int32,
    ):
        """The loader warp: each tile's tokens, a bulk copy each, to padded rows of its slot."""
        shape = self.shape
        lane = cute.arch.lane_idx()
        policy = evict_first_policy()
        position = self.ring.state()
        sources = cute.make_rmem_tensor((TILE // 32,), Int64)
        for tile in cutlass.range(begin, end, unroll=1):
            first = tile * TILE
            valid = cutlass.min(limit - first, TILE)  # at least 1
            # Looked up before the slot is free. A lane without a token looks up the last one.
            for i in cutlass.range_constexpr(TILE // 32):
                token = first + cutlass.min(lane + 32 * i, valid - 1)
                block = ld_global_i64(table + Int64(token // shape.block_size) * 8)
                block = cutlass.max(cutlass.min(block, num_blocks - 1), Int64(0))
                slot = block * shape.block_size + Int64(token % shape.block_size)
                sources[i] = cache + slot * self.tile.row_bytes
            slot_base = ring_base + position[0] * self.ring.slot_bytes
            full = barriers + position[0]
            cute.arch.mbarrier_wait(barriers + self.ring.slots + position[0], position[1] ^ 1)
            # What lies beyond may be NaN, and 0 x NaN is NaN. Before the arrival, which publishes.
            for piece in cutlass.range(
                lane, (TILE - valid) * (self.tile.row_bytes // 16), 32, unroll=1
            ):
                row = valid + piece // (self.tile.row_bytes // 16)
                column = piece % (self.tile.row_bytes // 16)
                zero = Uint32(0)
                at = slot_base + row * self.tile.row_stride + column * 16
                st_shared_u32x4(at, (zero, zero, zero, zero))
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, valid * self.tile.row_bytes)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(TILE // 32):
                row = lane + 32 * i
                if row < valid:
                    at = slot_base + row * self.tile.row_stride
                    bulk_copy_g2s(at, sources[i], Int32(self.tile.row_bytes), full, policy)
            cute.arch.sync_warp()
            self.ring.advance(position)

    # ---- compute warps ----

    @cute.jit
    def stage_positions(
        self,
        positions: Int64,
        first_row: Int32,
        num_rows: Int32,
        limit: Int32,
        work: Int32,
        tid: Int32,
    ):
        """The last token that each row sees, -1 for none, to shared memory."""
        if tid < self.rows:
            query = (first_row + cutlass.min(tid, num_rows - 1)) // self.shape.heads
            last = cutlass.min(Int32(ld_global_i64(positions + Int64(query) * 8)), limit - 1)
            if tid >= num_rows:
                last = Int32(-1)
            st_shared_u32(work + self.tile.seen_at + tid * 4, last)

    @cute.jit
    def stage_queries(
        self, q_latent: Int64, q: Int64, row: Int64, num_rows: Int32, work: Int32, tid: Int32
    ):
        """Queries [rows, L + Dr] to shared memory; missing rows repeat the last and see nothing."""
        shape = self.shape
        latent_pieces, per_row = shape.rank // 8, self.tile.row_bytes // 16
        latent_at = q_latent + row * (2 * shape.rank)
        head_bytes = 2 * (shape.nope_dim + shape.rope_dim)
        rope_at = q + row * head_bytes + 2 * shape.nope_dim
        for piece in cutlass.range(tid, self.rows * per_row, WARPS * 32, unroll=1):
            r = piece // per_row
            column = piece % per_row
            source_row = Int64(cutlass.min(r, num_rows - 1))
            source = latent_at + source_row * (2 * shape.rank) + Int64(column * 16)
            if column >= latent_pieces:
                source = rope_at + source_row * head_bytes + Int64((column - latent_pieces) * 16)
            st_shared_u32x4(work + r * self.tile.row_stride + column * 16, ld_global_u32x4(source))

    @cute.jit
    def attend(
        self,
        begin: Int32,
        end: Int32,
        barriers,
        ring_base: Int32,
        num_rows: Int32,
        work: Int32,
        partial: Int64,
        stats: Int64,
        out_row: Int64,
        tid: Int32,
    ):
        """Tiles begin .. end - 1, then the outputs."""
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        top = filled(2 * self.row_tiles, LOWEST)
        total = filled(2 * self.row_tiles, 0.0)
        context = filled(4 * self.row_tiles * self.tile.value_tiles, 0.0)
        position = self.ring.state()
        for tile in cutlass.range(begin, end, unroll=1):
            at = self.ring.wait(barriers, ring_base, position)
            self.tile.attend(at, tile * TILE, top, total, context, work, warp, lane)
            self.ring.release(barriers, position, lane)
        sums = self.tile.sums(total, work, warp, lane)
        for i in cutlass.range_constexpr(2 * self.row_tiles):
            row = 8 * i + lane // 4
            if row < num_rows:
                self.store_context(context, i, partial, out_row + Int64(row), warp, lane)
                if (warp == 0) & (lane % 4 == 0):
                    # Not `> 0`: a sum that is NaN must stay one.
                    nothing = Uint32(sums[i] == Float32(0.0))
                    largest = select_f32(nothing, Float32(float("-inf")), top[i])
                    st_global_f32x2(stats + (out_row + Int64(row)) * 8, (largest, sums[i]))

    def store_context(self, context, i, partial, row, warp, lane):
        """The warp's columns of one of the lane's rows: each lane has 2 of every 8."""
        value_tiles = self.tile.value_tiles
        at = partial + row * (4 * self.shape.rank)
        at = at + Int64((warp * (8 * value_tiles) + lane % 4 * 2) * 4)
        for n in range(value_tiles):
            c = 4 * (i // 2 * value_tiles + n) + i % 2 * 2
            st_global_f32x2(at + n * 32, (context[c], context[c + 1]))


# ---- host ----


def row_groups(shape: Shape, num_queries: int) -> tuple[int, int]:
    """How a request's Q * H rows are cut: (groups, row tiles of each)."""
    tiles = -(-num_queries * shape.heads // 16)
    groups = -(-tiles // MAX_ROW_TILES)
    return groups, -(-tiles // groups)


def num_splits(shape: Shape, num_reqs: int, num_queries: int, max_context: int, sms: int) -> int:
    """Fixed for a captured graph, from the longest context that it may serve: one CTA an SM."""
    groups, _ = row_groups(shape, num_queries)
    return max(1, min(sms // (num_reqs * groups), -(-max_context // TILE)))


@functools.cache
def compile_mla_decode(shape: Shape, row_tiles: int, arch: str):
    pointers = (Int64(0), Int64(0), Int64(0), Int64(1), Int64(0), Int32(1), *(Int64(0),) * 3)
    args = (*pointers, *(Int32(1),) * 4, make_fake_stream())
    return compile_kernel(MLADecode(shape, row_tiles), args, arch)


def mla_decode(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    shape: Shape,
    *,
    partial: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """q_latent [T, H * L], q [T, H * (Dn + Dr)], cache [slots, L + Dr] bf16, block_table
    [R, blocks] i64, positions [T] i64 -> partial [splits, T, H, L] f32, stats [splits, T, H, 2]
    f32."""
    num_reqs, max_blocks = block_table.shape
    tokens, heads = positions.shape[0], shape.heads
    splits = partial.shape[0]
    assert all(t.dtype == torch.bfloat16 for t in (q_latent, q, cache))
    assert block_table.dtype == positions.dtype == torch.int64
    assert partial.dtype == stats.dtype == torch.float32
    assert num_reqs >= 1 and tokens >= num_reqs and tokens % num_reqs == 0
    assert q_latent.shape == (tokens, heads * shape.rank)
    assert q.shape == (tokens, heads * (shape.nope_dim + shape.rope_dim))
    assert cache.shape[1] == shape.rank + shape.rope_dim
    assert cache.shape[0] >= shape.block_size and cache.shape[0] % shape.block_size == 0
    assert splits >= 1 and partial.shape == (splits, tokens, heads, shape.rank)
    assert stats.shape == (splits, tokens, heads, 2)
    assert block_table.is_contiguous() and positions.is_contiguous()
    tensors = (q_latent, q, cache, partial, stats)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
    num_queries = tokens // num_reqs
    groups, row_tiles = row_groups(shape, num_queries)
    launch(
        compile_mla_decode(shape, row_tiles, arch_of(q.device.index)),
        address(q_latent),
        address(q),
        address(cache),
        cache.shape[0] // shape.block_size,
        address(block_table),
        max_blocks,
        address(positions),
        address(partial),
        address(stats),
        num_queries,
        splits,
        groups,
        num_reqs,
    )
