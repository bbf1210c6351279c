"""The files of a batch: which names will do, what an earlier run left, what is written when.

In this order, so that any moment can be the last: a finished line to the journal and to the disk;
its record to the output, and to the file of errors, when its turn comes; the output to the disk
before the journal is shortened or removed. `journal.py` has the files one by one. The names are
checked before a model is loaded; "-" is stdin or stdout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nanok3.batch_input import InputError
from nanok3.batch_lines import Line, failed, names
from nanok3.console import OutputError, TextError, decode_text, parse_json
from nanok3.journal import Entry, Journal, Mark, RecordFile, journal_path

JOURNAL_BYTES = 16 * 2**20  # from here on it is replaced by what is still needed of it


def check_paths(source: str, target: str, resume: bool, errors: str | None = None) -> None:
    """Refuses what can be refused from names alone."""
    if source != "-":
        if not Path(source).exists():
            raise InputError(f"{source}: no such file; name a JSONL file, or - for stdin")
        if Path(source).is_dir():
            raise InputError(f"{source} is a directory; name a JSONL file, or - for stdin")
    if target == "-":
        if resume:
            raise InputError("--resume needs an output file, but the output is stdout")
    else:
        _check_output(source, target, resume, "output")
        journal = journal_path(target)
        if Path(target).exists() and not Path(target).is_file():
            if resume:
                raise InputError(f"--resume needs a file to go on with, and {target} is none")
        elif not resume and journal.exists():
            raise OutputError(
                f"{journal} exists; add --resume to go on with the run that left it, or remove it"
            )
    if errors is not None:
        if errors == "-":
            raise InputError("--errors needs a file, and - is none")
        for taken in () if target == "-" else (target, journal_path(target)):
            if os.path.realpath(errors) == os.path.realpath(taken):
                raise InputError(f"{errors} is {taken} too; name another file for the errors")
        _check_output(source, errors, resume, "errors")


def _check_output(source: str, path: str, resume: bool, what: str) -> None:
    if not Path(path).exists():
        if not Path(path).parent.is_dir():
            raise OutputError(f"{path} cannot be written: {Path(path).parent} is no directory")
        return
    if source != "-" and os.path.samefile(source, path):
        raise InputError(f"{path} is the input too; name another file for the {what}")
    if Path(path).is_dir():
        raise OutputError(f"{path} is a directory; name a file")
    if Path(path).is_file() and not resume:
        raise OutputError(f"{path} exists; name another file, or add --resume to go on with it")


class BatchFiles:
    """The output, its journal where it is a file, and the file of errors where one is wanted."""

    def __init__(
        self, target: str, errors: str | None, options: dict[str, Any], resume: bool
    ) -> None:
        """options: what the records depend on beside the lines; an earlier run's must be equal."""
        self._options, self._resume = options, resume
        self._written = 0  # records in the output
        self._answered = hashlib.sha256()  # of the digests of the lines that they answer
        self._kept: dict[int, Entry] = {}  # by place: what only the journal of an earlier run has
        self._errors = self._journal = None
        with ExitStack() as stack:
            self._out = stack.enter_context(RecordFile(target, resume, is_derived=True))
            if errors is not None:
                self._errors = stack.enter_context(RecordFile(errors, resume, is_derived=False))
            if self._out.is_file:
                self._journal = stack.enter_context(Journal(journal_path(target)))
            self._stack = stack.pop_all()

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self, next_line: Callable[[], Line | None]) -> Iterator[tuple[Line, bool]]:
        """The lines that the output answers already, and whether their records are errors.

        next_line: takes a line of the input; None at its end. Raises OutputError for what is not
        of this batch, before the output is changed. Must be run to its end.
        """
        mark = None
        if self._resume and self._journal is not None and self._journal.path.exists():
            mark, entries = self._journal.read()
            self._check_options(mark.options)
            self._kept = {entry.place: entry for entry in entries if entry.place >= mark.written}
        if self._resume:
            for raw in self._out.old_lines(None if mark is None else mark.out_bytes):
                line, is_error = self._match(raw, next_line())
                self._count(line, raw, is_error)
                yield line, is_error
        if mark is None and self._journal is not None:
            self._out.cut()
            self._out.sync()
            self._journal.begin(self._mark(), [])
        elif mark is not None:
            if (self._written, self._out.end) != (mark.written, mark.out_bytes):
                raise OutputError(f"{self._out.name} has lost records that its journal counts")
            if self._answered.hexdigest() != mark.lines:
                raise _foreign("a line of the input has changed")

    def kept(self, line: Line) -> Entry | None:
        """The record of a line that an earlier run had finished before its turn."""
        entry = self._kept.pop(line.place, None)
        if entry is not None and entry.digest != bytes.fromhex(line.digest):
            raise _foreign(f"line {line.number} of the input has changed")
        return entry

    def keep(self, entries: Sequence[Entry]) -> None:
        """Puts on the disk what is finished, in turn or not."""
        if self._journal is not None and entries:
            self._journal.append(entries)

    def write(self, turn: Sequence[tuple[Line, Entry]]) -> None:
        """The records whose turn it is, kept before."""
        for line, entry in turn:
            self._out.write(entry.data)
            self._count(line, entry.data, entry.is_error)
        if self._errors is not None and any(entry.is_error for _, entry in turn):
            self._errors.sync()

    def shorten(self, waiting: Callable[[], Sequence[Entry]], waiting_bytes: int) -> None:
        """Rids the journal of what the output has, once that is worth it."""
        if self._journal and self._journal.size > max(JOURNAL_BYTES, 2 * waiting_bytes):
            self._out.sync()
            # What an earlier run kept and this one has not read again yet is needed too.
            self._journal.begin(self._mark(), [*waiting(), *self._kept.values()])

    def end(self) -> None:
        """Every line has its record in the output: the journal has done its work."""
        if self._kept:
            raise _foreign("the journal has more lines than the input")
        self._out.cut()
        self._out.sync()
        if self._errors is not None:
            self._errors.sync()
        if self._journal is not None:
            self._journal.remove()

    def _match(self, raw: bytes, line: Line | None) -> tuple[Line, bool]:
        """A record of an earlier run with the line that it answers."""
        what = f"{self._out.name} line {self._written + 1}"
        try:
            record = parse_json(decode_text(raw, what), what)
            if not isinstance(record, dict):
                raise TextError(f"{what} is no record")
        except TextError as error:
            raise OutputError(f"{error}; --resume needs a file of records") from error
        if line is None:
            raise _foreign(f"{what} is one too many of the input")
        if not names(record, line):
            raise _foreign(f"{what} does not answer line {line.number} of the input")
        return line, failed(record)

    def _count(self, line: Line, data: bytes, is_error: bool) -> None:
        """What follows from a record in the output."""
        self._written += 1
        self._answered.update(bytes.fromhex(line.digest))
        if is_error and self._errors is not None:
            self._errors.write(data)

    def _mark(self) -> Mark:
        return Mark(self._written, self._out.end, self._answered.hexdigest(), self._options)

    def _check_options(self, before: dict[str, Any]) -> None:
        now = self._options
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                raise OutputError(
                    f"{self._out.name} was begun with {key} {json.dumps(before.get(key))}, and "
                    f"this run has {json.dumps(now.get(key))}; give the same, or another output"
                )


def _foreign(what: str) -> OutputError:
    return OutputError(f"{what}; --resume needs the input that the output was made from")
