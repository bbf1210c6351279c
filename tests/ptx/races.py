"""Races on global memory between the warps of a cooperative grid, found by clocks.

A hand-off between CTAs is right when every read is known to follow the last write, and every write
the last write and all reads since: by barriers, mbarriers, and releases that an acquire has seen.
What a warp knows is a row of times, one for each warp (`warp.Cluster.clock`); an access at time t
of warp w is known to one whose row has t or more at w. A bulk copy reads through the async proxy:
for it counts what a fence.proxy.async has followed, and it reads until it lands.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Lanes = np.ndarray[Any, np.dtype[Any]]

IN_FLIGHT = np.iinfo(np.int32).max  # the time of a copy's read that has not landed
# A warp or a CTA's copies, the row of what it knows, its own time, the instruction.
By = tuple[int, Lanes, int, str]


class Race(Exception):
    """`unit` is where, `sentence` who did what."""

    def __init__(self, unit: int, sentence: str) -> None:
        super().__init__(unit, sentence)
        self.unit, self.sentence = unit, sentence


class History:
    """Of each unit of a buffer's bytes: who wrote it last in this launch, who has read it since."""

    def __init__(self, num_bytes: int, unit: int, num_warps: int, warps_per_cta: int) -> None:
        self.unit, self.num_warps, self.warps_per_cta = unit, num_warps, warps_per_cta
        num_units = -(-num_bytes // unit)
        self.writer = np.zeros(num_units, np.int32)
        self.written = np.zeros(num_units, np.int32)  # 0: not in this launch
        self.line = np.zeros(num_units, np.int32)  # of `lines`: the last write's
        self.lines: dict[str, int] = {}
        self.counts = np.zeros(num_units, bool)  # the last write was a release's
        # by each warp, and by each CTA's copies; memory that is not touched costs nothing
        self.read = np.zeros((num_units, num_warps + num_warps // warps_per_cta), np.int32)

    def units(self, offsets: Lanes, size: int) -> Lanes:
        """Of accesses [n] of `size` bytes, [n * units of each]."""
        first = offsets // self.unit
        if size <= self.unit:
            return first
        return (first[:, None] + np.arange(size // self.unit)).reshape(-1)

    def who(self, column: int) -> str:
        if column < self.num_warps:
            return "warp {1} of CTA {0}".format(*divmod(column, self.warps_per_cta))
        return f"a bulk copy of CTA {column - self.num_warps}"

    def last_write(self, unit: int) -> str:
        line = list(self.lines)[self.line[unit]]
        return f"written by {self.who(int(self.writer[unit]))}, {line}"

    def note_read(self, units: Lanes, by: By) -> None:
        self.check_read(units, by)
        self.read[units, by[0]] = by[2]

    def check_read(self, units: Lanes, by: By) -> None:
        column, known, _, _ = by
        writer = self.writer[units]
        late = known[writer] < self.written[units]
        if late.any():
            unit = int(units[late.argmax()])
            lacks = "no signal orders this read after it"
            if column >= self.num_warps:
                lacks = "no signal, or no fence.proxy.async after it, orders this copy after it"
            raise Race(unit, f"{self.last_write(unit)}: {lacks}")

    def note_landed(self, units: Lanes, column: int, time: int) -> None:
        self.read[units, column] = time

    def note_write(self, units: Lanes, by: By) -> None:
        self.check_write(units, by, self.written[units])
        self.set_write(units, by, False)

    def note_count(self, units: Lanes, by: By) -> None:
        """An addition with release: others may come beside it."""
        self.check_write(units, by, np.where(self.counts[units], 0, self.written[units]))
        self.set_write(units, by, True)

    def note_look(self, units: Lanes, by: By) -> None:
        """A load with acquire: additions may come beside it, also the first one."""
        self.check_read(units[~self.counts[units]], by)

    def set_write(self, units: Lanes, by: By, counts: bool) -> None:
        self.writer[units], self.written[units], self.counts[units] = by[0], by[2], counts
        self.line[units] = self.lines.setdefault(by[3], len(self.lines))

    def check_write(self, units: Lanes, by: By, written: Lanes) -> None:
        known, sentence = by[1], "no signal orders this write after it"
        late = known[self.writer[units]] < written
        if late.any():
            unit = int(units[late.argmax()])
            raise Race(unit, f"{self.last_write(unit)}: {sentence}")
        late = self.read[units] > known[: self.read.shape[1]]
        if late.any():
            i, column = (int(k) for k in np.argwhere(late)[0])
            raise Race(int(units[i]), f"read by {self.who(column)}: {sentence}")
