"""Multi-head latent attention in the persistent kernel (`reference/mla`), in the latent.

step        what                                                    signals
`latent`    `mla_latent`: cache rows, the gate, q's latent          (the op) q_latent
`stage_q`   q's latent in shared memory, for the product with q_b   (the op) q
`compute`   absorb: q_n of each head to the latent                  q_absorbed
            `mla_attend`: attention over splits of the context      mla_partial
            `mla_value`: the splits' sum, its product with values   mla_heads
`stage`     the gated heads in shared memory, for the product with o_proj

For one row there is no q_latent: `stage_q` makes it in every CTA that needs it, which costs less
than a hand-off, and the cache row and the gate are handed over with q.
Rounding as the chain of kernels: q_absorbed to bf16 (`gemv`), else see those files.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from nanok3.dsl import ld_global_u32x4, pack_bf16, st_global_u16
from nanok3.kernels.mega.mla_attend import Attend
from nanok3.kernels.mega.mla_latent import Latent
from nanok3.kernels.mega.mla_value import Values, tile_product
from nanok3.kernels.mega.role import Traced
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
        r.signal("q_absorbed")
        self.attention.load(r, r.field("mla.cache"))
        r.signal("mla_partial")
        self.values.load(r, r.field("mla.value"))
        r.signal("mla_heads")

    def latent(self, r):
        self.before.compute(r)

    def stage_q(self, r, staged):
        self.before.stage_q(r, staged)

    def compute(self, r):
        self.absorb(r)
        r.signal("q_absorbed")
        self.attention.compute(r)
        r.signal("mla_partial")
        self.values.compute(r)
        r.signal("mla_heads")

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
        if r.cta < self.units:
            r.wait("q")
        for unit in cutlass.range(r.cta, self.units, s.sms, unroll=1):
            chunk = r.take()
            if r.warp < self.tiles:
                tile = unit * self.tiles + r.warp
                head = tile // (s.kv_rank // TILE)
                token = cutlass.min(r.lane // 4, r.num_tokens - 1)
                query = (token * s.mla_heads + head) * (2 * (s.nope_dim + s.rope_dim))
                at = r.buffer("q") + Int64(query + r.lane % 4 * 16)
                x = [ld_global_u32x4(at + i * (2 * BLOCK)) for i in range(self.blocks)]
                weights = chunk + r.warp * (self.blocks * BLOCK_BYTES) + r.lane * 16
                c = tile_product(weights, x)
                base = r.buffer("q_absorbed") + Int64((tile * TILE + r.lane // 4) * 2)
                for i in cutlass.range_constexpr(1 if s.pass_rows == 1 else 2):
                    token = r.lane % 4 * 2 + i
                    if token < r.num_tokens:
                        to = base + Int64(token * (2 * s.mla_heads * s.kv_rank))
                        st_global_u16(to, pack_bf16(c[i], Float32(0.0)))
                        st_global_u16(to + 16, pack_bf16(c[2 + i], Float32(0.0)))
            r.release()
