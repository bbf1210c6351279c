"""The exchanges of a layer between processes on one machine, through memory that all have mapped.

It is the device's protocol, run on a CPU: peers store data and tag in one word, readers poll their
own memory until every word has the tag of this epoch, and nothing is ever cleared but once in 2^31
epochs. Sums run in rank order, so all ranks hold the same bits.

flag                written by            read by              value          order    reset
word [dst, parity,  rank src, all words   rank dst, before it  low half the   none: a  two epochs
  src, i], 64 bits  of a message at       uses any word of     data, high     word is  on; tags:
  aligned           epoch e               epoch e              half e         whole    `_forget`

Two parities are enough: src sends epoch e + 2 only after it has read e + 1 of every rank, which
each of them sent after it had read e.

A message longer than a mailbox goes in several epochs. All ranks must make the same calls with the
same shapes. Who runs the ranks, and what they decide, is for `host.py` and `lockstep.py`.

P ranks, T rows.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

WORDS = 1 << 15  # of a mailbox: data of 128 KiB
DEADLINE_S = 6.0  # of a wait: a rank that is this late is lost
CHECK_S = 0.2  # between two looks at whether the peers still live
SPINS = 200  # polls before a waiting rank begins to sleep
SLEEP_S = 50e-6
WRAP = 1 << 32  # a tag has 32 bits
FORGET_EVERY = WRAP // 2  # epochs
DATA = 0xFFFFFFFF  # the half of a word that is data


class PeerLost(RuntimeError):
    """A rank that is gone, or later than the deadline; the message names it."""


def nobody_is_gone() -> None:
    """The look at one's peers where nothing is known of them but what they send."""


# ---- memory ----


def memory_bytes(size: int, words: int = WORDS) -> int:
    return size * 2 * size * words * 8


def create_memory(path: Path, size: int, words: int = WORDS) -> None:
    """A file of zeros that every rank maps; it may be unlinked once all have done so."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, memory_bytes(size, words))  # full disks show here
    finally:
        os.close(descriptor)


def map_memory(path: Path, size: int, words: int = WORDS) -> Tensor:
    """Mailboxes [P destinations, 2 parities, P sources, words] i64 over such a file."""
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), memory_bytes(size, words))
    return torch.frombuffer(mapped, dtype=torch.int64).view(size, 2, size, words)


# ---- the protocol ----


class Exchange:
    """One rank's end: the exchanges of `ops.Ops`, over mailboxes that all ranks have mapped."""

    def __init__(
        self,
        memory: Tensor,
        rank: int,
        *,
        deadline_s: float = DEADLINE_S,
        check_peers: Callable[[], None] = nobody_is_gone,
        epoch: int = 0,
    ) -> None:
        """memory: see `map_memory`, with the tag of `epoch` everywhere. check_peers: called now and
        then while this rank waits; raises PeerLost if one is known to be gone."""
        self.size, self.rank = memory.shape[0], rank
        self.epoch = epoch  # of the last exchange; only grows
        self._memory = memory
        self._deadline_s = deadline_s
        self._check_peers = check_peers

    def all_reduce(self, part: Tensor, *, out: Tensor) -> None:
        """The sum over ranks."""
        message = pack([part])
        received = self.swap([message] * self.size)
        out.copy_(sum_in_order([unpack(words, [part])[0] for words in received]))

    def all_gather(self, parts: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
        """The ranks' columns side by side."""
        message = pack(parts)
        received = [unpack(words, parts) for words in self.swap([message] * self.size)]
        for whole, of_ranks in zip(out, zip(*received, strict=True), strict=True):
            whole.copy_(torch.cat(of_ranks, dim=1))

    def reduce_moe(self, parts: Sequence[Tensor], *, out: Sequence[Tensor]) -> None:
        """Of the first part the sum, of the second this rank's columns of the sum."""
        routed, shared = parts
        columns = shared.chunk(self.size, dim=1)  # of each destination
        received = self.swap([pack([routed, own]) for own in columns])
        of_ranks = [unpack(words, [routed, columns[self.rank]]) for words in received]
        for whole, summands in zip(out, zip(*of_ranks, strict=True), strict=True):
            whole.copy_(sum_in_order(summands))

    def swap(self, messages: Sequence[Tensor]) -> Tensor:
        """messages[d] [n] i32 goes to rank d -> what each rank sent to this one, [P, n] i32."""
        count, step = messages[0].numel(), self._memory.shape[-1]
        parts = []
        for begin in range(0, count, step):
            self._send([message[begin : begin + step] for message in messages])
            parts.append(self._receive(min(step, count - begin)))
        return torch.cat(parts, dim=1) if parts else messages[0].new_empty(self.size, 0)

    def _send(self, messages: Sequence[Tensor]) -> None:
        self.epoch += 1
        for destination, message in enumerate(messages):
            box = self._memory[destination, self.epoch % 2, self.rank, : message.numel()]
            # One operation with elements of 64 bits: a word is written whole.
            torch.bitwise_or(message.long() & DATA, tag_of(self.epoch) << 32, out=box)

    def _receive(self, count: int) -> Tensor:
        box = self._memory[self.rank, self.epoch % 2, :, :count]  # [P, count]
        tag = tag_of(self.epoch)
        start = looked = time.monotonic()
        polls = 0
        while True:
            words = box.clone()
            tags = words >> 32
            if bool((tags == tag).all()):
                break
            polls += 1
            if polls < SPINS:
                os.sched_yield()
                continue
            time.sleep(SLEEP_S)
            now = time.monotonic()
            if now - looked > CHECK_S:
                looked = now
                self._check_peers()
            if now - start > self._deadline_s:
                self._give_up(tags)
        if self.epoch % FORGET_EVERY < 2:
            self._forget()
        return words.int()  # the low half

    def _give_up(self, tags: Tensor) -> None:
        """tags: [P, n], as they were when the deadline passed."""
        late = [rank for rank, own in enumerate(tags) if (own != tag_of(self.epoch)).any()]
        ranks = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        seen = sorted({int(tag) % WRAP for tag in tags[late].flatten()})
        raise PeerLost(
            f"{ranks} did not answer rank {self.rank} within {self._deadline_s:g} s: expected "
            f"epoch {self.epoch}, found tags {', '.join(map(str, seen[:4]))}"
        )

    def _forget(self) -> None:
        """Gives all words of this parity the tag of this epoch.

        A word that only long messages use may keep an old tag until the tags have gone round. Here
        nobody writes to these boxes: this epoch has come, and who writes the next but one has read
        what this rank sends after this.
        """
        self._memory[self.rank, self.epoch % 2].fill_(tag_of(self.epoch) << 32)


def tag_of(epoch: int) -> int:
    """The low 32 bits, with a sign."""
    return (epoch + WRAP // 2) % WRAP - WRAP // 2


def pack(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of all parts as words [n] i32, each part padded to whole words."""
    words = []
    for part in parts:
        raw = part.contiguous().view(-1).view(torch.uint8)
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
        words.append(raw.view(torch.int32))
    return torch.cat(words) if len(words) > 1 else words[0]


def unpack(words: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The other way: tensors of the shapes and dtypes of `like`."""
    parts, begin = [], 0
    for model in like:
        count = -(-model.nbytes // 4)
        # A copy, for a wide dtype cannot begin at an odd word.
        raw = words[begin : begin + count].clone().view(torch.uint8)[: model.nbytes]
        parts.append(raw.view(model.dtype).view(model.shape))
        begin += count
    return parts


# ---- reference ----


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """From rank 0 upwards, in f32 (f64 for f64)."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


def all_reduce_ref(parts: Sequence[Tensor]) -> Tensor:
    """parts: of all ranks -> what every rank gets."""
    return sum_in_order(parts).to(parts[0].dtype)


def all_gather_ref(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1)


def reduce_moe_ref(
    routed: Sequence[Tensor], shared: Sequence[Tensor], rank: int
) -> tuple[Tensor, Tensor]:
    columns = all_reduce_ref(shared).chunk(len(shared), dim=1)[rank]
    return all_reduce_ref(routed), columns
