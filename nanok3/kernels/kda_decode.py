"""KDA for the rows of a decode step: convolution, gates, delta rule and gated norm in one launch.

    q, k, v = silu(conv(rows));  q, k l2-normalised, q scaled by D^-0.5       (`reference/kda.py`)
    g = lower_bound sigmoid(exp(A_log) (f_a @ f_b.T + dt_bias));  beta = sigmoid(b)
    S = exp(g) S;  e = v - S' k;  S = S + beta k e';  o = S' q
    out = o / sqrt(mean(o^2) + eps) * o_norm * sigmoid(gate)

As o = (exp(g) S)' q + beta (k . q) e, both products read the same S: one reduction over keys a row.

Shapes   x [R Q, q|k|v|gate|f_a|b] bf16, conv [3 H D, 4] f32, f_b [H D, 128] bf16, A_log [H] f32,
         dt_bias [H D] f32, o_norm [D] f32, conv_state [slots, 3, 3 H D] bf16, state
         [slots, H, D, D] f32 (keys, values), state_slots [R] i64 -> out [R Q, H D] bf16; conv_state
         and state of the slots are left as they are after the last row. H, D = 128, the 4 taps and
         the numbers are static; R and Q >= 1 are read at launch. Requests that share a slot
         (padding: slot 0) leave anything there.
Bytes    128 KB of state a request and head, 32 KB of f_b a head (by 4 CTAs, through L2), the rows.
         R = 1, H = 6: 1.0 MB, 0.2 us at 4.64 TB/s: what it takes is latency.
Grid     a cluster of 4 CTAs for each request and head, one CTA for 32 value columns; 8 warps, a
         warp for 4 columns x 128 keys of the state: lane l holds keys 4 l .. 4 l + 3. Each CTA
         convolves q and k and makes the decay for all 128 keys. Rows go in passes of up to 8: what
         does not need the state is made for all rows of a pass at once.
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
Rounding to bf16: q, k, v after silu, f_a @ f_b.T, o, out. All else float32, sums in a fixed order.
         The decay is kept as exp(g) - 1, so that a channel that forgets slowly (1e-4 a row) is off
         by 1e-6 of its g and not by a rounding of 0.9999; sigmoid errs about 1e-6, l2 3e-7.
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
    bf16_low,
    compile_kernel,
    cp_async_16,
    ex2_approx,
    launch,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_i64,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_f32x4,
    ldmatrix_x4,
    mapa_shared,
    mma_bf16,
    pack_bf16,
    rsqrt_approx,
    select_f32,
    sigmoid,
    st_cluster_f32,
    st_global_f32x4,
    st_global_u16,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32,
    tree,
    warp_sum,
    warp_sums,
)
from nanok3.reference.kda import L2_EPS, KDAWeights
from nanok3.reference.kda import kda_ref as kda_ref

DIM = 128  # D, of keys and values
TAPS = 4
RANK = 128  # width of f_a
CTAS = 4  # of a cluster: 6 heads take 24 SMs
COLUMNS = DIM // CTAS  # value columns of a CTA, one a lane
WARPS = 8  # a warp is 4 columns of the state, 16 channels of f_b, or one row of a pass
THREADS = 32 * WARPS  # a thread is also a channel of q (the first half) or of k
PASS = 8  # rows of a pass: the N of an mma
LOG2_E = 1.4426950408889634

# Shared memory: byte offsets of float32 arrays (f_a, f_b: bf16). Strides keep lanes in other banks.
STATE_ROW = 4 * COLUMNS
QK_ROW = 4 * 2 * DIM
DECAY_ROW = 4 * DIM + 16
VALUE_ROW = 4 * COLUMNS
F_A_ROW = F_B_ROW = 2 * RANK + 16
SUMS_BYTES = PASS * CTAS * 4
STATE_AT = 0  # [128 keys, 8 pieces of 4 columns], pieces swizzled by `state_at`
QK_AT = STATE_AT + DIM * STATE_ROW  # [PASS, q|k], not normalised
DECAY_AT = QK_AT + PASS * QK_ROW  # [PASS, 128], exp(g) - 1
VALUE_AT = DECAY_AT + PASS * DECAY_ROW  # [PASS, COLUMNS]
OUT_AT = VALUE_AT + PASS * VALUE_ROW  # [PASS, COLUMNS], o, rounded
SCALES_AT = OUT_AT + PASS * VALUE_ROW  # [PASS, 4], see `scales`
F_A_AT = SCALES_AT + PASS * 16  # [PASS, RANK]
F_B_AT = F_A_AT + PASS * F_A_ROW  # [128, RANK]
SUMS_AT = F_B_AT + DIM * F_B_ROW  # [2, PASS, CTAS], sums of o^2 over each CTA's columns
SHARED_BYTES = SUMS_AT + 2 * SUMS_BYTES


@dataclass(frozen=True)
class Shape:
    """Static sizes and numbers."""

    heads: int  # H, of this rank
    lower_bound: float
    eps: float


# ---- device ----


def state_at(base, key, piece):
    """Where 4 columns of a key lie: 8 lanes with 8 pieces of one key, or with one piece of keys
    4 apart, hit different banks."""
    return base + STATE_AT + key * STATE_ROW + ((piece ^ (key // 4 % 8)) * 16)


def rounded(value):
    """The nearest bf16, as float32."""
    return bf16_low(pack_bf16(value, Float32(0.0)))


def convolved(taps, words):
    """silu(sum of taps times a window's bf16 words), rounded."""
    mixed = taps[0] * bf16_low(words[0])
    for j in range(1, TAPS):
        mixed = mixed + taps[j] * bf16_low(words[j])
    return rounded(mixed * sigmoid(mixed))


def expm1(g):
    """e^g - 1 for g <= 0: 6 terms near 0 (5e-8), ex2 - 1 below -0.25, where it errs 2e-7."""
    series = Float32(1.0 / 720)
    for divisor in (120, 24, 6, 2, 1):
        series = series * g + Float32(1.0 / divisor)
    far = ex2_approx(g * Float32(LOG2_E)) - Float32(1.0)
    return select_f32(Int32(g > Float32(-0.25)), g * series, far)


def dot(a, b):
    return tree([x * y for x, y in zip(a, b, strict=True)])


class KDADecode:
    def __init__(self, shape: Shape, pass_rows: int):
        assert pass_rows in (1, PASS)
        self.shape, self.pass_rows = shape, pass_rows
        self.heads, self.width = shape.heads, shape.heads * DIM
        self.row_bytes = 2 * (4 * self.width + RANK + self.heads)  # of x
        self.window_row = 2 * 3 * self.width  # bytes of a row of conv_state

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
        num_reqs: Int32,
        num_rows: Int32,
        stream,
    ):
        self.kernel(
            *(x, conv, f_b, A_log, dt_bias, o_norm),
            *(conv_state, state, state_slots, out, num_rows),
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
        num_rows: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cluster_arrive_relaxed()
        cta, head, request = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        base = Int32(SmemAllocator().allocate(SHARED_BYTES, byte_alignment=128).toint())
        column = head * DIM + cta * COLUMNS + lane  # of the H * D value columns
        channel = tid // DIM * self.width + head * DIM + tid % DIM  # of q|k|v
        value_channel = 2 * self.width + column

        # 1. weights
        self.load_f_b(base, f_b + Int64(head) * (DIM * 2 * RANK), tid)
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
        tile = state + ((slot * self.heads + Int64(head)) * DIM * DIM + Int64(cta * COLUMNS)) * 4
        tail = cute.make_rmem_tensor((TAPS - 1,), Uint32)
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
                self.load_state(base, tile, tid)
                if warp < 3:  # of this CTA's columns of q, k and v, the inputs to keep
                    last = num_rows - (TAPS - 1)
                    self.load_window(
                        *(rows, windows, history_row, last, warp * self.width + column, tail)
                    )
            for j in cutlass.range_constexpr(2):
                st_shared_u32(base + F_A_AT + warp * F_A_ROW + lane * 4 + j * 128, f_a[j])
            cute.arch.cp_async_wait_group(1)  # f_b; the state may still come
            cute.arch.sync_threads()

            # 3. decay of the pass's rows; convolution; each row's scalars
            self.decay(base, bias, rate, warp, lane)
            for row in cutlass.range_constexpr(self.pass_rows):
                mixed = convolved(taps, words[row : row + TAPS])
                st_shared_f32(base + QK_AT + row * QK_ROW + tid * 4, mixed)
            mixed = convolved(value_taps, value_words)
            st_shared_f32(base + VALUE_AT + warp * VALUE_ROW + lane * 4, mixed)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.scales(base, b, warp, lane)
            cute.arch.sync_threads()

            # 4. the delta rule, row by row
            self.walk(base, count, warp, lane)
            cute.arch.sync_threads()

            # 5. sums of o^2 to all CTAs of the cluster, and the norm; the state goes out meanwhile
            o = ld_shared_f32(base + OUT_AT + warp * VALUE_ROW + lane * 4)
            sums = base + SUMS_AT + parity * SUMS_BYTES + warp * (CTAS * 4)
            (square,) = warp_sum([o * o])
            if lane < CTAS:
                st_cluster_f32(mapa_shared(sums + cta * 4, lane), square)
            cute.arch.cluster_arrive()
            if first + PASS >= num_rows:
                self.store_state(base, tile, tid)
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
        if warp < 3:
            for j in cutlass.range_constexpr(TAPS - 1):
                at = windows + Int64(j * self.window_row + 2 * (warp * self.width + column))
                st_global_u16(at, tail[j])

    # ---- loads and stores ----

    def load_f_b(self, base, at, tid):
        """Asks for the head's 128 rows."""
        for i in range(DIM * RANK // (8 * THREADS)):
            row, piece = tid // 16 + 16 * i, tid % 16
            cp_async_16(
                base + F_B_AT + row * F_B_ROW + piece * 16,
                at + Int64(row * (2 * RANK) + piece * 16),
            )
        cute.arch.cp_async_commit_group()

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

    def load_state(self, base, tile, tid):
        """Asks for this CTA's columns of the state: 8 pieces a key, 32 keys at a time."""
        for i in range(DIM // 32):
            key, piece = tid // 8 + 32 * i, tid % 8
            cp_async_16(state_at(base, key, piece), tile + Int64(key * (4 * DIM) + piece * 16))
        cute.arch.cp_async_commit_group()

    def store_state(self, base, tile, tid):
        for i in range(DIM // 32):
            key, piece = tid // 8 + 32 * i, tid % 8
            values = ld_shared_f32x4(state_at(base, key, piece))
            st_global_f32x4(tile + Int64(key * (4 * DIM) + piece * 16), values)

    # ---- arithmetic ----

    def decay(self, base, bias, rate, warp, lane):
        """exp(g) - 1 of 16 channels a warp, for all rows of the pass."""
        matrix = base + F_B_AT + (warp * 16 + lane % 16) * F_B_ROW + lane // 16 * 16
        rows = base + F_A_AT + lane % 8 * F_A_ROW + lane // 8 * 16
        chains = [[Float32(0.0)] * 4 for _ in range(2)]
        for block in range(RANK // 32):
            b = ldmatrix_x4(rows + block * 64)  # two steps of 16 columns
            for half in range(2):
                a = ldmatrix_x4(matrix + block * 64 + half * 32)
                chains[half] = mma_bf16(a, b[2 * half : 2 * half + 2], chains[half])
        rate = ex2_approx(rate * Float32(LOG2_E))
        for i in range(4):  # channel l / 4 (8 more for the last two) of rows 2 (l % 4) + i % 2
            f = rounded(chains[0][i] + chains[1][i]) + bias[i // 2]
            g = Float32(self.shape.lower_bound) * sigmoid(rate * f)
            at = base + DECAY_AT + (lane % 4 * 2 + i % 2) * DECAY_ROW
            st_shared_f32(at + (warp * 16 + lane // 4 + 8 * (i // 2)) * 4, expm1(g))

    @cute.jit
    def scales(self, base, b, warp, lane):
        """Row `warp`: 1 / |k|, beta / |k|, D^-0.5 / |q|, beta D^-0.5 (q . k) / (|q| |k|)."""
        at = base + QK_AT + cutlass.min(warp, self.pass_rows - 1) * QK_ROW + lane * 16
        q, k = ld_shared_f32x4(at), ld_shared_f32x4(at + 4 * DIM)
        q_q, k_k, q_k = warp_sum([dot(q, q), dot(k, k), dot(q, k)])
        q_scale = rsqrt_approx(q_q + Float32(L2_EPS)) * Float32(DIM**-0.5)
        k_scale = rsqrt_approx(k_k + Float32(L2_EPS))
        beta = sigmoid(bf16_low(b))
        if lane == 0:
            st_shared_f32x4(
                base + SCALES_AT + warp * 16,
                (k_scale, k_scale * beta, q_scale, q_scale * k_scale * beta * q_k),
            )

    @cute.jit
    def walk(self, base: Int32, count: Int32, warp: Int32, lane: Int32):
        """`count` rows of the recurrence on this warp's 4 columns; the state is read from shared
        memory and left there, where only this warp has it until the next barrier."""
        s = cute.make_rmem_tensor((16,), Float32)  # [4 keys, 4 columns]
        for i in cutlass.range_constexpr(4):
            values = ld_shared_f32x4(state_at(base, 4 * lane + i, warp))
            for j in cutlass.range_constexpr(4):
                s[4 * i + j] = values[j]
        for row in cutlass.range(count, unroll=1):
            q = ld_shared_f32x4(base + QK_AT + row * QK_ROW + lane * 16)
            k = ld_shared_f32x4(base + QK_AT + row * QK_ROW + 4 * DIM + lane * 16)
            decay = ld_shared_f32x4(base + DECAY_AT + row * DECAY_ROW + lane * 16)
            v = ld_shared_f32x4(base + VALUE_AT + row * VALUE_ROW + warp * 16)
            k_scale, k_beta, q_scale, q_k_beta = ld_shared_f32x4(base + SCALES_AT + row * 16)
            for i in cutlass.range_constexpr(16):
                s[i] = s[i] + decay[i // 4] * s[i]
            # lane l: column l % 4 of S' k (bit 2 of l clear) or of S' q (set)
            total = warp_sums(self.products(k, s) + self.products(q, s), lane)
            error = self.errors(v, k_scale, total)
            for i in cutlass.range_constexpr(16):
                s[i] = s[i] + k[i // 4] * (k_beta * error[i % 4])
            if lane // 4 == 1:
                own = select_f32(
                    lane & 2,
                    select_f32(lane & 1, error[3], error[2]),
                    select_f32(lane & 1, error[1], error[0]),
                )
                at = base + OUT_AT + row * VALUE_ROW + (4 * warp + lane % 4) * 4
                st_shared_f32(at, rounded(q_scale * total + q_k_beta * own))
        for i in cutlass.range_constexpr(4):
            values = [s[4 * i + j] for j in range(4)]
            st_shared_f32x4(state_at(base, 4 * lane + i, warp), values)

    def products(self, weights, s):
        """This lane's share of weights @ S: 4 columns over its 4 keys."""
        return [dot(weights, [s[4 * i + j] for i in range(4)]) for j in range(4)]

    def errors(self, v, k_scale, total):
        """v - S' k of the warp's 4 columns, in every lane."""
        return [v[j] - k_scale * cute.arch.shuffle_sync(total, j) for j in range(4)]


# ---- host ----


@functools.cache
def compile_kda_decode(shape: Shape, pass_rows: int, arch: str):
    args = (*(Int64(0) for _ in range(10)), Int32(1), Int32(1), make_fake_stream())
    return compile_kernel(KDADecode(shape, pass_rows), args, arch)


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
    shape = Shape(heads, w.lower_bound, w.eps)
    launch(
        compile_kda_decode(shape, 1 if rows == 1 else PASS, arch_of(x.device.index)),
        *(address(t) for t in (x, w.conv, w.f_b, w.A_log, w.dt_bias, w.o_norm)),
        *(address(t) for t in (conv_state, state, state_slots, out)),
        *(requests, rows),
    )
