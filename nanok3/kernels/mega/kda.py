"""KDA in the persistent kernel: what `kda_decode` does, between two hand-offs.

One row goes as in `kda_tile`, up to 8 rows of a request go at once (`kda_chunk`).

A unit is a request, a head and a quarter of its 128 value columns. CTA c has the units c, c + SMs,
..; fewer units than SMs are spread over the chip.

step              what                                                   published
`compute_heads`   convolution, gates, the walk of the request's rows     kda_heads   [T, H D] f32
                                                                         kda_squares [T, H, 4] f32
`store`           the state after the last row; may follow the signal
`stage`           x = kda_heads / sqrt(mean square + eps), of all heads,
                  to shared memory; the new windows

Where rows are recorded, `compute_heads` writes what `kda_rows` says in place of states and windows;
`kda_commit` applies it after the step.

What does not depend on this step's rows is asked for before they are waited for: f_b lies in
registers, as it goes into the mma, the rest in shared memory. kda_heads is o times o_norm and the
gate: only the norm's factor is missing, as the four quarters of a head lie in different CTAs;
kda_squares are their sums of o^2.

Shapes   kda_in [slices, T, q|k|v|gate|f_a|b] f32; conv, f_b, A_log, dt_bias, o_norm, conv_state and
         state as `kda_decode`. T = R Q up to 8.
Waits    `compute_heads`: kda_in. `stage` comes after the wait for kda_heads. Of one row both are
         words, and nobody signals.
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
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    bf16_high,
    bf16_low,
    cp_async_16,
    ld_global_f32,
    ld_global_f32x4,
    ld_global_i64,
    ld_shared_f32,
    ld_shared_f32x4,
    ld_shared_u16,
    ld_shared_u32x2,
    ld_shared_u32x4,
    pack_bf16,
    rsqrt_approx,
    sigmoid,
    st_global_f32,
    st_global_u32x4,
    st_relaxed_u32,
    st_shared_f32,
    st_shared_u32x2,
    st_shared_u32x4,
    tree,
    warp_sum,
)
from nanok3.kernels.kda_chunk import KDAChunk
from nanok3.kernels.kda_rows import KDARows
from nanok3.kernels.kda_tile import (
    COLUMNS,
    DIM,
    QUARTERS,
    RANK,
    TAPS,
    THREADS,
    VALUE_ROW,
    KDATile,
    convolved,
    expm1,
)
from nanok3.kernels.mega.linear import partial_bytes, x_stride
from nanok3.kernels.mega.role import tagged, untagged
from nanok3.kernels.mega.sizes import Sizes

HISTORY = TAPS - 1  # rows of a window
# A row of words in shared memory, bf16: q, k, f_a, then the unit's columns of v and of the gate,
# and 4 heads' beta. Bytes; the stride keeps lanes in other banks.
KINDS = 4
KIND_BYTES = 2 * DIM
VALUE_AT, GATE_AT, BETA_AT = 3 * KIND_BYTES, 3 * KIND_BYTES + 64, 3 * KIND_BYTES + 128
OTHERS = 17  # groups of 4 columns from VALUE_AT on
WORD_ROW = 960
CHANNELS = 2 * DIM + COLUMNS  # of a unit: q, k, v
PIECES = CHANNELS * 2 // 16  # of a row of a unit's window, 16 bytes each
KEPT_ROW = 3 * COLUMNS * 2  # bytes of what a unit keeps of a row: its columns of q, k, v
KEPT_BYTES = HISTORY * KEPT_ROW
KEPT_PIECES = KEPT_ROW // 16  # 4 of q, 4 of k, 4 of v
GROUPS_IN_FLIGHT = 4  # groups of 4 columns of x that a thread makes at once
NORM, RATE, BIAS, CONSTANTS = 0, 1, 2, 4  # of Asked.constants


@dataclass(frozen=True)
class Asked:
    """What a thread has in registers of a unit before its rows are there."""

    constants: Any  # [CONSTANTS] f32
    f_b: Any  # words of `KDATile.load_f_b`
    column: Any  # of kda_in, the first of 4 that it reads
    states: Any  # addresses of the unit's state and of the next one's


@dataclass(frozen=True)
class Unit:
    request: Any
    head: Any
    quarter: Any


@dataclass(frozen=True)
class Row:
    """What a thread has of its warp's row."""

    qk: Any  # [8] f32: 4 channels of q, of k
    held: Any  # part of the unit's old state
    gate: Any  # of column l


class KDA:
    def __init__(self, sizes: Sizes, recorded: bool = False) -> None:
        self.sizes, self.product = sizes, sizes.products["kda.in_proj"]
        self.recorded, self.records = recorded, KDARows(sizes.kda_heads)
        self.rows, self.heads, self.width = sizes.pass_rows, sizes.kda_heads, sizes.kda_width
        self.window_row = 2 * 3 * self.width  # bytes of a row of conv_state
        self.most_units = -(-self.rows * self.heads * QUARTERS // sizes.sms)  # of a CTA
        self.tile = KDATile(self.rows, sizes.lower_bound)
        self.chunk = KDAChunk(self.tile, self.tile.num_bytes) if self.rows > 1 else None
        # [HISTORY + T, WORD_ROW], the window's rows first
        self.words_at = self.chunk.num_bytes if self.chunk else self.tile.num_bytes
        self.taps_at = self.words_at + (HISTORY + self.rows) * WORD_ROW  # [CHANNELS, TAPS] f32
        # from "partial" on, which lies before "scratch" and is free while heads are made
        parts = 2 * partial_bytes(self.rows)
        staged = parts + self.rows * x_stride(self.width)
        self.kept_at = max(self.taps_at + CHANNELS * TAPS * 4, staged)
        kept = 0 if recorded else self.most_units * KEPT_BYTES
        self.scratch_bytes = self.kept_at + kept - parts

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

    @cute.jit
    def compute_heads(self, r):
        """-> where `store` puts the state of the CTA's last unit, 0 if it has none."""
        base, sms = r.shared("partial"), self.sizes.sms
        first, count = self.share(r)
        request, head, quarter = self.place(first)
        states = zeros(2, Int64)
        asked = Asked(zeros(CONSTANTS, Float32), zeros(32, Uint32), zeros(1, Int32), states)
        if count > 0:
            self.ask(r, base, request, head, quarter, asked)
            self.tile.load_state(base, states[1], r.tid)
            cute.arch.cp_async_commit_group()
        for i in cutlass.range(count, unroll=1):
            if const_expr(self.rows > 1):  # noqa: SIM102
                if i == 0:  # not before the loop: what the compiler takes out of it comes first
                    r.wait("kda_in")
            states[0] = states[1]
            factor = asked.constants[NORM]
            held = self.read(r, base, request, asked)
            r.bar()  # the rows are there
            unit = Unit(request, head, quarter)
            row = self.weigh(r, base, unit, held, asked)
            if const_expr(self.recorded):
                self.record_inputs(r, base, unit)
            else:
                self.keep(r, base, quarter, base + self.kept_at + i * KEPT_BYTES)
            r.bar()  # decays, scales, ..; and after the next one words and taps have been read
            next_request, next_head, next_quarter = self.place(first + (i + 1) * sms)
            if const_expr(self.most_units > 1):  # noqa: SIM102 - one is decided here, one on the GPU
                if i + 1 < count:
                    self.ask(r, base, next_request, next_head, next_quarter, asked)
            o = self.outputs(r, base, row, unit)
            self.write(r, request, head, quarter, o, factor * row.gate)
            if const_expr(self.most_units > 1):  # noqa: SIM102
                if i + 1 < count:
                    if const_expr(not self.recorded):
                        self.store(r, states[0])
                    r.bar()
                    self.tile.load_state(base, states[1], r.tid)
                    cute.arch.cp_async_commit_group()
            request, head, quarter = next_request, next_head, next_quarter
        return states[0]

    @cute.jit
    def store(self, r, state: Int64):
        """The state that the CTA's last unit leaves."""
        if state != 0:
            base = r.shared("partial")
            if const_expr(self.rows == 1):
                self.tile.store_state(base, state, r.tid)
            else:
                r.bar()  # `solve` has been done
                last = self.rows_of_request(r) - 1
                self.chunk.update(base, state, last, r.warp, r.lane)

    @cute.jit
    def ask(self, r, base: Int32, request: Int32, head: Int32, quarter: Int32, asked: Asked):
        """Asks for what no row of this step changes, but for the state, whose address it leaves."""
        constants = asked.constants
        slot = ld_global_i64(r.state_slots + Int64(request) * 8)
        f_b = r.field("kda.f_b") + Int64(head) * (DIM * 2 * RANK)
        words = self.tile.load_f_b(f_b, r.warp, r.lane)
        constants[NORM] = ld_global_f32(
            r.field("kda.o_norm") + Int64(quarter * COLUMNS + r.lane) * 4
        )
        constants[RATE] = ld_global_f32(r.field("kda.A_log") + Int64(head) * 4)
        # the lane makes the decays of `key` and `key` + 8
        key = head * DIM + r.warp * 16 + (r.lane >> 2)
        bias = r.field("kda.dt_bias") + Int64(key) * 4
        for i in cutlass.range_constexpr(2):
            constants[BIAS + i] = ld_global_f32(bias + Int64(32 * i))
        conv, windows = r.field("kda.conv"), r.field("kda.conv_state")
        taps_of = (r.tid >> 7) * self.width + head * DIM + (r.tid & (DIM - 1))  # q|k
        taps_at = base + self.taps_at
        cp_async_16(taps_at + place_of(r.tid), conv + Int64(taps_of) * (4 * TAPS))
        values = head * DIM + quarter * COLUMNS  # first of the unit's columns of v
        if r.warp == 0:
            at = conv + Int64(2 * self.width + values + r.lane) * (4 * TAPS)
            cp_async_16(taps_at + 2 * DIM * (4 * TAPS) + place_of(r.lane), at)
        index = (THREADS - 1 - r.tid) & 0xFF  # not negative, for all to see
        if index < HISTORY * PIECES:
            row, piece = index // PIECES, index % PIECES
            kind = piece >> 4  # q|k|v
            column = kind * self.width + head * DIM + (piece & 15) * 8
            column = column + Int32(kind == 2) * (quarter * COLUMNS)
            at = windows + slot * (HISTORY * self.window_row) + Int64(row * self.window_row)
            to = row * WORD_ROW + piece * 16 + Int32(kind == 2) * (VALUE_AT - 2 * KIND_BYTES)
            cp_async_16(base + self.words_at + to, at + Int64(2 * column))
        row = (slot * self.heads + Int64(head)) * DIM * DIM
        asked.states[1] = r.field("kda.state") + (row + Int64(quarter * COLUMNS)) * 4
        for i in cutlass.range_constexpr(32):
            asked.f_b[i] = words[i]
        # by kind: q, k, f_a, then 8 lanes v, 8 the gate, the rest beta
        kind = r.warp & 3
        column = kind * self.width + head * DIM + r.lane * 4
        if kind == 2:
            column = 4 * self.width + r.lane * 4
        elif kind == 3:
            column = (2 + (r.lane >> 3)) * self.width + values + (r.lane & 7) * 4
            if r.lane >= OTHERS - 1:
                column = 4 * self.width + RANK + (head & -4)
        asked.column[0] = column

    def read(self, r, base, request, asked):
        """The request's rows of kda_in, their slices summed, to words in shared memory -> what
        the lane holds of the old state. A warp has one kind of columns, of every second row."""
        count = self.rows_of_request(r)
        at = r.buffer("kda_in")
        at = at + Int64(request * count * self.product.rows + asked.column[0]) * 4
        row = r.warp >> 2
        rows = [row + 2 * i for i in range(2)] if self.rows > 1 else [row]
        loaded = [self.ask_row(r, at, i, count) for i in rows]
        cute.arch.cp_async_wait_group(0)  # taps, window, state
        r.bar()
        if self.rows == 1:
            held = self.tile.held(base, r.warp, r.lane)
        else:
            held = self.chunk.state_parts(base, r.warp, r.lane)
        self.put_words(r, base, row, count, loaded[0])
        if self.rows > 1:
            self.read_rest(r, base, at, row, count, loaded[1])
        return held

    @cute.jit
    def read_rest(self, r, base: Int32, at: Int64, row: Int32, count: Int32, second):
        """But for the first row; the next one is asked for before one is used."""
        if count > 4:
            third = self.ask_row(r, at, row + 4, count)
            self.put_words(r, base, row + 2, count, second)
            fourth = self.ask_row(r, at, row + 6, count)
            self.put_words(r, base, row + 4, count, third)
            self.put_words(r, base, row + 6, count, fourth)
        else:
            self.put_words(r, base, row + 2, count, second)

    def ask_row(self, r, at, row, count):
        """4 columns of each slice; of the last row, if there is no such row."""
        here = at + Int64(cutlass.min(row, count - 1) * (self.product.rows * 4))
        step = self.rows * self.product.rows * 4  # from slice to slice
        slices = range(self.product.slices)
        addresses = [here + Int64(s * step) for s in slices]
        if self.rows > 1:
            return [ld_global_f32x4(address) for address in addresses]
        words = r.words(addresses, r.tag_of["kda_in"])
        return [[untagged(words[4 * s + c]) for c in range(4)] for s in slices]

    @cute.jit
    def put_words(self, r, base: Int32, row: Int32, count: Int32, parts):
        sums = [tree([part[c] for part in parts]) for c in range(4)]
        to = base + self.words_at + (HISTORY + row) * WORD_ROW
        to = to + (r.warp & 3) * KIND_BYTES + r.lane * 8
        if (((r.warp & 3) < 3) | (r.lane < OTHERS)) & (row < count):
            words = (pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]))
            st_shared_u32x2(to, words)

    def weigh(self, r, base, unit, held, asked):
        """q, k, v, decays and scales -> what a warp keeps of row `warp`."""
        last = self.rows_of_request(r) - 1
        words, constants = base + self.words_at, asked.constants
        f_a = words + (HISTORY + cutlass.min(r.lane >> 2, last)) * WORD_ROW + (r.lane & 3) * 16
        row = words + cutlass.min(r.warp, last) * WORD_ROW  # the oldest of its window
        last_word = row + HISTORY * WORD_ROW
        gate = ld_shared_u16(last_word + GATE_AT + r.lane * 2)
        beta = bf16_low(ld_shared_u16(last_word + BETA_AT + (unit.head & 3) * 2))
        qk = zeros(8, Float32)
        if self.rows == 1:
            self.convolve_one(r, base, row, beta)
        else:
            self.convolve_own(r, base, row, last, beta, qk)
        logs = self.tile.log_decays(
            [asked.f_b[i] for i in range(32)],
            f_a + 2 * KIND_BYTES,
            [constants[BIAS], constants[BIAS + 1]],
            constants[RATE],
        )
        one = self.rows == 1
        decays = [expm1(g) for g in logs] if one else self.chunk.running(logs, r.lane)
        self.tile.store_decays(base, decays, r.warp, r.lane)
        if self.recorded:
            self.record_keys(r, unit, logs, qk)
        return Row(qk, held, sigmoid(bf16_low(gate)))

    @cute.jit
    def convolve_own(self, r, base: Int32, row: Int32, last: Int32, beta: Float32, qk):
        """Row `warp`, if there is one: q and k to `qk`, v and its scales to shared memory."""
        if r.warp <= last:
            q = self.convolve(base, row, 0, r)
            k = self.convolve(base, row, 1, r)
            value = self.convolve_value(base, row, r.lane)
            scales = self.tile.scales(warp_sum(self.tile.products_of(q, k)), beta)
            st_shared_f32(base + self.tile.value_at + r.warp * VALUE_ROW + r.lane * 4, value)
            self.tile.store_scales(base, scales, r.warp, r.lane)
            kept = qk
            for i in cutlass.range_constexpr(4):
                kept[i] = q[i]
                kept[4 + i] = k[i]

    def convolve_one(self, r, base, row, beta):
        q, k = (self.convolve(base, row, kind, r) for kind in range(2))
        value = self.convolve_value(base, row, r.lane)
        products = warp_sum(self.tile.products_of(q, k))
        self.put(r, base, q, k, value, (*products, beta))

    def convolve(self, base, row, kind, r):
        """Channels 4 l .. 4 l + 3 of q or k; of a single row, channel l of a quarter of them."""
        at = [row + (j * WORD_ROW + kind * KIND_BYTES) for j in range(TAPS)]
        taps_at = base + self.taps_at + kind * DIM * (4 * TAPS)
        if self.rows == 1:
            channel = (r.warp & 3) * COLUMNS + r.lane
            words = [bf16_low(ld_shared_u16(a + channel * 2)) for a in at]
            return [convolved(ld_shared_f32x4(taps_at + place_of(channel)), words)]
        pairs = [ld_shared_u32x2(a + r.lane * 8) for a in at]
        made = []
        for i in range(4):
            taps = ld_shared_f32x4(taps_at + place_of(4 * r.lane + i))
            half = bf16_high if i % 2 else bf16_low
            made.append(convolved(taps, [half(pair[i // 2]) for pair in pairs]))
        return made

    def convolve_value(self, base, row, lane):
        """Column l of the unit's values."""
        words = [ld_shared_u16(row + (j * WORD_ROW + VALUE_AT) + lane * 2) for j in range(TAPS)]
        taps = ld_shared_f32x4(base + self.taps_at + 2 * DIM * (4 * TAPS) + place_of(lane))
        return convolved(taps, [bf16_low(word) for word in words])

    @cute.jit
    def put(self, r, base: Int32, q, k, value, sums):
        """The single row; for its scales the sums of each quarter of its channels, and beta."""
        if r.warp < QUARTERS:
            at = base + self.tile.qk_at + (r.warp * COLUMNS + r.lane) * 4
            st_shared_f32(at, q[0])
            st_shared_f32(at + 4 * DIM, k[0])
            self.tile.store_scales(base, sums, r.warp, r.lane)
        elif r.warp == QUARTERS:
            st_shared_f32(base + self.tile.value_at + r.lane * 4, value)

    def outputs(self, r, base, row, unit):
        """-> o of row `warp`, column l; a barrier before `write` lies in here."""
        if self.rows == 1:
            at = base + self.tile.scales_at
            parts = [ld_shared_f32x4(at + i * 16) for i in range(QUARTERS)]
            sums = [tree([part[i] for part in parts]) for i in range(3)]
            scales = self.tile.scales(sums, parts[0][3])
            state = list(row.held)
            self.tile.step(base, Int32(0), scales, state, r.warp, r.lane)
            self.tile.leave(base, state, r.warp, r.lane)
            r.bar()
            return ld_shared_f32(base + self.tile.out_at + r.lane * 4)
        chunk = self.chunk
        last = self.rows_of_request(r) - 1
        chunk.put_row(base, row.qk, last, r.warp, r.lane)
        r.bar()
        chunk.multiply(base, row.held, r.warp, r.lane)
        chunk.mix(base, row.qk, last, r.warp, r.lane)
        r.bar()
        o, errors = chunk.solve(base, last, r.warp, r.lane, self.recorded)
        if self.recorded:
            self.record_values(r, unit, errors)
        return o

    @cute.jit
    def write(self, r, request: Int32, head: Int32, quarter: Int32, o: Float32, factor: Float32):
        """o times its norm's weight and gate, and the sum of o^2; a warp a row."""
        count = self.rows_of_request(r)
        if r.warp < count:
            group = (request * count + r.warp) * self.heads + head
            at = r.buffer("kda_heads") + Int64(group * DIM + quarter * COLUMNS + r.lane) * 4
            self.publish(r, at, o * factor)
            (square,) = warp_sum([o * o])
            if r.lane == 0:
                at = r.buffer("kda_squares") + Int64(group * QUARTERS + quarter) * 4
                self.publish(r, at, square)

    def publish(self, r, at, value):
        """A value for `stage`; of one row as a word."""
        if self.rows > 1:
            st_global_f32(at, value)
        else:
            st_relaxed_u32(at, tagged(value, r.tag_of["kda_heads"]))

    @cute.jit
    def keep(self, r, base: Int32, quarter: Int32, kept: Int32):
        """The window after the rows, of the unit's columns of q, k and v, for `stage`."""
        rows = base + self.words_at + self.rows_of_request(r) * WORD_ROW
        index = (THREADS - 1 - r.tid) & 0xFF  # the last warps: the first ones have the rows
        if index < HISTORY * KEPT_PIECES:
            row, piece = index // KEPT_PIECES, index % KEPT_PIECES
            at = rows + row * WORD_ROW + self.piece_of(piece, quarter)
            st_shared_u32x4(kept + row * KEPT_ROW + piece * 16, ld_shared_u32x4(at))

    def piece_of(self, piece, quarter):
        """Where a row of words has 16 bytes of the unit: 4 pieces of q, 4 of k, 4 of v."""
        kind, is_value = piece >> 2, Int32(piece >> 2 == 2)
        q_or_k = kind * KIND_BYTES + quarter * (COLUMNS * 2)
        return q_or_k + is_value * (VALUE_AT - q_or_k) + (piece & 3) * 16

    # ---- records ----

    def record_of(self, r, unit):
        """The first row of the unit's request in the records; looked up by each use, as registers
        are scarce. By whole warps."""
        slot = ld_global_i64(r.state_slots + Int64(unit.request) * 8)
        layer = Int64(r.number("kda.index")) * Int64(r.record_slots)
        return (layer + slot) * Int64(r.record_rows)

    @cute.jit
    def record_inputs(self, r, base: Int32, unit: Unit):
        """The rows' inputs of the convolution, the unit's columns of q, k and v."""
        record = self.record_of(r, unit)
        index = (THREADS - 1 - r.tid) & 0xFF
        if index < self.rows_of_request(r) * KEPT_PIECES:
            row, piece = index // KEPT_PIECES, index % KEPT_PIECES
            at = base + self.words_at + (HISTORY + row) * WORD_ROW
            kind = piece >> 2
            column = kind * self.width + unit.head * DIM + unit.quarter * COLUMNS + (piece & 3) * 8
            to = r.record_qkv + self.records.inputs(record + Int64(row), column)
            st_global_u32x4(to, ld_shared_u32x4(at + self.piece_of(piece, unit.quarter)))

    def record_keys(self, r, unit, logs, qk):
        """And the decays. qk: q and k of row `warp`."""
        at = self.records.numbers(self.record_of(r, unit), unit.head, unit.quarter)
        place = unit.quarter, self.rows_of_request(r), r.warp, r.lane
        self.records.put_decays(r.record_log_decay + at, logs, *place)
        self.records.put_key(r.record_key + at, [qk[4 + i] for i in range(4)], *place)

    @cute.jit
    def record_values(self, r, unit: Unit, errors: list):
        """What k is multiplied by: every warp has all rows, and writes its own."""
        at = self.records.numbers(self.record_of(r, unit), unit.head, unit.quarter)
        at = r.record_value + at + Int64(r.lane * 4)
        for row in cutlass.range_constexpr(len(errors)):
            if (r.warp == row) & (row < self.rows_of_request(r)):
                st_global_f32(at + Int64(row * self.records.numbers_row), errors[row])

    # ---- stage ----

    @cute.jit
    def stage(self, r, staged: Int32):
        """x [T, H D] bf16 to shared memory, in rows of x_stride; this CTA's windows to conv_state.

        By every CTA, after the wait for kda_heads (of one row, when its words are there). `staged`
        is where scratch begins.
        """
        per_row = self.width // 4  # groups of 4 columns
        groups = r.num_tokens * per_row
        flight = min(GROUPS_IN_FLIGHT, -(-self.rows * per_row // THREADS))
        heads, squares = r.buffer("kda_heads"), r.buffer("kda_squares")
        for base in cutlass.range(r.tid, groups, flight * THREADS, unroll=1):
            loaded = []
            for i in cutlass.range_constexpr(flight):  # all in flight; past the end, the last
                group = cutlass.min(base + i * THREADS, groups - 1)
                four = squares + Int64(group // (DIM // 4)) * 16
                loaded.append(self.published(r, heads + Int64(group) * 16, four))
            for i in cutlass.range_constexpr(flight):
                group = cutlass.min(base + i * THREADS, groups - 1)
                y, four = loaded[i]
                mean = tree(list(four)) * Float32(1.0 / DIM)
                factor = rsqrt_approx(mean + Float32(self.sizes.eps))
                x = [v * factor for v in y]
                at = staged + group // per_row * x_stride(self.width) + group % per_row * 8
                st_shared_u32x2(at, (pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])))
        if const_expr(self.rows == 1):
            r.bar()  # all heads have been seen, so nobody reads an old window any more
        if const_expr(not self.recorded):
            self.store_windows(r)

    def published(self, r, y, squares):
        """4 values and the 4 sums of their head."""
        if self.rows > 1:
            return ld_global_f32x4(y), ld_global_f32x4(squares)
        words = r.words([y, squares], r.tag_of["kda_heads"])
        return tuple([untagged(words[4 * i + c]) for c in range(4)] for i in range(2))

    @cute.jit
    def store_windows(self, r):
        first, count = self.share(r)
        kept, conv_state = r.shared("partial") + self.kept_at, r.field("kda.conv_state")
        # by the last threads: they have the fewest groups of x
        for i in cutlass.range(THREADS - 1 - r.tid, count * KEPT_PIECES, THREADS, unroll=1):
            index, piece = i // KEPT_PIECES, i % KEPT_PIECES
            request, head, quarter = self.place(first + index * self.sizes.sms)
            slot = ld_global_i64(r.state_slots + Int64(request) * 8)
            column = (piece >> 2) * self.width + head * DIM + quarter * COLUMNS
            to = conv_state + slot * (HISTORY * self.window_row)
            to = to + Int64(2 * column + (piece & 3) * 16)
            at = kept + index * KEPT_BYTES + piece * 16
            for j in cutlass.range_constexpr(HISTORY):
                words = ld_shared_u32x4(at + j * KEPT_ROW)
                st_global_u32x4(to + Int64(j * self.window_row), words)


def place_of(channel):
    """Where a channel's taps lie among 128; lanes with channels 4 apart hit other banks."""
    return (channel ^ (channel >> 3 & 3)) * (4 * TAPS)


def zeros(count, kind):
    values = cute.make_rmem_tensor((count,), kind)
    for i in range(count):
        values[i] = kind(0)
    return values
