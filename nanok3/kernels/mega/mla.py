"""Multi-head latent attention in the persistent kernel (`reference/mla`), in the latent.

step        what                                                    published
`latent`    `mla_latent`: cache rows, the gate, q's latent          (the op) q_latent
`stage_q`   q's latent in shared memory, for the product with q_b   (the op) q
`compute`   absorb: q_n of each head to the latent                  q_absorbed
            `mla_attend`: attention over splits of the context      mla_partial
            `mla_value`: the splits' sum, its product with values   mla_heads
`stage`     the gated heads in shared memory, for the product with o_proj

Of one row all that is published are words, with the tag of "mla_in"; the signal "q_latent" says
only that the cache row is written. `stage_q` makes q's latent in every CTA that needs it, which
costs less than a hand-off.
Rounding as the chain of kernels: q_absorbed to bf16 (`gemv`), else see those files.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from nanok3.dsl import ld_global_u32x4, pack_bf16, st_global_u16, st_relaxed_u32
from nanok3.kernels.mega.linear import rounded
from nanok3.kernels.mega.mla_attend import Attend
from nanok3.kernels.mega.mla_latent import Latent
from nanok3.kernels.mega.mla_value import Values, tile_product
from nanok3.kernels.mega.role import Traced, bf16_pair, tagged
from nanok3.kernels.mega.sizes import BLOCK, BLOCK_BYTES, SLOT_BLOCKS, TILE, Sizes


class MLA(Traced):
    def __init__(self, sizes: Sizes) -> None:
        s = self.sizes = sizes
        assert s.nope_dim % BLOCK == 0 and s.kv_rank % (4 * TILE) == 0
        self.before, self.attention = Latent(s), Attend(s)
        self.values = Values(s, self.attention)
        parts = self.before, self.attention, self.values
        self.scratch_bytes = max(part.scratch_bytes for part in parts)
        # absorb: a tile a warp; few tiles a unit, so that many CTAs have one
        tiles = s.mla_heads * s.kv_rank // TILE
        self.blocks = s.nope_dim // BLOCK
        self.tiles = next((n for n in (1, 2) if tiles <= n * s.sms), 4)
        self.units = tiles // self.tiles
        assert self.tiles * self.blocks <= SLOT_BLOCKS

    def load(self, r):
        """The loader warp, of `compute`."""
        r.begin("mla")
        self.load_absorb(r, r.field("mla.absorb"))
        self.signal(r, "q_absorbed")
        self.attention.load(r, r.field("mla.cache"))
        self.signal(r, "mla_partial")
        self.values.load(r, r.field("mla.value"))
        self.signal(r, "mla_heads")

    def signal(self, r, buffer):
        if not self.sizes.is_words(buffer):
            r.signal(buffer)

    def latent(self, r):
        self.before.compute(r)

    def stage_q(self, r, staged):
        self.before.stage_q(r, staged)

    def compute(self, r):
        self.absorb(r)
        self.signal(r, "q_absorbed")
        self.attention.compute(r)
        self.signal(r, "mla_partial")
        self.values.compute(r)
        self.signal(r, "mla_heads")

    def stage(self, r, staged):
        self.values.stage(r, staged)

    # ---- absorb ----

    @cute.jit
    def load_absorb(self, r, base: Int64):
        unit_bytes = self.tiles * self.blocks * BLOCK_BYTES
        for unit in cutlass.range(r.cta, self.units, self.sizes.sms, unroll=1):
            r.fill(base + Int64(unit) * unit_bytes, Int32(unit_bytes))

    @cute.jit
    def absorb(self, r):
        """A tile a warp: [16 rows of the latent, T]."""
        s = self.sizes
        if const_expr(not s.is_words("q")):  # noqa: SIM102 - one is decided here, one on the GPU
            if r.cta < self.units:
                r.wait("q")
        for unit in cutlass.range(r.cta, self.units, s.sms, unroll=1):
            chunk = r.take()
            if r.warp < self.tiles:
                tile = unit * self.tiles + r.warp
                head = tile // (s.kv_rank // TILE)
                token = cutlass.min(r.lane // 4, r.num_tokens - 1)
                query = (token * s.mla_heads + head) * (s.nope_dim + s.rope_dim) + r.lane % 4 * 8
                x = self.queries(r, query)
                weights = chunk + r.warp * (self.blocks * BLOCK_BYTES) + r.lane * 16
                c = tile_product(weights, x)
                index = tile * TILE + r.lane // 4
                for i in cutlass.range_constexpr(1 if s.pass_rows == 1 else 2):
                    token = r.lane % 4 * 2 + i
                    if token < r.num_tokens:
                        self.store(r, index + token * (s.mla_heads * s.kv_rank), c[i], c[2 + i])
            r.release()

    def queries(self, r, column):
        """This lane's 8 of each 32 columns of a head's q_n, as bf16 pairs."""
        if self.sizes.is_words("q"):
            at = r.buffer("q") + Int64(column * 4)
            steps = range(self.blocks)
            addresses = [at + (4 * BLOCK * i + 16 * half) for i in steps for half in range(2)]
            words = r.words(addresses, r.tag_of["mla_in"])
            pairs = [bf16_pair(words[2 * i], words[2 * i + 1]) for i in range(4 * self.blocks)]
            return [pairs[4 * i : 4 * i + 4] for i in steps]
        at = r.buffer("q") + Int64(column * 2)
        return [ld_global_u32x4(at + i * (2 * BLOCK)) for i in range(self.blocks)]

    def store(self, r, index, low, high):
        """Values `index` and `index` + 8 of q_absorbed."""
        base = r.buffer("q_absorbed")
        if self.sizes.is_words("q_absorbed"):
            tag, to = r.tag_of["mla_in"], base + Int64(index) * 4
            st_relaxed_u32(to, tagged(rounded(low), tag))
            st_relaxed_u32(to + 32, tagged(rounded(high), tag))
        else:
            to = base + Int64(index) * 2
            st_global_u16(to, pack_bf16(low, Float32(0.0)))
            st_global_u16(to + 16, pack_bf16(high, Float32(0.0)))
