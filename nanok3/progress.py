"""One line on stderr that shows how far some work is, how fast, and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

REFRESH_SECONDS = 0.5


class StatusLine:
    """Rewrites one line where stderr is a terminal; elsewhere prints a line every ten seconds."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._wait = REFRESH_SECONDS if self._terminal else 10.0
        self._shown = self.start
        self._width = 0

    @property
    def seconds(self) -> float:
        """Since the work began."""
        return max(time.monotonic() - self.start, 1e-9)

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._shown >= self._wait

    @property
    def is_empty(self) -> bool:
        """Nothing has been shown yet."""
        return self._shown == self.start

    def show(self, line: str, last: bool = False) -> None:
        """`last`: the work is over, and what is printed next begins a new line."""
        self._shown = time.monotonic()
        self._width = max(self._width, len(line))
        end = "\n" if last or not self._terminal else ""
        start = "\r" if self._terminal else ""
        with suppress(OSError):  # the work goes on when nobody can read of it
            print(f"{start}{line:<{self._width}}", end=end, file=sys.stderr, flush=True)


class ProgressLine:
    """The status line of a load."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._line = StatusLine()

    def __call__(self, done: int, total: int) -> None:
        over = done == total
        if not self._line.is_due and (not over or self._line.is_empty):
            return  # not yet, or over before anything needed to be shown
        rate = done / self._line.seconds
        left = (total - done) / max(rate, 1e-9)
        unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
        self._line.show(
            f"{self._label} {done / size:.1f} of {total / size:.1f} {unit}, {rate / size:.2f} "
            f"{unit}/s, {left:.0f} s left",
            over,
        )
