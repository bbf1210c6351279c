"""Top-k routing, and the list of experts that a step needs:

    s       = sigmoid(logits), pick = s + bias
    ids     = the A largest pick of a row, value down, id up; NaN counts as largest
    weights = s[ids], divided by their sum + 1e-20 if renormalised, times the scaling
    distinct [n] = the experts of all rows, ascending;  slot_of[t, a] = where ids[t, a] is in it

Shapes   logits [T, E] f32, bias [E] f32 -> ids [T, A] i64, weights [T, A] f32, distinct [>= n] i32
         (what lies behind n is not written), num_distinct [1] i32, slot_of [T, A] i32.
         E <= 2048, A <= 32 and A <= E are static; T <= 64 is read at launch. No expert groups.
Bytes    4 T E + 4 E read: nothing; what counts is latency.
Grid     one CTA. 16 rows at a time: all warps make sort keys, then a warp a row takes the largest,
         A times. Keys lie in shared memory; a lane keeps the largest of its run of 32 or 64 ids, so
         a round is two warp maxima and one look at the run that had it.
Waits    bias: none (constant); logits: the grid dependency.
Signals  launch_dependents at once. CTA barriers between the phases.
Aliases  none.
Archs    sm_90a, sm_100a, sm_103a.
Rounding float32; s errs by up to 3e-7 (approximate exponential and reciprocal), so the ids are the
         reference's except where two of its pick differ by less than 1e-6. Whatever the logits, ids
         are distinct and in range; a row with NaN logits has NaN weights, by which it is refused.
         The same on every run: ties are settled by id, and bits are only ever OR-ed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from nanok3.dsl import (
    address,
    arch_of,
    bits_of,
    compile_kernel,
    launch,
    ld_global_f32,
    ld_shared_f32,
    ld_shared_u32,
    lowest_bit,
    max_u32,
    red_or_shared,
    sigmoid,
    st_global_f32,
    st_global_u32,
    st_global_u32x2,
    st_shared_f32,
    st_shared_u32,
    tree,
    warp_max_u32,
    warp_sum,
)
from nanok3.kernels.routed import count_before, rank_in
from nanok3.reference.router import route_ref as route_ref

WARPS = 16
THREADS = 32 * WARPS
MAX_ROWS = 64  # of a step; one CTA takes about 2 us for every 16
IN_FLIGHT = 14  # loads of logits that a thread keeps in flight: 8 rows of 896 at once


@dataclass(frozen=True)
class Shape:
    num_experts: int
    top_k: int
    renormalize: bool
    scaling: float

    def __post_init__(self) -> None:
        assert 1 <= self.top_k <= min(32, self.num_experts), f"top {self.top_k}: 1 to 32 are taken"
        assert self.num_experts <= 2048, f"{self.num_experts} experts: at most 2048 are taken"

    @property
    def run_chunks(self) -> int:
        """A run is what one lane watches: 1 or 2 chunks of 32 ids."""
        return -(-self.num_experts // 1024)

    @property
    def chunks(self) -> int:
        """Of 32 ids, in whole runs."""
        return -(-self.num_experts // (32 * self.run_chunks)) * self.run_chunks

    @property
    def words(self) -> int:
        return -(-self.num_experts // 32)


# ---- device ----


def sort_key(value):
    """A word that orders as the float does, NaN above all; never 0, which stands for "taken"."""
    bits = bits_of(value)
    nan = Uint32((bits & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000))
    flip = (Uint32(0) - (bits >> 31)) | Uint32(0x80000000)
    return (bits ^ flip) | (Uint32(0) - nan)


class Route:
    def __init__(self, shape: Shape):
        self.shape = shape
        self.key_bytes = WARPS * shape.chunks * 32 * 4
        self.best_bytes = WARPS * shape.chunks * 4
        self.id_bytes = MAX_ROWS * shape.top_k * 4

    @cute.jit
    def __call__(
        self,
        logits: Int64,
        bias: Int64,
        ids: Int64,
        weights: Int64,
        distinct: Int64,
        num_distinct: Int64,
        slot_of: Int64,
        num_tokens: Int32,
        stream,
    ):
        self.kernel(logits, bias, ids, weights, distinct, num_distinct, slot_of, num_tokens).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        logits: Int64,
        bias: Int64,
        ids: Int64,
        weights: Int64,
        distinct: Int64,
        num_distinct: Int64,
        slot_of: Int64,
        num_tokens: Int32,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        shape = self.shape
        tid, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        keys = Int32(smem.allocate(self.key_bytes, byte_alignment=128).toint())
        best = Int32(smem.allocate(self.best_bytes, byte_alignment=128).toint())
        biases = Int32(smem.allocate(shape.num_experts * 4, byte_alignment=128).toint())
        chosen = Int32(smem.allocate(self.id_bytes, byte_alignment=128).toint())  # [T, A]
        bits = Int32(smem.allocate(shape.words * 4, byte_alignment=128).toint())
        before = Int32(smem.allocate(shape.words * 4 + 16, byte_alignment=128).toint())
        total = before + shape.words * 4

        # 1. the bias, and an empty set of experts
        for i in cutlass.range(tid, shape.num_experts, THREADS, unroll=1):
            st_shared_f32(biases + i * 4, ld_global_f32(bias + Int64(i) * 4))
        if tid < shape.words:
            st_shared_u32(bits + tid * 4, Uint32(0))
        cute.arch.griddepcontrol_wait()

        # 2. 16 rows at a time: keys by all warps, then a warp a row
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        for first in cutlass.range(0, num_tokens, WARPS, unroll=1):
            cute.arch.sync_threads()  # the bias is there, the last rows' keys have been read
            source = logits + Int64(first) * (4 * shape.num_experts)
            rows = cutlass.min(num_tokens - first, WARPS)
            self.score(source, rows, biases, keys, best, warp, lane)
            cute.arch.sync_threads()
            if warp < rows:
                row = first + warp
                mine = self.choose(
                    keys + warp * (shape.chunks * 128), best + warp * (shape.chunks * 4), lane
                )
                weight = self.weigh(source + Int64(warp) * (4 * shape.num_experts), mine, lane)
                if lane < shape.top_k:
                    pair = row * shape.top_k + lane
                    st_global_u32x2(ids + Int64(pair) * 8, (mine, Int32(0)))
                    st_global_f32(weights + Int64(pair) * 4, weight)
                    st_shared_u32(chosen + pair * 4, mine)
                    red_or_shared(bits + mine // 32 * 4, Uint32(1) << Uint32(mine % 32))
        cute.arch.sync_threads()

        # 3. the list, and where each pair's expert is in it
        count_before(bits, before, total, shape.words, tid)
        cute.arch.sync_threads()
        for i in cutlass.range(tid, shape.words * 32, THREADS, unroll=1):
            word = ld_shared_u32(bits + i // 32 * 4)
            if ((word >> Uint32(i % 32)) & Uint32(1)) != Uint32(0):
                st_global_u32(distinct + Int64(rank_in(bits, before, i)) * 4, i)
        for pair in cutlass.range(tid, num_tokens * shape.top_k, THREADS, unroll=1):
            expert = Int32(ld_shared_u32(chosen + pair * 4))
            st_global_u32(slot_of + Int64(pair) * 4, rank_in(bits, before, expert))
        if tid == 0:
            st_global_u32(num_distinct, ld_shared_u32(total))

    @cute.jit
    def score(
        self,
        logits: Int64,
        rows: Int32,
        biases: Int32,
        keys: Int32,
        best: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """Keys [rows, chunks, 32] and the largest of every chunk, best [rows, chunks]."""
        shape = self.shape
        count = rows * shape.chunks
        values = cute.make_rmem_tensor((IN_FLIGHT,), Float32)
        for base in cutlass.range(warp, count, WARPS * IN_FLIGHT, unroll=1):
            for j in cutlass.range_constexpr(IN_FLIGHT):
                at = base + j * WARPS
                values[j] = Float32(0.0)
                if at < count:
                    row, expert = at // shape.chunks, self.expert(at % shape.chunks, lane)
                    values[j] = ld_global_f32(
                        logits + (Int64(row) * shape.num_experts + Int64(expert)) * 4
                    )
            for j in cutlass.range_constexpr(IN_FLIGHT):
                at = base + j * WARPS
                if at < count:
                    chunk = at % shape.chunks
                    pick = sigmoid(values[j]) + ld_shared_f32(biases + self.expert(chunk, lane) * 4)
                    key = sort_key(pick)
                    if const_expr(shape.chunks * 32 != shape.num_experts):  # the last run's rest
                        key = key * Uint32(chunk * 32 + lane < shape.num_experts)
                    st_shared_u32(keys + (at * 32 + lane) * 4, key)
                    largest = warp_max_u32(key)
                    if lane == 0:
                        st_shared_u32(best + at * 4, largest)

    def expert(self, chunk, lane):
        """Id of a lane of a chunk; the last one for lanes that have none."""
        if self.shape.chunks * 32 == self.shape.num_experts:
            return chunk * 32 + lane
        return cutlass.min(chunk * 32 + lane, self.shape.num_experts - 1)

    @cute.jit
    def choose(self, keys: Int32, best: Int32, lane: Int32):
        """The row's A largest: lane i returns the i-th id. By a whole warp.

        Runs and lanes are in the order of the ids, so the first of equals is the lowest id.
        """
        shape = self.shape
        run = shape.run_chunks
        largest = Uint32(0)  # of this lane's run
        for s in cutlass.range_constexpr(run):
            if lane * run + s < shape.chunks:
                largest = max_u32(largest, ld_shared_u32(best + (lane * run + s) * 4))
        mine = Int32(0)
        for i in cutlass.range(shape.top_k, unroll=1):
            key = warp_max_u32(largest)
            owner = lowest_bit(cute.arch.vote_ballot_sync(largest == key))
            at = keys + (owner * (run * 32) + lane) * 4
            place = Int32(0)
            words = [ld_shared_u32(at + s * 128) for s in range(run)]
            for s in cutlass.range_constexpr(run - 1, -1, -1):
                hits = cute.arch.vote_ballot_sync(words[s] == key)
                if hits != 0:
                    place = s * 32 + lowest_bit(hits)
            left = [words[s] * Uint32(place != s * 32 + lane) for s in range(run)]
            for s in cutlass.range_constexpr(run):
                st_shared_u32(at + s * 128, left[s])  # a word is only ever this lane's
            rest = warp_max_u32(tree(left, max_u32))
            if lane == owner:
                largest = rest
            if lane == i:
                mine = owner * (run * 32) + place
        return mine

    @cute.jit
    def weigh(self, logits: Int64, mine: Int32, lane: Int32):
        """Weight of the lane's expert, from its unbiased score. By a whole warp."""
        score = Float32(0.0)
        if lane < self.shape.top_k:
            score = sigmoid(ld_global_f32(logits + Int64(mine) * 4))
        if const_expr(self.shape.renormalize):
            score = score / (warp_sum([score])[0] + Float32(1e-20))
        return score * Float32(self.shape.scaling)


# ---- host ----


@functools.cache
def compile_route(shape: Shape, arch: str):
    args = (*(Int64(0),) * 7, Int32(1), make_fake_stream())
    return compile_kernel(Route(shape), args, arch)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling: float,
    *,
    ids: torch.Tensor,
    weights: torch.Tensor,
    distinct: torch.Tensor,
    num_distinct: torch.Tensor,
    slot_of: torch.Tensor,
) -> None:
    """logits [T, E] f32, bias [E] f32 -> ids [T, A] i64, weights [T, A] f32, distinct
    [>= min(E, T A)] i32, num_distinct [1] i32, slot_of [T, A] i32."""
    tokens, experts = logits.shape
    assert num_groups == 1, (
        f"{num_groups} expert groups, of which {topk_groups} count: this kernel routes over all "
        f"experts at once; use the reference router"
    )
    assert 1 <= tokens <= MAX_ROWS, f"{tokens} rows: one launch routes 1 to {MAX_ROWS}"
    assert bias.shape == (experts,) and ids.shape == weights.shape == (tokens, top_k)
    assert slot_of.shape == (tokens, top_k) and num_distinct.shape == (1,)
    assert distinct.dim() == 1 and distinct.shape[0] >= min(experts, tokens * top_k)
    assert all(t.dtype == torch.float32 for t in (logits, bias, weights))
    assert all(t.dtype == torch.int32 for t in (distinct, num_distinct, slot_of))
    assert ids.dtype == torch.int64
    outs = (ids, weights, distinct, num_distinct, slot_of)
    assert all(t.is_contiguous() for t in (logits, bias, *outs))
    shape = Shape(experts, top_k, renormalize, scaling)
    kernel = compile_route(shape, arch_of(logits.device.index))
    launch(kernel, *(address(t) for t in (logits, bias, *outs)), tokens)
