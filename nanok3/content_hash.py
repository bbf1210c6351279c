r"""sha256 of a checkpoint's files, and one of its content that no sharding changes.

The content hash is over the lines

    NAME \t DTYPE \t SHAPE, numbers joined by commas \t sha256 of the tensor's bytes \n

of all tensors of the text model, by their official names, in the order of names: copies with other
shards, with or without the vision tower and under either root have the same. A file's own hash
covers every byte of it.

Each finished file is a line of JSON in a state file, with the file's size and time of change; a
later run reads only the files without such a line and those that have changed since. (A sha256
cannot be taken up in the middle of a file.)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from nanok3.checkpoint import Checkpoint, CheckpointError, open_file, unreadable
from nanok3.console import OutputError
from nanok3.progress import Progress

CHUNK_BYTES = 8 << 20
LINE_START = b'{"file": "'  # of every line of a state file, a torn one too

Span = tuple[int, int]  # first byte of a tensor in its file, and the one after its last


class StateError(ValueError):
    """A state file that is something else; the message is one sentence."""


@dataclass(frozen=True)
class FileHash:
    """A line of the state file."""

    file: str  # the whole path
    size: int
    mtime_ns: int
    sha256: str
    tensors: list[str]  # sha256 of each tensor of the text model, in the order of their bytes


@dataclass(frozen=True)
class ContentHash:
    content: str
    files: dict[str, str]  # sha256 of each file by its name
    num_known: int  # files whose hashes a state file had


def content_hash(
    checkpoint: Checkpoint, others: Sequence[str], state: Path, progress: Progress | None = None
) -> ContentHash:
    """Hashes the files of a checkpoint, and `others` beside them, a chunk at a time.

    CheckpointError where a file cannot be read or changes meanwhile; StateError and OutputError
    where the state file cannot serve. Finished files are kept whatever ends this.
    """
    names: dict[str, list[str]] = {file: [] for file in (*checkpoint.files, *others)}
    for name in checkpoint.in_file_order(checkpoint.specs):
        names[checkpoint.files[checkpoint.places[name][0]]].append(name)

    known = read_state(state)
    done: dict[str, FileHash] = {}
    sizes: dict[str, int] = {}  # of the files to read
    for file, own in names.items():
        path = checkpoint.model_dir / file
        record = known.get(str(path.resolve()))
        try:
            now = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        if (
            record is not None
            and (record.size, record.mtime_ns) == stamp(now)
            and len(record.tensors) == len(own)
        ):
            done[file] = record
        else:
            sizes[file] = now.st_size
    num_known, total, bytes_done = len(done), sum(sizes.values()), 0

    def advance(nbytes: int) -> None:
        nonlocal bytes_done
        bytes_done += nbytes
        if progress is not None:
            progress(bytes_done, total)

    with open_state(state) as log, ThreadPoolExecutor(1) as pool:
        for file in sizes:
            spans = [span_of(checkpoint, name) for name in names[file]]
            done[file] = hash_file(checkpoint.model_dir / file, spans, pool, advance)
            add_line(log, done[file])

    digests = {
        name: digest
        for file, own in names.items()
        for name, digest in zip(own, done[file].tensors, strict=True)
    }
    content = hashlib.sha256()
    for name in sorted(digests):
        spec = checkpoint.specs[name]
        shape = ",".join(map(str, spec.shape))
        content.update(f"{name}\t{spec.dtype}\t{shape}\t{digests[name]}\n".encode())
    return ContentHash(content.hexdigest(), {f: done[f].sha256 for f in sorted(done)}, num_known)


def span_of(checkpoint: Checkpoint, name: str) -> Span:
    begin = checkpoint.places[name][1]
    return begin, begin + checkpoint.specs[name].nbytes


def stamp(status: os.stat_result) -> tuple[int, int]:
    """What is taken as proof that a file is unchanged."""
    return status.st_size, status.st_mtime_ns


def hash_file(
    path: Path, spans: Sequence[Span], pool: ThreadPoolExecutor, advance: Callable[[int], None]
) -> FileHash:
    """One pass over a file; `spans` ascend and do not overlap. `advance` is told of bytes read."""
    whole, tensors = hashlib.sha256(), []
    tensor, number, start = hashlib.sha256(), 0, 0  # `number`: of the span that comes next
    descriptor = open_file(path)
    try:
        before = os.fstat(descriptor)
        while chunk := os.read(descriptor, CHUNK_BYTES):
            hashed = pool.submit(whole.update, chunk)  # beside the tensors: half the time
            view, end = memoryview(chunk), start + len(chunk)
            while number < len(spans) and spans[number][0] < end:
                first, last = spans[number]
                tensor.update(view[max(first - start, 0) : last - start])
                if last > end:
                    break
                tensors.append(tensor.hexdigest())
                tensor, number = hashlib.sha256(), number + 1
            hashed.result()
            start = end
            advance(len(chunk))
        after = os.fstat(descriptor)
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)
    if stamp(before) != stamp(after) or start != before.st_size or number != len(spans):
        found = f"{path.name}: expected {before.st_size} bytes that stay as they are, found {start}"
        raise CheckpointError(path.parent, [f"{found}; it has changed while it was read"])
    return FileHash(str(path.resolve()), *stamp(before), whole.hexdigest(), tensors)


# ---- the state file ----


def read_state(path: Path) -> dict[str, FileHash]:
    """The last line of each file, by its path; a line that was cut off does not count."""
    known: dict[str, FileHash] = {}
    if not path.exists():
        return known
    try:
        with path.open("rb") as log:
            lines = log.readlines()
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}; name another --state"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            record = read_line(line)
        except (ValueError, TypeError, RecursionError):
            what = "is not a line of `nanok3 check --hash`"
            raise StateError(f"{path}: line {number} {what}; name another --state") from None
        if record is not None:
            known[record.file] = record
    return known


def read_line(line: bytes) -> FileHash | None:
    """None for the start of a line."""
    if line.endswith(b"\n"):
        return FileHash(**json.loads(line))
    if line.startswith(LINE_START) or LINE_START.startswith(line):
        return None
    raise ValueError("not the start of a line")


def open_state(path: Path) -> BinaryIO:
    """Open for further lines, without a last line that was cut off. `read_state` has read it."""
    try:
        log = path.open("a+b", buffering=0)
        size = os.fstat(log.fileno()).st_size
        os.ftruncate(log.fileno(), os.pread(log.fileno(), size, 0).rfind(b"\n") + 1)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
    return log


def add_line(log: BinaryIO, record: FileHash) -> None:
    try:
        left = memoryview(json.dumps(asdict(record)).encode() + b"\n")
        while left:
            left = left[log.write(left) :]
        os.fsync(log.fileno())
    except OSError as error:
        raise OutputError(f"{log.name} cannot be written: {error.strerror}") from error
