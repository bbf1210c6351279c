"""Top-k routing in the persistent kernel: every CTA routes for itself, nothing is exchanged.

    s = sigmoid(logits), pick = s + bias; the A largest pick of a row, value down, id up
    weights = s of these, divided by their sum + 1e-20 if renormalised, times the scaling

Shapes   logits [T, E] f32: this rank's experts are sums of K slices of buffer "moe_in", the others
         lie in `router_logits`; where ranks exchange, all are words (`exchange`). T <= 8,
         E <= 1024, A <= 32 and A <= E.
Gives    in the shared area "routed", until the next MoE layer: n, how many experts the rows have
         among them; their ids, ascending; where [n, 8], which of a row's experts this one is, or
         -1; weight [n, 8], its weight there, or 0 (as `kernels/routed`). CTA 0 also writes the
         rows' ids [T, A] i64 and weights [T, A] f32 to the caller's buffers.
How      A threshold that A keys reach is the A-th largest of 32 groups' best ones. What reaches it
         is gathered (some 24 of 896), in the order of ids, and ranked by counting.
         One row: all warps share its keys, each gathers and ranks its own part. More rows: a warp a
         row, and a bitmap of experts that gives each its place in the list.
Waits    for "moe_in", before it is called (`ops`). The bias was asked for by `ahead`.
Signals  the mbarrier `routed`, once a layer, when the list is there; weights follow it, a barrier
         of the compute warps must come before they are read.
Rounding as `kernels/route`, from which keys come: the same ids and weights for the same logits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    cp_async_16,
    float_of,
    ld_global_f32,
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_u32x4,
    max_u32,
    red_or_shared,
    select_f32,
    sigmoid,
    st_global_f32,
    st_global_u32x2,
    st_shared_f32,
    st_shared_u32,
    tree,
    warp_max_u32,
    warp_sum,
)
from nanok3.kernels.mega.role import Frozen
from nanok3.kernels.mega.sizes import PASS, WARPS, Sizes
from nanok3.kernels.route import sort_key

THREADS = 32 * WARPS
LANES = 32
BEYOND = 0x7FFFFFFF  # an id above all ids
PAD = 8  # keys behind a row's gathered ones: they are read eight at a time


class Tables(Frozen):
    """Where things lie in the shared area "routed"."""

    def __init__(self, sizes: Sizes) -> None:
        self.capacity = min(sizes.num_experts, sizes.act_rows)
        self.top_stride = -(-sizes.top_k // 4) * 4
        self.total = 0  # [1] i32
        self.bias = 16  # [E] f32
        self.experts = self.bias + -(-sizes.num_experts // 4) * 16  # [n] i32
        self.where = self.experts + -(-self.capacity // 4) * 16  # [n, 8] i32
        self.weight = self.where + self.capacity * PASS * 4  # [n, 8] f32
        self.bits = self.weight + self.capacity * PASS * 4  # [32] u32, experts in use
        self.top = self.bits + LANES * 4  # [T, A] i32, a row's experts by rank
        self.table_bytes = self.top + sizes.pass_rows * self.top_stride * 4

    def num_experts_here(self, base):
        return Int32(ld_shared_u32(base + self.total))

    def expert(self, base, i):
        return Int32(ld_shared_u32(base + self.experts + i * 4))

    def place(self, base, i, row):
        """Which of the row's experts expert i of the list is; -1: none."""
        return Int32(ld_shared_u32(base + self.where + (i * PASS + row) * 4))


class Route(Frozen):
    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.tables = sizes, Tables(sizes)
        self.table_bytes = self.tables.table_bytes
        self.rows = sizes.pass_rows
        chunks = -(-sizes.num_experts // LANES)
        self.chunks = chunks if self.rows > 1 else -(-chunks // WARPS)  # of 32 ids, of a warp
        self.segment = self.chunks * LANES + PAD  # keys that a warp may gather
        # best [row, 32], gathered keys [warp, segment], their ids, their logits, counts [warp]
        self.best = 0
        self.keys = self.best + self.rows * LANES * 4
        self.ids = self.keys + WARPS * self.segment * 4
        self.logits = self.ids + WARPS * self.segment * 4  # of one row the gathered keys' logits
        self.counts = self.logits + (WARPS * self.segment * 4 if self.rows == 1 else 0)
        self.scratch_bytes = self.counts + WARPS * 4

    # ---- logits ----

    def own_logit(self, r, row, column):
        """Of this rank's router row `column`: the K slices' sums in their order, by pairs."""
        product = self.sizes.products["moe_in"]
        base = r.buffer("moe_in") + Int64(row * product.rows + column) * 4
        step = self.rows * product.rows * 4
        return tree([ld_global_f32(base + Int64(s * step)) for s in range(product.slices)])

    def sent_logits(self, r, row, experts):
        """Of experts of all ranks, when they are there."""
        places = [r.program.exchange.logit_at(r, row, expert) for expert in experts]
        addresses, sources = map(list, zip(*places, strict=True))
        name = "all_gather of router"
        found = r.peer_words(addresses, sources, r.tag_of["moe"], 1, name)
        return [float_of(found[2 * i]) for i in range(len(experts))]

    def logit(self, r, row, expert, low=0, high=1024):
        """Of an expert, known to be one of low .. high - 1 when the kernel is compiled."""
        if self.sizes.ranks > 1:
            return self.sent_logits(r, row, [expert])[0]
        first, end = self.sizes.router_first, self.sizes.router_first + self.sizes.router_rows
        low, high = min(low, self.sizes.num_experts - 1), min(high, self.sizes.num_experts)
        if first <= low and high <= end:
            return self.own_logit(r, row, expert - first)
        at = r.router_logits + Int64(row * self.sizes.num_experts + expert) * 4
        other = ld_global_f32(at)
        if high <= first or end <= low:
            return other
        column = cutlass.min(cutlass.max(expert - first, 0), end - first - 1)
        own = self.own_logit(r, row, column)
        here = Uint32((expert >= first) & (expert < end))
        return select_f32(here, own, other)

    # ---- the op ----

    @cute.jit
    def ahead(self, r):
        """Asks for the bias, at any time before `compute` and after the last layer's."""
        bias, count = r.field("moe.bias"), self.sizes.num_experts
        to = r.shared("routed") + self.tables.bias
        for piece in cutlass.range(r.tid, count // 4, THREADS, unroll=1):
            cp_async_16(to + piece * 16, bias + Int64(piece * 16))
        if const_expr(count % 4 != 0):
            rest = count // 4 * 4 + r.tid
            if rest < count:
                st_shared_f32(to + rest * 4, ld_global_f32(bias + Int64(rest * 4)))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def compute(self, r, meanwhile: Constexpr):
        """meanwhile: called while logits are on their way."""
        scratch, table = r.shared("scratch"), r.shared("routed")
        # 1. logits are asked for; nobody is routed anywhere yet
        logits = cute.make_rmem_tensor((self.chunks,), Float32)
        row = Int32(0)
        if const_expr(self.rows > 1):
            row = cutlass.min(r.warp, r.num_tokens - 1)
        known = [
            cutlass.min(self.expert(r, i), self.sizes.num_experts - 1) for i in range(self.chunks)
        ]
        if const_expr(self.sizes.ranks == 1):
            for i in cutlass.range_constexpr(self.chunks):
                if const_expr(self.rows > 1):
                    logits[i] = self.logit(r, row, known[i], i * LANES, (i + 1) * LANES)
                else:
                    logits[i] = self.logit(r, row, known[i])
        self.clear(r, scratch, table)
        meanwhile()
        if const_expr(self.sizes.ranks > 1):
            sent = self.sent_logits(r, row, known)
            for i in cutlass.range_constexpr(self.chunks):
                logits[i] = sent[i]
        cute.arch.cp_async_wait_group(0)
        r.bar()
        # 2. keys
        keys = cute.make_rmem_tensor((self.chunks,), Uint32)
        for i in cutlass.range_constexpr(self.chunks):
            expert = self.expert(r, i)
            place = cutlass.min(expert, self.sizes.num_experts - 1)
            pick = sigmoid(logits[i]) + ld_shared_f32(table + self.tables.bias + place * 4)
            keys[i] = sort_key(pick) * Uint32(expert < self.sizes.num_experts)
        # 3. the largest, and the list
        if const_expr(self.rows > 1):
            self.many(r, row, scratch, table, keys)
        else:
            self.one(r, scratch, table, keys, logits)

    def expert(self, r, i):
        """Id of the lane's key i; there may be no such expert."""
        chunk = i if self.rows > 1 else r.warp * self.chunks + i
        return chunk * LANES + r.lane

    @cute.jit
    def clear(self, r, scratch: Int32, table: Int32):
        tables = self.tables
        for i in cutlass.range(r.tid, tables.capacity * PASS, THREADS, unroll=1):
            st_shared_u32(table + tables.where + i * 4, Int32(-1))
            st_shared_f32(table + tables.weight + i * 4, Float32(0.0))
        if const_expr(self.rows > 1):
            for i in cutlass.range(r.tid, tables.capacity, THREADS, unroll=1):
                st_shared_u32(table + tables.experts + i * 4, Uint32(0))
            if r.tid < LANES:
                st_shared_u32(table + tables.bits + r.tid * 4, Uint32(0))
        else:
            if r.tid < tables.top_stride - self.sizes.top_k:
                at = table + tables.top + (self.sizes.top_k + r.tid) * 4
                st_shared_u32(at, Int32(BEYOND))
            if r.tid < LANES - WARPS * self.chunks:
                at = scratch + self.best + (WARPS * self.chunks + r.tid) * 4
                st_shared_u32(at, Uint32(0))

    @cute.jit
    def threshold(self, r, best: Int32):
        """The A-th largest of the 32 words at `best`, at least 1. By a whole warp."""
        mine = ld_shared_u32(best + r.lane * 4)
        words = [w for i in range(LANES // 4) for w in ld_shared_u32x4(best + i * 16)]
        above = tree([Int32(word > mine) for word in words])
        low = ~warp_max_u32(~mine * Uint32(above < self.sizes.top_k))
        return max_u32(low, Uint32(1))

    @cute.jit
    def gather(self, r, scratch: Int32, keys, logits, low: Uint32):
        """The warp's keys that reach `low`, in the order of ids, to its segment -> how many."""
        first = r.warp * self.segment
        count = Int32(0)
        before = (Uint32(1) << Uint32(r.lane)) - Uint32(1)
        for i in cutlass.range_constexpr(self.chunks):
            hits = cute.arch.vote_ballot_sync(keys[i] >= low)
            if keys[i] >= low:
                at = first + count + Int32(cute.arch.popc(hits & before))
                st_shared_u32(scratch + self.keys + at * 4, keys[i])
                st_shared_u32(scratch + self.ids + at * 4, Uint32(self.expert(r, i)))
                if const_expr(self.rows == 1):
                    st_shared_f32(scratch + self.logits + at * 4, logits[i])
            count = count + Int32(cute.arch.popc(hits))
        if r.lane < PAD:
            st_shared_u32(scratch + self.keys + (first + count + r.lane) * 4, Uint32(0))
        return count

    @cute.jit
    def weigh(self, r, logit: Float32):
        """Weight of the lane's expert, from its logit. By a whole warp."""
        score = select_f32(Uint32(r.lane < self.sizes.top_k), sigmoid(logit), Float32(0.0))
        if const_expr(self.sizes.renormalize):
            score = score / (warp_sum([score])[0] + Float32(1e-20))
        return score * Float32(self.sizes.scaling)

    @cute.jit
    def tell(self, r, pair: Int32, expert: Int32, weight: Float32):
        """The caller's lists [T, A], by one CTA."""
        if r.cta == 0:
            st_global_u32x2(r.topk_ids + Int64(pair * 8), (expert, Int32(0)))
            st_global_f32(r.topk_weights + Int64(pair * 4), weight)

    # ---- one row ----

    @cute.jit
    def one(self, r, scratch: Int32, table: Int32, keys, logits):
        tables, top_k = self.tables, self.sizes.top_k
        top = table + tables.top
        best = scratch + self.best
        for i in cutlass.range_constexpr(self.chunks):  # a chunk is a group
            largest = warp_max_u32(keys[i])
            if r.lane == 0:
                st_shared_u32(best + (r.warp * self.chunks + i) * 4, largest)
        r.bar()
        count = self.gather(r, scratch, keys, logits, self.threshold(r, best))
        if r.lane == 0:
            st_shared_u32(scratch + self.counts + r.warp * 4, Uint32(count))
        r.bar()
        # 8 lanes a key of the own segment, a segment each
        other = r.lane % WARPS
        there = Int32(ld_shared_u32(scratch + self.counts + other * 4))
        most = Int32(warp_max_u32(Uint32(there)))
        for base in cutlass.range(0, count, LANES // WARPS, unroll=1):
            index = cutlass.min(base + r.lane // WARPS, count - 1)
            place = r.warp * self.segment + index
            key = ld_shared_u32(scratch + self.keys + place * 4)
            above = Int32(0)
            for d in cutlass.range(0, most, 4, unroll=1):
                at = other * self.segment + d
                words = ld_shared_u32x4(scratch + self.keys + at * 4)
                # of equals the one that comes first is above: w > key - 1
                above = above + tree(
                    [
                        Int32(words[j] > key - Uint32(at + j < place)) * Int32(d + j < there)
                        for j in range(4)
                    ]
                )
            for distance in (1, 2, 4):
                above = above + cute.arch.shuffle_sync_bfly(above, distance)
            if (other == 0) & (base + r.lane // WARPS < count) & (above < top_k):
                st_shared_u32(top + above * 4, ld_shared_u32(scratch + self.ids + place * 4))
                logit = ld_shared_f32(scratch + self.logits + place * 4)
                st_shared_f32(best + above * 4, logit)  # the groups' best have been read
        r.bar()
        if r.warp == 0:  # the list, and the weights behind it
            rank = cutlass.min(r.lane, top_k - 1)
            mine = Int32(ld_shared_u32(top + rank * 4))
            words = [
                w for i in range(tables.top_stride // 4) for w in ld_shared_u32x4(top + i * 16)
            ]
            place = tree([Int32(Int32(word) < mine) for word in words])
            if r.lane < top_k:
                st_shared_u32(table + tables.experts + place * 4, Uint32(mine))
                st_shared_u32(table + tables.where + place * (PASS * 4), Uint32(r.lane))
            if r.lane == 0:
                st_shared_u32(table + tables.total, Uint32(top_k))
            cute.arch.sync_warp()
            if r.lane == 0:
                cute.arch.mbarrier_arrive(r.routed)
            weight = self.weigh(r, ld_shared_f32(best + rank * 4))
            if r.lane < top_k:
                st_shared_f32(table + tables.weight + place * (PASS * 4), weight)
                self.tell(r, r.lane, mine, weight)

    # ---- a warp a row ----

    @cute.jit
    def many(self, r, row: Int32, scratch: Int32, table: Int32, keys):
        tables, top_k = self.tables, self.sizes.top_k
        live = r.warp < r.num_tokens
        top = table + tables.top + row * (tables.top_stride * 4)
        if live:
            best = scratch + self.best + row * (LANES * 4)
            st_shared_u32(best + r.lane * 4, tree([keys[i] for i in range(self.chunks)], max_u32))
            cute.arch.sync_warp()
            count = self.gather(r, scratch, keys, None, self.threshold(r, best))
            cute.arch.sync_warp()
            self.rank(r, scratch, top, table + tables.bits, count)
        r.bar()
        # the place of an expert in the list: how many bits are set before its own
        mine, place, logit = Int32(0), Int32(0), Float32(0.0)
        if live:
            mine = Int32(ld_shared_u32(top + cutlass.min(r.lane, top_k - 1) * 4))
            logit = self.logit(r, row, mine)
            word = ld_shared_u32(table + tables.bits + r.lane * 4)
            total = Int32(cute.arch.popc(word))
            before = Int32(0)
            # total: of 2, 4, .. neighbours; before: of those in lower lanes
            for distance in (1, 2, 4, 8, 16):
                other = cute.arch.shuffle_sync_bfly(total, distance)
                before = before + other * Int32((r.lane & distance) != 0)
                total = total + other
            before = cute.arch.shuffle_sync(before, mine // 32)
            bits = cute.arch.shuffle_sync(word, mine // 32)
            lower_bits = bits & ((Uint32(1) << Uint32(mine % 32)) - Uint32(1))
            place = before + Int32(cute.arch.popc(lower_bits))
            if r.lane < top_k:
                red_or_shared(table + tables.experts + place * 4, Uint32(mine))  # by several rows
                at = table + tables.where + (place * PASS + row) * 4
                st_shared_u32(at, Uint32(r.lane))
            if r.tid == 0:
                st_shared_u32(table + tables.total, Uint32(total))
        r.bar()
        if r.tid == 0:
            cute.arch.mbarrier_arrive(r.routed)
        if live:
            weight = self.weigh(r, logit)
            if r.lane < top_k:
                st_shared_f32(table + tables.weight + (place * PASS + row) * 4, weight)
                self.tell(r, row * top_k + r.lane, mine, weight)

    @cute.jit
    def rank(self, r, scratch: Int32, top: Int32, bits: Int32, count: Int32):
        """A lane a gathered key: the row's A largest by rank, and in the bitmap."""
        first = r.warp * self.segment
        keys = scratch + self.keys + first * 4
        for base in cutlass.range(0, count, LANES, unroll=1):
            index = cutlass.min(base + r.lane, count - 1)
            key = ld_shared_u32(keys + index * 4)
            above = Int32(0)
            for d in cutlass.range(0, count, PAD, unroll=1):
                low, high = ld_shared_u32x4(keys + d * 4), ld_shared_u32x4(keys + d * 4 + 16)
                words = (*low, *high)  # zeros behind the last one
                above = above + tree(
                    [Int32(words[j] > key - Uint32(d + j < index)) for j in range(PAD)]
                )
            if (base + r.lane < count) & (above < self.sizes.top_k):
                expert = ld_shared_u32(scratch + self.ids + (first + index) * 4)
                st_shared_u32(top + above * 4, expert)
                red_or_shared(bits + expert // 32 * 4, Uint32(1) << (expert % 32))
