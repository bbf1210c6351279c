"""KDA of one head's 128 keys and 32 value columns, up to 8 rows at once instead of row by row.

With L the decays multiplied up to a row, everything but a triangle of 8 x 8 numbers is a product
with the old state (rows t, j; beta in f):

    e_t = v_t - S' (L_t k_t) - sum_{j < t} (L_t k_t . k_j / L_j) f_j;     f_t = beta_t e_t
    o_t = S' (L_t q_t) + sum_{j <= t} (L_t q_t . k_j / L_j) f_j
    S = L_T (S + sum_j k_j / L_j f_j')

q and k are put in unnormalised, their factors stand in `KDATile.scales`. What belongs to a row that
is not there may be anything, but for its decays, which are finite, and its f, 0.

step           gives                                                by
`running`      log L, in the place of the decays                    a warp: 16 channels, all rows
`put_row`      L q and L k in three bf16 parts, k / L               a warp: a row, 4 channels a lane
`multiply`     S' (L q), S' (L k), sums over half of the keys       a warp: 8 columns, half the keys
`mix`          the triangles                                        a warp: a row
`solve`        f of all rows; o of row `warp`                       a warp: a row, a column a lane
`update`       the state, to global memory                          a warp: 16 keys, a column a lane

Between `running`, `put_row`, `multiply` and `mix`, `solve`, `update` there are barriers.

Rounding as `kda_tile`. A product of two numbers in three bf16 parts each leaves out 2^-24 of them.
         L is exp of a sum, so L_t / L_j errs by 2^-24 of log L_j; the state decays by expm1 of it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nanok3.dsl import (
    bf16_high,
    bf16_low,
    bits_of,
    ex2_approx,
    ld_shared_f32,
    ld_shared_f32x4,
    ld_shared_u32x2,
    mma_bf16,
    pack_bf16,
    select_f32,
    st_global_f32,
    st_shared_f32,
    st_shared_f32x4,
    st_shared_u32x2,
    tree,
    warp_sums,
)
from nanok3.kernels.kda_tile import (
    COLUMNS,
    DECAY_ROW,
    DIM,
    LOG2_E,
    PASS,
    STATE_ROW,
    VALUE_ROW,
    WARPS,
    KDATile,
    dot,
    expm1,
    rounded,
)

PARTS = 3
PART_BYTES = 2 * DIM
PARTS_ROW = 2 * PARTS * PART_BYTES + 32  # q's parts, k's; strides keep lanes in other banks
KEYS_ROW = 4 * DIM
TRIANGLE_ROW = 2 * PASS * 4
SUMS_ROW = 4 * COLUMNS + 32
# Parts of the two factors that are multiplied, the smallest products first.
PAIRS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
STEPS = DIM // 2 // 16  # mma of a half of the keys


def parts_of(x, y):
    """Two numbers as three words of two bf16, whose sum they are."""
    words = []
    for _ in range(PARTS):
        word = pack_bf16(x, y)
        words.append(word)
        x, y = x - bf16_low(word), y - bf16_high(word)
    return words


class KDAChunk:
    """Offsets in shared memory, behind a tile's at `at`; the arithmetic."""

    def __init__(self, tile: KDATile, at: int):
        assert -PASS * tile.lower_bound < 80, "1 / L must be a float32"
        self.tile = tile
        self.parts_at = at  # [row, q|k, part, 128] bf16
        self.keys_at = self.parts_at + PASS * PARTS_ROW  # [row, 128], k / L
        self.triangles_at = self.keys_at + PASS * KEYS_ROW  # [row, q|k, PASS]
        self.sums_at = self.triangles_at + PASS * TRIANGLE_ROW  # [half, q|k, row, COLUMNS]
        self.errors_at = self.sums_at + 4 * PASS * SUMS_ROW  # [row, COLUMNS], f
        self.num_bytes = self.errors_at + PASS * VALUE_ROW

    def running(self, logs, lane):
        """Of `KDATile.log_decays`: sums over the rows up to each."""
        made = []
        quad = lane & 3
        for first, second in (logs[:2], logs[2:]):
            total = first + second
            for distance in (1, 2):
                other = cute.arch.shuffle_sync(total, (lane - distance) & 31)
                total = total + select_f32(Int32(quad >= distance), other, Float32(0.0))
            other = cute.arch.shuffle_sync(total, (lane - 1) & 31)
            made += [select_f32(Int32(quad >= 1), other, Float32(0.0)) + first, total]
        return made

    @cute.jit
    def put_row(self, base: Int32, qk, last: Int32, warp: Int32, lane: Int32):
        """qk: q and k of this lane's channels; L q and L k take their place."""
        if warp <= last:
            both = qk
            log = ld_shared_f32x4(base + self.tile.decay_at + warp * DECAY_ROW + lane * 16)
            keys = []
            for i in cutlass.range_constexpr(4):
                keys.append(both[4 + i] * ex2_approx(log[i] * Float32(-LOG2_E)))
                decay = ex2_approx(log[i] * Float32(LOG2_E))
                both[i] = both[i] * decay
                both[4 + i] = both[4 + i] * decay
            to = base + self.parts_at + warp * PARTS_ROW + lane * 8
            for i in cutlass.range_constexpr(2):
                low = parts_of(both[4 * i], both[4 * i + 1])
                high = parts_of(both[4 * i + 2], both[4 * i + 3])
                for p in cutlass.range_constexpr(PARTS):
                    st_shared_u32x2(to + (PARTS * i + p) * PART_BYTES, (low[p], high[p]))
            st_shared_f32x4(base + self.keys_at + warp * KEYS_ROW + lane * 16, keys)

    def state_parts(self, base, warp, lane):
        """The old state as `multiply` needs it: column l / 4 of the warp's, keys 4 (l % 4) .. + 3
        of each 16."""
        piece, column, quad = (warp & 3) * 2 + (lane >> 4), lane >> 2 & 3, lane & 3
        key = (warp >> 2) * (DIM // 2) + quad * 4
        # of an even step, of an odd one: their swizzles differ
        places = [self.tile.piece_at(base, key + 16 * i, piece) + column * 4 for i in range(2)]
        made = []
        for step in range(STEPS):
            at = places[step % 2] + step // 2 * (32 * STATE_ROW)
            s = [ld_shared_f32(at + i * STATE_ROW) for i in range(4)]
            made.append(list(zip(parts_of(*s[:2]), parts_of(*s[2:]), strict=True)))
        return made

    def multiply(self, base, state, warp, lane):
        """state: of `state_parts`."""
        half, group, quad = warp >> 2, lane >> 2, lane & 3
        at = base + self.parts_at + group * PARTS_ROW + half * (STEPS * 32) + quad * 8
        chains = [[Float32(0.0)] * 4 for _ in PAIRS]
        for step in range(STEPS):
            words = [ld_shared_u32x2(at + i * PART_BYTES + step * 32) for i in range(2 * PARTS)]
            for c, (i, j) in enumerate(PAIRS):
                q, k = words[i], words[PARTS + i]
                chains[c] = mma_bf16((q[0], k[0], q[1], k[1]), state[step][j], chains[c])
        to = base + self.sums_at + (half * (2 * PASS) + group) * SUMS_ROW
        to = to + ((warp & 3) * 8 + quad * 2) * 4
        for i in range(2):  # q, k
            pair = [tree([chain[2 * i + j] for chain in chains]) for j in range(2)]
            st_shared_u32x2(to + i * (PASS * SUMS_ROW), [bits_of(x) for x in pair])

    @cute.jit
    def mix(self, base: Int32, qk, last: Int32, warp: Int32, lane: Int32):
        """qk: as `put_row` leaves it."""
        if warp <= last:
            at = base + self.keys_at + lane * 16
            keys = [ld_shared_f32x4(at + j * KEYS_ROW) for j in range(PASS)]
            rows = [[qk[4 * i + c] for c in range(4)] for i in range(2)]
            total = warp_sums([dot(row, key) for row in rows for key in keys], lane)
            there = Int32((lane & 7) + (lane >> 3) <= warp)  # j <= t for q, j < t for k
            if lane < 2 * PASS:
                to = base + self.triangles_at + warp * TRIANGLE_ROW + lane * 4
                st_shared_f32(to, select_f32(there, total, Float32(0.0)))

    def solve(self, base, last, warp, lane, recorded=False):
        """-> o of row `warp`, rounded, and f of all rows; column l. recorded: rows may turn out
        wrong, and even their NaN must not reach those before them."""
        sums = base + self.sums_at + lane * 4
        half = 2 * PASS * SUMS_ROW
        old = [sums + (PASS + t) * SUMS_ROW for t in range(PASS)]
        old = [ld_shared_f32(at) + ld_shared_f32(at + half) for at in old]
        at = base + self.tile.value_at + lane * 4
        values = [ld_shared_f32(at + t * VALUE_ROW) for t in range(PASS)]
        scales = [ld_shared_f32x4(base + self.tile.scales_at + t * 16) for t in range(PASS)]
        triangles = base + self.triangles_at
        errors = []
        for t in range(PASS):
            total = old[t]
            for first in range(0, t, 4):
                at = triangles + (t * TRIANGLE_ROW + (PASS + first) * 4)
                row = ld_shared_f32x4(at)
                for x, error in zip(row, errors[first:], strict=False):
                    total = total + x * error
            error = scales[t][1] * (values[t] - scales[t][0] * total)
            errors.append(select_f32(Int32(last >= t), error, Float32(0.0)))
        self.put_errors(base, errors, warp, lane)
        own = sums + warp * SUMS_ROW
        row = [
            x
            for first in range(0, PASS, 4)
            for x in ld_shared_f32x4(triangles + warp * TRIANGLE_ROW + first * 4)
        ]
        known = errors
        if recorded:
            known = [
                select_f32(Int32(warp >= j), error, Float32(0.0)) for j, error in enumerate(errors)
            ]
        total = (ld_shared_f32(own) + ld_shared_f32(own + half)) + dot(row, known)
        o = rounded(ld_shared_f32(base + self.tile.scales_at + warp * 16 + 8) * total)
        return o, errors

    @cute.jit
    def put_errors(self, base: Int32, errors, warp: Int32, lane: Int32):
        if warp == 0:
            for t in cutlass.range_constexpr(PASS):
                st_shared_f32(base + self.errors_at + t * VALUE_ROW + lane * 4, errors[t])

    def update(self, base, state, last, warp, lane):
        """state: its address; last: the last row that is there."""
        at = base + self.errors_at + lane * 4
        errors = [ld_shared_f32(at + j * VALUE_ROW) for j in range(PASS)]
        rows = [cutlass.min(j, last) for j in range(PASS)]  # their f is 0 where j is past it
        first = warp * (DIM // WARPS)
        log = base + self.tile.decay_at + last * DECAY_ROW + (first + (lane & 15)) * 4
        log = ld_shared_f32(log)
        decay, less_one = ex2_approx(log * Float32(LOG2_E)), expm1(log)  # k / L may be e^40
        for group in range(DIM // WARPS // 4):
            place = self.tile.piece_at(base, first + 4 * group, lane >> 2) + (lane & 3) * 4
            at = base + self.keys_at + (first + 4 * group) * 4
            keys = [ld_shared_f32x4(at + row * KEYS_ROW) for row in rows]
            for i in range(4):
                key = first + 4 * group + i
                old = ld_shared_f32(place + i * STATE_ROW)
                new = old + cute.arch.shuffle_sync(less_one, 4 * group + i) * old
                added = dot([row[i] for row in keys], errors)
                new = new + cute.arch.shuffle_sync(decay, 4 * group + i) * added
                st_global_f32(state + Int64(key * (4 * DIM)) + Int64(lane * 4), new)
