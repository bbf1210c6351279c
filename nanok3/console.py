"""What people type and see: text in, a reply out, Ctrl-C in between.

Content and tool calls go to stdout; thinking, notes and errors go to stderr, so that stdout holds
results alone. Knows no engine and no click.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nanok3.exits import USAGE, Refused
from nanok3.reply import ContentDelta, Event, ReasoningDelta, ToolCall

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# A terminal obeys control characters, and a model may write any: there they are shown, not sent.
_CONTROLS = {c: "\ufffd" for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


class TextError(ValueError):
    """Text or JSON that cannot be read; the message says where it breaks off."""


class OutputError(Exception):
    """An output that cannot be written; the message names it and says why."""


def note(text: str) -> None:
    """One line for a person. The work goes on without one if nobody can read it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_out(text: str) -> None:
    """Text to stdout, at once. Raises BrokenPipeError when the reader has gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"stdout cannot be written: {error.strerror}") from error


def close_stdout() -> None:
    """What stdout still buffers is dropped, so that the interpreter does not fail on it at exit."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.close(descriptor)


# ---- in ----


def decode_text(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{what} is not valid UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
        ) from error


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text; NaN and Infinity, which JSON lacks, are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON value")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{what} is not valid JSON: {error}") from error


def read_line() -> str | None:
    """The next line that someone types, or that a pipe holds; None at its end."""
    if not sys.stdin.isatty():
        raw = sys.stdin.buffer.readline()
        return decode_text(raw, "a line of stdin").rstrip("\r\n") if raw else None
    with suppress(ImportError):  # gives input() line editing and history, where a system has it
        import readline as readline
    prompt = "> "
    if not sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise TextError(f"the line is not valid UTF-8: {error.reason}") from error


def read_file(path: Path) -> str:
    """The text of a file, without its last line's end."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise Refused(USAGE, f"{path} cannot be read: {error.strerror}") from error
    return _without_line_end(decode_text(raw, str(path)))


def read_stdin() -> str:
    """All of stdin, without its last line's end."""
    try:
        raw = sys.stdin.buffer.read()
    except OSError as error:
        raise Refused(USAGE, f"stdin cannot be read: {error.strerror}") from error
    return _without_line_end(decode_text(raw, "stdin"))


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


class Interrupts:
    """Ctrl-C, counted, while this is entered.

    The first one only counts, so that work can stop where it leaves nothing half done; the next
    one, and any while a line is being typed, raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._typing = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def read_line(self) -> str | None:
        """`read_line`, after which the count starts again."""
        self._typing = True
        try:
            line = read_line()
        finally:
            self._typing = False
        self.count = 0
        return line

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._typing or self.count > 1:
            raise KeyboardInterrupt


# ---- out ----


class Printer:
    """Shows one reply as it comes: content, then a line of JSON for each tool call, on stdout."""

    def __init__(self, show_thinking: bool) -> None:
        self._show_thinking = show_thinking
        self._dim = sys.stderr.isatty()
        self._clean = sys.stdout.isatty()
        self._thinking = False  # the last thing shown was thinking
        self._line_open = False  # stdout is in the middle of a line

    def show(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self._think(event.text)
        elif isinstance(event, ContentDelta):
            self._end_thinking()
            text = event.text.translate(_CONTROLS) if self._clean else event.text
            write_out(text)
            self._line_open = not text.endswith("\n")
        elif isinstance(event, ToolCall):
            self._end_thinking()
            self._end_line()
            write_out(json.dumps(asdict(event), ensure_ascii=False) + "\n")

    def finish(self) -> None:
        """What is printed next begins a new line."""
        self._end_thinking()
        self._end_line()

    def _think(self, text: str) -> None:
        if not self._show_thinking:
            return
        self._end_line()
        start = DIM if self._dim and not self._thinking else ""
        self._thinking = True
        text = text.translate(_CONTROLS) if self._dim else text
        with suppress(OSError):
            print(start + text, end="", file=sys.stderr, flush=True)

    def _end_thinking(self) -> None:
        if self._thinking:
            self._thinking = False
            note((PLAIN if self._dim else "") + "\n")

    def _end_line(self) -> None:
        if self._line_open:
            self._line_open = False
            write_out("\n")
