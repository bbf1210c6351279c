"""What a pass of up to 8 rows is routed to: tables in shared memory, made of what `route` wrote.

    total                 n, how many experts the rows of the pass have among them
    experts [n]           their ids, ascending
    where   [n, 8] i32    which of a row's experts this one is, -1 if the row is not routed to it
    weight  [n, 8] f32    its weight there, 0 if not (only where asked for)

With at most 8 rows in the step these are `route`'s own list and places; with more, the experts that
no row of the pass wants are left out, so that their weights are not read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from nanok3.dsl import (
    ld_global_f32,
    ld_global_u32,
    ld_shared_u32,
    red_or_shared,
    st_shared_f32,
    st_shared_u32,
    tree,
)

PASS = 8  # rows of a pass: the N of an mma


@cute.jit
def count_before(
    bits: Int32, before: Int32, total: Int32, words: cutlass.Constexpr[int], tid: Int32
):
    """Of a bitmap [words] u32: how many bits are set before each word, and in all.

    By all threads, at least `words` of them; a CTA barrier must follow.
    """
    if tid < words:
        mine = Int32(0)
        counts = []
        for w in cutlass.range_constexpr(words):
            count = Int32(cute.arch.popc(ld_shared_u32(bits + w * 4)))
            counts.append(count * Int32(w < tid))
            mine = mine + count * Int32(w == tid)
        sum_before = tree(counts)
        st_shared_u32(before + tid * 4, sum_before)
        if tid == words - 1:
            st_shared_u32(total, sum_before + mine)


def rank_in(bits, before, index):
    """How many bits are set before bit `index`."""
    word = ld_shared_u32(bits + index // 32 * 4)
    lower = word & ((Uint32(1) << Uint32(index % 32)) - Uint32(1))
    return Int32(ld_shared_u32(before + index // 32 * 4)) + Int32(cute.arch.popc(lower))


class Routed:
    """Static sizes, and where the tables lie from a base address in shared memory."""

    def __init__(self, num_experts: int, top_k: int, weighted: bool, threads: int):
        assert PASS * top_k <= threads and num_experts <= 32 * threads
        self.num_experts, self.top_k, self.weighted = num_experts, top_k, weighted
        self.threads = threads
        self.capacity = -(-min(num_experts, PASS * top_k) // PASS) * PASS
        self.words = -(-num_experts // 32)
        self.where = 0
        self.weight = self.where + self.capacity * PASS * 4
        self.experts = self.weight + (self.capacity * PASS * 4 if weighted else 0)
        self.bits = self.experts + self.capacity * 4
        self.before = self.bits + self.words * 4
        self.total = self.before + self.words * 4
        self.shared_bytes = self.total + 16

    @cute.jit
    def build(
        self,
        slot_of: Int64,
        distinct: Int64,
        num_distinct: Int64,
        weights: Int64,
        first: Int32,
        num_tokens: Int32,
        base: Int32,
        tid: Int32,
    ):
        """Tables of the rows from `first` on. By all threads; ends with a CTA barrier, and touches
        the tables of an earlier call only after its first one."""
        pairs = cutlass.min(num_tokens - first, PASS) * self.top_k
        few = num_tokens <= PASS
        # 1. ask for what is needed, while the tables of the last pass may still be read
        slot = Int32(0)
        weight = Float32(0.0)
        expert = Uint32(0)
        total = Uint32(0)
        if tid < pairs:
            pair = Int64(first * self.top_k + tid)
            slot = Int32(ld_global_u32(slot_of + pair * 4))
            if const_expr(self.weighted):
                weight = ld_global_f32(weights + pair * 4)
        listed = few & (tid < cutlass.min(pairs, self.num_experts))
        if listed:
            expert = ld_global_u32(distinct + Int64(tid) * 4)
            total = ld_global_u32(num_distinct)
        cute.arch.sync_threads()
        # 2. nobody is routed anywhere yet
        for i in cutlass.range(tid, self.capacity * PASS, self.threads, unroll=1):
            st_shared_u32(base + self.where + i * 4, Int32(-1))
            if const_expr(self.weighted):
                st_shared_f32(base + self.weight + i * 4, Float32(0.0))
        if listed:
            st_shared_u32(base + self.experts + tid * 4, expert)
            if tid == 0:
                st_shared_u32(base + self.total, total)
        if tid < self.words:
            st_shared_u32(base + self.bits + tid * 4, Uint32(0))
        cute.arch.sync_threads()
        # 3. the pairs
        if num_tokens > PASS:
            self.select(distinct, base, slot, tid, pairs)
            if tid < pairs:
                slot = rank_in(base + self.bits, base + self.before, slot)
        if tid < pairs:
            at = (slot * PASS + tid // self.top_k) * 4
            st_shared_u32(base + self.where + at, tid % self.top_k)
            if const_expr(self.weighted):
                st_shared_f32(base + self.weight + at, weight)
        cute.arch.sync_threads()

    @cute.jit
    def select(self, distinct: Int64, base: Int32, slot: Int32, tid: Int32, pairs: Int32):
        """The experts of this pass alone, out of the list of the step."""
        bits, before = base + self.bits, base + self.before
        if tid < pairs:
            red_or_shared(bits + slot // 32 * 4, Uint32(1) << Uint32(slot % 32))
        cute.arch.sync_threads()
        count_before(bits, before, base + self.total, self.words, tid)
        cute.arch.sync_threads()
        for i in cutlass.range(tid, self.words * 32, self.threads, unroll=1):
            word = ld_shared_u32(bits + i // 32 * 4)
            if ((word >> Uint32(i % 32)) & Uint32(1)) != Uint32(0):
                at = base + self.experts + rank_in(bits, before, i) * 4
                st_shared_u32(at, ld_global_u32(distinct + Int64(i) * 4))

    # ---- reading, after `build` ----

    def num_experts_here(self, base):
        return Int32(ld_shared_u32(base + self.total))

    def expert(self, base, i):
        return Int64(Int32(ld_shared_u32(base + self.experts + i * 4)))

    def place(self, base, i, row):
        """Which of the row's experts expert i of the list is; -1: none."""
        return Int32(ld_shared_u32(base + self.where + (i * PASS + row) * 4))
