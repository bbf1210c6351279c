"""KDA for the rows of a decode step: convolution, gates, delta rule and gated norm in one launch.

    q, k, v = silu(conv(rows));  q, k l2-normalised, q scaled by D^-0.5       (`reference/kda.py`)
    g = lower_bound sigmoid(exp(A_log) (f_a @ f_b.T + dt_bias));  beta = sigmoid(b)
    S = exp(g) S;  e = v - S' k;  S = S + beta k e';  o = S' q
    out = o / sqrt(mean(o^2) + eps) * o_norm * sigmoid(gate)

Shapes   x [R Q, q|k|v|gate|f_a|b] bf16, conv [3 H D, 4] f32, f_b [H D, 128] bf16, A_log [H] f32,
         dt_bias [H D] f32, o_norm [D] f32, conv_state [slots, 3, 3 H D] bf16, state
         [slots, H, D, D] f32 (keys, values), state_slots [R] i64 -> out [R Q, H D] bf16; conv_state
         and state of the slots are left as they are after the last row. H, D = 128, the 4 taps and
         the numbers are static; R and Q >= 1 are read at launch. Requests that share a slot
         (padding: slot 0) leave anything there.
Bytes    128 KB of state a request and head, 32 KB of f_b a head (by 4 CTAs, through L2), the rows.
         R = 1, H = 6: 1.0 MB, 0.2 us at 4.64 TB/s: what it takes is latency.
Grid     a cluster of 4 CTAs for each request and head, one CTA for 32 value columns; 8 warps
         (`kda_tile`). Each CTA convolves q and k and makes the decay for all 128 keys. Rows go in
         passes of up to 8: what does not need the state is made for all rows of a pass at once.
Records  `kda_recorded` only reads conv_state and state; what would move them goes to `kda_rows`,
         [slots, rows, ..] at the request's slot: a CTA writes what lies in its columns.
Waits    weights: none (constant); x, conv_state, state, state_slots: the grid dependency.
Signals  launch_dependents at once. In the cluster, barrier n being barrier.cluster by all threads:

         what             written by               read by             order
         a peer's memory  -                        -                   barrier 0, before any store
                                                                       to a peer: all CTAs run
         sums [2, 8, 4]   pass n: warp r of CTA    pass n: warp r of   barrier n + 1: arrive.release
           f32, [n % 2,   c, to place c of every   every CTA           after the store, wait.acquire
           row r, CTA c]  CTA                                          before the load
                          pass n + 2: anew         -                   barrier n + 2: a thread
                                                                       arrives after its loads of
                                                                       pass n
         conv_state       at the end, each CTA     pass 0, every CTA   the last barrier
                          its columns

Aliases  out, conv_state and state overlap nothing else.
Archs    sm_90a, sm_100a, sm_103a (cp.async, warp-level mma, clusters).
Rounding as `kda_tile`; out to bf16. Sums of o^2 in a fixed order.
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
    bf16_low,
    compile_kernel,
    launch,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_i64,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_f32x4,
    mapa_shared,
    pack_bf16,
    rsqrt_approx,
    sigmoid,
    st_cluster_f32,
    st_global_f32,
    st_global_u16,
    st_shared_f32,
    st_shared_u32,
    tree,
    warp_sum,
)
from nanok3.kernels.kda_rows import KDARows, check_records
from nanok3.kernels.kda_tile import (
    COLUMNS,
    DIM,
    PASS,
    QK_ROW,
    QUARTERS,
    RANK,
    TAPS,
    THREADS,
    VALUE_ROW,
    KDATile,
    convolved,
    expm1,
)
from nanok3.reference.kda import KDAWeights
from nanok3.reference.kda import kda_ref as kda_ref
from nanok3.reference.kda_records import KDARecords
from nanok3.reference.kda_records import kda_recorded_ref as kda_recorded_ref

CTAS = QUARTERS  # of a cluster: 6 heads take 24 SMs
SUMS_BYTES = PASS * CTAS * 4
F_A_ROW = 2 * RANK + 64  # bytes; they keep lanes in other banks


@dataclass(frozen=True)
class Shape:
    """Static sizes and numbers."""

    heads: int  # H, of this rank
    lower_bound: float
    eps: float


# ---- device ----


class KDADecode:
    def __init__(self, shape: Shape, pass_rows: int, recorded: bool):
        assert pass_rows in (1, PASS)
        self.shape, self.pass_rows, self.recorded = shape, pass_rows, recorded
        self.heads, self.width = shape.heads, shape.heads * DIM
        self.row_bytes = 2 * (4 * self.width + RANK + self.heads)  # of x
        self.window_row = 2 * 3 * self.width  # bytes of a row of conv_state
        self.tile = KDATile(PASS, shape.lower_bound, recorded)
        self.records = KDARows(shape.heads)
        self.f_a_at = self.tile.num_bytes  # [PASS, RANK] bf16
        self.sums_at = self.f_a_at + PASS * F_A_ROW  # [2, PASS, CTAS], sums of o^2 of each CTA
        self.shared_bytes = self.sums_at + 2 * SUMS_BYTES

    @cute.jit
    def __call__(
        self,
        x: Int64,
        conv: Int64,
        f_b: Int64,
        A_log: Int64,
        dt_bias: Int64,
        o_norm: Int64,
        conv_state: Int64,
        state: Int64,
        state_slots: Int64,
        out: Int64,
        qkv: Int64,
        log_decay: Int64,
        record_key: Int64,
        record_value: Int64,
        num_reqs: Int32,
        num_rows: Int32,
        record_rows: Int32,
        stream,
    ):
        self.kernel(
            *(x, conv, f_b, A_log, dt_bias, o_norm),
            *(conv_state, state, state_slots, out),
            *(qkv, log_decay, record_key, record_value, num_rows, record_rows),
        ).launch(
            grid=(CTAS, self.heads, num_reqs),
            block=(THREADS, 1, 1),
            cluster=(CTAS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        conv: Int64,
        f_b: Int64,
        A_log: Int64,
        dt_bias: Int64,
        o_norm: Int64,
        conv_state: Int64,
        state: Int64,
        state_slots: Int64,
        out: Int64,
        qkv: Int64,
        log_decay: Int64,
        record_key: Int64,
        record_value: Int64,
        num_rows: Int32,
        record_rows: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive_relaxed()
        cta, head, request = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        base = Int32(SmemAllocator().allocate(self.shared_bytes, byte_alignment=128).toint())
        column = head * DIM + cta * COLUMNS + lane  # of the H * D value columns
        channel = tid // DIM * self.width + head * DIM + tid % DIM  # of q|k|v
        value_channel = 2 * self.width + column

        # 1. weights
        f_b_words = self.tile.load_f_b(f_b + Int64(head) * (DIM * 2 * RANK), warp, lane)
        taps = ld_global_f32x4(conv + Int64(channel) * (4 * TAPS))
        value_taps = ld_global_f32x4(conv + Int64(value_channel) * (4 * TAPS))
        norm = ld_global_f32(o_norm + Int64(cta * COLUMNS + lane) * 4)
        rate = ld_global_f32(A_log + Int64(head) * 4)
        key = head * DIM + warp * 16 + lane // 4  # this lane makes the decay of `key`, `key` + 8
        bias = [ld_global_f32(dt_bias + Int64(key + i) * 4) for i in (0, 8)]
        rows = x + Int64(request) * Int64(num_rows) * self.row_bytes
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()

        slot = ld_global_i64(state_slots + Int64(request) * 8)
        windows = conv_state + slot * ((TAPS - 1) * self.window_row)
        columns = state + ((slot * self.heads + Int64(head)) * DIM * DIM + Int64(cta * COLUMNS)) * 4
        tail = cute.make_rmem_tensor((TAPS - 1,), Uint32)
        recorded_row = slot * Int64(record_rows)
        # The taps - 1 rows before the pass: their address and stride.
        history, history_row = windows, Int32(self.window_row)
        parity = Int32(0)
        for first in cutlass.range(0, num_rows, PASS, unroll=1):
            count = cutlass.min(num_rows - first, PASS)
            # A row that is not there is read as the last one, and what comes of it is not used.
            own = cutlass.min(warp, count - 1)
            here = rows + Int64(first * self.row_bytes)

            # 2. ask for the rows, then for what needs the slot; f_a to shared memory
            at = here + Int64(own * self.row_bytes)
            words = self.load_rows(here + Int64(2 * channel), count)
            gate = ld_global_u16(at + Int64(2 * (3 * self.width + column)))
            b = ld_global_u16(at + Int64(2 * (4 * self.width + RANK + head)))
            f_a = self.load_f_a(at + (8 * self.width), lane)
            words = self.load_history(history + Int64(2 * channel), history_row) + words
            value_words = cute.make_rmem_tensor((TAPS,), Uint32)
            self.load_window(
                *(here, history, history_row, own - (TAPS - 1), value_channel, value_words)
            )
            if first == 0:
                self.tile.load_state(base, columns, tid)
                cute.arch.cp_async_commit_group()
                if const_expr(not self.recorded):  # noqa: SIM102 - one is decided here, one on the GPU
                    if warp < 3:  # of this CTA's columns of q, k and v, the inputs to keep
                        last = num_rows - (TAPS - 1)
                        self.load_window(
                            *(rows, windows, history_row, last, warp * self.width + column, tail)
                        )
            for j in cutlass.range_constexpr(2):
                st_shared_u32(base + self.f_a_at + warp * F_A_ROW + lane * 4 + j * 128, f_a[j])
            cute.arch.sync_threads()

            # 3. decay of the pass's rows; convolution; each row's scalars
            f_a_rows = base + self.f_a_at + lane // 4 * F_A_ROW + lane % 4 * 16
            logs = self.tile.log_decays(f_b_words, f_a_rows, bias, rate)
            self.tile.store_decays(base, [expm1(g) for g in logs], warp, lane)
            record = recorded_row + Int64(first)
            if const_expr(self.recorded):
                to = log_decay + self.records.numbers(record, head, cta)
                self.records.put_decays(to, logs, cta, count, warp, lane)
                if warp % CTAS == cta:  # the thread's channel of q or k is the CTA's
                    to = qkv + self.records.inputs(record, channel)
                    self.records.put_channel(to, words[TAPS - 1 :], count)
                if warp < count:
                    to = qkv + self.records.inputs(record + Int64(warp), value_channel)
                    st_global_u16(to, value_words[TAPS - 1])
            for row in cutlass.range_constexpr(self.pass_rows):
                mixed = convolved(taps, [bf16_low(w) for w in words[row : row + TAPS]])
                st_shared_f32(base + self.tile.qk_at + row * QK_ROW + tid * 4, mixed)
            mixed = convolved(value_taps, [bf16_low(value_words[j]) for j in range(TAPS)])
            st_shared_f32(base + self.tile.value_at + warp * VALUE_ROW + lane * 4, mixed)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            at = base + self.tile.qk_at + cutlass.min(warp, count - 1) * QK_ROW + lane * 16
            q, k = ld_shared_f32x4(at), ld_shared_f32x4(at + 4 * DIM)
            if const_expr(self.recorded):
                to = record_key + self.records.numbers(record, head, cta)
                self.records.put_key(to, k, cta, count, warp, lane)
            products = warp_sum(self.tile.products_of(q, k))
            self.tile.store_scales(base, self.tile.scales(products, bf16_low(b)), warp, lane)
            cute.arch.sync_threads()

            # 4. the delta rule, row by row
            self.tile.walk(base, count, warp, lane)
            cute.arch.sync_threads()
            if const_expr(self.recorded):  # noqa: SIM102
                if warp < count:
                    value = ld_shared_f32(base + self.tile.update_at + warp * VALUE_ROW + lane * 4)
                    to = record_value + self.records.numbers(record + Int64(warp), head, cta)
                    st_global_f32(to + Int64(lane * 4), value)

            # 5. sums of o^2 to all CTAs of the cluster, and the norm; the state goes out meanwhile
            o = ld_shared_f32(base + self.tile.out_at + warp * VALUE_ROW + lane * 4)
            sums = base + self.sums_at + parity * SUMS_BYTES + warp * (CTAS * 4)
            (square,) = warp_sum([o * o])
            if lane < CTAS:
                st_cluster_f32(mapa_shared(sums + cta * 4, lane), square)
            cute.arch.cluster_arrive()
            if const_expr(not self.recorded):  # noqa: SIM102
                if first + PASS >= num_rows:
                    self.tile.store_state(base, columns, tid)
            cute.arch.cluster_wait()
            mean = tree(list(ld_shared_f32x4(sums))) * Float32(1.0 / DIM)
            y = o * rsqrt_approx(mean + Float32(self.shape.eps)) * norm * sigmoid(bf16_low(gate))
            if warp < count:
                row = Int64(request) * Int64(num_rows) + Int64(first + warp)
                target = out + (row * self.width + Int64(column)) * 2
                st_global_u16(target, pack_bf16(y, Float32(0.0)))
            parity = parity ^ 1
            history = here + (PASS - (TAPS - 1)) * self.row_bytes
            history_row = Int32(self.row_bytes)

        # 6. the window of the next step; every CTA of the cluster has read the old one
        if const_expr(not self.recorded):  # noqa: SIM102
            if warp < 3:
                for j in cutlass.range_constexpr(TAPS - 1):
                    at = windows + Int64(j * self.window_row + 2 * (warp * self.width + column))
                    st_global_u16(at, tail[j])

    # ---- loads and stores ----

    def load_rows(self, at, count):
        """A channel's words of the pass."""
        steps = [cutlass.min(i, count - 1) * self.row_bytes for i in range(self.pass_rows)]
        return [ld_global_u16(at + Int64(step)) for step in steps]

    def load_history(self, at, stride):
        return [ld_global_u16(at + Int64(j * stride)) for j in range(TAPS - 1)]

    @cute.jit
    def load_window(
        self,
        here: Int64,
        history: Int64,
        history_row: Int32,
        row: Int32,
        channel: Int32,
        words,
    ):
        """A channel's inputs at `row`, `row` + 1, ..; row -1 is the last one of the history."""
        for j in cutlass.range_constexpr(cute.size(words)):
            at = here + Int64((row + j) * self.row_bytes)
            if row + j < 0:
                at = history + Int64((row + (j + TAPS - 1)) * history_row)
            words[j] = ld_global_u16(at + Int64(2 * channel))

    def load_f_a(self, at, lane):
        """Columns 2 l, 2 l + 1 and 64 more, as two words; a row of x is only 2-byte aligned."""
        halves = [ld_global_u16(at + Int64(4 * lane + 2 * j)) for j in (0, 1, 64, 65)]
        return [halves[j] | (halves[j + 1] << 16) for j in (0, 2)]


# ---- host ----


@functools.cache
def compile_kda_decode(shape: Shape, pass_rows: int, recorded: bool, arch: str):
    args = (*(Int64(0) for _ in range(14)), *(Int32(1) for _ in range(3)), make_fake_stream())
    return compile_kernel(KDADecode(shape, pass_rows, recorded), args, arch)


def kda_decode(
    x: torch.Tensor,
    w: KDAWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """conv_state [slots, 3, 3 H D] bf16 and state [slots, H, D, D] f32 are read and written at
    state_slots [R] i64; x [R * Q, q|k|v|gate|f_a|b] bf16 -> out [R * Q, H * D] bf16."""
    shape, requests, rows = checked(x, w, conv_state, state, state_slots, out)
    launch(
        compile_kda_decode(shape, 1 if rows == 1 else PASS, False, arch_of(x.device.index)),
        *(address(t) for t in (x, w.conv, w.f_b, w.A_log, w.dt_bias, w.o_norm)),
        *(address(t) for t in (conv_state, state, state_slots, out)),
        *(0, 0, 0, 0, requests, rows, 0),
    )


def kda_recorded(
    x: torch.Tensor,
    w: KDAWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    records: KDARecords,
    *,
    out: torch.Tensor,
) -> None:
    """As `kda_decode`, but conv_state and state are only read and the rows go to `records`."""
    shape, requests, rows = checked(x, w, conv_state, state, state_slots, out)
    record_rows = records.key.shape[1]
    check_records(records, (len(state), record_rows), shape.heads)
    assert rows <= record_rows, f"{rows} rows, and room for {record_rows}"
    launch(
        compile_kda_decode(shape, PASS, True, arch_of(x.device.index)),
        *(address(t) for t in (x, w.conv, w.f_b, w.A_log, w.dt_bias, w.o_norm)),
        *(address(t) for t in (conv_state, state, state_slots, out)),
        *(address(t) for t in (records.qkv, records.log_decay, records.key, records.value)),
        *(requests, rows, record_rows),
    )


def checked(
    x: torch.Tensor,
    w: KDAWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    out: torch.Tensor,
) -> tuple[Shape, int, int]:
    """-> static sizes, requests, rows of each"""
    heads, requests = w.A_log.shape[0], state_slots.shape[0]
    width, rows = heads * DIM, x.shape[0] // requests
    assert w.o_norm.shape == (DIM,) and w.dt_bias.shape == (width,), (
        f"KDA heads of {DIM} keys and values are needed, "
        f"not {w.dt_bias.shape[0] // heads} and {w.o_norm.shape[0]}; use the reference ops"
    )
    assert w.conv.shape == (3 * width, TAPS), f"{TAPS} taps are needed, not {w.conv.shape[1]}"
    assert w.f_b.shape == (width, RANK), f"an f_a of {RANK} is needed, not {w.f_b.shape[1]}"
    assert rows >= 1 and x.shape == (requests * rows, 4 * width + RANK + heads)
    assert x[:rows].nbytes < 2**31, "offsets in a request's rows are 32 bits: pass fewer rows"
    assert out.shape == (requests * rows, width)
    assert conv_state.shape[1:] == (TAPS - 1, 3 * width)
    assert state.shape == (conv_state.shape[0], heads, DIM, DIM)
    half, single = (x, w.f_b, conv_state, out), (w.conv, w.A_log, w.dt_bias, w.o_norm, state)
    assert all(t.dtype == torch.bfloat16 for t in half)
    assert all(t.dtype == torch.float32 for t in single) and state_slots.dtype == torch.int64
    assert all(t.is_contiguous() for t in (*half, *single, state_slots))
    assert all(t.data_ptr() % 16 == 0 for t in (w.conv, w.f_b, state))
    return Shape(heads, w.lower_bound, w.eps), requests, rows
