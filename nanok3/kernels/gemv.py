"""Product of few rows with a bf16 matrix:  out[t, o] = finish(sum_k x[t, g(o) + k] * weight[o, k])

finish   "bf16"  out = the sum                                          (projections)
         "f32"   out = the sum, float32                                 (router logits, lm_head)
         "situ"  out[t, o] = situ(gate row o, up row o), 2 O rows       (gate_up)
         "add"   out = the sum + extra[t, o]                            (latent_up after its norm)
         "gate"  out = round(sum) * sigmoid(extra[t, o])                (MLA values)
         "moe_in" three outputs from three ranges of tiles: "f32" (router logits), "bf16" (latent),
                 "situ" (shared experts)
Shapes   x [T, X] bf16, weight [O, K] packed by `gemv_layout`, extra [T, >= O] bf16 (any row stride)
         -> out [T, O] bf16 or f32 (any row stride: it may be columns of a wider buffer). O, K, X
         static; T is read at launch, any T >= 1.
         groups > 1: block-diagonal; rows of group j read x from column j * group_stride on.
         split > 1: K in that many parts, one a CTA of a cluster.
Bytes    2 O K for every 8 rows of x, + 2 T X a CTA through L2. O = 3220, K = 7168, T = 1: 46.2 MB,
         10.0 us at 4.64 TB/s.
Grid     clusters of `split` CTAs take tiles of 16 weight rows in turn; the CTAs, and in each 8
         compute warps, share a tile's K; 1 warp a CTA loads. A split is for products with too few
         tiles to fill the SMs, and keeps the staged part of x small.
Waits    weights: none (they are constant), so the loader starts before the grid dependency; x and
         extra: the grid dependency (griddepcontrol.wait), by the compute warps.
Signals  launch_dependents at once: the next kernel's loader may fill its ring beside this one.
         Within a cluster, once a tile:
             sums [2, split, 128] f32  written by CTA r's threads on rank 0's shared memory, read by
                                       rank 0 after a cluster barrier that all warps join (the
                                       loaders too); the other half is written at the next tile,
                                       when rank 0 has passed that barrier's successor
Aliases  none: out may be nothing that this kernel reads.
Archs    sm_90a, sm_100a, sm_103a (warp-level mma, bulk copy).
Rounding float32 accumulators; the warps' parts are added by pairs, then the CTAs' in rank order;
         one rounding, at the store ("gate": the sum is rounded to bf16 first, as the model does).
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    bf16_low,
    compile_kernel,
    evict_first_policy,
    launch,
    ld_global_u16,
    ld_global_u32x4,
    ld_shared_f32,
    ld_shared_u32x4,
    mapa_shared,
    mma_bf16,
    pack_bf16,
    sigmoid,
    situ,
    st_cluster_f32,
    st_global_f32,
    st_global_u16,
    st_shared_f32,
    st_shared_u32x4,
    tree,
)
from nanok3.kernels.gemv_layout import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK_BLOCKS,
    TILE,
    Shape,
    resident_ctas,
)
from nanok3.kernels.ring import Ring
from nanok3.reference.linear import linear_ref as linear_ref

WARPS = 8  # compute warps; with the loader 288 threads
THREADS = 32 * (WARPS + 1)
PASS = 8  # rows of x of a pass: the N of an mma
STAGE_LOADS = 4  # 16-byte loads of x that a thread keeps in flight
MOST_SLOTS, LEAST_SLOTS = 6, 4
HALF_SM, WHOLE_SM = 113 << 10, 226 << 10  # shared memory of a CTA if two, or one, run on an SM


# ---- device ----


class Gemv:
    def __init__(self, shape: Shape, pass_rows: int):
        self.shape, self.pass_rows = shape, pass_rows
        self.part_width = shape.x_width if shape.split == 1 else shape.part_blocks * BLOCK
        self.x_stride = 2 * self.part_width + 64  # bytes; 64 more: 8 lanes hit 8 bank groups
        self.x_bytes = pass_rows * self.x_stride
        self.partial_bytes = 2 * WARPS * TILE * PASS * 4  # two tiles: one barrier a tile
        self.sums_bytes = 2 * shape.split * TILE * PASS * 4 if shape.split > 1 else 0
        slot_bytes = min(CHUNK_BLOCKS, shape.part_blocks) * BLOCK_BYTES
        others = self.x_bytes + self.partial_bytes + self.sums_bytes + 1024
        room = HALF_SM if HALF_SM - others >= LEAST_SLOTS * slot_bytes else WHOLE_SM
        slots = min(MOST_SLOTS, (room - others) // slot_bytes)
        assert slots >= 2, f"{pass_rows} rows of {self.part_width} columns do not fit an SM"
        self.ctas_per_sm = 2 if room == HALF_SM else 1
        self.ring = Ring(slots, slot_bytes, WARPS)

    @cute.jit
    def __call__(
        self,
        x: Int64,
        weight: Int64,
        extra: Int64,
        extra_stride: Int32,
        out: Int64,
        out_stride: Int32,
        out_2: Int64,
        out_2_stride: Int32,
        out_3: Int64,
        out_3_stride: Int32,
        num_tokens: Int32,
        grid: Int32,
        stream,
    ):
        outs = (out, out_stride, out_2, out_2_stride, out_3, out_3_stride)
        self.kernel(x, weight, extra, extra_stride, *outs, num_tokens).launch(
            grid=(grid, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.shape.split, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        weight: Int64,
        extra: Int64,
        extra_stride: Int32,
        out: Int64,
        out_stride: Int32,
        out_2: Int64,
        out_2_stride: Int32,
        out_3: Int64,
        out_3_stride: Int32,
        num_tokens: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        barriers, ring_base = self.ring.allocate(smem)
        x_base = Int32(smem.allocate(self.x_bytes, byte_alignment=128).toint())
        partial = Int32(smem.allocate(self.partial_bytes, byte_alignment=128).toint())
        sums = partial
        if const_expr(self.shape.split > 1):
            sums = Int32(smem.allocate(self.sums_bytes, byte_alignment=128).toint())
        self.ring.init(barriers, tid)
        if const_expr(self.shape.split > 1):  # and no CTA writes to one that has not begun
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        warp = cute.arch.make_warp_uniform(tid // 32)
        if warp == WARPS:
            self.load(weight, num_tokens, barriers, ring_base)
        else:
            cute.arch.griddepcontrol_wait()
            outs = ((out, out_stride), (out_2, out_2_stride), (out_3, out_3_stride))
            boxes = (x_base, partial, sums)
            self.compute(x, extra, extra_stride, outs, num_tokens, barriers, ring_base, boxes)

    @cute.jit
    def load(self, weight: Int64, num_tokens: Int32, barriers, ring_base: Int32):
        """The loader warp: this CTA's tiles, chunk by chunk, once for every pass."""
        shape = self.shape
        rank, cluster, clusters = self.place()
        lane = cute.arch.lane_idx()
        policy = evict_first_policy()
        position = self.ring.state()
        first_block = rank * shape.part_blocks
        for _ in cutlass.range(0, num_tokens, self.pass_rows, unroll=1):
            for tile in cutlass.range(cluster, shape.tiles, clusters, unroll=1):
                source = weight + (Int64(tile) * shape.blocks + Int64(first_block)) * BLOCK_BYTES
                for chunk in cutlass.range(shape.chunks, unroll=1):
                    first = chunk * CHUNK_BLOCKS
                    count = cutlass.min(shape.part_blocks - first, CHUNK_BLOCKS)
                    self.ring.fill(
                        barriers,
                        ring_base,
                        position,
                        source + Int64(first * BLOCK_BYTES),
                        count * BLOCK_BYTES,
                        policy,
                        lane,
                    )
                if const_expr(shape.split > 1):
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()

    def place(self):
        """-> rank in the cluster, cluster, number of clusters."""
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        split = self.shape.split
        return cta % split, cta // split, grid // split

    @cute.jit
    def compute(
        self,
        x: Int64,
        extra: Int64,
        extra_stride: Int32,
        outs,
        num_tokens: Int32,
        barriers,
        ring_base: Int32,
        boxes,
    ):
        """The compute warps: per pass stage x, then tile by tile multiply, add up, finish."""
        shape = self.shape
        x_base, partial, sums = boxes
        tid, _, _ = cute.arch.thread_idx()
        rank, cluster, clusters = self.place()
        position = self.ring.state()
        x_part = x + Int64(rank * (2 * BLOCK * shape.part_blocks))
        # goes on from pass to pass: rank 0 may still read the box of the last tile
        parity = Int32(0)
        for first in cutlass.range(0, num_tokens, self.pass_rows, unroll=1):
            count = cutlass.min(num_tokens - first, self.pass_rows)
            self.stage(x_part + Int64(first) * (2 * shape.x_width), count, x_base, tid)
            cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
            for tile in cutlass.range(cluster, shape.tiles, clusters, unroll=1):
                where = partial + parity * (self.partial_bytes // 2)
                self.tile(tile, count, barriers, ring_base, position, x_base, where, tid)
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
                if const_expr(shape.split > 1):
                    box = sums + parity * (self.sums_bytes // 2)
                    self.hand_over(where, box, rank, tid)
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()
                    if rank == 0:
                        self.finish(tile, first, count, box, extra, extra_stride, outs, tid)
                else:
                    self.finish(tile, first, count, where, extra, extra_stride, outs, tid)
                parity = parity ^ 1
            # x and the partials of the last tile are read by all before they are staged anew
            cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)

    @cute.jit
    def hand_over(self, partial: Int32, box: Int32, rank: Int32, tid: Int32):
        """This CTA's sum of its warps' parts, to rank 0."""
        if tid < TILE * PASS:
            value = self.total(partial, WARPS, tid)
            st_cluster_f32(mapa_shared(box + (rank * TILE * PASS + tid) * 4, Int32(0)), value)

    @cute.jit
    def stage(self, x: Int64, count: Int32, x_base: Int32, tid: Int32):
        """This part's columns of x [count, X] to shared memory, rows padded."""
        per_row = self.part_width // 8  # 16-byte pieces
        pieces = count * per_row
        step = STAGE_LOADS * WARPS * 32
        for base in cutlass.range(tid, pieces, step, unroll=1):
            words = []
            for i in cutlass.range_constexpr(STAGE_LOADS):  # all in flight; past the end, the last
                piece = cutlass.min(base + i * WARPS * 32, pieces - 1)
                row, column = piece // per_row, piece % per_row
                at = x + Int64(row) * (2 * self.shape.x_width) + Int64(column * 16)
                words.append(ld_global_u32x4(at))
            for i in cutlass.range_constexpr(STAGE_LOADS):
                piece = cutlass.min(base + i * WARPS * 32, pieces - 1)
                row, column = piece // per_row, piece % per_row
                st_shared_u32x4(x_base + row * self.x_stride + column * 16, words[i])

    @cute.jit
    def tile(
        self,
        tile: Int32,
        count: Int32,
        barriers,
        ring_base: Int32,
        position,
        x_base: Int32,
        partial: Int32,
        tid: Int32,
    ):
        """16 weight rows times `count` rows of x, this warp's share of K, to `partial`."""
        shape = self.shape
        lane, warp = tid % 32, tid // 32
        row, quad = lane // 4, lane % 4
        # Lanes of rows that are not there read row 0; their columns are never stored.
        token = cutlass.min(row, count - 1)
        x_at = x_base + token * self.x_stride + quad * 16
        if const_expr(shape.groups > 1):
            group = tile * TILE // (shape.rows // shape.groups)
            x_at = x_at + group * (2 * shape.group_stride)
        c = cute.make_rmem_tensor((8,), Float32)  # two chains of accumulators
        for i in cutlass.range_constexpr(8):
            c[i] = Float32(0.0)
        for chunk in cutlass.range(shape.chunks, unroll=1):
            at = self.ring.wait(barriers, ring_base, position)
            for i in cutlass.range_constexpr(-(-CHUNK_BLOCKS // WARPS)):
                block = warp + i * WARPS
                if chunk * CHUNK_BLOCKS + block < shape.part_blocks:
                    weights = at + block * BLOCK_BYTES + lane * 16
                    r = ld_shared_u32x4(weights)  # row `row`, 8 columns
                    s = ld_shared_u32x4(weights + 8 * BLOCK * 2)  # row `row` + 8
                    v = ld_shared_u32x4(x_at + (chunk * CHUNK_BLOCKS + block) * (BLOCK * 2))
                    low = mma_bf16((r[0], s[0], r[1], s[1]), (v[0], v[1]), (c[0], c[1], c[2], c[3]))
                    high = mma_bf16(
                        (r[2], s[2], r[3], s[3]), (v[2], v[3]), (c[4], c[5], c[6], c[7])
                    )
                    for j in cutlass.range_constexpr(4):
                        c[j] = low[j]
                        c[4 + j] = high[j]
            self.ring.release(barriers, position, lane)
        # [warp, token, row]: c0 and c1 are row `row` of tokens 2 quad, 2 quad + 1; c2, c3 row + 8
        mine = partial + warp * (TILE * PASS * 4) + (2 * quad * TILE + row) * 4
        st_shared_f32(mine, c[0] + c[4])
        st_shared_f32(mine + TILE * 4, c[1] + c[5])
        st_shared_f32(mine + 8 * 4, c[2] + c[6])
        st_shared_f32(mine + (TILE + 8) * 4, c[3] + c[7])

    @cute.jit
    def finish(
        self,
        tile: Int32,
        first: Int32,
        count: Int32,
        partial: Int32,
        extra: Int64,
        extra_stride: Int32,
        outs,
        tid: Int32,
    ):
        """To the output in whose range the tile is."""
        ranges = self.shape.ranges
        for i in cutlass.range_constexpr(len(ranges)):
            at = tile - ranges[i].first_tile
            out, stride = outs[i]
            if const_expr(len(ranges) == 1):
                self.finish_in(i, at, first, count, partial, extra, extra_stride, out, stride, tid)
            else:
                if (at >= 0) & (at < ranges[i].tiles):
                    self.finish_in(
                        i, at, first, count, partial, extra, extra_stride, out, stride, tid
                    )

    @cute.jit
    def finish_in(
        self,
        which: cutlass.Constexpr[int],
        tile: Int32,
        first: Int32,
        count: Int32,
        partial: Int32,
        extra: Int64,
        extra_stride: Int32,
        out: Int64,
        out_stride: Int32,
        tid: Int32,
    ):
        """Threads 0..127: one (token, row) of a range's tile each; adds the parts and stores."""
        shape, part = self.shape, self.shape.ranges[which]
        token, row = tid // TILE, tid % TILE
        o = tile * TILE + row
        live = (token < count) & (o < part.rows)
        if const_expr(part.finish == "situ"):  # rows 0..7 gate, 8..15 up
            o = tile * 8 + row
            live = (token < count) & (row < 8) & (o < part.out_width)
        if live:
            parts = WARPS if shape.split == 1 else shape.split
            value = self.total(partial, parts, token * TILE + row)
            t = Int64(first + token)
            target = t * Int64(out_stride) + Int64(o)
            if const_expr(part.finish == "f32"):
                st_global_f32(out + target * 4, value)
            else:
                if const_expr(part.finish == "situ"):
                    up = self.total(partial, parts, token * TILE + row + 8)
                    value = situ(value, up, shape.beta, shape.linear_beta)
                if const_expr(part.finish in ("add", "gate")):
                    other = self.extra(extra + (t * Int64(extra_stride) + Int64(o)) * 2)
                    if const_expr(part.finish == "add"):
                        value = value + other
                    else:
                        value = bf16_low(pack_bf16(value, value)) * sigmoid(other)
                st_global_u16(out + target * 2, pack_bf16(value, Float32(0.0)))

    def total(self, partial, parts, index):
        at = partial + index * 4
        return tree([ld_shared_f32(at + p * (TILE * PASS * 4)) for p in range(parts)])

    def extra(self, at):
        """One bf16 of global memory as float32."""
        return bf16_low(ld_global_u16(at))


# ---- host ----


@functools.cache
def compile_gemv(shape: Shape, pass_rows: int, arch: str):
    pairs = (Int64(0), Int32(0)) * 4  # extra and the outs
    args = (Int64(0), Int64(0), *pairs, Int32(1), Int32(1), make_fake_stream())
    return compile_kernel(Gemv(shape, pass_rows), args, arch)


def gemv(
    x: torch.Tensor,
    packed: torch.Tensor,
    shape: Shape,
    *,
    out: torch.Tensor | tuple[torch.Tensor, ...],
    extra: torch.Tensor | None = None,
) -> None:
    """x [T, X] bf16, packed by `pack_gemv`, extra [T, >= O] bf16 -> out [T, O], one a range."""
    tokens = x.shape[0]
    assert x.dtype == torch.bfloat16 and x.shape[1] == shape.x_width and x.is_contiguous()
    assert packed.shape == (shape.tiles, shape.blocks, TILE, BLOCK) and packed.is_contiguous()
    outs = out if isinstance(out, tuple) else (out,)
    for part, y in zip(shape.ranges, outs, strict=True):
        assert y.shape == (tokens, part.out_width) and y.stride(1) == 1
        assert y.dtype == (torch.float32 if part.finish == "f32" else torch.bfloat16)
    assert (extra is not None) == (shape.finish in ("add", "gate"))
    pass_rows = 1 if tokens == 1 else PASS
    kernel = compile_gemv(shape, pass_rows, arch_of(x.device.index))
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    resident = resident_ctas(shape.split, sms) * Gemv(shape, pass_rows).ctas_per_sm // 2
    clusters = min(shape.tiles, resident // shape.split)
    launch(
        kernel,
        address(x),
        address(packed),
        address(extra) if extra is not None else 0,
        extra.stride(0) if extra is not None else 0,
        *(number for y in outs for number in (address(y), y.stride(0))),
        *(0, 0) * (3 - len(outs)),
        tokens,
        clusters * shape.split,
    )
