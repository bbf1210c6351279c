"""Down of the routed experts, with MXFP4 weights, and their weighted sum:

    out[t, z] = sum_a weights[t, a] * sum_f w2[e, z, f] act[t, a, f],  e = ids[t, a], e ascending

Shapes   act [T, A, F] bf16, weights [T, A] f32, slot_of [T, A] i32, distinct [>= n] i32,
         num_distinct [1] i32 (all four by `route`), w2 packed by `pack_expert_down` -> out [T, Z]
         bf16. Z and F are multiples of 32, static like E and A; any T >= 1 is read at launch.
Bytes    0.53 F Z for every expert that a pass of 8 rows is routed to. TP16, T = 1: 5.8 MB, 1.3 us
         at 4.64 TB/s; T = 8 with 110 experts: 40 MB, 8.7 us.
Grid     a CTA takes 32 rows of Z (two tiles) with K = the experts of the pass laid end to end, so
         that the sum over experts stays in it. 16 compute warps: warp p takes every eighth expert
         from p % 8 on, and tile p // 8; 1 warp loads 8 experts at a time, a lane for each warp.
Waits    everything waits for the grid dependency: which weights to load is the router's result.
Signals  launch_dependents at once.
Aliases  none: out may be nothing that this kernel reads.
Archs    sm_90a, sm_100a, sm_103a (warp-level mma, bulk copy).
Rounding float32 accumulators; the weight is applied to an expert's float32 product, then a warp
         adds its experts in their order, then the 8 warps' parts are added by pairs; one rounding,
         at the store. The same on every run; which warp has an expert depends on the other rows of
         the pass, so a row's last bit may, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    bulk_copy_g2s,
    compile_kernel,
    evict_first_policy,
    launch,
    ld_global_u32x4_or_zero,
    ld_shared_f32,
    pack_bf16,
    st_global_u16,
    st_shared_f32,
    tree,
)
from nanok3.kernels.mxfp4 import multiply_block
from nanok3.kernels.mxfp4_layout import (
    BLOCK,
    BLOCK_BYTES,
    DOWN_LAYOUT,
    TILE,
    PackedExperts,
    pack_experts,
)
from nanok3.kernels.ring import Ring
from nanok3.kernels.routed import PASS, Routed
from nanok3.reference.experts import experts_ref as experts_ref

LANES = 8  # experts side by side
TILES = 2  # of a CTA: what is read of act serves both
WARPS = LANES * TILES
THREADS = 32 * (WARPS + 1)
MOST_BLOCKS = 6  # of a warp's part of a ring slot: act's part takes 4 registers a block
SLOTS = 4  # of 16 parts, 26 KB at F = 192


@dataclass(frozen=True)
class Shape:
    """Static sizes."""

    num_experts: int
    top_k: int
    latent: int  # Z
    width: int  # F

    def __post_init__(self) -> None:
        assert self.latent % BLOCK == 0, f"Z must be a multiple of {BLOCK}, not {self.latent}"
        assert self.width % BLOCK == 0, f"F must be a multiple of {BLOCK}, not {self.width}"

    @property
    def tiles(self) -> int:
        return self.latent // TILE

    @property
    def blocks(self) -> int:
        return self.width // BLOCK

    @property
    def part_blocks(self) -> int:
        """Blocks of a part of a ring slot: they divide F evenly."""
        return max(n for n in range(1, MOST_BLOCKS + 1) if self.blocks % n == 0)

    @property
    def parts(self) -> int:
        """Parts of an expert's F."""
        return self.blocks // self.part_blocks


# ---- device ----


class ExpertDown:
    def __init__(self, shape: Shape):
        self.shape = shape
        self.part_bytes = shape.part_blocks * BLOCK_BYTES
        self.ring = Ring(SLOTS, WARPS * self.part_bytes, WARPS)
        self.routed = Routed(shape.num_experts, shape.top_k, weighted=True, threads=THREADS)
        self.partial_bytes = WARPS * TILE * PASS * 4

    @cute.jit
    def __call__(
        self,
        act: Int64,
        weights: Int64,
        slot_of: Int64,
        distinct: Int64,
        num_distinct: Int64,
        weight: Int64,
        out: Int64,
        num_tokens: Int32,
        grid: Int32,
        stream,
    ):
        self.kernel(act, weights, slot_of, distinct, num_distinct, weight, out, num_tokens).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        act: Int64,
        weights: Int64,
        slot_of: Int64,
        distinct: Int64,
        num_distinct: Int64,
        weight: Int64,
        out: Int64,
        num_tokens: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        barriers, ring_base = self.ring.allocate(smem)
        partial = Int32(smem.allocate(self.partial_bytes, byte_alignment=128).toint())
        tables = Int32(smem.allocate(self.routed.shared_bytes, byte_alignment=128).toint())
        self.ring.init(barriers, tid)
        cute.arch.griddepcontrol_wait()
        warp = cute.arch.make_warp_uniform(tid // 32)
        position = self.ring.state()  # the loader's, or a compute warp's
        for first in cutlass.range(0, num_tokens, PASS, unroll=1):
            # (a CTA barrier: the ring is ready, the last pass is over)
            self.routed.build(
                slot_of, distinct, num_distinct, weights, first, num_tokens, tables, tid
            )
            experts = self.routed.num_experts_here(tables)
            for pair in cutlass.range(cta, self.shape.tiles // TILES, grid, unroll=1):
                if warp == WARPS:
                    self.load(weight, pair, experts, tables, barriers, ring_base, position)
                else:
                    self.multiply(
                        act, first, experts, tables, barriers, ring_base, position, partial, tid
                    )
                    cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
                    count = cutlass.min(num_tokens - first, PASS)
                    self.finish(pair, first, count, partial, out, tid)
                    cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)

    @cute.jit
    def load(
        self,
        weight: Int64,
        pair: Int32,
        experts: Int32,
        tables: Int32,
        barriers,
        ring_base: Int32,
        position,
    ):
        """The loader warp: lane p < 16 asks for what compute warp p multiplies by, part by part."""
        shape = self.shape
        lane = cute.arch.lane_idx()
        policy = evict_first_policy()
        expert_bytes = shape.tiles * shape.blocks * BLOCK_BYTES
        for group in cutlass.range(0, experts, LANES, unroll=1):
            mine = group + lane % LANES
            expert = self.routed.expert(tables, cutlass.min(mine, experts - 1))
            tile = pair * TILES + lane // LANES % TILES
            source = weight + expert * expert_bytes + Int64(tile) * (shape.blocks * BLOCK_BYTES)
            live = cutlass.min(experts - group, LANES) * TILES
            for part in cutlass.range_constexpr(shape.parts):
                slot = position[0]
                full = barriers + slot
                cute.arch.mbarrier_wait(barriers + self.ring.slots + slot, position[1] ^ 1)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, live * self.part_bytes)
                cute.arch.sync_warp()
                if (lane < WARPS) & (mine < experts):
                    shared = ring_base + slot * self.ring.slot_bytes + lane * self.part_bytes
                    at = source + Int64(part * self.part_bytes)
                    bulk_copy_g2s(shared, at, Int32(self.part_bytes), full, policy)
                cute.arch.sync_warp()
                self.ring.advance(position)

    @cute.jit
    def multiply(
        self,
        act: Int64,
        first: Int32,
        experts: Int32,
        tables: Int32,
        barriers,
        ring_base: Int32,
        position,
        partial: Int32,
        tid: Int32,
    ):
        """A compute warp: the weighted sum of its experts' products, to `partial`."""
        shape = self.shape
        lane, warp = tid % 32, tid // 32
        row, quad = lane // 4, lane % 4
        total = cute.make_rmem_tensor((4,), Float32)
        for j in cutlass.range_constexpr(4):
            total[j] = Float32(0.0)
        c = cute.make_rmem_tensor((8,), Float32)  # of an expert, in two chains
        x = cute.make_rmem_tensor((4 * shape.part_blocks,), Uint32)
        source = self.source(act, first, warp % LANES, experts, tables, row, quad)
        for b in cutlass.range_constexpr(shape.part_blocks):
            self.fetch(x, b, source + b * (2 * BLOCK), source)
        for group in cutlass.range(0, experts, LANES, unroll=1):
            mine = group + warp % LANES
            source = self.source(act, first, mine, experts, tables, row, quad)
            after = self.source(act, first, mine + LANES, experts, tables, row, quad)
            for j in cutlass.range_constexpr(8):
                c[j] = Float32(0.0)
            for part in cutlass.range_constexpr(shape.parts):
                at = self.ring.wait(barriers, ring_base, position) + warp * self.part_bytes
                # a block's part of act gives way to that of the next part, which is then on its way
                next_base = after
                next_at = after
                if const_expr(part + 1 < shape.parts):
                    next_base = source
                    next_at = source + (part + 1) * (2 * BLOCK * shape.part_blocks)
                if mine < experts:
                    for b in cutlass.range_constexpr(shape.part_blocks):
                        words = tuple(x[4 * b + j] for j in range(4))
                        sums = tuple(c[j] for j in range(8))
                        sums = multiply_block(at + b * BLOCK_BYTES, lane, words, sums)
                        for j in cutlass.range_constexpr(8):
                            c[j] = sums[j]
                        self.fetch(x, b, next_at + b * (2 * BLOCK), next_base)
                self.ring.release(barriers, position, lane)
            if mine < experts:  # c0 and c2 are of token 2 quad, c1 and c3 of the next
                weight_at = tables + self.routed.weight + (mine * PASS + 2 * quad) * 4
                for j in cutlass.range_constexpr(4):
                    total[j] = total[j] + ld_shared_f32(weight_at + j % 2 * 4) * (c[j] + c[4 + j])
        # [tile, expert lane, token, row]
        at = partial + warp * (TILE * PASS * 4) + (2 * quad * TILE + row) * 4
        st_shared_f32(at, total[0])
        st_shared_f32(at + TILE * 4, total[1])
        st_shared_f32(at + 8 * 4, total[2])
        st_shared_f32(at + (TILE + 8) * 4, total[3])

    @cute.jit
    def source(
        self,
        act: Int64,
        first: Int32,
        index: Int32,
        experts: Int32,
        tables: Int32,
        row: Int32,
        quad: Int32,
    ):
        """Address of the lane's columns of its row's act for an expert of the list; 0: none."""
        place = self.routed.place(tables, cutlass.min(index, experts - 1), row)
        at = Int64(0)
        if (index < experts) & (place >= 0):
            pair = Int64((first + row) * self.shape.top_k + place)
            at = act + pair * (2 * self.shape.width) + Int64(quad * 16)
        return at

    def fetch(self, x, b, at, base):
        """16 bytes of act into the registers of block b; zeros where there is no base address."""
        words = ld_global_u32x4_or_zero(at, Int32(base != 0))
        for j in range(4):
            x[4 * b + j] = words[j]

    @cute.jit
    def finish(
        self, pair: Int32, first: Int32, count: Int32, partial: Int32, out: Int64, tid: Int32
    ):
        """Threads 0..255: a (tile, token, row) each; adds the experts' parts and stores."""
        if tid < TILES * TILE * PASS:
            tile, token, row = tid // (TILE * PASS), tid // TILE % PASS, tid % TILE
            at = partial + (tile * LANES * TILE * PASS + token * TILE + row) * 4
            value = tree([ld_shared_f32(at + i * (TILE * PASS * 4)) for i in range(LANES)])
            if token < count:
                z = (pair * TILES + tile) * TILE + row
                place = Int64(first + token) * self.shape.latent + Int64(z)
                st_global_u16(out + place * 2, pack_bf16(value, Float32(0.0)))


# ---- host ----


def pack_expert_down(packed: torch.Tensor, scale: torch.Tensor) -> PackedExperts:
    """packed [E, Z, F / 2] u8, scale [E, Z, F / 32] u8."""
    return pack_experts(packed, scale, DOWN_LAYOUT, pairs=False)


@functools.cache
def compile_expert_down(shape: Shape, arch: str):
    args = (*(Int64(0),) * 7, Int32(1), Int32(1), make_fake_stream())
    return compile_kernel(ExpertDown(shape), args, arch)


def expert_down(
    act: torch.Tensor,
    weights: torch.Tensor,
    slot_of: torch.Tensor,
    distinct: torch.Tensor,
    num_distinct: torch.Tensor,
    packed: PackedExperts,
    *,
    out: torch.Tensor,
) -> None:
    """act [T, A, F] bf16, weights [T, A] f32, slot_of [T, A], distinct [>= n], num_distinct [1] i32
    -> out [T, Z] bf16."""
    tokens, top_k, width = act.shape
    assert packed.layout == DOWN_LAYOUT, f"weights lie as «{packed.layout}», not «{DOWN_LAYOUT}»"
    experts = packed.tiles.shape[0]
    shape = Shape(experts, top_k, out.shape[1], width)
    assert packed.tiles.shape == (experts, shape.tiles, shape.blocks, BLOCK_BYTES)
    assert out.shape[0] == tokens >= 1 and act.dtype == out.dtype == torch.bfloat16
    assert weights.shape == slot_of.shape == (tokens, top_k) and weights.dtype == torch.float32
    assert num_distinct.shape == (1,)
    assert distinct.dim() == 1 and distinct.shape[0] >= min(experts, tokens * top_k)
    assert all(t.dtype == torch.int32 for t in (slot_of, distinct, num_distinct))
    tensors = (act, weights, slot_of, distinct, num_distinct, packed.tiles, out)
    assert all(t.is_contiguous() for t in tensors) and act.data_ptr() % 16 == 0
    kernel = compile_expert_down(shape, arch_of(act.device.index))
    sms = torch.cuda.get_device_properties(act.device).multi_processor_count
    launch(kernel, *(address(t) for t in tensors), tokens, min(sms, shape.tiles // TILES))
