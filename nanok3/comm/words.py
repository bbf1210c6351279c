"""The exchanges' protocol on a GPU: words that say themselves whether they are there.

It is that of `exchange.py`. A word has 64 bits: 32 of data (two bf16, or a float32) and a tag of 32
bits. It is written and read whole; two lie side by side, for accesses of 16 bytes. A rank stores
words into the mailboxes of all ranks, its own too, and looks only at its own memory, with the loads
of all ranks' words in flight. Nothing is ever cleared; a word that is not used any more keeps its
old tag, which comes again after 2^32 tags.

word             written by         read by          value          order        reset
of a mailbox     the source rank    the owner of     data, tag of   relaxed, at  never: written
                                    the mailbox,     this exchange  `scope`      anew, once all
                                    until it has                                 have read it
                                    the tag

When all have read it is for whoever lays out mailboxes to say (`kernels/exchange`,
`kernels/mega/exchange`).

Scope    "gpu" for ranks that run in one launch on one GPU, "sys" for ranks with GPUs of their own.
Deadline a look in vain is counted; after `limit` looks the first wait to give up leaves a record,
         unless there is one, and the wait passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Int32, Int64, Uint32, const_expr
from torch import Tensor

from nanok3.dsl import (
    bf16_high,
    bf16_low,
    ld_relaxed_u32,
    ld_relaxed_word,
    ld_relaxed_words,
    lowest_bit,
    pack_bf16,
    st_relaxed_u32,
    st_relaxed_words,
    tree,
)

LOOKS = 1024  # after so many, a look whether another wait has given up
RECORD_WORDS = 5  # what gave up, CTA, number, expected, seen
MAILBOX_ALIGN = 256
NOBODY = 1 << 16  # above any rank


# ---- memory ----


@dataclass(frozen=True)
class Peers:
    """What a rank knows of all ranks' mailboxes, which are laid out alike."""

    size: int
    rank: int
    mail: Tensor  # bytes of its own mailboxes; zeros before the first exchange
    bases: Tensor  # [P] i64: where each rank's mailboxes begin, as this rank sees them


def virtual_peers(size: int, num_bytes: int, device: str) -> list[Peers]:
    """Of `size` ranks that share a GPU."""
    stride = -(-num_bytes // MAILBOX_ALIGN) * MAILBOX_ALIGN
    mail = torch.zeros(size, stride, dtype=torch.uint8, device=device)
    bases = torch.tensor([own.data_ptr() for own in mail], dtype=torch.int64, device=device)
    return [Peers(size, rank, own, bases) for rank, own in enumerate(mail)]


Rows = tuple[tuple[int, ...], ...]


def device_tables(device: str) -> Callable[[Rows], Tensor]:
    """Tables of addresses [ranks of a launch, columns] i64 on a device. The same rows are the same
    tensor, made once and never changed, so that a step can be captured after it has run."""

    @functools.cache
    def table_of(rows: Rows) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device)

    return table_of


# ---- device ----


def send(at, first, second, tag, scope):
    """Two words of data as 16 bytes of a mailbox."""
    st_relaxed_words(at, first, second, tag, scope)


def packed(values):
    """Four float32 as the data of two words."""
    return pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3])


def sum_of_ranks(found, ranks):
    """found: as `await_words` gives it for 16 bytes a rank -> four float32, added in the order of
    ranks and not yet rounded."""
    totals = []
    for word in (0, 2):
        for half in (bf16_low, bf16_high):
            total = half(found[word])
            for rank in range(1, ranks):
                total = total + half(found[4 * rank + word])
            totals.append(total)
    return totals


@cute.jit
def await_words(
    addresses: list,
    sources: list,
    tag: Uint32,
    each: Constexpr[int],
    health: Int64,
    what: Constexpr[int],
    cta: Int32,
    lane: Int32,
    limit: Constexpr[int],
    scope: Constexpr[str],
):
    """`each` (2 or 1) words at each address, as soon as all have the tag: data and tag of each, one
    behind the other. By whole warps. sources: the ranks that the words are of."""
    width = 2 * each
    found = cute.make_rmem_tensor((width * len(addresses),), Uint32)
    missing = Uint32(1)
    looks = Int32(0)
    while (missing != Uint32(0)) & (looks < limit):
        wrong = []
        for i in cutlass.range_constexpr(len(addresses)):
            if const_expr(each == 2):
                loaded = ld_relaxed_words(addresses[i], scope)
            else:
                loaded = ld_relaxed_word(addresses[i], scope)
            for k in cutlass.range_constexpr(width):
                found[width * i + k] = loaded[k]
                if const_expr(k % 2 == 1):
                    wrong.append(loaded[k] ^ tag)
        missing = Uint32(cute.arch.vote_ballot_sync(tree(wrong, lambda x, y: x | y) != 0))
        looks += 1
        if looks % LOOKS == 0:  # noqa: SIM102
            if ld_relaxed_u32(health) != 0:
                looks = Int32(limit)
    if (missing != Uint32(0)) & (lane == Int32(lowest_bit(missing))):
        source, seen = Int32(NOBODY), tag
        for i in cutlass.range_constexpr(len(addresses)):
            for k in cutlass.range_constexpr(1, width, 2):
                late = Int32(found[width * i + k] != tag) & Int32(sources[i] < source)
                source = source + late * (sources[i] - source)
                seen = seen + Uint32(late) * (found[width * i + k] - seen)
        leave_record(health, what, Uint32(cta), Uint32(source), tag, seen)
    return found


@cute.jit
def leave_record(
    health: Int64,
    what: Constexpr[int],
    cta: Uint32,
    number: Uint32,
    expected: Uint32,
    seen: Uint32,
):
    """Of a wait that gave up, unless there is one."""
    if ld_relaxed_u32(health) == 0:
        st_relaxed_u32(health + 4, cta)
        st_relaxed_u32(health + 8, number)
        st_relaxed_u32(health + 12, expected)
        st_relaxed_u32(health + 16, seen)
        st_relaxed_u32(health, Uint32(what))
