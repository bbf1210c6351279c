"""KDA in the persistent kernel: what `kda_decode` does, between two hand-offs (`kda_tile`).

A unit is a request, a head and a quarter of its 128 value columns. CTA c has the units c, c + SMs,
..; fewer units than SMs are spread over the chip.

step              what                                                   published
`compute_heads`   convolution, gates, the walk of the request's rows     kda_heads   [T, H D] f32
                                                                         kda_squares [T, H, 4] f32
`store`           the state after the last row; may follow the signal
`stage`           x = kda_heads / sqrt(mean square + eps), of all heads,
                  to shared memory; the new windows

What does not depend on this step's rows is asked for before they are waited for. kda_heads is o
times o_norm and the gate: only the norm's factor is missing, as the four quarters of a head lie in
different CTAs; kda_squares are their sums of o^2.

Shapes   kda_in [slices, T, q|k|v|gate|f_a|b] f32; conv, f_b, A_log, dt_bias, o_norm, conv_state and
         state as `kda_decode`. T = R Q up to 8.
Waits    `compute_heads`: kda_in, in every CTA. `stage` comes after the wait for kda_heads.
Aliases  conv_state: all four units of a head read its old window of q and k before they signal
         kda_heads, so `stage` writes the new one. Its words wait in scratch, behind what is staged.
         The state of a unit is read and written by its CTA only. Requests that share a slot
         (padding: slot 0) leave anything there.
Rounding as `kda_decode`; what `in_proj` gives is rounded to bf16 here, the sum of its K slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    bf16_low,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_i64,
    ld_global_u16,
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_u32x4,
    pack_bf16,
    rsqrt_approx,
    sigmoid,
    st_global_f32,
    st_global_u32x4,
    st_shared_f32,
    st_shared_u32,
    st_shared_u32x2,
    tree,
    warp_sum,
)
from nanok3.kernels.kda_tile import (
    COLUMNS,
    DIM,
    F_A_ROW,
    QK_ROW,
    QUARTERS,
    RANK,
    TAPS,
    THREADS,
    VALUE_ROW,
    KDATile,
    convolved,
)
from nanok3.kernels.mega.linear import partial_bytes, x_stride
from nanok3.kernels.mega.sizes import Sizes

HISTORY = TAPS - 1  # rows of a window
WINDOW_ROW = 3 * COLUMNS * 2  # bytes of a row of a unit's window, q|k|v
WINDOW_BYTES = HISTORY * WINDOW_ROW
PIECES = WINDOW_ROW // 16  # 4 of q, 4 of k, 4 of v
LOADS_IN_FLIGHT = 64  # of kda_in, that a thread asks for at once
GROUPS_IN_FLIGHT = 4  # groups of 4 columns of x that a thread makes at once
# Warps 0 to 3 read f_a, these the unit's columns of v, of the gate, and beta:
VALUE_WARP, GATE_WARP, BETA_WARP = 4, 5, 6
# of Asked.constants: taps of the thread's channel, of its value column, and so on
VALUE_TAPS, NORM, RATE, BIAS, CONSTANTS = TAPS, 2 * TAPS, 2 * TAPS + 1, 2 * TAPS + 2, 2 * TAPS + 4


@dataclass(frozen=True)
class Asked:
    """What a thread has in registers of a unit before its rows are there."""

    constants: Any  # [CONSTANTS] f32
    words: Any  # windows of its channel of q or k, and of its value column, oldest word first
    columns: Any  # of kda_in: that channel, and one of what else the unit needs
    states: Any  # addresses of the unit's state and of the next one's


class KDA:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.product = sizes, sizes.products["kda.in_proj"]
        self.rows, self.heads, self.width = sizes.pass_rows, sizes.kda_heads, sizes.kda_width
        self.window_row = 2 * 3 * self.width  # bytes of a row of conv_state
        self.rows_in_flight = max(1, LOADS_IN_FLIGHT // (2 * self.product.slices))
        self.most_units = -(-self.rows * self.heads * QUARTERS // sizes.sms)  # of a CTA
        self.tile = KDATile(self.rows, sizes.lower_bound)
        self.gate_at = self.tile.num_bytes  # [T, COLUMNS] f32, after the sigmoid
        self.beta_at = self.gate_at + self.rows * VALUE_ROW  # [T] words, before it
        # from "partial" on, which lies before "scratch" and is free while heads are made
        parts = 2 * partial_bytes(self.rows)
        self.windows_at = max(
            self.beta_at + self.rows * 16, parts + self.rows * x_stride(self.width)
        )
        self.scratch_bytes = self.windows_at + self.most_units * WINDOW_BYTES - parts

    def load(self, r):
        """The loader warp: nothing comes through the ring."""

    # ---- units ----

    def share(self, r):
        """-> this CTA's first unit, how many it has; its units are SMs apart."""
        sms = self.sizes.sms
        if self.rows == 1:
            units = Int32(self.heads * QUARTERS)
            spread = max(1, sms // (self.heads * QUARTERS))
        else:
            units = r.num_reqs * (self.heads * QUARTERS)
            spread = cutlass.max(Int32(sms) // units, 1)
        first = r.cta // spread + Int32(r.cta % spread != 0) * units
        return first, (cutlass.max(units - first, 0) + (sms - 1)) // sms

    def place(self, unit):
        """-> request, head, quarter"""
        group = unit >> 2
        return group // self.heads, group % self.heads, unit & 3

    def rows_of_request(self, r):
        return Int32(1) if self.rows == 1 else r.num_tokens // r.num_reqs

    # ---- compute ----

    def compute(self, r):
        """By all CTAs, with the state stored."""
        self.store(r, self.compute_heads(r))

    @cute.jit
    def compute_heads(self, r):
        """-> where `store` puts the state of the CTA's last unit, 0 if it has none."""
        base, sms = r.shared("partial"), self.sizes.sms
        first, count = self.share(r)
        request, head, quarter = self.place(first)
        states = zeros(2, Int64)
        asked = Asked(
            zeros(CONSTANTS, Float32), zeros(2 * HISTORY, Uint32), zeros(2, Int32), states
        )
        if count > 0:
            self.ask(r, base, request, head, quarter, asked)
            self.tile.load_state(base, states[1], r.tid)
        r.wait("kda_in")
        for i in cutlass.range(count, unroll=1):
            states[0] = states[1]
            norm = asked.constants[NORM]
            self.read(r, base, request, asked)
            gate = self.weigh(r, base, asked.constants)
            window = base + self.windows_at + i * WINDOW_BYTES
            next_request, next_head, next_quarter = self.place(first + (i + 1) * sms)
            if const_expr(self.most_units > 1):  # noqa: SIM102 - one is decided here, one on the GPU
                if i + 1 < count:
                    self.keep(r, window, quarter, asked.words)
                    self.ask(r, base, next_request, next_head, next_quarter, asked)
            self.tile.walk(base, self.rows_of_request(r), r.warp, r.lane)
            r.bar()  # o and the state are there
            self.write(r, base, request, head, quarter, norm * gate)
            if i + 1 == count:
                self.keep(r, window, quarter, asked.words)
            if const_expr(self.most_units > 1):  # noqa: SIM102
                if i + 1 < count:  # by the same threads, piece for piece
                    self.tile.store_state(base, states[0], r.tid)
                    self.tile.load_state(base, states[1], r.tid)
            request, head, quarter = next_request, next_head, next_quarter
        return states[0]

    @cute.jit
    def store(self, r, state: Int64):
        """The state that the CTA's last unit leaves."""
        if state != 0:
            self.tile.store_state(r.shared("partial"), state, r.tid)

    @cute.jit
    def ask(self, r, base: Int32, request: Int32, head: Int32, quarter: Int32, asked: Asked):
        """Asks for what no row of this step changes, but for the state, whose address it leaves."""
        constants, words = asked.constants, asked.words
        slot = ld_global_i64(r.state_slots + Int64(request) * 8)
        self.tile.load_f_b(base, r.field("kda.f_b") + Int64(head) * (DIM * 2 * RANK), r.tid)
        column = quarter * COLUMNS + r.lane  # of the head's
        channel = r.tid // DIM * self.width + head * DIM + r.tid % DIM  # of q|k|v
        value_channel = 2 * self.width + head * DIM + column
        conv = r.field("kda.conv")
        taps = ld_global_f32x4(conv + Int64(channel) * (4 * TAPS))
        value_taps = ld_global_f32x4(conv + Int64(value_channel) * (4 * TAPS))
        constants[NORM] = ld_global_f32(r.field("kda.o_norm") + Int64(column) * 4)
        constants[RATE] = ld_global_f32(r.field("kda.A_log") + Int64(head) * 4)
        key = head * DIM + r.warp * 16 + r.lane // 4  # the lane makes the decay of `key`, `key` + 8
        bias = r.field("kda.dt_bias") + Int64(key) * 4
        for i in cutlass.range_constexpr(2):
            constants[BIAS + i] = ld_global_f32(bias + Int64(32 * i))
        windows = r.field("kda.conv_state") + slot * (HISTORY * self.window_row)
        for j in cutlass.range_constexpr(HISTORY):
            at = windows + Int64(j * self.window_row)
            words[j] = ld_global_u16(at + Int64(2 * channel))
            words[HISTORY + j] = ld_global_u16(at + Int64(2 * value_channel))
        row = (slot * self.heads + Int64(head)) * DIM * DIM
        asked.states[1] = r.field("kda.state") + (row + Int64(quarter * COLUMNS)) * 4
        for j in cutlass.range_constexpr(TAPS):
            constants[j] = taps[j]
            constants[VALUE_TAPS + j] = value_taps[j]
        asked.columns[0] = channel
        other = 4 * self.width + r.tid  # f_a
        if r.warp == VALUE_WARP:
            other = value_channel
        elif r.warp == GATE_WARP:
            other = value_channel + self.width
        elif r.warp >= BETA_WARP:
            other = 4 * self.width + RANK + head
        asked.columns[1] = other

    @cute.jit
    def read(self, r, base: Int32, request: Int32, asked: Asked):
        """The request's rows of kda_in to shared memory, convolved where they are."""
        count = self.rows_of_request(r)
        at = r.buffer("kda_in") + Int64(request * count * self.product.rows) * 4
        if count == 1:
            self.read_rows(r, base, at, 0, count, 1, asked)
        else:
            for first in cutlass.range(0, count, self.rows_in_flight, unroll=1):
                self.read_rows(r, base, at, first, count, self.rows_in_flight, asked)

    @cute.jit
    def read_rows(
        self,
        r,
        base: Int32,
        at: Int64,
        first: Int32,
        count: Int32,
        number: Constexpr[int],
        asked: Asked,
    ):
        """`number` rows of the `count` at `at`, from `first` on."""
        step = self.rows * self.product.rows * 4  # from slice to slice
        loaded = []
        for i in cutlass.range_constexpr(number):  # all in flight; past the end, the last
            row = cutlass.min(first + i, count - 1) * self.product.rows
            for c in cutlass.range_constexpr(2):
                here = at + Int64(row + asked.columns[c]) * 4
                slices = range(self.product.slices)
                loaded.append([ld_global_f32(here + Int64(s * step)) for s in slices])
        for i in cutlass.range_constexpr(number):
            word = pack_bf16(tree(loaded[2 * i]), Float32(0.0))
            other = pack_bf16(tree(loaded[2 * i + 1]), Float32(0.0))
            if const_expr(number == 1):
                self.take_row(r, base, first, word, other, asked)
            elif first + i < count:
                self.take_row(r, base, first + i, word, other, asked)

    @cute.jit
    def take_row(self, r, base: Int32, row: Int32, word: Uint32, other: Uint32, asked: Asked):
        """A row's two words of this thread. What only some warps need is made by all, beside the
        rest: a branch would make it wait."""
        constants, words = asked.constants, asked.words
        pair = other | (cute.arch.shuffle_sync_bfly(other, 1) << 16)
        taps = [[constants[first + j] for j in range(TAPS)] for first in (0, VALUE_TAPS)]
        mixed = convolved(taps[0], [words[0], words[1], words[2], word])
        value = convolved(taps[1], [words[3], words[4], words[5], other])
        gate = sigmoid(bf16_low(other))
        shift(words, 0, word)
        shift(words, HISTORY, other)
        st_shared_f32(base + self.tile.qk_at + row * QK_ROW + r.tid * 4, mixed)
        if r.warp < VALUE_WARP:
            if r.lane % 2 == 0:
                st_shared_u32(base + self.tile.f_a_at + row * F_A_ROW + r.tid * 2, pair)
        elif r.warp == VALUE_WARP:
            st_shared_f32(base + self.tile.value_at + row * VALUE_ROW + r.lane * 4, value)
        elif r.warp == GATE_WARP:
            st_shared_f32(base + self.gate_at + row * VALUE_ROW + r.lane * 4, gate)
        elif (r.warp == BETA_WARP) & (r.lane == 0):
            st_shared_u32(base + self.beta_at + row * 4, other)

    def weigh(self, r, base, constants):
        """Decays and scales of the rows -> the gate of row `warp`. Between two barriers."""
        last = self.rows_of_request(r) - 1
        cute.arch.cp_async_wait_group(1)  # f_b; the state may still come
        r.bar()  # what `read` gives is there, f_b too
        own = cutlass.min(r.warp, last)
        gate = ld_shared_f32(base + self.gate_at + own * VALUE_ROW + r.lane * 4)
        beta = ld_shared_u32(base + self.beta_at + own * 4)
        # q and k are loaded before decays are stored, so that the sums over a warp overlap the mma
        scales = self.tile.scales(base, beta, last, r.warp, r.lane)
        bias = [constants[BIAS], constants[BIAS + 1]]
        decays = self.tile.decays(base, bias, constants[RATE], last, r.warp, r.lane)
        self.tile.store_scales(base, scales, r.warp, r.lane)
        self.tile.store_decays(base, decays, r.warp, r.lane)
        cute.arch.cp_async_wait_group(0)
        r.bar()  # decays, scales and the state are there; f_b and the gate have been read
        return gate

    @cute.jit
    def write(self, r, base: Int32, request: Int32, head: Int32, quarter: Int32, factor: Float32):
        """o times its norm's weight and gate, and the sum of o^2; a warp a row."""
        count = self.rows_of_request(r)
        if r.warp < count:
            o = ld_shared_f32(base + self.tile.out_at + r.warp * VALUE_ROW + r.lane * 4)
            group = (request * count + r.warp) * self.heads + head
            at = r.buffer("kda_heads") + Int64(group * DIM + quarter * COLUMNS + r.lane) * 4
            st_global_f32(at, o * factor)
            (square,) = warp_sum([o * o])
            if r.lane == 0:
                at = r.buffer("kda_squares") + Int64(group * QUARTERS + quarter) * 4
                st_global_f32(at, square)

    @cute.jit
    def keep(self, r, at: Int32, quarter: Int32, words):
        """The window after the rows, of the unit's columns of q, k and v, for `stage`."""
        if r.warp % QUARTERS == quarter:
            self.keep_columns(at + r.warp // QUARTERS * (COLUMNS * 2), r.lane, words, 0)
        if r.warp == VALUE_WARP:
            self.keep_columns(at + 2 * (COLUMNS * 2), r.lane, words, HISTORY)

    @cute.jit
    def keep_columns(self, at: Int32, lane: Int32, words, first: Constexpr[int]):
        for j in cutlass.range_constexpr(HISTORY):
            word = words[first + j]
            pair = word | (cute.arch.shuffle_sync_bfly(word, 1) << 16)
            if lane % 2 == 0:
                st_shared_u32(at + j * WINDOW_ROW + lane * 2, pair)

    # ---- stage ----

    @cute.jit
    def stage(self, r, staged: Int32):
        """x [T, H D] bf16 to shared memory, in rows of x_stride; this CTA's windows to conv_state.

        By every CTA, after the wait for kda_heads. `staged` is where scratch begins.
        """
        per_row = self.width // 4  # groups of 4 columns
        groups = r.num_tokens * per_row
        flight = min(GROUPS_IN_FLIGHT, -(-self.rows * per_row // THREADS))
        heads, squares = r.buffer("kda_heads"), r.buffer("kda_squares")
        for base in cutlass.range(r.tid, groups, flight * THREADS, unroll=1):
            loaded = []
            for i in cutlass.range_constexpr(flight):  # all in flight; past the end, the last
                group = cutlass.min(base + i * THREADS, groups - 1)
                y = ld_global_f32x4(heads + Int64(group) * 16)
                loaded.append((y, ld_global_f32x4(squares + Int64(group // (DIM // 4)) * 16)))
            for i in cutlass.range_constexpr(flight):
                group = cutlass.min(base + i * THREADS, groups - 1)
                y, four = loaded[i]
                mean = tree(list(four)) * Float32(1.0 / DIM)
                factor = rsqrt_approx(mean + Float32(self.sizes.eps))
                x = [v * factor for v in y]
                at = staged + group // per_row * x_stride(self.width) + group % per_row * 8
                st_shared_u32x2(at, (pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])))
        self.store_windows(r)

    @cute.jit
    def store_windows(self, r):
        first, count = self.share(r)
        windows, conv_state = r.shared("partial") + self.windows_at, r.field("kda.conv_state")
        # by the last threads: they have the fewest groups of x
        for i in cutlass.range(THREADS - 1 - r.tid, count * PIECES, THREADS, unroll=1):
            index, piece = i // PIECES, i % PIECES
            request, head, quarter = self.place(first + index * self.sizes.sms)
            slot = ld_global_i64(r.state_slots + Int64(request) * 8)
            column = (piece >> 2) * self.width + head * DIM + quarter * COLUMNS
            to = conv_state + slot * (HISTORY * self.window_row)
            to = to + Int64(2 * column + (piece & 3) * 16)
            at = windows + index * WINDOW_BYTES + piece * 16
            for j in cutlass.range_constexpr(HISTORY):
                words = ld_shared_u32x4(at + j * WINDOW_ROW)
                st_global_u32x4(to + Int64(j * self.window_row), words)


def zeros(count, kind):
    values = cute.make_rmem_tensor((count,), kind)
    for i in range(count):
        values[i] = kind(0)
    return values


def shift(words, first, word):
    """A window one row on."""
    words[first] = words[first + 1]
    words[first + 1] = words[first + 2]
    words[first + 2] = word
