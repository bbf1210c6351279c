"""Where a batch's lines come from: a file or stdin, plain or gzip, read in a thread of its own.

A slow pipe therefore never holds up requests that run. What waits is bounded: a few lines, and of
a line no more than it takes to see that it is too long. What lines mean is `batch_lines.py`'s.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import queue
import sys
import threading
import zlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

MAX_LINE_BYTES = 16 * 2**20  # a million tokens, escaped; a longer line gets an error record
MAX_WAITING = 16  # lines read and not yet taken
GZIP = b"\x1f\x8b"


class InputError(ValueError):
    """A batch that cannot begin or go on; the message names the file and says why."""


class LineSource:
    """The raw lines of a file, or of stdin for "-"; a long one is cut behind MAX_LINE_BYTES + 1."""

    def __init__(self, source: str) -> None:
        self.name = "stdin" if source == "-" else source
        self.error: InputError | None = None  # why the lines end, where that is not their end
        try:
            file = io.FileIO(sys.stdin.fileno() if source == "-" else source, closefd=source != "-")
        except OSError as error:
            raise InputError(f"{source} cannot be read: {error.strerror}") from error
        self._size = os.fstat(file.fileno()).st_size
        self._file = _Counted(file)
        self._is_gzip = False
        self._read = 0  # bytes of text
        self._closed = threading.Event()
        self._lines: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        # A daemon: at a pipe that says nothing it could not be asked to end.
        threading.Thread(target=self._fill, daemon=True).start()

    def __enter__(self) -> LineSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        with suppress(queue.Empty):  # wakes the thread, should it wait for room
            self._lines.get_nowait()

    def take(self, seconds: float) -> bytes | None:
        """The next line, b"" for good after the last one, None if none came in time."""
        try:
            return self._lines.get(timeout=seconds) if seconds else self._lines.get_nowait()
        except queue.Empty:
            return None

    def total(self) -> int:
        """Bytes of text in all, for gzip as far as can be told; 0: unknown, as for a pipe."""
        if self._is_gzip:
            return self._size * self._read // max(self._file.taken, 1)
        return self._size

    def _fill(self) -> None:
        try:
            for line in self._split():
                self._lines.put(line)
                if self._closed.is_set():
                    return
        except OSError as error:  # BadGzipFile too
            self.error = InputError(f"{self.name} cannot be read: {error.strerror or error}")
        except (EOFError, zlib.error) as error:
            self.error = InputError(f"{self.name} is gzip, but damaged or cut off: {error}")
        finally:
            if self._closed.is_set():
                self._file.close()
            else:
                self._lines.put(b"")

    def _split(self) -> Iterator[bytes]:
        self._is_gzip = self._file.peek(2) == GZIP
        file: io.BufferedIOBase = io.BufferedReader(self._file, 2**16)
        if self._is_gzip:
            file = gzip.GzipFile(fileobj=file)
        while line := file.readline(MAX_LINE_BYTES + 1):
            self._read += len(line)
            rest = line if len(line) > MAX_LINE_BYTES else b""
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(2**20)
                self._read += len(rest)
            yield line
        file.close()


class _Counted(io.RawIOBase):
    """A file that says how much was read, and whose beginning can be seen before."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._head = b""
        self.taken = 0

    def peek(self, count: int) -> bytes:
        while len(self._head) < count and (more := self._file.read(count - len(self._head))):
            self._head += more
        return self._head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if self._head:
            count = min(len(view), len(self._head))
            view[:count], self._head = self._head[:count], self._head[count:]
        else:
            count = self._file.readinto(view) or 0
        self.taken += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class SeenIds:
    """Which line had a custom_id first, in 24 to 48 bytes an id: a table of 64-bit digests.

    Two ids with one digest would be taken for one: 3e-8 likely among a million.
    """

    def __init__(self) -> None:
        self._count = 0
        self._resize(1024)

    def first(self, custom_id: str, number: int) -> int:
        """The line that had it first: `number` itself, which is then remembered, if none did."""
        raw = custom_id.encode("utf-8", "surrogatepass")
        # 0 marks a free place
        key = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") or 1
        place = self._find(key)
        if self._keys[place]:
            return self._numbers[place]
        self._keys[place], self._numbers[place] = key, number
        self._count += 1
        if 2 * self._count > len(self._keys):
            old = zip(self._keys, self._numbers, strict=True)
            self._resize(2 * len(self._keys))
            for key, value in old:
                if key:
                    place = self._find(key)
                    self._keys[place], self._numbers[place] = key, value
        return number

    def _resize(self, size: int) -> None:
        self._keys = array("Q", bytes(8 * size))
        self._numbers = array("I", bytes(4 * size))

    def _find(self, key: int) -> int:
        """Where it stands, or would stand."""
        place = key % len(self._keys)
        while self._keys[place] not in (0, key):
            place = (place + 1) % len(self._keys)
        return place
