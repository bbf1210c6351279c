"""The exchanges between ranks in the persistent kernel; their reference is `comm/exchange`.

Who makes a value stores it as words (`comm/words`) straight into the mailboxes of all ranks, who
needs it looks until all ranks' words are there. All ranks hold the same bits: sums run in the order
of ranks, in float32, over parts rounded to bf16. One rank compiles none of this.

exchange                      what a rank sends to each of P ranks           K3, P = 8, T = 1 (8)
all_reduce of delta           its sum of the owner's columns, bf16, from     28 KB (224 KB) a peer
  embedding, o_proj, down     CTA b to CTA b
all_gather of router, latent  logits f32 and latent bf16 of its rows         2.6 KB (21 KB)
reduce_moe, shared experts    as all_reduce; looked for after the experts    28 KB (224 KB)
reduce_moe, routed            its sum of a tile of Z, bf16, from CTA to CTA  14 KB (112 KB)
all_gather of delta           K slices of latent_up's rows, words of 32      3.5 KB a slice (28 KB)
                              bits, to all owners

Hops     delta: one, owner to owner, no hand-off inside a rank. Router and latent: one, after the
         rank's own "moe_in" was waited for (K slices are added before they are sent: as slices
         they would be 4 times the bytes for each of the CTAs that read them all). Shared: one,
         while the experts run. Routed: one, then the rank's own hand-off of it; sending each
         tile to one owner and its sum to all would take two hops between ranks and 2/P of the
         bytes, which pays from about 16 rows on. latent_up: the hand-off that is there anyway,
         to all ranks. Logits: each rank leaves its columns, the host gathers them.

mailbox    [source rank, ..]                       written by          read by       rewritten
attn, mlp  [CTA, own tile, T, 16] bf16             CTA b of source     CTA b         next layer
embed      the same                                CTA b               CTA b         next step
logits     [T, E / P] f32, a word of 64 bits each  any CTA             all CTAs      next MoE layer
latent     [T, Z / P] bf16                         any CTA             all CTAs      next MoE layer
routed     [T, Z] bf16                             the tile's CTA      the same CTA  next MoE layer
latent_up  [slices, T, C / P], words of 32 bits    the tile's CTA      all owners    next MoE layer

A word is rewritten when all have read it. A CTA that sends in a sub-layer has staged x of it, so it
has seen the sums (`attn_res`, stats) of all CTAs of its rank, which have therefore done with the
sub-layer before. Sums of "attn" from every rank thus say that all CTAs of all ranks have done with
the MLP before it, and sums of "mlp" (those of the shared experts too) the same of the attention; no
CTA gets x of a sub-layer before the owners of its rank have these sums. So what was sent in one
sub-layer has been read by all when any CTA sends in the next but one.
Rows from T on are not sent: tags of 64-bit words do not come again. (Words of 32 bits are, as in
`role`.)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32

from nanok3.comm.words import packed, send, sum_of_ranks
from nanok3.dsl import (
    bits_of,
    ld_global_f32,
    ld_global_f32x4,
    ld_shared_f32x4,
    st_global_u32x2,
    st_relaxed_u32,
    st_relaxed_u32x4,
    st_shared_f32x4,
    tree,
)
from nanok3.kernels.mega.linear import THREADS, rounded
from nanok3.kernels.mega.role import Traced, tagged
from nanok3.kernels.mega.sizes import TILE, WARPS, Product, Sizes

PIECE = 4  # columns of bf16 in 16 bytes of words
PIECES = TILE // PIECE  # of a tile


class Sent(Traced):
    """A K slice's sums [slice, T, rows] as words of 32 bits, to all ranks (`linear.Parts`)."""

    all_rows = True

    def __init__(self, r, box: str, product: Product, tag) -> None:
        self.product, self.tag, self.ranks, self.scope = product, tag, r.sizes.ranks, r.scope
        self.r = r
        part_bytes = 4 * r.sizes.pass_rows * product.rows
        own = r.rank * (product.slices * part_bytes) + r.cta % product.slices * part_bytes
        self.at = Int64(r.sizes.box_offsets[box]) + Int64(own)

    def store(self, local, tile, token, row, value):
        at = self.at + Int64(token * self.product.rows + tile * TILE + row) * 4
        for rank in range(self.ranks):
            st_relaxed_u32(self.r.peer(rank) + at, tagged(value, self.tag), self.scope)


class Exchange(Traced):
    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.rows, self.ranks = sizes, sizes.pass_rows, sizes.ranks

    # ---- own columns: their sum over ranks ----

    def own_tiles(self, r):
        """How many column tiles this CTA has."""
        return (self.sizes.hidden // TILE - r.cta + (self.sizes.sms - 1)) // self.sizes.sms

    def own_at(self, r, source):
        """Of a rank's part of this CTA's columns in a mailbox."""
        return (source * self.sizes.sms + r.cta) * self.sizes.own_bytes

    @cute.jit
    def send_own(self, r, area: Constexpr[str], box: Constexpr[str], tag: Uint32):
        """This rank's part, bf16 values in an area [own tile, T, 16] f32, to all ranks. A barrier
        has followed what wrote it."""
        most = self.sizes.own_tiles * self.rows * PIECES
        own = self.own_tiles(r) * (self.rows * PIECES)
        for i in cutlass.range(r.tid, most * self.ranks, THREADS, unroll=1):
            piece, to = i % most, i // most
            if (piece < own) & (piece // PIECES % self.rows < r.num_tokens):
                low, high = packed(ld_shared_f32x4(r.shared(area) + piece * 16))
                at = r.mailbox(to, box) + Int64(self.own_at(r, r.rank) + piece * 16)
                send(at, low, high, tag, r.scope)

    @cute.jit
    def receive_own(self, r, area: Constexpr[str], box: Constexpr[str], tag: Uint32):
        """The sum over ranks, rounded, to the area. A barrier has followed what read it."""
        own = self.own_tiles(r) * (self.rows * PIECES)
        for base in cutlass.range(0, own, THREADS, unroll=1):
            index = cutlass.min(base + r.tid, own - 1)
            row = index // PIECES % self.rows
            known = cutlass.min(row, r.num_tokens - 1)
            piece = index + (known - row) * PIECES
            box_at = r.mailbox(r.rank, box) + Int64(piece * 16)
            places = [box_at + Int64(self.own_at(r, s)) for s in range(self.ranks)]
            found = r.peer_words(places, [Int32(s) for s in range(self.ranks)], tag)
            total = [rounded(v) for v in sum_of_ranks(found, self.ranks)]
            if (base + r.tid < own) & (row < r.num_tokens):
                st_shared_f32x4(r.shared(area) + index * 16, tuple(total))

    # ---- router and latent: all ranks' columns ----

    def logit_at(self, r, row, expert):
        """-> address of an expert's logit, the rank that it is of."""
        sizes = self.sizes
        source = expert // sizes.router_rows
        place = (source * self.rows + row) * sizes.router_rows + expert % sizes.router_rows
        return r.mailbox(r.rank, "logits") + Int64(place) * 8, source

    def latent_at(self, r, row, column):
        """-> address of 4 columns of the latent, the rank that they are of."""
        sizes = self.sizes
        source = column // sizes.latent_rows
        place = (source * self.rows + row) * sizes.latent_rows + column % sizes.latent_rows
        return r.mailbox(r.rank, "latent") + Int64(place) * 4, source

    @cute.jit
    def send_moe(self, r, tag: Uint32):
        """This rank's router logits and latent, sums of K slices of "moe_in": a lane two logits or
        four columns, for one rank. "moe_in" was waited for."""
        sizes, product = self.sizes, self.sizes.products["moe_in"]
        pairs = sizes.router_rows // 2
        per_row = pairs + sizes.latent_rows // PIECE
        items = r.num_tokens * per_row
        across = (items + 31) // 32  # warps' work for one rank
        step = self.rows * product.rows * 4
        first, last = r.warp * sizes.sms + r.cta, across * self.ranks
        for share in cutlass.range(first, last, WARPS * sizes.sms, unroll=1):
            item, to = share % across * 32 + r.lane, share // across
            if item < items:
                row, i = item // per_row, item % per_row
                source = r.buffer("moe_in") + Int64(row * product.rows) * 4
                if i < pairs:
                    at = source + Int64(i * 8)
                    parts = [at + Int64(s * step) for s in range(product.slices)]
                    two = [tree([ld_global_f32(p + Int64(4 * k)) for p in parts]) for k in range(2)]
                    place = (r.rank * self.rows + row) * sizes.router_rows + 2 * i
                    box = r.mailbox(to, "logits") + Int64(place) * 8
                    send(box, bits_of(two[0]), bits_of(two[1]), tag, r.scope)
                else:
                    column = (i - pairs) * PIECE
                    at = source + Int64(sizes.router_tiles * TILE + column) * 4
                    parts = [ld_global_f32x4(at + Int64(s * step)) for s in range(product.slices)]
                    low, high = packed([tree([p[k] for p in parts]) for k in range(PIECE)])
                    place = (r.rank * self.rows + row) * sizes.latent_rows + column
                    box = r.mailbox(to, "latent") + Int64(place) * 4
                    send(box, low, high, tag, r.scope)

    # ---- routed latent: the sum over ranks ----

    def routed_at(self, source, row, column):
        return ((source * self.rows + row) * self.sizes.latent + column) * 4

    def send_routed(self, r, to, row, column, values, tag):
        """4 columns of this rank's part."""
        low, high = packed(values)
        at = r.mailbox(to, "routed") + Int64(self.routed_at(r.rank, row, column))
        send(at, low, high, tag, r.scope)

    @cute.jit
    def receive_routed(self, r, first: Int32, end: Int32, tag: Uint32):
        """The sum over ranks of tiles first .. end - 1 of Z, rounded, to the buffer "routed"."""
        pieces = (end - first) * (self.rows * PIECES)
        for base in cutlass.range(0, pieces, THREADS, unroll=1):
            index = cutlass.min(base + r.tid, pieces - 1)
            row = index // PIECES % self.rows
            known = cutlass.min(row, r.num_tokens - 1)
            tile = first + index // (PIECES * self.rows)
            column = tile * TILE + index % PIECES * PIECE
            box = r.mailbox(r.rank, "routed")
            places = [box + Int64(self.routed_at(s, known, column)) for s in range(self.ranks)]
            found = r.peer_words(places, [Int32(s) for s in range(self.ranks)], tag)
            total = sum_of_ranks(found, self.ranks)
            if (base + r.tid < pieces) & (row < r.num_tokens):
                self.store_routed(r, row * self.sizes.latent + column, total)

    def store_routed(self, r, index, values):
        """For this rank's CTAs, as `expert_down` does for one rank."""
        routed = r.buffer("routed")
        if self.sizes.is_words("routed"):
            tag = r.tag_of["expert_act"]
            words = tuple(tagged(rounded(v), tag) for v in values)
            st_relaxed_u32x4(routed + Int64(index) * 4, words)
        else:
            st_global_u32x2(routed + Int64(index) * 2, packed(values))

    # ---- latent_up: all ranks' columns ----

    def up_parts(self, r, row, column):
        """Addresses of the K slices' words of a column of C."""
        sizes, product = self.sizes, self.sizes.products["latent_up"]
        source, own = column // sizes.up_rows, column % sizes.up_rows
        place = (source * product.slices * self.rows + row) * product.rows + own
        at = r.mailbox(r.rank, "latent_up") + Int64(place) * 4
        step = self.rows * product.rows * 4
        return [at + Int64(s * step) for s in range(product.slices)]
