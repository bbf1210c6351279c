"""The files that a batch writes: records in the input's order, and the journal behind them.

The journal, OUT.journal beside OUT, holds every finished line from the moment it is finished, in
any order; OUT gets a line when its turn comes, and only after the journal has it on the disk. So
whatever ends a run, OUT is a prefix of the whole and the journal has the rest of what was done.

    file   = MAGIC frame(Mark as JSON) frame(Entry)*
    frame  = length u32, CRC-32 u32, body; little-endian
    Entry  = place u64, digest 12 bytes, is_error u8, record (a line of OUT with its line end)

Appending cannot harm what is there; a torn end has no valid frame and is cut off. Once the journal
has grown, it is replaced in one step by a new one with a later Mark. Knows no engine and no lines.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanok3.console import OutputError

MAGIC = b"nanok3 batch journal 1\n"
FRAME = struct.Struct("<II")
KEY = struct.Struct("<Q12s?")


@dataclass(frozen=True)
class Mark:
    """What OUT is known to hold, on the disk, and of which input."""

    written: int  # records
    out_bytes: int  # of these records
    lines: str  # digest of the input's lines that they answer
    options: dict[str, Any]  # what the results depend on beside the lines


@dataclass(frozen=True)
class Entry:
    """A finished line."""

    place: int
    digest: bytes  # [12] of the input's line
    is_error: bool
    data: bytes  # the record as OUT has it


KEPT = "; what was finished before is kept, and --resume goes on"


def _cannot(path: Path | str, error: OSError, kept: str = "") -> str:
    return f"{path} cannot be written: {error.strerror}{kept}"


def journal_path(target: str) -> Path:
    return Path(target + ".journal")


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_directory(path: Path) -> None:
    """Makes names in it last that were made, replaced or removed."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Journal:
    """OUT.journal, open for appending after `begin` or `read`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0  # bytes of whole frames
        self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def begin(self, mark: Mark, entries: Sequence[Entry]) -> None:
        """A journal of this alone, in place of the one that is there: in one step, or not at all.

        What `mark` says must be on the disk already.
        """
        new = self.path.with_name(self.path.name + ".new")
        data = MAGIC + _frame(json.dumps(asdict(mark)).encode())
        data += b"".join(_frame(_body(entry)) for entry in entries)
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(fd, data)
                os.fsync(fd)
                os.replace(new, self.path)
            except BaseException:
                os.close(fd)
                raise
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self.size = fd, len(data)
            sync_directory(self.path)
        except OSError as error:
            raise OutputError(_cannot(self.path, error, KEPT)) from error

    def read(self) -> tuple[Mark, list[Entry]]:
        """What an earlier run left, in the order of its finishing; a torn end is cut off."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(self._fd).st_size
            with open(self._fd, "rb", closefd=False) as file:
                bodies = self._bodies(file, size)
                try:
                    mark = Mark(**json.loads(next(bodies)))
                except (StopIteration, ValueError, TypeError) as error:
                    raise OutputError(
                        f"{self.path} is no journal of a batch; remove it, and --resume goes on "
                        "with the records of the output alone"
                    ) from error
                entries = [_entry(body) for body in bodies]
            os.truncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be read: {error.strerror}") from error
        return mark, entries

    def append(self, entries: Sequence[Entry]) -> None:
        """Once this returns, they are on the disk: one write and one fsync for all of them."""
        data = b"".join(_frame(_body(entry)) for entry in entries)
        try:
            write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError as error:
            with suppress(OSError):  # else the next run does it
                os.truncate(self._fd, self.size)
            raise OutputError(_cannot(self.path, error, KEPT)) from error
        self.size += len(data)

    def remove(self) -> None:
        """Once OUT holds everything, on the disk."""
        try:
            self.path.with_name(self.path.name + ".new").unlink(missing_ok=True)
            os.unlink(self.path)
            sync_directory(self.path)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be removed: {error.strerror}") from error

    def _bodies(self, file: Any, size: int) -> Iterator[bytes]:
        if file.read(len(MAGIC)) != MAGIC:
            return
        self.size, least = len(MAGIC), 1
        while len(head := file.read(FRAME.size)) == FRAME.size:
            length, crc = FRAME.unpack(head)
            # A stretch of zeros, which a power cut can leave, has the right CRC for length 0.
            if not least <= length <= size - self.size - FRAME.size:
                return
            body = file.read(length)
            if zlib.crc32(body) != crc:
                return
            self.size += FRAME.size + length
            least = KEY.size + 1
            yield body


def _entry(body: bytes) -> Entry:
    place, digest, is_error = KEY.unpack_from(body)
    return Entry(place, digest, is_error, body[KEY.size :])


def _body(entry: Entry) -> bytes:
    return KEY.pack(entry.place, entry.digest, entry.is_error) + entry.data


def _frame(body: bytes) -> bytes:
    return FRAME.pack(len(body), zlib.crc32(body)) + body


class RecordFile:
    """A file of records, whole lines each: OUT, or the one that errors go to besides.

    What an earlier run wrote is compared as it would be written again: it stays as far as it is the
    same. A difference is cut off where the journal knows better (`is_derived`: OUT); in another
    file it can be but a torn end, and anything else is refused.
    """

    def __init__(self, target: str, resume: bool, *, is_derived: bool) -> None:
        self.name = "stdout" if target == "-" else target
        self.end = 0  # bytes of the lines that are written, or found to be there
        self._is_derived = is_derived
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_EXCL)
        if target == "-":
            self._fd = os.dup(1)
        else:
            try:
                if Path(target).exists() and not Path(target).is_file():  # a device or a pipe
                    flags = os.O_WRONLY | os.O_CLOEXEC
                self._fd = os.open(target, flags, 0o666)
            except OSError as error:
                raise OutputError(_cannot(target, error)) from error
        # Only what someone named: stdout may be a file too, but one that others write to as well.
        self.is_file = target != "-" and stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._has_old = self.is_file and os.fstat(self._fd).st_size > 0
        try:
            if self.is_file:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise OutputError(f"{target} is being written by another run; wait for it") from error
        except OSError:
            pass  # a file system without locks

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def old_lines(self, limit: int | None) -> Iterator[bytes]:
        """The whole lines that are there, in `limit` bytes; `end` moves over them."""
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n") or self.end == limit:
                    return
                yield line
                self.end += len(line)

    def write(self, data: bytes) -> None:
        if self._has_old:
            found = os.pread(self._fd, len(data), self.end)
            if found == data:
                self.end += len(data)
                return
            if not self._is_derived and not data.startswith(found):
                raise OutputError(
                    f"{self.name} holds something else than this batch writes; name another file"
                )
            self.cut()
        try:
            write_all(self._fd, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            with suppress(OSError):  # a file can lose its torn line, a device cannot
                os.truncate(self._fd, self.end)
            raise OutputError(_cannot(self.name, error, KEPT * self.is_file)) from error
        self.end += len(data)

    def cut(self) -> None:
        """Ends the file where what is written ends."""
        if self.is_file:
            os.truncate(self._fd, self.end)
            os.lseek(self._fd, self.end, os.SEEK_SET)
            self._has_old = False

    def sync(self) -> None:
        if not self.is_file:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OutputError(_cannot(self.name, error, KEPT)) from error
