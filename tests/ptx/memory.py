"""Global memory as the launcher's tensors, and a CTA's shared memory with what is known of it."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ptx.instructions import SHARED_BASE
from ptx.races import By, History, Race

Lanes = np.ndarray[Any, np.dtype[Any]]


class Fault(Exception):
    """The kernel did what a GPU would not forgive, or would not report."""


@dataclass
class Buffer:
    """The bytes from a tensor's first element to its last."""

    tensor: torch.Tensor
    start: int
    data: Lanes  # u8, shared with the tensor
    inside: Lanes | None  # bool, for a tensor with gaps
    constant: bool  # a weight, which no kernel writes
    name: str = ""
    unordered: bool = False  # read and written without order, on purpose: no race is looked for
    history: History | None = None  # of a cooperative launch
    views: dict[int, Lanes] = field(default_factory=dict)  # words of so many bytes

    def __str__(self) -> str:
        return f"{self.name or 'a tensor'} {tuple(self.tensor.shape)}"

    def words(self, size: int) -> Lanes | None:
        """The bytes as words of `size` bytes; None where these would not be aligned."""
        if size not in self.views and size in (2, 4, 8, 16) and self.start % size == 0:
            whole = self.data[: len(self.data) // size * size]
            self.views[size] = whole.view("V16" if size == 16 else f"u{size}")
        return self.views.get(size)

    def take(self, offsets: Lanes, size: int) -> Lanes:
        """[n, size] u8."""
        words = self.words(size)
        if len(offsets) == 1:
            return self.data[offsets[0] : offsets[0] + size].copy()[None]
        if words is None:
            return self.data[offsets[:, None] + np.arange(size)]
        return words[offsets // size].view(np.uint8).reshape(len(offsets), size)

    def put(self, offsets: Lanes, values: Lanes) -> None:
        size = values.shape[1]
        words = self.words(size)
        if words is None:
            self.data[offsets[:, None] + np.arange(size)] = values
        else:
            words[offsets // size] = np.ascontiguousarray(values).view(words.dtype)[:, 0]


def buffer_of(
    tensor: torch.Tensor, constant: bool, name: str = "", unordered: bool = False
) -> Buffer:
    size = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * size
    raw: Any = (ctypes.c_uint8 * num_bytes).from_address(tensor.data_ptr())
    inside = None
    if last + 1 != tensor.numel():
        held = torch.zeros(last + 1, dtype=torch.bool)
        held.as_strided(tensor.shape, tensor.stride()).fill_(True)
        inside = held.numpy().repeat(size)
    data = np.frombuffer(raw, np.uint8)
    return Buffer(tensor, tensor.data_ptr(), data, inside, constant, name, unordered)


class Global:
    """What a launch may touch."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = sorted(buffers, key=lambda b: b.start)
        self.starts = [b.start for b in self.buffers]

    def track(self, num_warps: int, warps_per_cta: int) -> None:
        """Looks for races from now on. Units are as small as what a buffer's warps share."""
        end = 0
        for b in self.buffers:
            assert b.start >= end or b.constant, f"{b} overlaps another tensor"
            end = max(end, b.start + len(b.data))
            if not (b.constant or b.unordered):
                unit = min(max(b.tensor.element_size(), 2), 4)
                b.history = History(len(b.data), unit, num_warps, warps_per_cta)

    def places(self, at: Lanes, size: int) -> list[tuple[Buffer, Any, Lanes]]:
        """Of accesses [n] of `size` bytes: (buffer, which of them, offsets in it)."""
        every = at.tolist()
        low, high = min(every), max(every)
        if (at & (min(size, 16) - 1)).any():
            raise Fault(f"global access of {size} bytes at an address that is no multiple of it")
        first = bisect_right(self.starts, low) - 1
        if first >= 0:
            b = self.buffers[first]
            if b.inside is None and high + size <= b.start + len(b.data):
                return [(b, slice(None), at - b.start)]
        found, missing = [], np.ones(len(at), bool)
        for b in self.buffers:
            within = missing & (at >= b.start) & (at + size <= b.start + len(b.data))
            if not within.any():
                continue
            if b.inside is not None:
                spots = (at[within] - b.start)[:, None] + np.arange(size)
                within[within] = b.inside[spots].all(1)
            found.append((b, within, at[within] - b.start))
            missing &= ~within
        if missing.any():
            raise Fault(f"global access outside every tensor: {self.near(int(at[missing][0]))}")
        return found

    def near(self, at: int) -> str:
        nearest = min(self.buffers, key=lambda b: abs(at - b.start))
        offset = at - nearest.start
        return f"byte {offset} of the {len(nearest.data)} of {nearest}"

    def load(self, at: Lanes, size: int, early: bool, by: By | None = None) -> Lanes:
        """[n, size] u8; `early`: before what earlier kernels wrote is there."""
        places = self.places(at, size)
        out = np.zeros((len(at), size), np.uint8) if len(places) > 1 else None
        for buffer, which, offsets in places:
            if early and not buffer.constant:
                raise Fault(f"{buffer} is read before griddepcontrol.wait, and is no weight")
            if by and buffer.history:
                note(buffer, History.note_read, offsets, size, by)
            if out is None:
                return buffer.take(offsets, size)
            out[which] = buffer.take(offsets, size)
        assert out is not None
        return out

    def store(self, at: Lanes, values: Lanes, by: By | None = None) -> None:
        """values [n, size] u8."""
        size = values.shape[1]
        for buffer, which, offsets in self.places(at, size):
            if buffer.constant:
                raise Fault(f"a store to a weight {buffer}")
            if by and buffer.history:
                note(buffer, History.note_write, offsets, size, by)
            buffer.put(offsets, values[which])

    def landed(self, at: Lanes, size: int, column: int, time: int) -> None:
        """What a copy read is free to be written from `time` of CTA's copies on."""
        for buffer, _, offsets in self.places(at, size):
            if buffer.history:
                buffer.history.note_landed(buffer.history.units(offsets, size), column, time)

    # ---- words that CTAs count in ----

    def word(self, address: int) -> int:
        ((buffer, _, offsets),) = self.places(np.array([address]), 4)
        return int(buffer.take(offsets, 4).view(np.uint32)[0, 0])

    def look(self, address: int, by: By) -> int:
        """By a load with acquire."""
        ((buffer, _, offsets),) = self.places(np.array([address]), 4)
        if buffer.history:
            note(buffer, History.note_look, offsets, 4, by)
        return int(buffer.take(offsets, 4).view(np.uint32)[0, 0])

    def add(self, address: int, value: int, by: By) -> None:
        """With release."""
        ((buffer, _, offsets),) = self.places(np.array([address]), 4)
        if buffer.constant:
            raise Fault(f"an addition to a weight {buffer}")
        if buffer.history:
            note(buffer, History.note_count, offsets, 4, by)
        total = (self.word(address) + value) % (1 << 32)
        buffer.put(offsets, np.array([[total]], np.uint32).view(np.uint8))


def note(
    buffer: Buffer,
    how: Callable[[History, Lanes, By], None],
    offsets: Lanes,
    size: int,
    by: By,
) -> None:
    assert buffer.history is not None
    try:
        how(buffer.history, buffer.history.units(offsets, size), by)
    except Race as race:
        byte = race.unit * buffer.history.unit
        raise Fault(f"race: byte {byte} of {buffer} was {race.sentence}") from None


class Shared:
    """A CTA's shared memory. Of each word: who wrote it last and who has read it since, and when.

    A time is a warp's own count of the moments at which it published what it did (a barrier, an
    arrival); `clock[w]` of a warp is the last moment of warp w that it is known to follow. An
    access is a race if one that it conflicts with is not known to come before it. Two writes of
    the same value are none: a last piece may be staged by several warps. Bytes that nothing was
    written to are NaN, as a row that is not there may be computed on but must not be used.
    """

    def __init__(self, size: int, num_warps: int, first_warp: int = 0):
        """Accessed by `num_warps` warps of the cluster, from `first_warp` on."""
        words = (size + 3) // 4
        self.size, self.first_warp = size, first_warp
        self.warps = slice(first_warp, first_warp + num_warps)
        self.data = np.full(4 * words, 0xFF, np.uint8)
        self.pending = np.zeros(4 * words, bool)  # a copy to it is under way
        self.writer = np.zeros(words, np.int32)
        self.written = np.zeros(words, np.int32)
        self.atomic = np.zeros(words, bool)
        self.read = np.zeros((words, num_warps), np.int32)

    def spots(self, at: Lanes, size: int) -> Lanes:
        """[n, size] indices of bytes."""
        if (at % min(size, 16)).any():
            raise Fault(f"shared access of {size} bytes at {at.tolist()[:4]}, not a multiple of it")
        begin = at - SHARED_BASE
        if (begin < 0).any() or (begin + size > self.size).any():
            raise Fault(f"shared bytes {begin.min()} to {begin.max() + size} of {self.size}")
        return begin[:, None] + np.arange(size)

    def load(self, at: Lanes, size: int, warp: int, clock: Lanes) -> Lanes:
        spots = self.spots(at, size)
        if self.pending[spots].any():
            raise Fault(f"shared byte {spots[0, 0]} is read before a copy to it is waited for")
        words = spots[:, ::4] // 4
        if (clock[self.writer[words]] < self.written[words]).any():
            raise Fault(f"race: shared byte {spots[0, 0]} is read, which another warp has written")
        self.read[words, warp - self.first_warp] = clock[warp]
        return self.data[spots]

    def claim(self, words: Lanes, warp: int, clock: Lanes, harmless: Lanes) -> None:
        """Notes a write of words [n] after checking that it follows all others' accesses.

        `harmless` [n]: it may happen beside another write.
        """
        late = clock[self.writer[words]] < self.written[words]
        if (late & ~harmless).any():
            raise Fault(f"race: two warps write shared byte {4 * words[0]}")
        if (self.read[words] > clock[self.warps]).any():
            raise Fault(
                f"race: shared byte {4 * words[0]} is written, another warp may read it yet"
            )
        self.writer[words], self.written[words] = warp, clock[warp]
        self.pending.reshape(-1, 4)[words] = False

    def store(self, at: Lanes, values: Lanes, warp: int, clock: Lanes) -> None:
        """values [n, size] u8."""
        size = values.shape[1]  # of half a word the whole word is noted
        spots = self.spots(at, size)
        words = (spots[:, ::4] // 4).reshape(-1)
        same = (self.data[spots] == values).reshape(len(words), min(size, 4)).all(1)
        self.claim(words, warp, clock, same & ~self.pending[4 * words])
        self.data[spots], self.atomic[words] = values, False

    def red_or(self, at: Lanes, values: Lanes, warp: int, clock: Lanes) -> None:
        """values [n] u32."""
        spots = self.spots(at, 4)
        words = spots[:, 0] // 4
        self.claim(words, warp, clock, self.atomic[words])
        np.bitwise_or.at(self.data.view(np.uint32), words, values)
        self.atomic[words] = True

    def begin_copy(self, at: Lanes, size: int, warp: int, clock: Lanes) -> Lanes:
        """Until the copy lands the bytes [n, size] must not be read."""
        spots = self.spots(at, size)
        words = (spots[:, ::4] // 4).reshape(-1)
        self.claim(words, warp, clock, np.zeros(len(words), bool))
        self.pending[spots], self.atomic[words] = True, False
        return spots

    def land(self, spots: Lanes, values: Lanes) -> None:
        self.data[spots], self.pending[spots] = values, False


@dataclass
class Mbarrier:
    count: int  # arrivals of a phase
    missing: int
    bytes_due: int
    phase: int
    born: tuple[int, int]  # the warp that initialised it, and when
    collected: Lanes  # clock of what has arrived
    published: Lanes  # clock of the last phase that completed

    def complete(self) -> None:
        """Begins the next phase if nothing is missing in this one."""
        if self.missing == 0 and self.bytes_due == 0:
            self.phase += 1
            self.missing = self.count
            self.published = self.collected


# ---- lanes: an instruction's values are 32 lanes, memory's are the bytes of those that take part


def lanes_of(mask: Lanes | None) -> Any:
    return np.arange(32) if mask is None else np.flatnonzero(mask)


def spread(raw: Lanes, which: Lanes, count: int, size: int) -> list[Lanes]:
    """[n, bytes] of the lanes `which` -> a word of all lanes, `count` times."""
    words = raw.view(f"uint{8 * size}")
    if len(which) == 32:
        return list(np.ascontiguousarray(words.T))
    out = np.zeros((count, 32), words.dtype)
    out[:, which] = words.T
    return list(out)


def gathered(values: list[Lanes], which: Lanes) -> Lanes:
    """The bytes [n, .] that the lanes `which` store."""
    return np.stack([v[which] for v in values], axis=1).view(np.uint8)
