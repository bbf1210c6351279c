"""The ops of the model as the persistent kernel's two kinds of warps read them.

`LoadOps` asks for an op's weights, `ComputeOps` does the op; both have a method for every op of
`model.py`, called with names where other readings get tensors. Products stand here with what they
wait for and signal; KDA, MLA, routing and experts do so in modules of their own. One rank: nothing
is exchanged, and parts of buffers that other ranks fill are read as they were left.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

from nanok3.dsl import (
    bf16_high,
    bf16_low,
    ld_global_f32,
    ld_global_i64,
    ld_global_u16,
    ld_global_u32x4,
    ld_global_u32x4_or_zero,
    ld_shared_f32,
    ld_shared_u32x4,
    pack_bf16,
    rsqrt_approx,
    select_f32,
    situ,
    st_global_f32,
    st_global_u16,
    st_shared_f32,
    st_shared_u32x2,
    st_shared_u32x4,
    tree,
    warp_sum,
)
from nanok3.kernels.mega.linear import (
    THREADS,
    Own,
    Parts,
    Rounded,
    rounded,
    stage_rows,
    x_stride,
)
from nanok3.kernels.mega.role import DONE, READY, Compute, Loader, bf16_pair, untagged
from nanok3.kernels.mega.sizes import TILE, WARPS

NEXT = {"attn": ("mlp.score", "mlp.streams"), "mlp": ("next.score", "next.streams")}
HALF = {"attn": 0, "mlp": 1, "output": 0}  # of `scores`, which the op of these weights reads


def product_of(weight: str) -> str:
    """The product that multiplies by a field."""
    return "moe_in" if weight == "moe.in_proj" else weight.removeprefix("moe.")


def normed_pair(word, scale, rstd):
    """Two values of a row, normalised and scaled, with the roundings of `rms_norm`."""
    low, high = rounded(bf16_low(word) * rstd), rounded(bf16_high(word) * rstd)
    return pack_bf16(low * bf16_low(scale), high * bf16_high(scale))


class LoadOps(Loader):
    """The loader warp's reading. It counts the signals of each op as the compute warps do."""

    def load(self, weight: str):
        self.fresh()
        self.program.products[product_of(weight)].load(self, self.field(weight))

    def start(self):
        pass

    def stop(self):
        pass

    def embed(self, ids, table, *, out):
        pass

    def attn_res(self, delta, streams, w, fresh, *, out):
        pass

    def linear(self, x, weight, *, out):
        self.load(weight)
        if out not in ("delta_sum", "shared_sum") and not self.sizes.is_words(out):
            self.signal(out)

    def kda(self, x, w, conv_state, state, state_slots, *, out):
        self.fresh()
        self.program.units["kda"].load(self)
        if not self.sizes.is_words("kda_heads"):
            self.signal("kda_heads")

    def kda_recorded(self, x, w, conv_state, state, state_slots, records, *, out):
        self.kda(x, w, conv_state, state, state_slots, out=out)

    def tap(self, delta, streams, *, out):
        pass

    def mla_latent(self, x, w, cache, slot_mapping, *, out):
        self.signal("q_latent")

    def mla(self, q, x, w, cache, block_table, positions, block_size, *, out):
        self.fresh()
        self.program.units["mla"].load(self)

    def gate_up(self, x, weight, *, out):
        self.load(weight)
        self.signal("dense_in")
        self.signal("dense_act")

    def moe_in(self, x, w, *, out):
        self.load("moe.in_proj")
        self.signal("moe_in")

    def route(self, logits, w, *, out):
        self.signal("shared_act")

    def experts(self, latent, ids, weights, w, *, out):
        self.fresh()
        self.program.units["experts"].load(self)

    def latent_up(self, routed, shared, w, *, out):
        self.load("moe.latent_up")

    def lm_head(self, x, weight, rows, *, out):
        self.load("lm_head")
        self.signal("lm_head")

    def all_reduce(self, part, *, out):
        pass

    def all_gather(self, parts, *, out):
        pass

    def reduce_moe(self, parts, *, out):
        pass


class ComputeOps(Compute):
    """The compute warps' reading."""

    def __init__(self, program: Any, env: dict[str, Any]) -> None:
        super().__init__(program, env)
        self.sub = "attn"  # whose AttnRes weights are in use: "attn", "mlp" or "output"
        self.tap_column: Any = None  # of the next AttnRes, if the text taps the layer

    # ---- first and last ----

    def start(self):
        """delta and the current stream of the own columns, and what the first AttnRes needs."""
        self.begin("start")
        last = self.number("attn.streams") - 1
        if self.program.whole:
            self.program.texts["embed"](self)
        else:
            self.read_own(last)
        attn_res, score = self.program.attn_res, self.field("attn.score")
        self.half = HALF["attn"]
        self.score_tag[0] = self.new_tag("scores")
        self.bar()
        attn_res.score_ahead(self, score, last, last, self.num_tokens)
        attn_res.prepare(self, score, last)

    @cute.jit
    def read_own(self, last: Int32):
        """Own columns of the caller's delta and of the stream that the first layer adds to."""
        attn_res = self.program.attn_res
        for index in cutlass.range(self.tid, attn_res.values, THREADS, unroll=1):
            row = index // TILE % self.sizes.pass_rows
            column, there = attn_res.column(self, index)
            if there & (row < self.num_tokens):
                at = Int64((row * self.sizes.hidden + column) * 2)
                st_shared_f32(
                    self.shared("delta") + index * 4, bf16_low(ld_global_u16(self.delta + at))
                )
                current = bf16_low(ld_global_u16(attn_res.stream(self, last) + at))
                st_shared_f32(self.shared("current") + index * 4, current)

    def stop(self):
        self.begin("stop")
        self.write_own()

    @cute.jit
    def write_own(self):
        """delta of the own columns, to the caller."""
        self.bar()
        attn_res = self.program.attn_res
        for index in cutlass.range(self.tid, attn_res.values, THREADS, unroll=1):
            row = index // TILE % self.sizes.pass_rows
            column, there = attn_res.column(self, index)
            if there & (row < self.num_tokens):
                at = self.delta + Int64((row * self.sizes.hidden + column) * 2)
                value = ld_shared_f32(self.shared("delta") + index * 4)
                st_global_u16(at, pack_bf16(value, Float32(0.0)))

    def embed(self, ids, table, *, out):
        self.embed_own()

    @cute.jit
    def embed_own(self):
        """Rows of the table; a row whose id is another rank's is zero."""
        attn_res, sizes = self.program.attn_res, self.sizes
        for index in cutlass.range(self.tid, attn_res.values, THREADS, unroll=1):
            row = index // TILE % sizes.pass_rows
            column, there = attn_res.column(self, index)
            value = Float32(0.0)
            if there & (row < self.num_tokens):
                id_ = Int32(ld_global_i64(self.input_ids + Int64(row * 8))) - sizes.embed_first
                if (id_ >= 0) & (id_ < sizes.embed_rows):
                    at = (Int64(id_) * sizes.hidden + Int64(column)) * 2
                    value = bf16_low(ld_global_u16(self.embed_table + at))
            st_shared_f32(self.shared("delta") + index * 4, value)

    # ---- AttnRes, and the products that read x ----

    def tap(self, delta, streams, *, out):
        """By the AttnRes that follows, which makes this sum."""
        self.tap_column = self.number("tap")

    def attn_res(self, delta, streams, w, fresh, *, out):
        self.begin(f"{w}_res")
        self.sub = w
        last = self.number(f"{w}.streams") - 1
        is_fresh = Int32(0) if w == "output" else self.number(f"{w}.fresh")
        self.half = HALF[w]
        tag = self.new_tag("mixed")
        tap = Int32(-1) if self.tap_column is None else self.tap_column
        self.tap_column = None
        self.program.attn_res.update(self, last, is_fresh, self.num_tokens, tap, tag)
        self.mark(DONE)

    def from_x(self, product: str, buffer: str):
        """x from the streams, a K slice's product with it, and the next AttnRes's scores."""
        self.begin(product)
        linear, attn_res, sub = self.program.products[product], self.program.attn_res, self.sub
        last, x = self.number(f"{sub}.streams") - 1, self.shared("scratch")
        width = linear.product.part_width
        first = linear.place(self)[0] * width
        norm = self.field(f"{sub}.norm")
        place = last, first, width, self.num_tokens, x
        attn_res.stage(self, norm, *place, self.tag_of["mixed"])
        self.bar()
        self.mark(READY)
        tag = self.new_tag(buffer) if self.sizes.is_words(buffer) else None
        linear.multiply(self, x, self.num_tokens, Parts(self, buffer, linear.product, tag))
        if tag is None:
            self.signal(buffer)
        if sub == "attn":
            self.score_next()

    def score_next(self):
        """The next AttnRes's scores of finished streams, also of the one that p became if that is
        finished with it; `prepare` will look for them."""
        score, streams = NEXT[self.sub]
        last, finished = self.number(f"{self.sub}.streams") - 1, self.number(streams) - 1
        self.half = HALF["mlp" if self.sub == "attn" else "attn"]
        self.score_tag[0] = self.new_tag("scores")
        attn_res = self.program.attn_res
        end = cutlass.min(finished, last)
        attn_res.score_ahead(self, self.field(score), end, finished, self.num_tokens)
        self.score_last(self.field(score), last, finished)

    @cute.jit
    def score_last(self, score: Int64, last: Int32, finished: Int32):
        if finished > last:
            tag = self.tag_of["mixed"]
            self.program.attn_res.score_last(self, score, last, self.num_tokens, tag)

    def prepare(self):
        """What the next AttnRes needs and can have now, after `score_next`."""
        score, streams = NEXT[self.sub]
        finished = self.number(streams) - 1
        self.program.attn_res.prepare(self, self.field(score), finished)

    # ---- products ----

    def linear(self, x, weight, *, out):
        if x == "x":
            self.from_x(product_of(weight), out)
            return
        self.begin(weight)
        if out == "delta_sum":
            self.prepare()
        linear = self.program.products[product_of(weight)]
        staged = self.shared("scratch")
        if self.sizes.is_words(x):
            self.bar()  # scratch is free
        elif x != "q_latent":
            self.wait(x)
        if x == "q_latent":
            self.program.units["mla"].stage_q(self, staged)
        elif x in ("kda_heads", "mla_heads"):
            self.program.units[x.removesuffix("_heads")].stage(self, staged)
        else:
            k = linear.product.k
            stage_rows(self, self.buffer(x), Int32(2 * k), k, self.num_tokens, staged)
        self.bar()
        if out == "q":
            sink: Any = Rounded(self, "q", linear.product, self.tag_of.get("mla_in"))
        else:
            sink = Own(self, "delta" if out == "delta_sum" else "shared")
        linear.multiply(self, staged, self.num_tokens, sink)
        if out == "q" and not self.sizes.is_words("q"):
            self.signal(out)

    def gate_up(self, x, weight, *, out):
        self.from_x(weight, "dense_in")
        self.wait("dense_in")
        product = self.program.products[weight].product
        self.act("dense_in", "dense_act", product, 0, self.sizes.dense_width)
        self.signal("dense_act")
        self.score_next()  # of streams that were written before dense_in was signalled

    def moe_in(self, x, w, *, out):
        self.program.units["route"].ahead(self)
        self.from_x("moe_in", "moe_in")

    @cute.jit
    def act(
        self,
        source: Constexpr[str],
        target: Constexpr[str],
        product: Constexpr,
        first_tile: Constexpr[int],
        width: Constexpr[int],
    ):
        """SiTU of the sums of K slices: tiles of 8 gate and 8 up rows -> [T, width] bf16."""
        values = self.num_tokens * width
        last_first = THREADS - 1 - self.tid  # the last warps: the first ones have other work
        for i in cutlass.range(
            last_first * self.sizes.sms + self.cta, values, THREADS * self.sizes.sms, unroll=1
        ):
            row, column = i // width, i % width
            at = (first_tile + column // 8) * TILE + column % 8
            gate = self.sum_parts(source, product, row, at)
            up = self.sum_parts(source, product, row, at + 8)
            value = situ(rounded(gate), rounded(up), self.sizes.beta, self.sizes.linear_beta)
            to = self.buffer(target) + Int64(row * width + column) * 2
            st_global_u16(to, pack_bf16(value, Float32(0.0)))

    def sum_parts(self, source, product, row, column):
        """One value: the K slices' sums in their order, by pairs."""
        base = self.buffer(source) + Int64(row * product.rows + column) * 4
        step = self.sizes.pass_rows * product.rows * 4
        return tree([ld_global_f32(base + Int64(s * step)) for s in range(product.slices)])

    # ---- attention ----

    def kda(self, x, w, conv_state, state, state_slots, *, out):
        self.begin("kda")
        if self.sizes.is_words("kda_heads"):
            self.new_tag("kda_heads")
        state = self.program.units["kda"].compute_heads(self)
        if not self.sizes.is_words("kda_heads"):
            self.signal("kda_heads")
        self.program.units["kda"].store(self, state)

    def kda_recorded(self, x, w, conv_state, state, state_slots, records, *, out):
        self.begin("kda")
        self.program.units["kda"].compute_heads(self)
        self.signal("kda_heads")

    def mla_latent(self, x, w, cache, slot_mapping, *, out):
        self.begin("mla_latent")
        self.program.units["mla"].latent(self)
        self.signal("q_latent")

    def mla(self, q, x, w, cache, block_table, positions, block_size, *, out):
        self.begin("mla")
        self.program.units["mla"].compute(self)

    # ---- mixture of experts ----

    def route(self, logits, w, *, out):
        """And the shared expert's activation, while the router's logits are on their way."""
        self.begin("route")
        self.wait("moe_in")
        self.program.units["route"].compute(self, self.activate_shared)

    def activate_shared(self):
        first = self.sizes.router_tiles + self.sizes.latent_tiles
        product = self.program.products["moe_in"].product
        self.act("moe_in", "shared_act", product, first, self.sizes.shared_width)
        self.program.units["experts"].ahead(self)
        self.signal("shared_act")  # of one row it also says that moe_in has been read

    def experts(self, latent, ids, weights, w, *, out):
        self.program.units["experts"].compute(self)

    def latent_up(self, routed, shared, w, *, out):
        self.begin("latent_up")
        linear, staged = self.program.products["latent_up"], self.shared("scratch")
        width = linear.product.part_width
        first = linear.place(self)[0] * width
        self.score_next()  # by the last CTAs, which have none of this op's tiles
        norm = self.field("moe.routed_norm") if self.sizes.routed_norm else Int64(0)
        if self.sizes.is_words("routed"):
            self.bar()  # scratch is free
            self.stage_words(norm, first, width, staged)
        else:
            self.wait("routed")
            self.stage_routed(norm, first, width, staged)
        self.bar()
        sink = Parts(self, "latent_up", linear.product, self.new_tag("latent_up"))
        linear.multiply(self, staged, self.num_tokens, sink)

    @cute.jit
    def stage_words(self, norm: Int64, first: Int32, width: Constexpr[int], staged: Int32):
        """`stage_routed` of one row: its words are seen once, and lie behind what is staged."""
        z, raw = self.sizes.latent, staged + x_stride(width)
        loads = range(-(-z // (4 * THREADS)))
        quads = [cutlass.min(self.tid + i * THREADS, z // 4 - 1) for i in loads]
        addresses = [self.buffer("routed") + Int64(quad * 16) for quad in quads]
        words = self.words(addresses, self.tag_of["expert_act"])
        squares = []
        for i in cutlass.range_constexpr(len(quads)):
            pairs = [bf16_pair(words[4 * i + k], words[4 * i + k + 1]) for k in (0, 2)]
            st_shared_u32x2(raw + quads[i] * 8, tuple(pairs))
            values = [untagged(words[4 * i + k]) for k in range(4)]
            there = Uint32(self.tid + i * THREADS < z // 4)
            squares.append(select_f32(there, tree([v * v for v in values]), Float32(0.0)))
        (square,) = warp_sum([tree(squares)])
        if self.lane == 0:
            st_shared_f32(self.shared("small") + self.warp * 4, square)
        self.bar()
        for i in cutlass.range(self.tid, width // 8, THREADS, unroll=1):
            eight = ld_shared_u32x4(raw + (first + i * 8) * 2)
            if cutlass.const_expr(self.sizes.routed_norm):
                eight = self.normed(eight, norm + Int64((first + i * 8) * 2), Int32(0))
            st_shared_u32x4(staged + i * 16, eight)

    def normed(self, words, scale_at, row):
        """8 columns of a row, of which `small` has the warps' sums of squares."""
        scale = ld_global_u32x4(scale_at)
        squares = self.shared("small") + row * (4 * WARPS)
        square = tree([ld_shared_f32(squares + w * 4) for w in range(WARPS)])
        mean = square * Float32(1.0 / self.sizes.latent)
        rstd = rsqrt_approx(mean + Float32(self.sizes.eps))
        return [normed_pair(words[k], scale[k], rstd) for k in range(4)]

    @cute.jit
    def stage_routed(self, norm: Int64, first: Int32, width: Constexpr[int], staged: Int32):
        """Columns of the routed latent, normalised if the model does, 8 at a time."""
        z, source = self.sizes.latent, self.buffer("routed")
        if cutlass.const_expr(self.sizes.routed_norm):
            for row in cutlass.range(self.num_tokens, unroll=1):
                self.sum_squares(source + Int64(row * (2 * z)), row)
            self.bar()
        per_row = width // 8
        for i in cutlass.range(self.tid, self.num_tokens * per_row, THREADS, unroll=1):
            row, column = i // per_row, i % per_row * 8
            words = ld_global_u32x4(source + Int64((row * z + first + column) * 2))
            if cutlass.const_expr(self.sizes.routed_norm):
                words = self.normed(words, norm + Int64((first + column) * 2), row)
            st_shared_u32x4(staged + row * x_stride(width) + column * 2, words)

    @cute.jit
    def sum_squares(self, row_at: Int64, row: Int32):
        """Of a row of the routed latent: each warp's part, to `small`."""
        loads = -(-self.sizes.latent // (8 * THREADS))
        squares = []
        for i in cutlass.range_constexpr(loads):  # all in flight
            piece = self.tid + i * THREADS
            there = Uint32(piece < self.sizes.latent // 8)
            words = ld_global_u32x4_or_zero(row_at + Int64(piece * 16), Int32(there))
            values = [f(w) for w in words for f in (bf16_low, bf16_high)]
            squares.append(tree([v * v for v in values]))
        (square,) = warp_sum([tree(squares)])
        if self.lane == 0:
            st_shared_f32(self.shared("small") + (row * WARPS + self.warp) * 4, square)

    # ---- exchanges ----

    def all_reduce(self, part, *, out):
        pass

    def reduce_moe(self, parts, *, out):
        pass

    def all_gather(self, parts, *, out):
        if out == ("delta",):
            self.begin("combine")
            self.prepare()
            self.combine(self.tag_of["latent_up"])
        elif out == ("logits",):
            self.begin("logits")
            self.wait("lm_head")
            self.write_logits()

    @cute.jit
    def combine(self, tag: Uint32):
        """delta of the own columns, where they are this rank's part: the latent's product, plus the
        shared expert's. Of other ranks' parts it stays what it was, as in the other readings."""
        attn_res, sizes = self.program.attn_res, self.sizes
        product = self.program.products["latent_up"].product
        for base in cutlass.range(0, attn_res.values, THREADS, unroll=1):
            index = cutlass.min(base + self.tid, attn_res.values - 1)
            row = cutlass.min(index // TILE % sizes.pass_rows, self.num_tokens - 1)
            column = cutlass.min(attn_res.column(self, index)[0], sizes.hidden - 1)
            own = cutlass.min(cutlass.max(column - sizes.up_first, 0), sizes.up_rows - 1)
            at = self.buffer("latent_up") + Int64(row * product.rows + own) * 4
            step = sizes.pass_rows * product.rows * 4
            words = self.words([at + Int64(s * step) for s in range(product.slices)], tag, 1)
            value = tree([untagged(words[s]) for s in range(product.slices)])
            value = value + ld_shared_f32(self.shared("shared") + index * 4)
            if (base + self.tid < attn_res.values) & (column - sizes.up_first == own):
                st_shared_f32(self.shared("delta") + index * 4, rounded(value))

    def lm_head(self, x, weight, rows, *, out):
        self.from_x("lm_head", "lm_head")

    @cute.jit
    def write_logits(self):
        product = self.program.products["lm_head"].product
        values = self.num_tokens * self.sizes.vocab
        for i in cutlass.range(
            self.cta * THREADS + self.tid, values, THREADS * self.sizes.sms, unroll=1
        ):
            row, column = i // self.sizes.vocab, i % self.sizes.vocab
            value = self.sum_parts("lm_head", product, row, column)
            st_global_f32(self.logits + Int64(row * self.logits_stride + column) * 4, value)
