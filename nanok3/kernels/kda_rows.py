"""Where a KDA row is recorded, and how a unit of a head's 32 columns writes its part of it.

A row that may be rolled back leaves the inputs of its convolution, g, k (not normalised) and what k
is multiplied by, beta e / |k| (`reference/kda_records.py`); `kda_commit` applies them. They lie as
[slots, rows, ..], and `row` counts slots x rows. The four units of a head, one a quarter of its
columns, have all of q, k and g, so each writes what lies in its columns: 96 inputs and 3 x 32
numbers a row.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64

from nanok3.dsl import st_global_f32, st_global_f32x4, st_global_u16
from nanok3.kernels.kda_tile import COLUMNS, DIM, PASS
from nanok3.reference.kda_records import KDARecords

# ---- device ----


class KDARows:
    def __init__(self, heads: int):
        self.heads = heads
        self.inputs_row = 2 * 3 * heads * DIM  # bytes
        self.numbers_row = 4 * heads * DIM

    def inputs(self, row, channel):
        """Offset of a channel of q|k|v."""
        return row * self.inputs_row + Int64(2 * channel)

    def numbers(self, row, head, quarter):
        """Offset of the unit's columns in g, k and values."""
        return (row * self.heads + Int64(head)) * (4 * DIM) + Int64(quarter * (4 * COLUMNS))

    @cute.jit
    def put_channel(self, to: Int64, words: list, count: Int32):
        """A thread's channel, in up to PASS rows."""
        for row in cutlass.range_constexpr(PASS):
            if row < count:
                st_global_u16(to + Int64(row * self.inputs_row), words[row])

    @cute.jit
    def put_decays(
        self, to: Int64, logs: list, quarter: Int32, count: Int32, warp: Int32, lane: Int32
    ):
        """logs: of `KDATile.log_decays`."""
        if warp // 2 == quarter:
            for i in cutlass.range_constexpr(4):
                row, column = lane % 4 * 2 + i % 2, warp % 2 * 16 + lane // 4 + i // 2 * 8
                if row < count:
                    st_global_f32(to + Int64(row * self.numbers_row + column * 4), logs[i])

    @cute.jit
    def put_key(self, to: Int64, k: list, quarter: Int32, count: Int32, warp: Int32, lane: Int32):
        """k of row `warp`, channels 4 l .. 4 l + 3."""
        if (warp < count) & (lane // (COLUMNS // 4) == quarter):
            at = warp * self.numbers_row + lane % (COLUMNS // 4) * 16
            st_global_f32x4(to + Int64(at), k)


# ---- host ----


def check_records(records: KDARecords, shape: tuple[int, ...], heads: int) -> None:
    """`shape`: up to the rows."""
    assert records.first == 0, "rows that begin from recorded ones need the reference ops"
    assert records.qkv.shape == (*shape, 3 * heads * DIM) and records.qkv.dtype == torch.bfloat16
    single = records.log_decay, records.key, records.value
    assert all(t.shape == (*shape, heads, DIM) and t.dtype == torch.float32 for t in single)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (records.qkv, *single))
