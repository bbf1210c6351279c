"""The files of a checkpoint: checks them all by their headers, then reads tensors from them.

Knows files, names and bytes. Which tensors a model has, and what becomes of them, is for
`weights.py`: it hands over a table of names and gets tensors as they are stored. Nothing is mapped:
a tensor is read into memory of its own, and a file is closed when nothing more is wanted from it.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanok3.checkpoint_check import (
    TEXT_ROOT,
    closest_format,
    is_skipped,
    misplaced,
    missing,
    official_name,
    read_index,
    scan_headers,
)
from nanok3.checkpoint_check import CheckpointError as CheckpointError
from nanok3.checkpoint_check import TensorSpec as TensorSpec

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
READ_AHEAD_BYTES = 512 << 20
LARGE_BYTES = 1 << 20
PAGE_BYTES = 4096  # what a disk reads at least


@dataclass(frozen=True)
class Part:
    """The rows (axis 0) or columns (axis 1) of a tensor that a rank keeps."""

    axis: int
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.axis, self.begin, self.end - self.begin)


def whole_tensor(name: str, spec: TensorSpec) -> Part | None:
    """The part of every tensor where nothing is split."""
    return None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers are as expected; made by `open`. Holds no open file."""

    model_dir: Path
    expert_format: str  # the key of the table that the files agree with
    specs: Mapping[str, TensorSpec]  # that table, by official name
    num_skipped: int  # tensors of the vision tower, the projector and the draft layers
    files: tuple[str, ...]  # those that hold the tensors of `specs`
    places: Mapping[str, tuple[int, int]]  # name -> number in `files`, first byte

    @classmethod
    def open(
        cls,
        model_dir: Path,
        expected: Mapping[str, Mapping[str, TensorSpec]],
        *,
        skip_layers_from: int | None = None,
        root: str | None = None,
    ) -> Checkpoint:
        """Checks index and headers; no tensor is read. CheckpointError lists all problems.

        `expected` has a table of all tensors for each format that experts may be stored in, by
        official name ("mxfp4": ..., "bf16": ...); names decide which one the checkpoint is in.
        Layers from `skip_layers_from` on (a draft head's) are skipped, like vision tensors.
        root: what the stored names lack of the official ones; None for a K3, where it is seen.
        """
        listed = read_index(model_dir)
        if root is None:
            root = "" if any(name.startswith(TEXT_ROOT) for name in listed) else TEXT_ROOT
        indexed = {official_name(name, root): file for name, file in listed.items()}
        expert_format = closest_format(expected, indexed)
        specs = expected[expert_format]
        others = [name for name in indexed if name not in specs]
        scan = scan_headers(model_dir, indexed, specs, root)
        problems = [
            *scan.problems,
            *misplaced(scan, indexed, specs, skip_layers_from),
            *missing(scan, indexed, specs),
            *(
                f"{name}: not a tensor of this model; the index names {indexed[name]}"
                for name in others
                if not is_skipped(name, skip_layers_from)
            ),
        ]
        if problems:
            raise CheckpointError(model_dir, problems)
        return cls(model_dir, expert_format, specs, len(others), scan.files, scan.places)

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored, in memory of its own."""
        number, begin = self.places[name]
        path = self.model_dir / self.files[number]
        descriptor = open_file(path)
        try:
            return read_tensor(descriptor, path, begin, self.specs[name])
        finally:
            os.close(descriptor)

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """The names in the order of their bytes, file by file: the fastest order to load in."""
        return sorted(names, key=lambda name: self.places[name])

    def load(
        self,
        names: Sequence[str],
        consume: Callable[[str, Tensor], None],
        *,
        part_of: Callable[[str, TensorSpec], Part | None] = whole_tensor,
        progress: Callable[[int, int], None] | None = None,  # (bytes done, bytes in all)
        workers: int = 4,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        """Calls `consume(name, tensor)` for each name, in the order of `names`, from this thread.

        `workers` threads read ahead meanwhile: at most `read_ahead_bytes`, or one tensor if that
        is larger, beside the one being consumed. A file is open from the first read to the last.
        `part_of` says what `consume` gets of a tensor, None for all; no other bytes are read but
        those of pages that are needed anyway.
        """
        parts = {name: part_of(name, self.specs[name]) for name in names}
        sizes = {name: part_bytes(self.specs[name], part) for name, part in parts.items()}
        bytes_total = sum(sizes.values())
        bytes_done = bytes_ahead = 0
        waiting = deque(names)
        ahead: deque[Future[Tensor]] = deque()
        reads_left = Counter(self.places[name][0] for name in names)
        descriptors: dict[int, int] = {}  # of the open files, by number in `files`
        pool = ThreadPoolExecutor(workers, thread_name_prefix="checkpoint")

        def read_on() -> None:
            nonlocal bytes_ahead
            while waiting:
                name = waiting[0]
                if ahead and bytes_ahead + sizes[name] > read_ahead_bytes:
                    break
                number, begin = self.places[name]
                path = self.model_dir / self.files[number]
                if number not in descriptors:
                    descriptors[number] = open_file(path)
                args = descriptors[number], path, begin, self.specs[name], parts[name]
                ahead.append(pool.submit(read_part, *args))
                bytes_ahead += sizes[name]
                waiting.popleft()

        try:
            read_on()
            for name in names:
                tensor = ahead.popleft().result()
                bytes_ahead -= sizes[name]
                number = self.places[name][0]
                reads_left[number] -= 1
                if reads_left[number] == 0:
                    os.close(descriptors.pop(number))
                read_on()  # so that the threads are busy while this tensor is consumed
                bytes_done += sizes[name]
                consume(name, tensor)
                del tensor  # or it would live on while the next one is waited for
                if progress is not None:
                    progress(bytes_done, bytes_total)
        finally:
            pool.shutdown(cancel_futures=True)
            for descriptor in descriptors.values():
                os.close(descriptor)


def part_bytes(spec: TensorSpec, part: Part | None) -> int:
    """Of the bytes of a tensor, those that this part is."""
    return (
        spec.nbytes
        if part is None
        else spec.nbytes * (part.end - part.begin) // spec.shape[part.axis]
    )


def read_part(
    descriptor: int, path: Path, begin: int, spec: TensorSpec, part: Part | None
) -> Tensor:
    """The part of a tensor whose bytes begin at `begin` of an open file."""
    if part is None:
        return read_tensor(descriptor, path, begin, spec)
    count, row_bytes = part.end - part.begin, spec.nbytes // spec.shape[0]
    if part.axis == 0:
        rows = TensorSpec((count, *spec.shape[1:]), spec.dtype)
        return read_tensor(descriptor, path, begin + part.begin * row_bytes, rows)
    own_bytes = row_bytes * count // spec.shape[1]
    if own_bytes < PAGE_BYTES:  # the disk reads all of it in any case
        return part.of(read_tensor(descriptor, path, begin, spec)).contiguous()
    raw = empty_bytes(own_bytes * spec.shape[0])
    first = begin + row_bytes * part.begin // spec.shape[1]
    for i, row in enumerate(raw.view(-1, own_bytes)):
        read_bytes(descriptor, path, first + i * row_bytes, row)
    return raw.view(DTYPES[spec.dtype]).view(spec.shape[0], count)


def read_tensor(descriptor: int, path: Path, begin: int, spec: TensorSpec) -> Tensor:
    """The tensor whose bytes begin at `begin` of an open file."""
    raw = empty_bytes(spec.nbytes)
    read_bytes(descriptor, path, begin, raw)
    return raw.view(DTYPES[spec.dtype]).view(spec.shape)


def read_bytes(descriptor: int, path: Path, begin: int, raw: Tensor) -> None:
    """Fills `raw` [n] u8 from byte `begin` on."""
    view = raw.numpy().data
    done = 0
    try:
        while done < raw.nbytes:  # one call reads at most 2 GiB
            count = os.preadv(descriptor, [view[done:]], begin + done)
            if count == 0:
                found = f"{path.name}: expected bytes up to {begin + raw.nbytes}, the file ends at"
                changed = "it has changed since its header was read"
                raise CheckpointError(path.parent, [f"{found} {begin + done}; {changed}"])
            done += count
    except OSError as error:
        raise unreadable(path, error) from error


def empty_bytes(nbytes: int) -> Tensor:
    """[nbytes] u8. Large ones go back to the system when dropped; malloc would keep them."""
    if nbytes < LARGE_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(path.parent, [f"{path.name}: the file cannot be read: {error.strerror}"])
