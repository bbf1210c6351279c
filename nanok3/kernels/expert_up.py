"""Gate and up of the routed experts, with MXFP4 weights:

    act[t, a] = situ(w1[e] @ latent[t], w3[e] @ latent[t]),  e = ids[t, a]

Shapes   latent [T, Z] bf16, slot_of [T, A] i32, distinct [>= n] i32, num_distinct [1] i32 (all
         three by `route`), w1 | w3 packed by `pack_expert_up` -> act [T, A, F] bf16. Z and F are
         multiples of 32, static like E and A; any T >= 1 is read at launch.
Bytes    1.0625 F Z for every expert that a pass of 8 rows is routed to. TP16, T = 1: 11.7 MB,
         2.5 us at 4.64 TB/s; T = 8 with 110 experts: 80 MB, 17.3 us.
Grid     one CTA an SM. Items are (expert, tile of 8 gate and 8 up rows) in that order, and a CTA
         takes an equal share of consecutive ones. 16 compute warps share an item's Z, 1 warp loads.
Waits    everything waits for the grid dependency: which weights to load is the router's result.
Signals  launch_dependents at once.
Aliases  none.
Archs    sm_90a, sm_100a, sm_103a (warp-level mma, bulk copy).
Rounding float32 accumulators; the warps' parts are added by pairs; one rounding, at the store.
         A row's values do not depend on the other rows. Rows that are not routed to an expert are
         multiplied (a column of the mma costs nothing) and not stored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    compile_kernel,
    evict_first_policy,
    launch,
    ld_global_u32x4,
    ld_shared_f32,
    ld_shared_u32x4,
    pack_bf16,
    situ,
    st_global_u16,
    st_shared_f32,
    st_shared_u32x4,
    tree,
)
from nanok3.kernels.mxfp4 import multiply_block
from nanok3.kernels.mxfp4_layout import (
    BLOCK,
    BLOCK_BYTES,
    TILE,
    UP_LAYOUT,
    PackedExperts,
    pack_experts,
)
from nanok3.kernels.ring import Ring
from nanok3.kernels.routed import PASS, Routed
from nanok3.reference.experts import experts_ref as experts_ref

WARPS = 16  # compute warps: unpacking takes 80 % of the issue slots that the stream leaves
THREADS = 32 * (WARPS + 1)
CHUNK_BLOCKS = 64  # of a ring slot, 17 KB: 4 for every warp, and 3 in the second of Z = 3584
SLOTS = 5
STAGE_LOADS = 4  # 16-byte loads of latent that a thread keeps in flight


@dataclass(frozen=True)
class Shape:
    """Static sizes."""

    num_experts: int
    top_k: int
    latent: int  # Z
    width: int  # F
    beta: float
    linear_beta: float

    def __post_init__(self) -> None:
        assert self.latent % BLOCK == 0, f"Z must be a multiple of {BLOCK}, not {self.latent}"
        assert self.width % BLOCK == 0, f"F must be a multiple of {BLOCK}, not {self.width}"

    @property
    def tiles(self) -> int:
        return self.width // 8

    @property
    def blocks(self) -> int:
        return self.latent // BLOCK


# ---- device ----


class ExpertUp:
    def __init__(self, shape: Shape, pass_rows: int):
        self.shape, self.pass_rows = shape, pass_rows
        self.chunks = [
            min(CHUNK_BLOCKS, shape.blocks - first)
            for first in range(0, shape.blocks, CHUNK_BLOCKS)
        ]  # blocks of each
        slot_bytes = -(-self.chunks[0] * BLOCK_BYTES // 128) * 128
        self.ring = Ring(SLOTS, slot_bytes, WARPS)
        self.routed = Routed(shape.num_experts, shape.top_k, weighted=False, threads=THREADS)
        self.x_stride = 2 * shape.latent + 64  # bytes; 64 more: 8 lanes hit 8 bank groups
        self.x_bytes = pass_rows * self.x_stride
        self.partial_bytes = 2 * WARPS * TILE * PASS * 4  # two items: one barrier an item

    @cute.jit
    def __call__(
        self,
        latent: Int64,
        slot_of: Int64,
        distinct: Int64,
        num_distinct: Int64,
        weight: Int64,
        act: Int64,
        num_tokens: Int32,
        grid: Int32,
        stream,
    ):
        self.kernel(latent, slot_of, distinct, num_distinct, weight, act, num_tokens).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        latent: Int64,
        slot_of: Int64,
        distinct: Int64,
        num_distinct: Int64,
        weight: Int64,
        act: Int64,
        num_tokens: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        barriers, ring_base = self.ring.allocate(smem)
        x_base = Int32(smem.allocate(self.x_bytes, byte_alignment=128).toint())
        partial = Int32(smem.allocate(self.partial_bytes, byte_alignment=128).toint())
        tables = Int32(smem.allocate(self.routed.shared_bytes, byte_alignment=128).toint())
        self.ring.init(barriers, tid)
        cute.arch.griddepcontrol_wait()
        warp = cute.arch.make_warp_uniform(tid // 32)
        position = self.ring.state()  # the loader's, or a compute warp's
        for first in cutlass.range(0, num_tokens, PASS, unroll=1):
            # (a CTA barrier: the ring is ready, the last pass is over)
            self.routed.build(
                slot_of, distinct, num_distinct, Int64(0), first, num_tokens, tables, tid
            )
            items = self.routed.num_experts_here(tables) * self.shape.tiles
            begin, end = cta * items // grid, (cta + 1) * items // grid
            if warp == WARPS:
                self.load(weight, begin, end, tables, barriers, ring_base, position)
            else:
                source = latent + Int64(first) * (2 * self.shape.latent)
                count = cutlass.min(num_tokens - first, self.pass_rows)
                self.stage(source, count, x_base, tid)
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
                parity = Int32(0)
                for item in cutlass.range(begin, end, unroll=1):
                    where = partial + parity * (self.partial_bytes // 2)
                    self.item(count, barriers, ring_base, position, x_base, where, tid)
                    cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)
                    self.finish(item, first, where, tables, act, tid)
                    parity = parity ^ 1

    @cute.jit
    def load(
        self,
        weight: Int64,
        begin: Int32,
        end: Int32,
        tables: Int32,
        barriers,
        ring_base: Int32,
        position,
    ):
        """The loader warp: the tiles of this CTA's items, chunk by chunk."""
        shape = self.shape
        lane = cute.arch.lane_idx()
        policy = evict_first_policy()
        for item in cutlass.range(begin, end, unroll=1):
            expert = self.routed.expert(tables, item // shape.tiles)
            tile = expert * shape.tiles + Int64(item % shape.tiles)
            source = weight + tile * (shape.blocks * BLOCK_BYTES)
            for i, blocks in enumerate(self.chunks):
                self.ring.fill(
                    barriers,
                    ring_base,
                    position,
                    source + Int64(i * CHUNK_BLOCKS * BLOCK_BYTES),
                    Int32(blocks * BLOCK_BYTES),
                    policy,
                    lane,
                )

    @cute.jit
    def stage(self, x: Int64, count: Int32, x_base: Int32, tid: Int32):
        """latent [count, Z] to shared memory, rows padded. By the compute warps."""
        per_row = self.shape.latent // 8  # 16-byte pieces
        pieces = count * per_row
        for base in cutlass.range(tid, pieces, STAGE_LOADS * WARPS * 32, unroll=1):
            words = []
            for i in cutlass.range_constexpr(STAGE_LOADS):  # all in flight; past the end, the last
                piece = cutlass.min(base + i * WARPS * 32, pieces - 1)
                words.append(ld_global_u32x4(x + Int64(piece) * 16))
            for i in cutlass.range_constexpr(STAGE_LOADS):
                piece = base + i * WARPS * 32
                if piece < pieces:
                    at = x_base + piece // per_row * self.x_stride + piece % per_row * 16
                    st_shared_u32x4(at, words[i])

    @cute.jit
    def item(
        self,
        count: Int32,
        barriers,
        ring_base: Int32,
        position,
        x_base: Int32,
        partial: Int32,
        tid: Int32,
    ):
        """16 weight rows times the rows of the pass, this warp's share of Z, to `partial`."""
        lane, warp = tid % 32, tid // 32
        row, quad = lane // 4, lane % 4
        # Lanes of rows that are not there read the last one; their columns are never stored.
        x_at = x_base + cutlass.min(row, count - 1) * self.x_stride + quad * 16
        c = cute.make_rmem_tensor((8,), Float32)  # two chains of accumulators
        for j in cutlass.range_constexpr(8):
            c[j] = Float32(0.0)
        for chunk, blocks in enumerate(self.chunks):
            at = self.ring.wait(barriers, ring_base, position)
            for i in cutlass.range_constexpr(-(-blocks // WARPS)):
                block = warp + i * WARPS
                x_block = x_at + (chunk * CHUNK_BLOCKS + block) * (2 * BLOCK)
                if const_expr((i + 1) * WARPS <= blocks) or block < blocks:
                    self.block(at + block * BLOCK_BYTES, x_block, lane, c)
            self.ring.release(barriers, position, lane)
        # [warp, token, row]: c0 and c1 are row `row` of tokens 2 quad, 2 quad + 1; c2, c3 row + 8
        mine = partial + warp * (TILE * PASS * 4) + (2 * quad * TILE + row) * 4
        st_shared_f32(mine, c[0] + c[4])
        st_shared_f32(mine + TILE * 4, c[1] + c[5])
        st_shared_f32(mine + 8 * 4, c[2] + c[6])
        st_shared_f32(mine + (TILE + 8) * 4, c[3] + c[7])

    def block(self, at, x_at, lane, c):
        sums = multiply_block(at, lane, ld_shared_u32x4(x_at), tuple(c[j] for j in range(8)))
        for j in range(8):
            c[j] = sums[j]

    @cute.jit
    def finish(
        self, item: Int32, first: Int32, partial: Int32, tables: Int32, act: Int64, tid: Int32
    ):
        """Threads 0..127: a (token, row) each add the warps' parts; gate rows' threads store."""
        shape = self.shape
        if tid < TILE * PASS:
            at = partial + tid * 4
            value = tree([ld_shared_f32(at + w * (TILE * PASS * 4)) for w in range(WARPS)])
            up = cute.arch.shuffle_sync_bfly(value, 8)  # row + 8 of the same token
            token, row = tid // TILE, tid % TILE
            place = self.routed.place(tables, item // shape.tiles, token)
            if (row < 8) & (place >= 0):
                pair = Int64((first + token) * shape.top_k + place)
                f = item % shape.tiles * 8 + row
                result = situ(value, up, shape.beta, shape.linear_beta)
                at_act = act + (pair * shape.width + Int64(f)) * 2
                st_global_u16(at_act, pack_bf16(result, Float32(0.0)))


# ---- host ----


def pack_expert_up(packed: torch.Tensor, scale: torch.Tensor) -> PackedExperts:
    """packed [E, 2F, Z / 2] u8, scale [E, 2F, Z / 32] u8: the rows of w1, then those of w3."""
    return pack_experts(packed, scale, UP_LAYOUT, pairs=True)


@functools.cache
def compile_expert_up(shape: Shape, pass_rows: int, arch: str):
    args = (*(Int64(0),) * 6, Int32(1), Int32(1), make_fake_stream())
    return compile_kernel(ExpertUp(shape, pass_rows), args, arch)


def expert_up(
    latent: torch.Tensor,
    slot_of: torch.Tensor,
    distinct: torch.Tensor,
    num_distinct: torch.Tensor,
    packed: PackedExperts,
    beta: float,
    linear_beta: float,
    *,
    act: torch.Tensor,
) -> None:
    """latent [T, Z] bf16, slot_of [T, A] i32, distinct [>= n] i32, num_distinct [1] i32 ->
    act [T, A, F] bf16."""
    tokens, top_k, width = act.shape
    assert packed.layout == UP_LAYOUT, f"weights lie as «{packed.layout}», not «{UP_LAYOUT}»"
    experts = packed.tiles.shape[0]
    shape = Shape(experts, top_k, latent.shape[1], width, beta, linear_beta)
    assert packed.tiles.shape == (experts, shape.tiles, shape.blocks, BLOCK_BYTES)
    assert latent.shape[0] == tokens >= 1 and latent.dtype == act.dtype == torch.bfloat16
    assert slot_of.shape == (tokens, top_k) and num_distinct.shape == (1,)
    assert distinct.dim() == 1 and distinct.shape[0] >= min(experts, tokens * top_k)
    assert all(t.dtype == torch.int32 for t in (slot_of, distinct, num_distinct))
    tensors = (latent, slot_of, distinct, num_distinct, packed.tiles, act)
    assert all(t.is_contiguous() for t in tensors) and latent.data_ptr() % 16 == 0
    kernel = compile_expert_up(shape, 1 if tokens == 1 else PASS, arch_of(latent.device.index))
    sms = torch.cuda.get_device_properties(latent.device).multi_processor_count
    items = min(experts, min(tokens, PASS) * top_k) * shape.tiles
    launch(kernel, *(address(t) for t in tensors), tokens, min(sms, items))
