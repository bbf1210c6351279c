"""Adds up what `mla_decode` found in each split of the context.

         weight[i] = 2^(max[i] - M) / sum_j 2^(max[j] - M) sum[j],  M = the largest max
         out[t, h] = sum_i weight[i] partial[i, t, h]
Shapes   partial [splits, T, H, L] f32, stats [splits, T, H, 2] f32 (max, sum) -> out [T, H * L]
         bf16. L static, at most 256 splits. A split with sum 0 has max -inf, and its partial is not
         used, whatever lies there. Zero where all splits are so.
Bytes    4 L for each split that saw something, 8 for each split, 2 L written, of each (t, h).
         132 splits, T = 1, H = 6, L = 512: 1.6 MB, from L2.
Grid     (T * H, slices of columns). Up to 4 splits: 2 groups of threads share the splits of a whole
         row; else 16 groups share those of 64 columns.
Waits    partial and stats: the grid dependency.
Signals  launch_dependents at once.
Aliases  none.
Archs    any (compiled for sm_90a, sm_100a, sm_103a).
Rounding float32 in fixed order: a group's splits in turn, then the groups by pairs. One rounding to
         bf16, at the store; the reference keeps this context in the dtype of its arithmetic and
         rounds only after the value product, whose input is bf16 here.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    compile_kernel,
    ex2_approx,
    launch,
    ld_global_f32,
    ld_global_f32x4,
    ld_shared_f32,
    ld_shared_f32x4,
    ld_shared_u32,
    pack_bf16,
    rcp_approx,
    select_f32,
    st_global_u32x2,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32,
    tree,
    warp_sum,
)
from nanok3.reference.mla import mla_absorbed_value as mla_absorbed_value

MAX_SPLITS = 256
FEW = 4  # splits up to which a CTA takes a whole row
LOWEST = -1e30  # below any maximum, and finite: no inf - inf


# ---- device ----


class MLAMerge:
    def __init__(self, rank: int, few: bool):
        assert rank % 64 == 0, f"L must be a multiple of 64, not {rank}"
        self.rank = rank
        self.most = FEW if few else MAX_SPLITS
        self.groups = 2 if few else 16  # of threads; a group takes every groups-th split
        self.width = rank if few else 64  # columns of a CTA
        self.columns = self.width // 4  # threads of a group, 4 columns each
        self.batch = 2 if few else 4  # loads in flight a thread
        self.threads = self.groups * self.columns

    @cute.jit
    def __call__(
        self, partial: Int64, stats: Int64, out: Int64, splits: Int32, num_rows: Int32, stream
    ):
        self.kernel(partial, stats, out, splits).launch(
            grid=(num_rows, self.rank // self.width, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, partial: Int64, stats: Int64, out: Int64, splits: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        row, slice_, _ = cute.arch.block_idx()
        num_rows, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        weights = Int32(smem.allocate(4 * self.most + 16, byte_alignment=16).toint())
        used_at = weights + 4 * self.most
        sums = Int32(smem.allocate(16 * self.threads, byte_alignment=16).toint())
        cute.arch.griddepcontrol_wait()

        # 1. the weights, by the first warp
        if tid < 32:
            self.weigh(stats + Int64(row) * 8, splits, Int64(num_rows) * 8, weights, used_at, tid)
        cute.arch.sync_threads()

        # 2. this thread's splits of its 4 columns
        used = Int32(ld_shared_u32(used_at))
        column = slice_ * self.width + tid % self.columns * 4
        at = partial + (Int64(row) * self.rank + Int64(column)) * 4
        stride = Int64(num_rows) * (4 * self.rank)
        total = cute.make_rmem_tensor((4,), Float32)
        for c in cutlass.range_constexpr(4):
            total[c] = Float32(0.0)
        step = self.groups * self.batch
        for first in cutlass.range(tid // self.columns, used, step, unroll=1):
            self.add(total, first, used, at, stride, weights)

        # 3. the groups' sums
        mine = (total[0], total[1], total[2], total[3])
        st_shared_f32x4(sums + tid * 16, mine)
        cute.arch.sync_threads()
        if tid < self.columns:
            self.store(out + (Int64(row) * self.rank + Int64(column)) * 2, sums + tid * 16)

    @cute.jit
    def weigh(
        self,
        stats: Int64,
        splits: Int32,
        stride: Int64,
        weights: Int32,
        used_at: Int32,
        lane: Int32,
    ):
        """Every split's weight to shared memory, and how many splits there are up to the last one
        that saw something. By a whole warp; lane l looks at splits l, l + 32, ..."""
        steps = -(-self.most // 32)
        tops = cute.make_rmem_tensor((steps,), Float32)
        sums = cute.make_rmem_tensor((steps,), Float32)
        for i in cutlass.range_constexpr(steps):
            split = lane + 32 * i
            at = stats + Int64(cutlass.min(split, splits - 1)) * stride
            here = Uint32(split < splits)
            tops[i] = select_f32(here, ld_global_f32(at), Float32(float("-inf")))
            sums[i] = select_f32(here, ld_global_f32(at + 4), Float32(0.0))
        top = Float32(LOWEST)
        used = Int32(0)
        for i in cutlass.range_constexpr(steps):
            top = cute.arch.fmax(top, tops[i])
            empty = Int32(sums[i] == Float32(0.0))  # a sum that is NaN counts, and shows
            used = cutlass.max(used, (1 - empty) * (lane + 32 * i + 1))
        for distance in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << distance))
            used = cutlass.max(used, cute.arch.shuffle_sync_bfly(used, 1 << distance))
        shares = cute.make_rmem_tensor((steps,), Float32)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(steps):
            shares[i] = ex2_approx(tops[i] - top)
            total = total + shares[i] * sums[i]
        total = warp_sum([total])[0]
        inverse = select_f32(Uint32(total == Float32(0.0)), Float32(0.0), rcp_approx(total))
        for i in cutlass.range_constexpr(steps):
            if lane + 32 * i < self.most:
                st_shared_f32(weights + (lane + 32 * i) * 4, shares[i] * inverse)
        if lane == 0:
            st_shared_u32(used_at, used)

    def add(self, total, first, used, at, stride, weights):
        """A batch of splits first, first + groups, ...; one that is not there weighs nothing."""
        values, shares = [], []
        for i in range(self.batch):
            split = first + i * self.groups
            there = cutlass.min(split, used - 1)
            values.append(ld_global_f32x4(at + Int64(there) * stride))
            share = ld_shared_f32(weights + there * 4)
            shares.append(select_f32(Uint32(split < used), share, Float32(0.0)))
        for value, share in zip(values, shares, strict=True):
            nothing = Uint32(share == Float32(0.0))  # then the value may be garbage
            for c in range(4):
                term = select_f32(nothing, Float32(0.0), share * value[c])
                total[c] = total[c] + term

    def store(self, at, sums):
        """Four columns: the groups' sums by pairs."""
        parts = [ld_shared_f32x4(sums + g * (16 * self.columns)) for g in range(self.groups)]
        v = [tree([part[c] for part in parts]) for c in range(4)]
        st_global_u32x2(at, (pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])))


# ---- host ----


@functools.cache
def compile_mla_merge(rank: int, few: bool, arch: str):
    args = (Int64(0), Int64(0), Int64(0), Int32(1), Int32(1), make_fake_stream())
    return compile_kernel(MLAMerge(rank, few), args, arch)


def mla_merge(partial: torch.Tensor, stats: torch.Tensor, *, out: torch.Tensor) -> None:
    """partial [splits, T, H, L] f32, stats [splits, T, H, 2] f32 -> out [T, H * L] bf16."""
    splits, tokens, heads, rank = partial.shape
    assert 1 <= splits <= MAX_SPLITS and tokens >= 1
    assert partial.dtype == stats.dtype == torch.float32 and out.dtype == torch.bfloat16
    assert stats.shape == (splits, tokens, heads, 2) and out.shape == (tokens, heads * rank)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (partial, stats, out))
    kernel = compile_mla_merge(rank, splits <= FEW, arch_of(partial.device.index))
    launch(kernel, address(partial), address(stats), address(out), splits, tokens * heads)
