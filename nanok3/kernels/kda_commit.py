"""Applies recorded KDA rows to states and windows, for all layers and requests in one launch.

    S = exp(g_j) S + a_j b_j'   for the request's rows j < count;  the window goes on by count rows
                                                                   (`reference/kda_records.py`)

`kda_recorded` has left the rows. A row that does not stand is not read.

Shapes   conv_state [layers, slots, 3, 3 H D] bf16, state [layers, slots, H, D, D] f32, records
         [layers, slots, Q, ..] as `KDARecords`, state_slots and counts [R] i64, of which 0 to Q
         are taken. H and D = 128 are static, the rest is read at launch. A request of count 0
         touches nothing; requests that share a slot (padding: slot 0) leave anything there.
Bytes    a layer, request and head: 128 KB of state, 1.5 KB a row, 4.5 KB of windows. R = 1, H = 6,
         69 layers, 4 rows: 59 MB, 13 us at 4.64 TB/s.
Grid     a CTA of 8 warps for half of the keys of a head, of a request, of a layer. A thread holds
         8 keys x 4 columns; rows come through shared memory, up to 8 at once. The CTA has the
         windows of half of the head's channels, a thread two of them.
Waits    all: the grid dependency.
Signals  launch_dependents at once.
Aliases  nothing overlaps. A window is read and written by one thread.
Archs    sm_90a, sm_100a, sm_103a.
Rounding the operations of `KDATile.step` on what it multiplied, in their order: the state is, bit
         for bit, that of `kda_decode`, however the rows were divided into steps.
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
    launch,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_i64,
    ld_global_u32,
    ld_shared_f32x4,
    select_f32,
    st_global_f32x4,
    st_global_u32,
    st_shared_f32,
)
from nanok3.kernels.kda_rows import check_records
from nanok3.kernels.kda_tile import DIM, PASS, TAPS, THREADS, WARPS, expm1
from nanok3.reference.kda_records import KDARecords

HISTORY = TAPS - 1  # rows of a window
HALVES = 2  # of a head's keys, and of its channels
KEYS = DIM // HALVES
OWN_KEYS = KEYS // WARPS  # of a warp
PAIRS = KEYS // 2  # of channels, of one kind
# A row in shared memory: exp(g) - 1 and a of the CTA's keys, b. A thread brings one value of it.
KEY_AT, VALUE_AT, ROW = 4 * KEYS, 8 * KEYS, 4 * (2 * KEYS + DIM)
assert ROW == 4 * THREADS


# ---- device ----


class KDACommit:
    def __init__(self, heads: int):
        self.heads, self.channels = heads, 3 * heads * DIM
        self.window_row = 2 * self.channels  # bytes

    @cute.jit
    def __call__(
        self,
        conv_state: Int64,
        state: Int64,
        qkv: Int64,
        log_decay: Int64,
        key: Int64,
        value: Int64,
        state_slots: Int64,
        counts: Int64,
        num_layers: Int32,
        num_slots: Int32,
        num_reqs: Int32,
        num_rows: Int32,
        stream,
    ):
        self.kernel(
            *(conv_state, state, qkv, log_decay, key, value, state_slots, counts),
            *(num_slots, num_rows),
        ).launch(
            grid=(HALVES * self.heads, num_reqs, num_layers),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        conv_state: Int64,
        state: Int64,
        qkv: Int64,
        log_decay: Int64,
        key: Int64,
        value: Int64,
        state_slots: Int64,
        counts: Int64,
        num_slots: Int32,
        num_rows: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        unit, request, layer = cute.arch.block_idx()
        head, half = unit // HALVES, unit % HALVES
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        base = Int32(SmemAllocator().allocate(PASS * ROW, byte_alignment=128).toint())
        cute.arch.griddepcontrol_wait()
        count = Int32(ld_global_i64(counts + Int64(request) * 8))
        count = cutlass.min(count, num_rows)
        if count > 0:
            slot = Int64(layer) * Int64(num_slots) + ld_global_i64(state_slots + Int64(request) * 8)
            first_row = slot * Int64(num_rows)

            # 1. the state
            first_key = (slot * self.heads + Int64(head)) * DIM + Int64(half * KEYS)
            at = state + (first_key + Int64(warp * OWN_KEYS)) * (4 * DIM) + Int64(lane * 16)
            loaded = [ld_global_f32x4(at + Int64(i * 4 * DIM)) for i in range(OWN_KEYS)]

            # 2. the window
            window = conv_state + slot * (HISTORY * self.window_row)
            inputs = qkv + first_row * self.window_row
            self.move_window(window, inputs, count, head * DIM + half * KEYS, tid)

            # 3. rows
            source, column = value, tid - 2 * KEYS
            if warp < 2 * KEYS // 32:
                source, column = key, half * KEYS + (tid - KEYS)
            if warp < KEYS // 32:
                source, column = log_decay, half * KEYS + tid
            source = source + (first_row * self.heads + Int64(head)) * (4 * DIM)
            source = source + Int64(column * 4)
            s = cute.make_rmem_tensor((4 * OWN_KEYS,), Float32)
            for i in cutlass.range_constexpr(4 * OWN_KEYS):
                s[i] = loaded[i // 4][i % 4]
            for first in cutlass.range(0, count, PASS, unroll=1):
                self.bring(base, source, first, count, tid)
                cute.arch.sync_threads()
                for row in cutlass.range(cutlass.min(count - first, PASS), unroll=1):
                    self.step(base + row * ROW, s, warp, lane)
                cute.arch.sync_threads()
            for i in cutlass.range_constexpr(OWN_KEYS):
                st_global_f32x4(at + Int64(i * 4 * DIM), [s[4 * i + j] for j in range(4)])

    @cute.jit
    def move_window(self, window: Int64, inputs: Int64, count: Int32, first: Int32, tid: Int32):
        """Two channels of the old window and of the rows: the last HISTORY of both."""
        if tid < 3 * PAIRS:
            channel = tid // PAIRS * (self.heads * DIM) + first + tid % PAIRS * 2
            words = []
            for j in cutlass.range_constexpr(HISTORY):
                row = count - HISTORY + j  # of this step; -1 is the last one of the window
                at = inputs + Int64(row) * self.window_row
                if row < 0:
                    at = window + Int64((row + HISTORY) * self.window_row)
                words.append(ld_global_u32(at + Int64(2 * channel)))
            for j in cutlass.range_constexpr(HISTORY):
                at = window + Int64(j * self.window_row + 2 * channel)
                st_global_u32(at, words[j])

    def bring(self, base, source, first, count, tid):
        """This thread's value of up to PASS rows; past the last one that one again, not used."""
        rows = [cutlass.min(first + i, count - 1) for i in range(PASS)]
        values = [ld_global_f32(source + Int64(row) * (self.heads * DIM * 4)) for row in rows]
        for i, x in enumerate(values):
            x = select_f32(Uint32(tid < KEYS), expm1(x), x)
            st_shared_f32(base + i * ROW + tid * 4, x)

    @cute.jit
    def step(self, row: Int32, s, warp: Int32, lane: Int32):
        decay, key = [], []
        for i in cutlass.range_constexpr(0, OWN_KEYS, 4):
            at = row + warp * (4 * OWN_KEYS) + i * 4
            decay += list(ld_shared_f32x4(at))
            key += list(ld_shared_f32x4(at + KEY_AT))
        value = ld_shared_f32x4(row + VALUE_AT + lane * 16)
        for i in cutlass.range_constexpr(4 * OWN_KEYS):
            s[i] = s[i] + decay[i // 4] * s[i]
            s[i] = s[i] + key[i // 4] * value[i % 4]


# ---- host ----


@functools.cache
def compile_kda_commit(heads: int, arch: str):
    args = (*(Int64(0) for _ in range(8)), *(Int32(1) for _ in range(4)), make_fake_stream())
    return compile_kernel(KDACommit(heads), args, arch)


def kda_commit(
    conv_state: torch.Tensor,
    state: torch.Tensor,
    records: KDARecords,
    state_slots: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """All layers' conv_state [layers, slots, 3, 3 H D] bf16 and state [layers, slots, H, D, D] f32,
    after the first counts[r] recorded rows of the request at state_slots[r]; both [R] i64."""
    layers, slots, heads = state.shape[:3]
    rows = records.key.shape[2]
    assert state.shape == (layers, slots, heads, DIM, DIM)
    assert conv_state.shape == (layers, slots, HISTORY, 3 * heads * DIM)
    check_records(records, (layers, slots, rows), heads)
    integers = state_slots, counts
    assert all(t.dtype == torch.int64 and t.shape == state_slots.shape for t in integers)
    assert state.dtype == torch.float32 and conv_state.dtype == torch.bfloat16
    assert all(t.is_contiguous() for t in (conv_state, state, *integers))
    assert state.data_ptr() % 16 == 0 and conv_state.data_ptr() % 4 == 0
    launch(
        compile_kda_commit(heads, arch_of(state.device.index)),
        *(address(t) for t in (conv_state, state, records.qkv, records.log_decay, records.key)),
        *(address(t) for t in (records.value, state_slots, counts)),
        *(layers, slots, len(state_slots), rows),
    )
