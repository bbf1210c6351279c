"""Global memory as the launcher's tensors, and a CTA's shared memory with what is known of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ptx.instructions import SHARED_BASE

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


def buffer_of(tensor: torch.Tensor, constant: bool) -> Buffer:
    size = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * size
    raw: Any = (ctypes.c_uint8 * num_bytes).from_address(tensor.data_ptr())
    inside = None
    if last + 1 != tensor.numel():
        held = torch.zeros(last + 1, dtype=torch.bool)
        held.as_strided(tensor.shape, tensor.stride()).fill_(True)
        inside = held.numpy().repeat(size)
    return Buffer(tensor, tensor.data_ptr(), np.frombuffer(raw, np.uint8), inside, constant)


@dataclass
class Global:
    """What a launch may touch."""

    buffers: list[Buffer]

    def places(self, at: Lanes, size: int) -> list[tuple[Buffer, Lanes, Lanes]]:
        """Of accesses [n] of `size` bytes: (buffer, which of them, bytes [., size] in it)."""
        if (at % min(size, 16)).any():
            raise Fault(f"global access of {size} bytes at an address that is no multiple of it")
        found, missing = [], np.ones(len(at), bool)
        for b in self.buffers:
            within = missing & (at >= b.start) & (at + size <= b.start + len(b.data))
            if not within.any():
                continue
            if b.inside is not None:
                spots = (at[within] - b.start)[:, None] + np.arange(size)
                within[within] = b.inside[spots].all(1)
            found.append((b, within, (at[within] - b.start)[:, None] + np.arange(size)))
            missing &= ~within
        if missing.any():
            raise Fault(f"global access outside every tensor: {self.near(at[missing])}")
        return found

    def near(self, at: Lanes) -> str:
        nearest = min(self.buffers, key=lambda b: abs(int(at[0]) - b.start))
        offset, shape = int(at[0]) - nearest.start, tuple(nearest.tensor.shape)
        return f"byte {offset} of the {len(nearest.data)} of {shape}"

    def load(self, at: Lanes, size: int, early: bool) -> Lanes:
        """[n, size] u8; `early`: before what earlier kernels wrote is there."""
        out = np.zeros((len(at), size), np.uint8)
        for buffer, which, spots in self.places(at, size):
            if early and not buffer.constant:
                shape = tuple(buffer.tensor.shape)
                raise Fault(f"{shape} is read before griddepcontrol.wait, and is no weight")
            out[which] = buffer.data[spots]
        return out

    def store(self, at: Lanes, values: Lanes) -> None:
        """values [n, size] u8."""
        for buffer, which, spots in self.places(at, values.shape[1]):
            if buffer.constant:
                raise Fault(f"a store to a weight {tuple(buffer.tensor.shape)}")
            buffer.data[spots] = values[which]


class Shared:
    """A CTA's shared memory. Of each word: who wrote it last and who has read it since, and when.

    A time is a warp's own count of the moments at which it published what it did (a barrier, an
    arrival); `clock[w]` of a warp is the last moment of warp w that it is known to follow. An
    access is a race if one that it conflicts with is not known to come before it. Two writes of
    the same value are none: a last piece may be staged by several warps. Bytes that nothing was
    written to are NaN, as a row that is not there may be computed on but must not be used.
    """

    def __init__(self, size: int, num_warps: int):
        words = (size + 3) // 4
        self.size = size
        self.data = np.full(4 * words, 0xFF, np.uint8)
        self.pending = np.zeros(4 * words, bool)  # a copy to it is under way
        self.writer = np.zeros(words, np.int64)
        self.written = np.zeros(words, np.int64)
        self.atomic = np.zeros(words, bool)
        self.read = np.zeros((words, num_warps), np.int64)

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
        self.read[words, warp] = clock[warp]
        return self.data[spots]

    def claim(self, words: Lanes, warp: int, clock: Lanes, harmless: Lanes) -> None:
        """Notes a write of words [n] after checking that it follows all others' accesses.

        `harmless` [n]: it may happen beside another write.
        """
        late = clock[self.writer[words]] < self.written[words]
        if (late & ~harmless).any():
            raise Fault(f"race: two warps write shared byte {4 * words[0]}")
        if (self.read[words] > clock[: self.read.shape[1]]).any():
            raise Fault(
                f"race: shared byte {4 * words[0]} is written, another warp may read it yet"
            )
        self.writer[words], self.written[words] = warp, clock[warp]
        self.pending.reshape(-1, 4)[words] = False

    def store(self, at: Lanes, values: Lanes, warp: int, clock: Lanes) -> None:
        """values [n, size] u8."""
        assert values.shape[1] % 4 == 0, "parts of a word are not tracked"
        spots = self.spots(at, values.shape[1])
        words = (spots[:, ::4] // 4).reshape(-1)
        same = (self.data[spots] == values).reshape(len(words), 4).all(1)
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
