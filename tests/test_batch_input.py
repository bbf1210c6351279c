"""Lines from files, gzip and pipes, in bounded memory."""

from __future__ import annotations

import gzip
import os
import threading
import time
from pathlib import Path

import pytest

from nanok3 import batch_input
from nanok3.batch_input import InputError, LineSource, SeenIds

TEXT = b'{"a": 1}\n\nlast line, not ended'
LINES = [b'{"a": 1}\n', b"\n", b"last line, not ended"]


def taken(path: Path) -> tuple[list[bytes], InputError | None]:
    lines = []
    with LineSource(str(path)) as source:
        while line := source.take(5.0):
            lines.append(line)
        assert line == b"" and source.take(0.0) in (None, b"")
        return lines, source.error


@pytest.mark.parametrize("count", [0, 1, 2, 3, len(TEXT)])
def test_plain_and_gzip_give_the_same_lines(tmp_path: Path, count: int) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"  # told by their first bytes alone
    plain.write_bytes(TEXT[:count])
    half = count // 2
    packed.write_bytes(gzip.compress(TEXT[:half]) + gzip.compress(TEXT[half:count]))
    assert taken(plain) == taken(packed) == (TEXT[:count].splitlines(keepends=True), None)


def test_damaged_gzip_gives_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    data = gzip.compress(b"".join(b"%d %d\n" % (i, i * i) for i in range(9000)))
    for damaged in (data[:-4], data[: len(data) // 2], data + b"garbage", data[:2]):
        path.write_bytes(damaged)
        lines, error = taken(path)
        assert error is not None and str(error).startswith(f"{path} ")
        assert lines == [] or lines[0] == b"0 0\n"


def test_long_line_is_cut_and_its_rest_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in"
    path.write_bytes(
        b"123456789\n1234567890\n12345678901\n" + b"x" * 3_000_000 + b"\nok\n" + b"y" * 99
    )
    assert taken(path)[0] == [
        *(b"123456789\n", b"1234567890\n", b"12345678901", b"xxxxxxxxxxx", b"ok\n"),
        b"yyyyyyyyyyy",
    ]


def test_reading_waits_for_whoever_takes(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"line\n" * 100_000)
    before = threading.active_count()
    with LineSource(str(path)) as source:
        deadline = time.monotonic() + 5
        while source._lines.qsize() < batch_input.MAX_WAITING:
            assert time.monotonic() < deadline
        assert source._read <= 5 * (batch_input.MAX_WAITING + 1)
        assert source.total() == 500_000
    while threading.active_count() > before:  # the thread ends with it
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_pipe_that_says_nothing_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    keeper = os.open(path, os.O_RDWR)
    with LineSource(str(path)) as source:
        assert source.take(0.0) is None and source.take(0.01) is None
        os.write(keeper, b"o")
        assert source.take(0.01) is None
        os.write(keeper, b"ne\n")
        assert source.take(5.0) == b"one\n"
        assert source.total() == 0
    os.close(keeper)


def test_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        LineSource(str(tmp_path / "none"))


def test_first_line_of_an_id() -> None:
    seen = SeenIds()
    ids = [f"id-{i}" for i in range(5000)] + ["", "\ud800", "né"]
    for number, custom_id in enumerate(ids, start=1):
        assert seen.first(custom_id, number) == number
    for number, custom_id in enumerate(ids, start=1):
        assert seen.first(custom_id, 10**6) == number
    assert len(seen._keys) == 16384, "at most half full"
