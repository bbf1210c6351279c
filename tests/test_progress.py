"""The line that shows a load, on a terminal and in a log, with a clock that the test moves."""

from __future__ import annotations

import io
import re
import sys

import pytest

from nanok3 import progress
from nanok3.progress import ProgressLine


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def show(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, terminal: bool, seconds: list[float]
) -> str:
    """What is written when a gigabyte comes at each of these times, the last one the end."""
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    line = ProgressLine("weights:")
    for done, second in enumerate(seconds, 1):
        clock.now = 100.0 + second
        line(done * 10**9, len(seconds) * 10**9)
    return screen.getvalue()


def test_a_terminal_shows_one_line_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    text = show(monkeypatch, clock, True, [0.1, 2.0, 2.1, 3.0, 4.0])
    shown = text.split("\r")
    assert shown[0] == "" and len(shown) == 4  # 0.1 and 2.1 are too soon
    assert shown[1] == "weights: 2.0 of 5.0 GB, 1.00 GB/s, 3 s left"
    assert shown[2].startswith("weights: 4.0 of 5.0 GB, 1.33 GB/s, 1 s left")
    assert shown[3].startswith("weights: 5.0 of 5.0 GB") and text.endswith("\n")
    assert text.count("\n") == 1
    widths = [len(part.rstrip("\n")) for part in shown[1:]]
    assert widths == sorted(widths), "a shorter line must cover a longer one"


def test_a_log_gets_whole_lines_seldom(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    text = show(monkeypatch, clock, False, [5.0, 11.0, 12.0, 22.0, 23.0])
    assert "\r" not in text
    assert [float(x) for x in re.findall(r"(\S+) of", text)] == [2.0, 4.0, 5.0]
    assert text.count("\n") == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_over_at_once_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, terminal: bool
) -> None:
    assert show(monkeypatch, clock, terminal, [0.1, 0.2, 0.3]) == ""


def test_no_time_and_no_bytes_divide_by_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    line = ProgressLine("x")
    clock.now += 1
    line(0, 0)
    line(0, 10)
    assert "0.0 of 0.0 MB" in screen.getvalue()
