"""The journal: what can be read of it whatever happened to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanok3 import journal as journal_module
from nanok3.console import OutputError
from nanok3.journal import FRAME, MAGIC, Entry, Journal, Mark, RecordFile

MARK = Mark(2, 30, "ab" * 32, {"model": "tiny", "sampling": {"stop": ["a"]}})
ENTRIES = [
    Entry(2, b"d" * 12, False, b'{"a": 1}\n'),
    Entry(5, bytes(12), True, b'{"error": 1}\n'),
    Entry(2**40, b"e" * 12, False, b"\n"),
]


def written(path: Path, *appended: Entry) -> bytes:
    with Journal(path) as journal:
        journal.begin(MARK, [])
        for entry in appended:
            journal.append([entry])
    return path.read_bytes()


def read(path: Path) -> tuple[Mark, list[Entry]]:
    with Journal(path) as journal:
        return journal.read()


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """Whole entries stay, the torn one goes, and what is appended then is read with them."""
    path = tmp_path / "j"
    ends = [len(written(path, *ENTRIES[:count])) for count in range(4)]
    data = written(path, *ENTRIES)
    for place in range(ends[0], len(data) + 1):
        path.write_bytes(data[:place])
        whole = sum(end <= place for end in ends[1:])
        with Journal(path) as journal:
            assert journal.read() == (MARK, ENTRIES[:whole]), place
            assert path.stat().st_size == ends[whole]
            journal.append([ENTRIES[0]])
        assert read(path) == (MARK, [*ENTRIES[:whole], ENTRIES[0]])
    for place in range(ends[0]):
        path.write_bytes(data[:place])
        with pytest.raises(OutputError, match="is no journal of a batch; remove it"):
            read(path)


def test_damaged_end(tmp_path: Path) -> None:
    path = tmp_path / "j"
    keep = len(written(path, *ENTRIES[:2]))
    data = written(path, *ENTRIES)
    for place in range(keep, len(data)):  # a bit of the last entry's frame
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        assert read(path) == (MARK, ENTRIES[:2]), place
    # What a power cut can leave: zeros, or a length without its bytes.
    for tail in (bytes(8), bytes(4096), FRAME.pack(2**32 - 1, 0), FRAME.pack(3, 0) + b"abc"):
        path.write_bytes(data + tail)
        assert read(path) == (MARK, ENTRIES)
        assert path.read_bytes() == data


def test_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for content in (b"", b"mine", MAGIC, MAGIC + bytes(100), b"x" * 5000):
        path.write_bytes(content)
        with pytest.raises(OutputError, match="is no journal"):
            read(path)
        assert path.read_bytes() == content


def test_begin_replaces_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    later = Mark(9, 99, "cd" * 32, {})
    for broken in ("write", "fsync", "replace"):
        old = written(path, *ENTRIES)
        with Journal(path) as journal, monkeypatch.context() as patch:

            def fail(*args: object) -> None:
                raise OSError(28, "No space left on device")

            journal.read()
            patch.setattr(journal_module.os, broken, fail)
            with pytest.raises(OutputError, match="No space left"):
                journal.begin(later, ENTRIES[:1])
            assert path.read_bytes() == old
    with Journal(path) as journal:
        journal.read()
        journal.begin(later, ENTRIES[:1])
        journal.append(ENTRIES[1:2])
        assert journal.size == path.stat().st_size
    assert read(path) == (later, ENTRIES[:2])


def test_append_that_fails_leaves_whole_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    data = written(path, ENTRIES[0])
    write = journal_module.os.write
    for room in range(40):
        left = [room]

        def full(fd: int, view: memoryview, left: list[int] = left) -> int:
            if not left[0]:
                raise OSError(28, "No space left on device")
            count = write(fd, view[: left[0]])
            left[0] -= count
            return count

        with Journal(path) as journal, monkeypatch.context() as patch:
            journal.read()
            patch.setattr(journal_module.os, "write", full)
            with pytest.raises(OutputError, match="--resume goes on"):
                journal.append(ENTRIES[1:2])
        assert path.read_bytes() == data


def test_what_an_earlier_run_wrote(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for old, is_derived, expected in [
        (b"a\nb\n", True, b"a\nb\n"),
        (b"a\n", True, b"a\nb\n"),
        (b"a\nb", True, b"a\nb\n"),
        (b"a\nxyz\nlong\n", True, b"a\nb\n"),
        (b"", False, b"a\nb\n"),
        (b"a\nb", False, b"a\nb\n"),
        (b"a\nx\n", False, None),
        (b"mine", False, None),
    ]:
        path.write_bytes(old)
        with RecordFile(str(path), True, is_derived=is_derived) as file:
            if expected is None:
                with pytest.raises(OutputError, match="holds something else"):
                    [file.write(line) for line in (b"a\n", b"b\n")]
            else:
                [file.write(line) for line in (b"a\n", b"b\n")]
        assert path.read_bytes() == (old if expected is None else expected)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        RecordFile(str(tmp_path / "out"), False, is_derived=True),
        pytest.raises(OutputError, match="being written by another run"),
    ):
        RecordFile(str(tmp_path / "out"), True, is_derived=True)
    RecordFile(str(tmp_path / "out"), True, is_derived=True).__exit__()
