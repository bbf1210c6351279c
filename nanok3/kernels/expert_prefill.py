"""Products of many rows with the experts they are routed to, with MXFP4 weights:

    out[out_rows[p]] = w[e] @ x[x_rows[p]]                    for each pair p of a row and an expert
    out[out_rows[p]] = situ(w1[e] @ x[..], w3[e] @ x[..])     with betas, w as `expert_up` reads it

Pairs lie sorted by expert; an item is up to N of them that share one (`make_items`).

Shapes   x [X, K] bf16, items [I, 3] i32 (expert, first pair, pairs), x_rows and out_rows [P] i32,
         w packed by `pack_expert_up` (betas) or `pack_expert_down` -> out [O, rows of w] bf16, half
         of them with betas. K is a multiple of 32, static like the tiles of w and N.
Bytes    0.53 rows K for every item, 4 P K once a CTA column. TP16, 512 rows: 0.96 GB for up and
         down of all experts, 0.21 ms at 4.64 TB/s.
Grid     a CTA takes an item and 8 tiles of 16 weight rows, a warp each; x and w come through a ring
         of 3 stages. Items without pairs end at once.
Waits    everything waits for the grid dependency.
Signals  launch_dependents at once.
Aliases  none.
Archs    sm_90a, sm_100a, sm_103a (warp-level mma, cp.async).
Rounding float32 accumulators in the order of K, one rounding, at the store. A pair's values do
         not depend on other pairs, nor on N.
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
    cp_async_16,
    launch,
    ld_global_u32,
    ld_shared_u32x4,
    mma_bf16,
    pack_bf16,
    situ,
    st_global_u16,
)
from nanok3.kernels.mxfp4 import load_block
from nanok3.kernels.mxfp4_layout import (
    BLOCK,
    BLOCK_BYTES,
    DOWN_LAYOUT,
    TILE,
    UP_LAYOUT,
    PackedExperts,
)
from nanok3.reference.experts import experts_ref as experts_ref

WARPS = 8  # a tile each
THREADS = 32 * WARPS
STAGES = 3
MOST_BLOCKS = 4  # of a stage: 25 KB with 64 pairs, so that 2 or 3 CTAs share an SM
FEW, MANY = 16, 64  # N: with few pairs an expert, columns without a pair cost more than reading w


@dataclass(frozen=True)
class Shape:
    """Static sizes."""

    tiles: int  # of 16 rows, of one expert
    blocks: int  # of 32 columns
    columns: int  # N, pairs of an item
    betas: tuple[float, float] | None  # of the SiTU between gate and up rows

    def __post_init__(self) -> None:
        assert self.columns % 8 == 0 and self.tiles >= 1 and self.blocks >= 1

    @property
    def parts(self) -> int:
        """CTAs of an item."""
        return -(-self.tiles // WARPS)

    @property
    def stage_blocks(self) -> int:
        """They divide K evenly."""
        return max(n for n in range(1, MOST_BLOCKS + 1) if self.blocks % n == 0)

    @property
    def out_width(self) -> int:
        return self.tiles * (TILE if self.betas is None else TILE // 2)


# ---- device ----


class ExpertPrefill:
    def __init__(self, shape: Shape):
        self.shape = shape
        self.stages = shape.blocks // shape.stage_blocks
        row = 2 * BLOCK * shape.stage_blocks
        self.x_row = row + (64 if row % 128 == 0 else 0)  # two rows hit all banks between them
        self.w_warp = shape.stage_blocks * BLOCK_BYTES
        self.x_at = WARPS * self.w_warp  # of a stage, after the weights
        self.stage_bytes = self.x_at + shape.columns * self.x_row
        self.x_pieces = shape.columns * shape.stage_blocks * 4  # of 16 bytes, of a stage
        self.w_pieces = self.w_warp // 16  # of a warp

    @cute.jit
    def __call__(
        self,
        x: Int64,
        items: Int64,
        x_rows: Int64,
        weight: Int64,
        out_rows: Int64,
        out: Int64,
        num_items: Int32,
        stream,
    ):
        self.kernel(x, items, x_rows, weight, out_rows, out).launch(
            grid=(num_items * self.shape.parts, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, x: Int64, items: Int64, x_rows: Int64, weight: Int64, out_rows: Int64, out: Int64
    ):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        base = Int32(smem.allocate(STAGES * self.stage_bytes, byte_alignment=128).toint())
        part = cta % self.shape.parts
        cute.arch.griddepcontrol_wait()
        item = items + Int64(cta // self.shape.parts) * 12
        expert = Int32(ld_global_u32(item))
        first = Int32(ld_global_u32(item + 4))
        count = Int32(ld_global_u32(item + 8))
        if count > 0:
            warp = cute.arch.make_warp_uniform(tid // 32)
            tile = part * WARPS + warp
            pair = Int64(first) * 4
            c = cute.make_rmem_tensor((self.shape.columns // 2,), Float32)
            self.multiply(x, x_rows + pair, weight, expert, tile, count, base, c, tid)
            if tile < self.shape.tiles:
                self.store(out, out_rows + pair, tile, count, c, tid)

    @cute.jit
    def multiply(
        self,
        x: Int64,
        x_rows: Int64,
        weight: Int64,
        expert: Int32,
        tile: Int32,
        count: Int32,
        base: Int32,
        c,
        tid: Int32,
    ):
        """c: per 8 pairs, the lane's four accumulators of the warp's tile."""
        shape = self.shape
        lane, warp = tid % 32, tid // 32
        for i in cutlass.range_constexpr(shape.columns // 2):
            c[i] = Float32(0.0)
        # Warps past the last tile read it as well; what they make of it is not stored. So are
        # columns past the last pair.
        which = Int64(expert) * shape.tiles + Int64(cutlass.min(tile, shape.tiles - 1))
        w_from = weight + which * (shape.blocks * BLOCK_BYTES) + Int64(lane * 16)
        x_from = []
        for i in cutlass.range_constexpr(-(-self.x_pieces // THREADS)):
            piece = tid + i * THREADS
            row = cutlass.min(piece // (4 * shape.stage_blocks), count - 1)
            source = Int64(Int32(ld_global_u32(x_rows + Int64(row) * 4)))
            at = piece % (4 * shape.stage_blocks) * 16
            x_from.append(x + source * (2 * BLOCK * shape.blocks) + Int64(at))
        for stage in cutlass.range_constexpr(STAGES - 1):
            if const_expr(stage < self.stages):
                self.load(w_from, x_from, Int32(stage), base + stage * self.stage_bytes, tid)
            cute.arch.cp_async_commit_group()
        x_lane = self.x_at + lane // 4 * self.x_row + lane % 4 * 16
        for stage in cutlass.range(self.stages, unroll=1):
            cute.arch.cp_async_wait_group(STAGES - 2)
            cute.arch.sync_threads()  # the stage is there, and nobody reads the one before it
            ahead = stage + (STAGES - 1)
            if ahead < self.stages:
                self.load(w_from, x_from, ahead, base + ahead % STAGES * self.stage_bytes, tid)
            cute.arch.cp_async_commit_group()
            here = base + stage % STAGES * self.stage_bytes
            self.stage(here + warp * self.w_warp, here + x_lane, lane, c)

    @cute.jit
    def load(self, w_from, x_from, stage: Int32, to: Int32, tid: Int32):
        """Asks for a stage: each warp its tile's blocks, all threads the rows of x."""
        shape = self.shape
        lane, warp = tid % 32, tid // 32
        w_stage = w_from + Int64(stage * self.w_warp)
        for i in cutlass.range_constexpr(-(-self.w_pieces // 32)):
            piece = lane + i * 32
            if piece < self.w_pieces:
                cp_async_16(to + warp * self.w_warp + piece * 16, w_stage + i * 512)
        for i in cutlass.range_constexpr(-(-self.x_pieces // THREADS)):
            piece = tid + i * THREADS
            if piece < self.x_pieces:
                per_row = 4 * shape.stage_blocks
                at = to + self.x_at + piece // per_row * self.x_row + piece % per_row * 16
                cp_async_16(at, x_from[i] + Int64(stage * (2 * BLOCK * shape.stage_blocks)))

    def stage(self, w_at, x_at, lane, c):
        """The blocks of a stage, each unpacked once for all pairs."""
        for block in range(self.shape.stage_blocks):
            first, second = load_block(w_at + block * BLOCK_BYTES, lane)
            for j in range(self.shape.columns // 8):
                x = ld_shared_u32x4(x_at + block * (2 * BLOCK) + j * (8 * self.x_row))
                sums = tuple(c[4 * j + i] for i in range(4))
                sums = mma_bf16(second, x[2:], mma_bf16(first, x[:2], sums))
                for i in range(4):
                    c[4 * j + i] = sums[i]

    @cute.jit
    def store(self, out: Int64, out_rows: Int64, tile: Int32, count: Int32, c, tid: Int32):
        """c0, c1: row g of pairs 2q, 2q + 1; c2, c3: row g + 8, which is up where g is gate."""
        shape = self.shape
        row, quad = tid % 32 // 4, tid % 4
        for j in cutlass.range_constexpr(shape.columns // 8):
            for i in cutlass.range_constexpr(2):
                pair = 8 * j + 2 * quad + i
                if pair < count:
                    to = Int64(Int32(ld_global_u32(out_rows + Int64(pair) * 4)))
                    target = out + to * (2 * shape.out_width)
                    if const_expr(shape.betas is not None):
                        value = situ(c[4 * j + i], c[4 * j + 2 + i], *shape.betas)
                        at = target + Int64((tile * 8 + row) * 2)
                        st_global_u16(at, pack_bf16(value, Float32(0.0)))
                    else:
                        at = target + Int64((tile * TILE + row) * 2)
                        st_global_u16(at, pack_bf16(c[4 * j + i], Float32(0.0)))
                        st_global_u16(at + 16, pack_bf16(c[4 * j + 2 + i], Float32(0.0)))


# ---- host ----


def columns_for(num_pairs: int, num_experts: int) -> int:
    """N for so many pairs: enough that an expert of average load is read once."""
    return FEW if num_pairs <= FEW * num_experts else MANY


def make_items(
    ids: torch.Tensor, num_experts: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, A] -> items [I, 3] i32, pairs [P] i32: numbers in `ids` sorted by their expert.

    I is the most items that P pairs can make, so that the device is not waited for: the last ones
    may have no pairs.
    """
    flat = ids.reshape(-1)
    sorted_ids, order = flat.sort(stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    ends = torch.searchsorted(sorted_ids, experts.to(flat.dtype), right=True)  # [E]
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    parts = (ends - starts + columns - 1) // columns  # items of each expert
    part_ends = parts.cumsum(0)
    most = len(flat) // columns + min(num_experts, len(flat))
    item = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(part_ends, item, right=True).clamp_(max=num_experts - 1)
    first = starts[expert] + (item - (part_ends - parts)[expert]) * columns
    count = (ends[expert] - first).clamp_(0, columns)
    return torch.stack([expert, first, count], dim=1).int(), order.int()


@functools.cache
def compile_expert_prefill(shape: Shape, arch: str):
    args = (*(Int64(0),) * 6, Int32(1), make_fake_stream())
    return compile_kernel(ExpertPrefill(shape), args, arch)


def expert_prefill(
    x: torch.Tensor,
    items: torch.Tensor,
    x_rows: torch.Tensor,
    packed: PackedExperts,
    out_rows: torch.Tensor,
    columns: int,
    betas: tuple[float, float] | None = None,
    *,
    out: torch.Tensor,
) -> None:
    """x [X, K] bf16, items [I, 3] i32 of at most `columns` pairs, x_rows and out_rows [P] i32 ->
    rows out_rows of out [O, rows of w, or half of them with betas] bf16."""
    layout = DOWN_LAYOUT if betas is None else UP_LAYOUT
    assert packed.layout == layout, f"weights lie as «{packed.layout}», not «{layout}»"
    _, tiles, blocks, block_bytes = packed.tiles.shape
    shape = Shape(tiles, blocks, columns, betas)
    assert block_bytes == BLOCK_BYTES and x.shape[1] == blocks * BLOCK
    assert out.shape[1] == shape.out_width and x.dtype == out.dtype == torch.bfloat16
    assert items.shape[1] == 3 and x_rows.shape == out_rows.shape
    assert all(t.dtype == torch.int32 for t in (items, x_rows, out_rows))
    tensors = (x, items, x_rows, packed.tiles, out_rows, out)
    assert all(t.is_contiguous() for t in tensors) and x.data_ptr() % 16 == 0
    kernel = compile_expert_prefill(shape, arch_of(x.device.index))
    launch(kernel, *(address(t) for t in tensors), items.shape[0])
