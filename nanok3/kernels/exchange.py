"""An exchange between ranks as a launch of the chain: `comm/exchange` with words in GPU memory.

    sum      out[t] = sum over ranks of part[t], in their order        all_reduce, routed latent
    scatter  the same, of this rank's columns of out                   shared experts of reduce_moe
    gather   out[t] = the ranks' part[t], side by side                 all_gather

Shapes   a segment's part [T, W] and out with any row stride, bf16 for sums, anything of whole 8
         bytes a row for gather; a launch has one or two segments (router and latent; routed and
         shared). Static: kinds, widths, P.
Bytes    a rank sends 2 bytes for one of data: W to each rank, of a scatter W / P. All_reduce of
         7168 bf16 at P = 8: 28 KB to each rank, T = 1; one hop.
Grid     CTAS a rank; with virtual ranks all of them in one cooperative launch. A thread sends the
         items (8 bytes of data) that it receives.
Waits    for the launch before it, then the words of all ranks.
Signals  words, table in `comm/words`: mailbox [2 parities, source rank, item] of 16 bytes.

         word            written by            read by             value          reset
         [e % 2, src, i] rank src, exchange e  this rank, exchange data, tag e    never; rewritten
                                               e                                  at e + 2
         epochs [CTA]    thread 0 of the CTA   the CTA, next       e + 1          with the words
                         at its end            launch

         A rank's launch e + 2 begins when e + 1 has heard from all ranks, which they sent in their
         launch e + 1, after e was complete: so two parities are enough, whatever the shapes.
Aliases  a part may be a view of its out, as `step.with_parts` lays them.
Archs    sm_90a, sm_100a, sm_103a.
Rounding sums in float32 in the order of ranks, rounded once: all ranks hold the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream
from torch import Tensor

from nanok3.comm.words import (
    RECORD_WORDS,
    Peers,
    Rows,
    await_words,
    packed,
    send,
    sum_of_ranks,
    virtual_peers,
)
from nanok3.dsl import (
    address,
    arch_of,
    compile_kernel,
    launch,
    ld_global_i64,
    ld_global_u32,
    ld_global_u32x2,
    st_global_u32,
    st_global_u32x2,
)

THREADS, CTAS = 256, 8  # 16 ranks of 8 CTAs fit on a GPU at once
ITEM = 8  # bytes of data in 16 of words
LIMIT = 1 << 20  # looks of a wait: about 1 s
KINDS = ("sum", "scatter", "gather")
MOST_SEGMENTS = 2
# a row of the table of a launch's ranks, i64
COLUMNS = (
    *("rank", "mail", "bases", "epochs", "health", "parity_bytes"),
    *("part 0", "out 0", "part stride 0", "out stride 0"),
    *("part 1", "out 1", "part stride 1", "out stride 1"),
)


@dataclass(frozen=True)
class Segment:
    kind: str
    items: int  # of a row, for one rank

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.items > 0, self


# ---- device ----


class Swap:
    def __init__(
        self, segments: tuple[Segment, ...], ranks: int, launched: int, limit: int = LIMIT
    ) -> None:
        assert launched in (1, ranks) and 1 <= len(segments) <= MOST_SEGMENTS
        self.segments, self.ranks, self.launched, self.limit = segments, ranks, launched, limit
        self.scope = "gpu" if launched == ranks else "sys"

    @cute.jit
    def __call__(self, table: Int64, num_tokens: Int32, stream):
        together = self.launched > 1  # these wait for each other, so all must run
        self.kernel(table, num_tokens).launch(
            grid=(CTAS, self.launched, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            cooperative=together,
            use_pdl=not together,
        )

    @cute.kernel
    def kernel(self, table: Int64, num_tokens: Int32):
        cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, index, _ = cute.arch.block_idx()
        row = table + Int64(index) * (8 * len(COLUMNS))
        cute.arch.griddepcontrol_wait()
        of = {name: ld_global_i64(row + Int64(8 * i)) for i, name in enumerate(COLUMNS)}
        epochs = of["epochs"] + Int64(cta) * 4
        epoch = ld_global_u32(epochs)
        cute.arch.sync_threads()  # all have it
        if tid == 0:
            st_global_u32(epochs, epoch + Uint32(1))
        parity = of["parity_bytes"] * Int64(Int32(epoch & Uint32(1)))
        thread = cta * THREADS + tid
        begin = Int32(0)
        for i in cutlass.range_constexpr(len(self.segments)):
            self.send(of, self.segments[i], i, parity, begin, thread, num_tokens, epoch)
            begin = begin + num_tokens * self.segments[i].items
        whole, begin = begin, Int32(0)
        for i in cutlass.range_constexpr(len(self.segments)):
            self.receive(of, self.segments[i], i, parity, begin, whole, thread, num_tokens, epoch)
            begin = begin + num_tokens * self.segments[i].items

    def send(self, of, segment, i, parity, begin, thread, num_tokens, epoch):
        whole = Int32(0)
        for s in self.segments:
            whole = whole + num_tokens * s.items
        place = parity + (Int64(Int32(of["rank"])) * Int64(whole) + Int64(begin)) * 16
        part, stride = of[f"part {i}"], of[f"part stride {i}"]
        count = num_tokens * segment.items
        self.send_items(segment, part, stride, of["bases"], place, count, thread, epoch)

    @cute.jit
    def send_items(
        self,
        segment: Constexpr,
        part: Int64,
        stride: Int64,
        bases: Int64,
        place: Int64,
        count: Int32,
        thread: Int32,
        epoch: Uint32,
    ):
        """Items to all ranks: of a scatter each its own."""
        bases_of = [ld_global_i64(bases + Int64(8 * rank)) for rank in range(self.ranks)]
        for item in cutlass.range(thread, count, CTAS * THREADS, unroll=1):
            row, column = item // segment.items, item % segment.items
            at = part + Int64(row) * stride + Int64(column * ITEM)
            for rank in cutlass.range_constexpr(self.ranks):
                own = at
                if const_expr(segment.kind == "scatter"):
                    own = at + Int64(rank * segment.items * ITEM)
                low, high = ld_global_u32x2(own)
                to = bases_of[rank] + place + Int64(item) * 16
                send(to, low, high, epoch, self.scope)

    def receive(self, of, segment, i, parity, begin, whole, thread, num_tokens, epoch):
        place = of["mail"] + parity + Int64(begin) * 16
        out, stride = of[f"out {i}"], of[f"out stride {i}"]
        count, cta = num_tokens * segment.items, thread // THREADS
        first = cta * THREADS
        self.receive_items(
            *(segment, out, stride, place, whole, count, first, thread, epoch),
            *(of["health"], cta),
        )

    @cute.jit
    def receive_items(
        self,
        segment: Constexpr,
        out: Int64,
        stride: Int64,
        place: Int64,
        whole: Int32,
        count: Int32,
        first: Int32,
        thread: Int32,
        epoch: Uint32,
        health: Int64,
        cta: Int32,
    ):
        what = 1 + KINDS.index(segment.kind)
        for base in cutlass.range(first, count, CTAS * THREADS, unroll=1):
            there = base + thread - first
            item = cutlass.min(there, count - 1)
            row, column = item // segment.items, item % segment.items
            addresses = [
                place + (Int64(whole) * rank + Int64(item)) * 16 for rank in range(self.ranks)
            ]
            sources = [Int32(rank) for rank in range(self.ranks)]
            found = await_words(
                *(addresses, sources, epoch, 2, health, what, cta, thread & 31),
                *(self.limit, self.scope),
            )
            at = out + Int64(row) * stride + Int64(column * ITEM)
            if there < count:
                if const_expr(segment.kind == "gather"):
                    for rank in cutlass.range_constexpr(self.ranks):
                        words = (found[4 * rank], found[4 * rank + 2])
                        st_global_u32x2(at + Int64(rank * segment.items * ITEM), words)
                else:
                    st_global_u32x2(at, packed(sum_of_ranks(found, self.ranks)))


# ---- host ----


@dataclass(frozen=True)
class End:
    """A rank's end of the exchanges."""

    peers: Peers
    epochs: Tensor  # [CTAS] i32, of the next exchange; ones before the first
    health: Tensor  # [RECORD_WORDS] i32, zeros


def virtual_ends(size: int, num_items: int, device: str) -> list[End]:
    """Of ranks that share a GPU; num_items: of a rank's longest message, T rows."""
    return [
        End(
            peers,
            torch.ones(CTAS, dtype=torch.int32, device=device),
            torch.zeros(RECORD_WORDS, dtype=torch.int32, device=device),
        )
        for peers in virtual_peers(size, 2 * size * num_items * 16, device)
    ]


def failure(end: End) -> str:
    """What a wait that gave up left; empty if none did. Waits for the device."""
    what, cta, source, expected, seen = end.health.tolist()
    if not what:
        return ""
    return (
        f"rank {end.peers.rank} of {end.peers.size}, CTA {cta}, exchange by {KINDS[what - 1]}: "
        f"words of rank {source} with tag {expected} expected, {seen} seen"
    )


def clear(ends: Sequence[End]) -> None:
    """As if there had been no exchange; of all ranks, with none under way."""
    for end in ends:
        end.peers.mail.zero_()
        end.epochs.fill_(1)
        end.health.zero_()


@functools.cache
def compile_exchange(segments: tuple[Segment, ...], ranks: int, launched: int, arch: str):
    args = (Int64(0), Int32(1), make_fake_stream())
    return compile_kernel(Swap(segments, ranks, launched), args, arch)


def exchange(
    ends: Sequence[End],
    kinds: Sequence[str],
    parts: Sequence[Sequence[Tensor]],
    *,
    outs: Sequence[Sequence[Tensor]],
    table_of: Callable[[Rows], Tensor],
) -> None:
    """One exchange of the ranks of this launch: all of them, or the only one of this GPU.

    kinds: of each segment; parts, outs: of each rank, its segments [T, W]; table_of: see
    `device_tables`.
    """
    size, launched, tokens = ends[0].peers.size, len(ends), len(parts[0][0])
    assert len(parts) == len(outs) == launched
    segments = tuple(
        segment_of(kind, size, part, out)
        for kind, part, out in zip(kinds, parts[0], outs[0], strict=True)
    )
    items = tokens * sum(segment.items for segment in segments)
    rows = []
    for end, own, whole in zip(ends, parts, outs, strict=True):
        half = end.peers.mail.nbytes // 2 // 16 * 16
        assert size * items * 16 <= half, "a message longer than the mailboxes"
        row = [end.peers.rank, address(end.peers.mail), address(end.peers.bases)]
        row += [address(end.epochs), address(end.health), half]
        for kind, part, out, segment in zip(kinds, own, whole, segments, strict=True):
            assert segment_of(kind, size, part, out) == segment and len(part) == tokens
            row += [address(part), address(out)]
            row += [t.stride(0) * t.element_size() for t in (part, out)]
        rows.append((*row, *[0] * (len(COLUMNS) - len(row))))
    arch = arch_of(ends[0].peers.mail.device.index)
    kernel = compile_exchange(segments, size, launched, arch)
    launch(kernel, address(table_of(tuple(rows))), tokens)


def segment_of(kind: str, size: int, part: Tensor, out: Tensor) -> Segment:
    """What two tensors make; they must fit each other."""
    widths = {
        "sum": (1, 1),
        "scatter": (size, 1),
        "gather": (1, size),
    }[kind]  # of part and out, in messages
    num_bytes = part.shape[1] // widths[0] * part.element_size()
    assert part.dtype == out.dtype and len(part) == len(out)
    assert kind == "gather" or part.dtype == torch.bfloat16, "only bf16 is added up"
    assert part.shape[1] * widths[1] == out.shape[1] * widths[0], (kind, part.shape, out.shape)
    assert num_bytes % ITEM == 0, f"{num_bytes} bytes of a row"
    for t in (part, out):
        assert t.stride(1) == 1 and t.data_ptr() % ITEM == 0
        assert t.stride(0) * t.element_size() % ITEM == 0
    return Segment(kind, num_bytes // ITEM)
