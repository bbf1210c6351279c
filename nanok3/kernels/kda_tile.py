"""KDA of one head's 128 keys and 32 value columns by eight warps: decay, scalars, the delta rule.

    S = exp(g) S;  e = v - S' k;  S = S + beta k e';  o = S' q              (`reference/kda.py`)

As o = (exp(g) S)' q + beta (k . q) e, both products read the same S: one reduction over keys a row.
Up to 8 rows. All but f_b lies in shared memory; who fills it, the barriers between the steps, and
what becomes of o are the kernel's. A warp has 4 columns x 128 keys of the state: lane l keys 4 l ..
4 l + 3.

step          reads                  gives                                     by
`log_decays`  f_b (registers), f_a   g, for all rows                           a warp: 16 channels
`scales`      q, k (convolved)       1 / |k| and three more numbers of a row   a warp: a row
`walk`        all but f_a and f_b    state; o, rounded; if rows are            a warp: 4 columns
                                     recorded, what k is multiplied by

Rounding to bf16: q, k, v after silu, f_a @ f_b.T, o. All else float32, sums in a fixed order. The
         decay is kept as exp(g) - 1, so that a channel that forgets slowly (1e-4 a row) is off by
         1e-6 of its g and not by a rounding of 0.9999; sigmoid errs about 1e-6, l2 3e-7.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from nanok3.dsl import (
    bf16_low,
    cp_async_16,
    ex2_approx,
    ld_global_u32x4,
    ld_shared_f32x4,
    ld_shared_u32x4,
    mma_bf16,
    pack_bf16,
    rsqrt_approx,
    select_f32,
    sigmoid,
    st_global_f32x4,
    st_shared_f32,
    st_shared_f32x4,
    tree,
    warp_sums,
)
from nanok3.reference.kda import L2_EPS

DIM = 128  # D, of keys and values
TAPS = 4
RANK = 128  # width of f_a
QUARTERS = 4  # of a head's value columns
COLUMNS = DIM // QUARTERS  # of a tile, one a lane
WARPS = 8
THREADS = 32 * WARPS  # a thread is also a channel of q (the first half) or of k
PASS = 8  # rows at once: the N of an mma
LOG2_E = 1.4426950408889634

# Strides in bytes of float32 arrays; they keep lanes in other banks.
STATE_ROW = 4 * COLUMNS
QK_ROW = 4 * 2 * DIM
DECAY_ROW = 4 * DIM + 16
VALUE_ROW = 4 * COLUMNS


def rounded(value):
    """The nearest bf16, as float32."""
    return bf16_low(pack_bf16(value, Float32(0.0)))


def convolved(taps, window):
    """silu(sum of taps times a window's values), rounded."""
    mixed = taps[0] * window[0]
    for j in range(1, TAPS):
        mixed = mixed + taps[j] * window[j]
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


class KDATile:
    """Offsets in shared memory for up to `rows` rows, 1 or PASS; the arithmetic."""

    def __init__(self, rows: int, lower_bound: float, recorded: bool = False):
        assert rows in (1, PASS)
        self.rows, self.lower_bound, self.recorded = rows, lower_bound, recorded
        self.state_at = 0  # [128 keys, 8 pieces of 4 columns], pieces swizzled by `piece_at`
        self.qk_at = self.state_at + DIM * STATE_ROW  # [row, q|k], not normalised
        self.decay_at = self.qk_at + rows * QK_ROW  # [row, 128], exp(g) - 1
        self.value_at = self.decay_at + rows * DECAY_ROW  # [row, COLUMNS]
        self.out_at = self.value_at + rows * VALUE_ROW  # [row, COLUMNS], o, rounded
        self.scales_at = self.out_at + rows * VALUE_ROW  # [warp, 4], see `scales`
        self.update_at = self.scales_at + WARPS * 16  # [row, COLUMNS], what k is multiplied by
        self.num_bytes = self.update_at + rows * VALUE_ROW * recorded

    def piece_at(self, base, key, piece):
        """Where 4 columns of a key lie: 8 lanes with 8 pieces of one key, or with one piece of keys
        4 apart, hit different banks."""
        return base + self.state_at + key * STATE_ROW + (piece ^ (key >> 2 & 7)) * 16

    # ---- loads and stores ----

    def load_f_b(self, at, warp, lane):
        """32 words of the head's 128 rows at `at`: row l / 4 of the warp's 16 and the one 8 on, 16
        bytes of each block of 32 columns. So an mma's K is permuted, as `log_decays` reads f_a."""
        here = at + Int64((warp * 16 + (lane >> 2)) * (2 * RANK) + (lane & 3) * 16)
        pieces = [
            ld_global_u32x4(here + Int64(block * 64 + half * (8 * 2 * RANK)))
            for block in range(RANK // 32)
            for half in range(2)
        ]
        return [word for piece in pieces for word in piece]

    def load_state(self, base, state, tid):
        """Asks for the tile's columns of the state, in the current group of copies."""
        at, state = self.pieces(base, state, tid)
        for i in range(0, DIM, 32):
            cp_async_16(at + i * STATE_ROW, state + Int64(i * (4 * DIM)))

    def store_state(self, base, state, tid):
        """By the threads that asked for the same pieces."""
        at, state = self.pieces(base, state, tid)
        for i in range(0, DIM, 32):
            st_global_f32x4(state + Int64(i * (4 * DIM)), ld_shared_f32x4(at + i * STATE_ROW))

    def pieces(self, base, state, tid):
        """A thread has a piece of every 32nd key; those lie in shared memory STATE_ROW apart."""
        key, piece = tid >> 3 & 31, tid & 7
        at = self.piece_at(base, key, piece)
        return at, state + Int64(key * (4 * DIM) + piece * 16)

    # ---- arithmetic ----

    def log_decays(self, f_b, f_a, bias, rate):
        """g of 4 (channel, row) places of this lane, of 16 channels a warp and all rows: channel
        l / 4 (8 more for the last two) of rows 2 (l % 4) + i % 2.

        f_b: `load_f_b`; f_a: where 16 bytes l % 4 of row l / 4 of f_a lie in shared memory, rows
        64 bytes apart modulo 128; bias, rate: dt_bias of the two channels, A_log.
        """
        sums = []
        for block in range(RANK // 32):
            b = ld_shared_u32x4(f_a + block * 64)
            low, high = f_b[8 * block : 8 * block + 4], f_b[8 * block + 4 : 8 * block + 8]
            for half in range(2):
                a = [w for i in (2 * half, 2 * half + 1) for w in (low[i], high[i])]
                chain = [Float32(0.0)] * 4 if block < 2 else sums[2 * (block - 2) + half]
                sums.append(mma_bf16(a, b[2 * half : 2 * half + 2], chain))
        rate = ex2_approx(rate * Float32(LOG2_E))
        f = [rounded(tree([chain[i] for chain in sums[-4:]])) + bias[i // 2] for i in range(4)]
        return [Float32(self.lower_bound) * sigmoid(rate * v) for v in f]

    @cute.jit
    def store_decays(self, base: Int32, decays, warp: Int32, lane: Int32):
        at = base + self.decay_at + (warp * 16 + (lane >> 2)) * 4
        if const_expr(self.rows == 1):
            if (lane & 3) == 0:
                st_shared_f32(at, decays[0])
                st_shared_f32(at + 32, decays[2])
        else:
            for i in cutlass.range_constexpr(4):
                row = (lane & 3) * 2 + i % 2
                st_shared_f32(at + row * DECAY_ROW + i // 2 * 32, decays[i])

    def products_of(self, q, k):
        """q . q, k . k, q . k of this lane's channels, not yet summed over lanes."""
        return [dot(q, q), dot(k, k), dot(q, k)]

    def scales(self, products, b):
        """1 / |k|, beta / |k|, D^-0.5 / |q|, beta D^-0.5 (q . k) / (|q| |k|); b: beta before the
        sigmoid."""
        q_q, k_k, q_k = products
        q_scale = rsqrt_approx(q_q + Float32(L2_EPS)) * Float32(DIM**-0.5)
        k_scale = rsqrt_approx(k_k + Float32(L2_EPS))
        beta = sigmoid(b)
        return k_scale, k_scale * beta, q_scale, q_scale * k_scale * beta * q_k

    @cute.jit
    def store_scales(self, base: Int32, scales, warp: Int32, lane: Int32):
        if lane == 0:
            st_shared_f32x4(base + self.scales_at + warp * 16, scales)

    def held(self, base, warp, lane):
        """This lane's part of the state: [4 keys, 4 columns], keys 4 l .. 4 l + 3."""
        at = self.piece_at(base, 4 * lane, warp)
        pieces = [ld_shared_f32x4(at + i * STATE_ROW) for i in range(4)]
        return [value for piece in pieces for value in piece]

    @cute.jit
    def walk(self, base: Int32, count: Int32, warp: Int32, lane: Int32):
        """`count` rows of the recurrence on this warp's 4 columns; the state is read from shared
        memory and left there, where only this warp has it until the next barrier."""
        s = cute.make_rmem_tensor((16,), Float32)
        held = self.held(base, warp, lane)
        for i in cutlass.range_constexpr(16):
            s[i] = held[i]
        for row in cutlass.range(count, unroll=1):
            scales = ld_shared_f32x4(base + self.scales_at + row * 16)
            self.step(base, row, scales, s, warp, lane)
        self.leave(base, s, warp, lane)

    @cute.jit
    def step(self, base: Int32, row: Int32, scales, s, warp: Int32, lane: Int32):
        """A row, on the part of the state that the lane holds."""
        q = ld_shared_f32x4(base + self.qk_at + row * QK_ROW + lane * 16)
        k = ld_shared_f32x4(base + self.qk_at + row * QK_ROW + 4 * DIM + lane * 16)
        decay = ld_shared_f32x4(base + self.decay_at + row * DECAY_ROW + lane * 16)
        v = ld_shared_f32x4(base + self.value_at + row * VALUE_ROW + warp * 16)
        k_scale, k_beta, q_scale, q_k_beta = scales
        for i in cutlass.range_constexpr(16):
            s[i] = s[i] + decay[i // 4] * s[i]
        # lane l: column l % 4 of S' k (bit 2 of l clear) or of S' q (set)
        total = warp_sums(self.products(k, s) + self.products(q, s), lane)
        error = self.errors(v, k_scale, total)
        if (lane >> 2) == 1:
            own = select_f32(
                lane & 2,
                select_f32(lane & 1, error[3], error[2]),
                select_f32(lane & 1, error[1], error[0]),
            )
            at = base + row * VALUE_ROW + (4 * warp + (lane & 3)) * 4
            st_shared_f32(at + self.out_at, rounded(q_scale * total + q_k_beta * own))
            if const_expr(self.recorded):
                st_shared_f32(at + self.update_at, k_beta * own)
        for i in cutlass.range_constexpr(16):
            s[i] = s[i] + k[i // 4] * (k_beta * error[i % 4])

    def leave(self, base, s, warp, lane):
        at = self.piece_at(base, 4 * lane, warp)
        for i in range(4):
            st_shared_f32x4(at + i * STATE_ROW, [s[4 * i + j] for j in range(4)])

    def products(self, weights, s):
        """This lane's share of weights @ S: 4 columns over its 4 keys."""
        return [dot(weights, [s[4 * i + j] for i in range(4)]) for j in range(4)]

    def errors(self, v, k_scale, total):
        """v - S' k of the warp's 4 columns, in every lane."""
        return [v[j] - k_scale * cute.arch.shuffle_sync(total, j) for j in range(4)]
