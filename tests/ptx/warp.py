"""A warp: control flow, barriers, copies and accesses; and the CTA and the cluster that it is in.

Lanes that differ in where they go next run in the order of the blocks and meet again; whoever comes
first to an instruction that needs the whole warp waits there for the others. What is done between
two barriers is ordered with what other warps do by clocks, see `memory.Shared`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ptx.arithmetic import RANK_SHIFT, parts_of
from ptx.instructions import Lanes, Program, Statement
from ptx.memory import Fault, Global, Mbarrier, Shared, gathered, lanes_of, spread
from ptx.races import IN_FLIGHT, By

ALL = np.ones(32, bool)
ALL.flags.writeable = False


@dataclass
class CTA:
    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    rank: int
    shared: Shared
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    landed: int = 0  # bulk copies
    barriers: dict[int, list[Warp]] = field(default_factory=dict)  # who waits at which
    warps: list[Warp] = field(default_factory=list)


class Cluster:
    """Some CTAs that run together, what they share, and the copies under way to them.

    `cooperative`: they are a whole grid, no cluster, and hand data over in global memory.
    """

    def __init__(
        self,
        program: Program,
        memory: Global,
        ctas: list[CTA],
        params: list[Lanes],
        cooperative: bool = False,
    ):
        self.program, self.memory, self.ctas, self.params = program, memory, ctas, params
        self.cooperative = cooperative
        per_cta = program.threads // 32
        total = per_cta * len(ctas)
        # What each warp knows. Columns: each warp's time; each CTA's bulk copies that have landed;
        # each warp's time as the async proxy sees it; "follows griddepcontrol.wait".
        self.clock = np.zeros((total, 2 * total + len(ctas) + 1), np.int64)
        np.fill_diagonal(self.clock, 1)
        self.times, self.async_times = slice(0, total), slice(total + len(ctas), -1)
        self.first_copy = total  # column
        self.released: dict[int, Lanes] = {}  # clock of what was released at an address
        self.ticks = 0  # of %globaltimer
        if cooperative:
            self.clock[:, -1] = 1  # such kernels do not begin before the one ahead has ended
        self.copies: list[Callable[[], None]] = []
        self.arrived, self.phase = 0, 0  # of the cluster barrier
        self.collected = self.published = np.zeros_like(self.clock[0])
        for cta in ctas:
            cta.warps = [Warp(self, cta, w, cta.rank * per_cta + w) for w in range(per_cta)]
        self.warps = [w for cta in ctas for w in cta.warps]


class Warp:
    def __init__(self, cluster: Cluster, cta: CTA, number: int, row: int):
        self.cluster, self.cta, self.row = cluster, cta, row
        self.params = cluster.params
        self.state = "run"  # or done, bar, cluster, mbarrier, look: what it waits for
        self.waits_at = ""
        self.seen: list[tuple[int, int]] = []  # addresses and words of the last ld.acquire
        self.known: dict[int, int] = {}  # word by address, as it last looked
        self.common: int | None = 0  # the next block of all lanes, or None where they differ
        self.pc = np.zeros(32, np.int64)  # of each lane, -1 when it has ended
        self.parked = np.zeros(32, bool)  # lanes that wait for the others of the warp
        self.groups: list[list[Callable[[], None]]] = []
        self.group: list[Callable[[], None]] = []
        self.cluster_phase: int | None = None  # in which it has arrived and not waited
        self.line = ""  # the last access, for messages
        lane = np.arange(32, dtype=np.uint32)
        rank = 0 if cluster.cooperative else cta.rank
        same = [np.full(32, v, np.uint32) for v in (rank, *cta.index, *cta.grid)]
        specials = [lane + np.uint32(32 * number), lane, *same]
        kinds = cluster.program.kinds[len(specials) :]
        self.registers = [*specials, *(poison(k) for k in kinds)]

    @property
    def clock(self) -> Lanes:
        return self.cluster.clock[self.row]

    # ---- control ----

    def advance(self, again: bool = False) -> bool:
        """Runs until the warp waits or ends; False if it could not move.

        A warp that polls runs on when what it looks at has changed, or if told to look `again`.
        """
        if self.state in ("done", "bar") or (self.state == "cluster" and not self.cluster_passed()):
            return False
        if self.state == "look" and not again and not self.seen_changes():
            return False
        moved, self.seen = False, []
        while True:
            where = self.choose()
            if where is None:
                return True
            block = self.cluster.program.blocks[where]
            mask = None if self.common is not None else self.pc == where
            if block.collective and mask is not None:
                self.parked |= mask
                continue
            if block.body:
                active = mask if mask is not None else ALL
                try:
                    self.cluster.program.function(block, mask is not None)(
                        self, self.registers, active
                    )
                except Fault as fault:
                    raise Fault(f"{fault} ({self.name()}, {self.line})") from None
            if block.end is None:
                self.go(mask, where + 1)
            elif not self.end(block.end, block.target, where, mask):
                if self.state == "look":
                    return self.saw_news()
                return moved or self.state != "mbarrier"
            moved = True

    def choose(self) -> int | None:
        """The block to run next: the lowest that a lane is at, so that lanes meet again."""
        if self.common is not None:
            return self.common
        live = self.pc >= 0
        if not live.any():
            self.state = "done"
            return None
        ready = live & ~self.parked
        if not ready.any():
            raise Fault(f"lanes miss a collective: blocks {np.unique(self.pc).tolist()}")
        where = int(self.pc[ready].min())
        if (self.pc == where).all():
            self.common = where
            self.parked[:] = False
        return where

    def go(self, mask: Lanes | None, where: int) -> None:
        if mask is None:
            self.common = where
        else:
            self.pc[mask] = where

    def end(self, s: Statement, target: int, where: int, mask: Lanes | None) -> bool:
        """A branch, an exit or a wait; False where the warp stops."""
        taken = ALL if mask is None else mask
        if s.guard:
            register, negated = s.guard
            taken = taken & (self.registers[register] != negated)
        if s.name.startswith("bra") and "barrier" not in s.name:
            self.split(mask, taken, target, where + 1)
            return True
        if s.name == "ret":
            self.split(mask, taken, -1, where + 1)
            if self.common == -1:
                self.state = "done"
            return self.state != "done"
        assert s.guard is None, s.text
        if s.name.startswith("mbarrier.try_wait"):
            if not self.passed(s, taken):
                self.state, self.waits_at = "mbarrier", s.text
                return False
            self.state = "run"
            self.go(mask, where + 1)
            return True
        self.go(mask, where + 1)
        self.waits_at = s.text
        if s.name.startswith("ld.acquire"):
            self.look(s, taken)
            return False
        if s.name.startswith("ld.relaxed"):
            self.look_at_words(s, taken)
            return False
        if s.name == "bar.sync":
            self.wait_at_barrier(s)
        else:
            self.cluster_passed()
        return self.state == "run"

    def split(self, mask: Lanes | None, taken: Lanes, target: int, after: int) -> None:
        if mask is not None:
            self.pc[mask] = np.where(taken[mask], target, after)
        elif taken.all():
            self.common = target
        elif not taken.any():
            self.common = after
        else:
            self.pc = np.where(taken, target, after)
            self.common = None

    def name(self) -> str:
        """With the warp's number in its CTA."""
        return f"CTA {self.cta.index}, warp {self.row % len(self.cta.warps)}"

    def waits_for(self) -> str:
        seen = ", ".join(f"{word} in {self.cluster.memory.near(at)}" for at, word in self.seen)
        kind = f"polls, sees {seen}" if self.state == "look" else f"waits ({self.state})"
        return f"{self.name()} {kind}: {self.waits_at}"

    # ---- barriers ----

    def publish(self) -> Lanes:
        """The clock of all that this warp did so far; what it does next is later."""
        clock = self.clock.copy()
        self.clock[self.row] += 1
        return clock

    def follow(self, clock: Lanes) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def value(self, operand: str, kind: str = "u32") -> Lanes:
        program = self.cluster.program
        if operand in program.names:
            return self.registers[program.names[operand]]
        return np.full(32, int(operand, 0), np.dtype(kind.replace("u", "uint")))

    def wait_at_barrier(self, s: Statement) -> None:
        number = uniform(self.value(s.operands[0]))
        threads = self.cluster.program.threads
        if len(s.operands) > 1:
            threads = uniform(self.value(s.operands[1]))
        waiting = self.cta.barriers.setdefault(number, [])
        waiting.append(self)
        self.state = "bar"
        if 32 * len(waiting) == threads:
            together = np.max([w.publish() for w in waiting], axis=0)
            for warp in waiting:
                warp.follow(together)
                warp.state = "run"
            waiting.clear()

    def arrive_at_cluster(self, release: bool) -> None:
        if self.cluster_phase is not None:
            raise Fault("a second arrival at the cluster barrier without a wait")
        cluster, clock = self.cluster, self.publish()
        self.cluster_phase = cluster.phase
        if release:
            cluster.collected = np.maximum(cluster.collected, clock)
        cluster.arrived += 1
        if cluster.arrived == len(cluster.warps):
            cluster.published, cluster.collected = cluster.collected, np.zeros_like(clock)
            cluster.arrived, cluster.phase = 0, cluster.phase + 1

    def cluster_passed(self) -> bool:
        if self.cluster_phase is None:
            raise Fault("a wait at the cluster barrier without an arrival")
        if self.cluster_phase == self.cluster.phase:
            self.state = "cluster"
            return False
        self.follow(self.cluster.published)
        self.state, self.cluster_phase = "run", None
        return True

    def wait_for_earlier_grids(self) -> None:
        self.clock[-1] = 1

    # ---- between CTAs ----

    def by(self) -> By:
        clock = self.cluster.clock[self.row]
        return self.row, clock, int(clock[self.row]), self.line

    def fence_async(self) -> None:
        c, row = self.cluster, self.clock
        row[c.async_times] = np.maximum(row[c.async_times], row[c.times])
        row[self.row] += 1  # what comes after the fence is not covered

    def look(self, s: Statement, active: Lanes) -> None:
        """ld.acquire; other warps run before this one goes on."""
        name, _, offset = s.operands[1].strip("[]").partition("+")
        at = self.value(name)
        words = np.zeros(32, np.uint32)
        for i in lanes_of(active):
            address = int(at[i]) + int(offset or 0)
            try:
                words[i] = self.cluster.memory.look(address, self.by())
            except Fault as fault:
                raise Fault(f"{fault} ({self.name()}, {s.text})") from None
            self.seen.append((address, int(words[i])))
            if address in self.cluster.released:
                self.follow(self.cluster.released[address])
        register = self.cluster.program.names[s.operands[0]]
        self.registers[register] = np.where(active, words, self.registers[register])
        self.state = "look"

    def look_at_words(self, s: Statement, active: Lanes) -> None:
        """ld.relaxed of words that say themselves whether they are there."""
        name, _, offset = s.operands[1].strip("[]").partition("+")
        at = self.value(name).astype(np.int64) + int(offset or 0)
        registers = s.operands[0].strip("{}").split(",")
        size = int(s.name.rpartition(".")[2][1:]) // 8
        loaded = self.load_global(at, len(registers), size, None if active.all() else active)
        for register, words in zip(registers, loaded, strict=True):
            index = self.cluster.program.names[register.strip()]
            self.registers[index] = np.where(active, words, self.registers[index])
        halves = loaded if size == 4 else [h for words in loaded for h in parts_of(words, 2)]
        for i in lanes_of(active):
            self.seen += [(int(at[i]) + 4 * k, int(half[i])) for k, half in enumerate(halves)]
        self.state = "look"

    def saw_news(self) -> bool:
        """Whether what it looks at is not what it saw there last: a loop over many words that
        never come gets nowhere."""
        news = {at: word for at, word in self.seen if self.known.get(at) != word}
        self.known |= news
        return bool(news)

    def seen_changes(self) -> bool:
        return any(self.cluster.memory.word(at) != word for at, word in self.seen)

    def red_add(self, at: Lanes, word: Lanes, mask: Lanes | None) -> None:
        """With release."""
        if not self.clock[-1]:
            raise Fault("an addition to global memory before griddepcontrol.wait")
        for i in lanes_of(mask):
            address = int(at[i])
            self.cluster.memory.add(address, int(word[i]), self.by())
            clock = self.publish()
            before = self.cluster.released.get(address, clock)
            self.cluster.released[address] = np.maximum(before, clock)

    def time(self) -> Lanes:
        self.cluster.ticks += 1
        return np.full(32, self.cluster.ticks, np.uint64)

    # ---- mbarriers and copies ----

    def mbarrier(self, at: int) -> Mbarrier:
        found = self.cta.mbarriers.get(at)
        if found is None or self.clock[found.born[0]] < found.born[1]:
            raise Fault(f"the mbarrier at {at} is used before this warp can know of its init")
        return found

    def init_mbarrier(self, at: Lanes, count: Lanes, mask: Lanes | None) -> None:
        for lane in lanes_of(mask):
            empty = np.zeros_like(self.clock)
            n, born = int(count[lane]), (self.row, int(self.clock[self.row]))
            where = int(at[lane])
            self.cta.shared.spots(np.array([where]), 8)
            self.cta.mbarriers[where] = Mbarrier(n, n, 0, 0, born, empty, empty)

    def arrive(self, at: Lanes, count: Lanes, due: Lanes, mask: Lanes | None) -> None:
        """Of each lane `count` arrivals, after as many bytes as it says are `due` besides."""
        for lane in lanes_of(mask):
            m = self.mbarrier(int(at[lane]))
            m.missing -= int(count[lane])
            if m.missing < 0:
                raise Fault("more arrivals at an mbarrier than its phase has")
            m.bytes_due += int(due[lane])
            m.collected = np.maximum(m.collected, self.publish())
            m.complete()

    def passed(self, s: Statement, active: Lanes) -> bool:
        """Whether the phases that the active lanes wait for are complete."""
        name, _, offset = s.operands[1].strip("[]").partition("+")
        at, parity = self.value(name), self.value(s.operands[2])
        found = [self.mbarrier(int(at[i]) + int(offset or 0)) for i in lanes_of(active)]
        if any(m.phase % 2 == parity[i] % 2 for m, i in zip(found, lanes_of(active), strict=True)):
            return False
        for m in found:
            self.follow(m.published)
        done = self.cluster.program.names[s.operands[0]]
        self.registers[done] = self.registers[done] | active
        return True

    def copy_bulk(
        self, to: Lanes, source: Lanes, size: Lanes, at: Lanes, mask: Lanes | None
    ) -> None:
        for i in lanes_of(mask):
            n, m = int(size[i]), self.mbarrier(int(at[i]))
            if n < 1 or n % 16:
                raise Fault(f"a bulk copy of {n} bytes")
            self.cluster.copies.append(self.begin_copy(to[i : i + 1], source[i : i + 1], n, m))

    def begin_copy(self, to: Lanes, source: Lanes, n: int, m: Mbarrier) -> Callable[[], None]:
        """Asks for n bytes; gives the function that lands them."""
        cluster, cta = self.cluster, self.cta
        spots = cta.shared.begin_copy(to, n, self.row, self.clock)[0]
        column = cluster.first_copy + cta.rank
        by = (column, self.clock[cluster.async_times], IN_FLIGHT, self.line)
        whole = cluster.memory.load(source, n, not self.clock[-1], by)[0]
        clock = self.publish()

        def land() -> None:
            cta.shared.land(spots, whole)
            cta.landed += 1
            if cluster.cooperative:
                cluster.memory.landed(source, n, column, cta.landed)
                clock[column] = cta.landed
            m.bytes_due -= n
            m.collected = np.maximum(m.collected, clock)
            m.complete()

        return land

    def copy_16(self, to: Lanes, source: Lanes, mask: Lanes | None) -> None:
        which = lanes_of(mask)
        spots = self.cta.shared.begin_copy(to[which], 16, self.row, self.clock)
        begin = source[which]
        values = self.cluster.memory.load(begin, 16, not self.clock[-1], self.by())

        def land() -> None:
            self.cta.shared.land(spots, values)
            if self.cluster.cooperative:  # it may have read until now
                self.cluster.memory.landed(begin, 16, self.row, int(self.clock[self.row]))

        self.group.append(land)

    def commit_group(self) -> None:
        self.groups.append(self.group)
        self.group = []

    def wait_group(self, most: int) -> None:
        while len(self.groups) > most:
            for land in self.groups.pop(0):
                land()

    # ---- loads and stores; each word of a result is 32 lanes ----

    def load_global(self, at: Lanes, count: int, size: int, mask: Lanes | None) -> list[Lanes]:
        which = lanes_of(mask)
        raw = self.cluster.memory.load(at[which], count * size, not self.clock[-1], self.by())
        return spread(raw, which, count, size)

    def load_shared(self, at: Lanes, count: int, size: int, mask: Lanes | None) -> list[Lanes]:
        which = lanes_of(mask)
        raw = self.cta.shared.load(at[which], count * size, self.row, self.clock)
        return spread(raw, which, count, size)

    def load_matrices(self, at: Lanes, transposed: bool) -> list[Lanes]:
        raw = self.cta.shared.load(at, 16, self.row, self.clock)
        rows = np.ascontiguousarray(raw).view(np.uint16).reshape(4, 8, 8)
        if transposed:
            rows = rows.transpose(0, 2, 1)
        return list(np.ascontiguousarray(rows).view(np.uint32).reshape(4, 32))

    def store_global(self, at: Lanes, values: list[Lanes], mask: Lanes | None) -> None:
        if not self.clock[-1]:
            raise Fault("a store to global memory before griddepcontrol.wait")
        which = lanes_of(mask)
        self.cluster.memory.store(at[which], gathered(values, which), self.by())

    def store_shared(self, at: Lanes, values: list[Lanes], mask: Lanes | None) -> None:
        which = lanes_of(mask)
        self.cta.shared.store(at[which], gathered(values, which), self.row, self.clock)

    def store_cluster(self, at: Lanes, values: list[Lanes], mask: Lanes | None) -> None:
        which = lanes_of(mask)
        raw, rank = gathered(values, which), (at[which] >> RANK_SHIFT) - 1
        for r in np.unique(rank):
            cta = self.cluster.ctas[r]
            if self.cluster.phase == 0:
                raise Fault("a store to a CTA of the cluster that may not have begun")
            if any(w.state == "done" for w in cta.warps):
                raise Fault("a store to a CTA of the cluster that may have ended")
            to = at[which][rank == r] & ((1 << RANK_SHIFT) - 1)
            cta.shared.store(to, raw[rank == r], self.row, self.clock)

    def red_or(self, at: Lanes, word: Lanes, mask: Lanes | None) -> None:
        which = lanes_of(mask)
        self.cta.shared.red_or(at[which], word[which], self.row, self.clock)


@functools.cache
def poison(kind: str) -> Lanes:
    """Registers are not changed in place, so all may share it."""
    return np.zeros(32, bool) if kind == "bool_" else np.full(32, 0xDEAD, kind)


def uniform(value: Lanes) -> int:
    if (value != value[0]).any():
        raise Fault("a barrier whose number differs between lanes")
    return int(value[0])
