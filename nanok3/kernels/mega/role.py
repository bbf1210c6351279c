"""What a warp of the persistent kernel has: its place, the ring, fields of weights, the hand-offs.

A CTA is WARPS compute warps, a loader warp and a signalling warp. The first two kinds trace the
same text: `Loader` asks for the weights of each op, `Compute` uses them, so they cannot disagree
about the order of the ring.

Fields    a layer's weights and caches are addresses, one row of a table in global memory; lane l
          of every warp holds entry l of the current layer, and of the next one, asked for early.
Hand-offs a signal is one op's "my part is written", by every CTA, also by one that had no part.
          Signals are numbered as they come in the text, 0, 1, .. over all launches; number s counts
          in counter s % COUNTERS, which then stands at (s / COUNTERS + 1) * SMs. No counter is ever
          cleared. A CTA is never COUNTERS signals ahead of another: it waits for all of them
          several times a layer.

          what       written by                                read by
          mbarrier,  each compute warp, when its part of a     the signalling warp
          8 in turn  signal is written
          counter s  the signalling warp of each CTA,          thread 0 of each CTA that needs it,
                     red.release, after the mbarrier           ld.acquire until it is there, then a
                                                               barrier of its compute warps
          A release waits until all that this CTA wrote has reached L2, 1 to 2.5 us while weights
          stream: the signalling warp waits for that, the compute warps go on.
Words     some buffers are handed over without a signal: each 32-bit word has the low 8 bits of its
          tag in its own low bits (a float32 keeps 16 bits of mantissa), and is looked at until it
          has. Tags are numbers, one more each time; a word is written anew, in all rows, before
          256 more have come.
Deadline  a wait gives up after LIMIT looks: the first to do so leaves a record (which CTA, which
          signal, which op, expected, seen), all later waits pass at once, the launch ends, and the
          host refuses what it computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from nanok3.dsl import (
    asm,
    bits_of,
    bulk_copy_g2s,
    evict_first_policy,
    float_of,
    global_clock,
    ld_acquire_u32,
    ld_global_i64,
    ld_relaxed_u32,
    ld_relaxed_u32x2,
    ld_relaxed_u32x4,
    ld_shared_u32,
    red_add_release,
    st_global_u32x4,
    st_relaxed_u32,
    st_shared_u32,
    tree,
)
from nanok3.kernels.mega.fields import ENTRIES, entry
from nanok3.kernels.mega.sizes import SLOT_BYTES, WARPS

COUNTERS = 64
PENDING = 8  # signals of a CTA that may be under way: more never are before it waits for others
COUNTER_BYTES = 128
FLIGHT = 2  # chunks that the loader keeps in flight; further slots hold data that has landed
LIMIT = 1 << 22  # looks of a wait: about 2 s
TAG = 0xFF  # bits of a word
LOOKS = 1024  # after so many, a look whether another wait has given up
# bytes in the sync area: the numbers of the next launch's first signal and first tag, the record of
# a wait that gave up (5 words); then the counters
NEXT_SIGNAL, NEXT_TAG, HEALTH, SYNC_HEAD = 0, 4, 8, 128
SYNC_BYTES = SYNC_HEAD + COUNTERS * COUNTER_BYTES
PROGRAMS = 3  # of one row, of more, of more that are recorded
SYNC_SHIFT = 32  # from one program's sync area to another's: their counters lie between each other
WORDS = 1 << 16  # in the record: what was waited for were words
# events of a trace: an op begins; what it waited for is there; its part is written
BEGIN, READY, DONE = 0, 1, 2
MOST_EVENTS = 8192  # of a CTA and launch


@dataclass(frozen=True)
class Frozen:
    """CuTe DSL carries an object whose method is called in a dynamic loop or branch as if the call
    changed it, and cannot; one that says it is frozen it leaves alone."""


class Traced(Frozen):
    """An object whose methods a dynamic block may call. Its attributes are set while tracing, and
    only outside of such blocks."""

    __setattr__ = object.__setattr__  # type: ignore[assignment]


class Role(Traced):
    """Kernel values as attributes; `env` is made by the kernel, once a role."""

    def __init__(self, program: Any, env: dict[str, Any]) -> None:
        self.program, self.sizes = program, program.sizes
        for name, value in env.items():
            setattr(self, name, value)
        # ring position: slot, phase; of the chunk FLIGHT back: slot, phase; chunks begun, to FLIGHT
        self.position = cute.make_rmem_tensor((5,), Int32)
        for i in range(5):
            self.position[i] = Int32(0)
        self.row = cute.make_rmem_tensor((4,), Uint32)  # low, high of this layer's, the next one's
        for i in range(4):
            self.row[i] = Uint32(0)
        self.block_signal = cute.make_rmem_tensor((1,), Uint32)  # number of the block's first one
        self.score_tag = cute.make_rmem_tensor((1,), Uint32)  # of AttnRes's scores, the next ones
        self.score_tag[0] = Uint32(0)
        self.routed_phase = cute.make_rmem_tensor((1,), Int32)  # of the mbarrier `routed`
        self.routed_phase[0] = Int32(0)
        self.signals = 0  # of the block, traced so far
        self.block_tag = cute.make_rmem_tensor((1,), Uint32)  # the block's first tag
        self.tags = 0  # of the block, traced so far
        self.tag_of: dict[str, Any] = {}  # of the block: buffer -> the tag of its words
        self.last: dict[str, int] = {}  # of the block: buffer -> its signal
        self.op = ""  # for the record of a wait that gave up
        self.fresh()

    def fresh(self):
        """Thread indices, read anew by every op: kept over ops, their arithmetic would spill."""
        self.tid = asm("mov.u32 $0,%tid.x;", "=r,~{memory}", (), Int32)
        self.cta = asm("mov.u32 $0,%ctaid.x;", "=r,~{memory}", (), Int32)
        self.lane = self.tid & 31  # not negative, for all to see: cheap divisions
        self.warp = cute.arch.make_warp_uniform(self.tid >> 5)

    def begin(self, op: str):
        self.op = op
        self.fresh()
        self.mark(BEGIN)

    def mark(self, event: int):
        """A clock stamp, if the program has stamps: it costs nothing where it has none."""

    # ---- fields ----

    def prefetch_row(self, row):
        """Asks for a row of the table; `next_row` makes it the current one."""
        at = self.table + Int64(row * ENTRIES + self.lane) * 8
        value = ld_global_i64(at)
        self.row[2] = Uint32(value & Int64(0xFFFFFFFF))
        self.row[3] = Uint32((value >> 32) & Int64(0xFFFFFFFF))

    def next_row(self):
        self.row[0] = self.row[2]
        self.row[1] = self.row[3]

    def field(self, name: str):
        """Address (or number) of a field of the current layer. By whole warps."""
        index = entry(name)
        low = cute.arch.shuffle_sync(self.row[0], index)
        high = cute.arch.shuffle_sync(self.row[1], index)
        return (Int64(high) << 32) | (Int64(low) & Int64(0xFFFFFFFF))

    def number(self, name: str):
        return Int32(cute.arch.shuffle_sync(self.row[0], entry(name)))

    def shared(self, area: str):
        """Address of an area of shared memory."""
        return self.areas + self.program.areas[area]

    def buffer(self, name: str):
        """Address of a buffer that CTAs exchange."""
        return self.work + Int64(self.sizes.offsets[name])

    # ---- blocks of the text ----

    def begin_block(self):
        self.signals, self.last = 0, {}
        self.tags, self.tag_of = 0, {}

    def end_block(self):
        self.block_signal[0] = self.block_signal[0] + Uint32(self.signals)
        self.block_tag[0] = self.block_tag[0] + Uint32(self.tags)

    def new_tag(self, buffer: str):
        """Of the words of a buffer that an op begins to write."""
        self.tag_of[buffer] = self.block_tag[0] + Uint32(self.tags)
        self.tags += 1
        return self.tag_of[buffer]

    def signal_of(self, name: str):
        """Number of the signal that this block gave for a buffer."""
        return self.block_signal[0] + Uint32(self.last[name])

    def goal_of(self, number):
        return (number // COUNTERS + 1) * self.sizes.sms

    def counter(self, number):
        return self.sync + Int64(SYNC_HEAD) + Int64(Int32(number % COUNTERS) * COUNTER_BYTES)

    @cute.jit
    def look(self, counter: Int64, number: Uint32, goal: Uint32):
        """Polls; on expiry leaves the record, unless there is one. By one thread."""
        seen = ld_acquire_u32(counter)
        looks = Int32(0)
        while (Int32(seen - goal) < 0) & (looks < self.program.limit):
            seen = ld_acquire_u32(counter)
            looks += 1
            if looks % LOOKS == 0:  # noqa: SIM102
                if ld_relaxed_u32(self.sync + HEALTH) != 0:
                    looks = Int32(self.program.limit)
        if Int32(seen - goal) < 0:
            self.record(number, goal, seen, 0)

    @cute.jit
    def record(self, number: Uint32, goal: Uint32, seen: Uint32, kind: cutlass.Constexpr[int]):
        """Unless there is one."""
        if ld_relaxed_u32(self.sync + HEALTH) == 0:
            st_relaxed_u32(self.sync + HEALTH + 4, Uint32(self.cta))
            st_relaxed_u32(self.sync + HEALTH + 8, number)
            st_relaxed_u32(self.sync + HEALTH + 12, goal)
            st_relaxed_u32(self.sync + HEALTH + 16, seen)
            op = self.program.op_number(self.op) + 1 | kind
            st_relaxed_u32(self.sync + HEALTH, Uint32(op))


def advance(position, at, slots):
    """To the next slot: position[at] is a slot, position[at + 1] its phase."""
    slot = position[at] + 1
    wraps = Int32(slot == slots)
    position[at] = slot - wraps * slots
    position[at + 1] = position[at + 1] ^ wraps


class Loader(Role):
    """The loader warp."""

    def __init__(self, program: Any, env: dict[str, Any]) -> None:
        super().__init__(program, env)
        self.policy = evict_first_policy()

    @cute.jit
    def claim(self, num_bytes: Int32):
        """The next slot, once it is empty and at most FLIGHT chunks are under way -> slot."""
        slot = self.position[0]
        cute.arch.mbarrier_wait(self.barriers + self.slots + slot, self.position[1] ^ 1)
        position = self.position
        if position[4] < FLIGHT:
            position[4] = position[4] + 1
        else:
            cute.arch.mbarrier_wait(self.barriers + position[2], position[3])
            advance(position, 2, self.slots)
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.barriers + slot, num_bytes)
        cute.arch.sync_warp()
        advance(position, 0, self.slots)
        return slot

    def ask(self, slot, offset, source, num_bytes):
        """One bulk copy into a claimed slot; by one lane, or by several with their own parts."""
        shared = self.ring + slot * SLOT_BYTES + offset
        bulk_copy_g2s(shared, source, num_bytes, self.barriers + slot, self.policy)

    @cute.jit
    def fill(self, source: Int64, num_bytes: Int32):
        """A chunk that is one copy."""
        slot = self.claim(num_bytes)
        if self.lane == 0:
            self.ask(slot, Int32(0), source, num_bytes)

    def signal(self, name: str):
        """Counts what compute warps signal."""
        self.last[name] = self.signals
        self.signals += 1


class Compute(Role):
    """The compute warps."""

    def __init__(self, program: Any, env: dict[str, Any]) -> None:
        super().__init__(program, env)
        self.events = cute.make_rmem_tensor((1,), Int32)
        self.events[0] = Int32(0)

    def mark(self, event: int):
        if self.program.stamps:
            self.stamp(event << 16 | self.program.op_number(self.op))

    @cute.jit
    def stamp(self, code: cutlass.Constexpr):
        """[clock in ns (two words), event and op, 0] of thread 0, in the order of the events."""
        if self.tid == 0:
            index = cutlass.min(self.events[0], MOST_EVENTS - 1)
            at = self.stamps + (Int64(self.cta) * MOST_EVENTS + Int64(index)) * 16
            clock = global_clock()
            low, high = Uint32(clock & Int64(0xFFFFFFFF)), Uint32(clock >> 32)
            st_global_u32x4(at, (low, high, Uint32(code), Uint32(0)))
        self.events[0] = self.events[0] + 1

    def bar(self):
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * 32)

    def take(self):
        """Address of the next chunk, when it has arrived."""
        slot = self.position[0]
        cute.arch.mbarrier_wait(self.barriers + slot, self.position[1])
        return self.ring + slot * SLOT_BYTES

    @cute.jit
    def release(self):
        """This warp has read the chunk. By whole warps, converged."""
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.barriers + self.slots + self.position[0])
        advance(self.position, 0, self.slots)

    def signal(self, name: str):
        """This CTA's part of a buffer is written. By all compute warps, once an op."""
        self.arrive(self.block_signal[0] + Uint32(self.signals))
        self.mark(DONE)
        self.last[name] = self.signals
        self.signals += 1

    @cute.jit
    def arrive(self, number: Uint32):
        cute.arch.sync_warp()
        if self.lane == 0:
            local = number - self.first_signal
            cute.arch.mbarrier_arrive(self.pending + Int32(local % PENDING))

    @cute.jit
    def finish(self):
        """The last thing that compute warps do: the signalling warp ends."""
        self.bar()
        if self.tid == 0:
            st_shared_u32(self.shared("stop"), Uint32(1))
        self.arrive(self.block_signal[0])

    def wait(self, name: str):
        """Until all CTAs have signalled a buffer of this block. By all compute warps."""
        self.await_signal(self.signal_of(name))
        self.mark(READY)

    @cute.jit
    def await_signal(self, number: Uint32):
        if self.tid == 0:
            self.look(self.counter(number), number, self.goal_of(number))
        self.bar()

    @cute.jit
    def words(self, addresses: list, tag: Uint32, each: cutlass.Constexpr = 4):
        """`each` (4, 2, 1) words at each address, as soon as all have the tag. By whole warps."""
        found = cute.make_rmem_tensor((each * len(addresses),), Uint32)
        missing = Uint32(1)
        looks = Int32(0)
        while (missing != Uint32(0)) & (looks < self.program.limit):
            wrong = []
            for i in cutlass.range_constexpr(len(addresses)):
                loaded = loaded_words(addresses[i], each)
                for k in cutlass.range_constexpr(each):
                    found[each * i + k] = loaded[k]
                    wrong.append((loaded[k] ^ tag) & Uint32(TAG))
            missing = Uint32(cute.arch.vote_ballot_sync(tree(wrong, lambda x, y: x | y) != 0))
            looks += 1
            if looks % LOOKS == 0:  # noqa: SIM102
                if ld_relaxed_u32(self.sync + HEALTH) != 0:
                    looks = Int32(self.program.limit)
        if (missing != Uint32(0)) & (self.lane == 0):
            self.record(tag, tag, found[0] & Uint32(TAG), WORDS)
        return found


def loaded_words(address, each):
    if each == 1:
        return (ld_relaxed_u32(address),)
    return ld_relaxed_u32x2(address) if each == 2 else ld_relaxed_u32x4(address)


def tagged(value, tag):
    """A float32 as a word with its tag."""
    return (bits_of(value) & Uint32(0xFFFFFF00)) | (tag & Uint32(TAG))


def untagged(word):
    return float_of(word & Uint32(0xFFFFFF00))


def bf16_pair(low, high):
    """Two words that hold a bf16 each."""
    return (low >> 16) | (high & Uint32(0xFFFF0000))


class Signaller(Role):
    """The signalling warp: it passes on what compute warps signal, in their order."""

    @cute.jit
    def run(self):
        local = Uint32(0)
        stop = Uint32(0)
        while stop == Uint32(0):
            phase = Int32(local // PENDING % 2)
            cute.arch.mbarrier_wait(self.pending + Int32(local % PENDING), phase)
            stop = ld_shared_u32(self.shared("stop"))
            if (stop == Uint32(0)) & (self.lane == 0):
                red_add_release(self.counter(self.first_signal + local), Uint32(1))
            local = local + Uint32(1)
