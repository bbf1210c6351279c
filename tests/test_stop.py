"""Stop strings against a matcher that looks at one character at a time, and who wins at the end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.stop import StopChecker, finish_reason


def by_character(text: str, stops: list[str]) -> tuple[str, bool]:
    """(What is shown of `text`, whether it stopped), the slow and obvious way."""
    for end in range(len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(len(s) for s in done)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stops)
    shown = ""
    for piece in pieces:
        emit, stopped = checker.push(piece)
        shown += emit
        if stopped:
            assert checker.finish() == ""
            return shown, True
    return shown + checker.finish(), False


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_gives_what_single_characters_give(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == by_character("".join(pieces), stops)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for i, character in enumerate(text):
        emit, stopped = checker.push(character)
        shown += emit
        if stopped:
            return
        held = text[len(shown) : i + 1]
        assert shown + held == text[: i + 1]
        assert not held or any(s.startswith(held) for s in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stopped"),
    [
        (["Hello", " wor", "ld"], ["</s>"], "Hello world", False),
        (["a<", "/s", ">b"], ["</s>"], "a", True),
        (["a<", "/s", "!"], ["</s>"], "a</s!", False),
        (["a<</", "s>"], ["</s>"], "a<", True),  # a false start right before the true one
        (["STOP"], ["STOP"], "", True),
        (["xSTOPySTOP"], ["STOP"], "x", True),
        (["abc"], ["abc", "b"], "a", True),  # "b" is complete first
        (["xabc"], ["bc", "abc"], "x", True),  # complete together: the one begun earlier
        (["ends with <"], ["</s>"], "ends with <", False),  # held back, then finished
        (["día\U0001f600", "\U0001f601"], ["\U0001f601"], "día\U0001f600", True),
        (["", "a", ""], ["b"], "a", False),
        (["anything"], [], "anything", False),
    ],
)
def test_by_hand(pieces: list[str], stops: list[str], shown: str, stopped: bool) -> None:
    assert run(pieces, stops) == (shown, stopped)


def test_text_before_min_tokens_does_not_stop() -> None:
    checker = StopChecker(["END"])
    assert checker.push("END EN", armed=False) == ("END EN", False)
    assert checker.push("D ok") == ("D ok", False)
    assert checker.push(" END") == (" ", True)


def test_text_after_the_stop_is_refused() -> None:
    checker = StopChecker(["x"])
    checker.push("x")
    with pytest.raises(AssertionError):
        checker.push("y")


# H-01: a stop anywhere in a step's block of tokens, against max_tokens anywhere.


def answer(
    tokens: list[str], block: int, stops: list[str], max_tokens: int
) -> tuple[str, str | None]:
    """Text and reason, `block` tokens a step; "<e>" stands for a stop id, which has no text."""
    checker, shown, num_output = StopChecker(stops), "", 0
    for start in range(0, len(tokens), block):
        for token in tokens[start : start + block]:
            num_output += 1
            is_end = token == "<e>"
            emit, met = checker.push("" if is_end else token)
            shown += emit
            reason = finish_reason(
                met_stop_id=is_end, met_stop_text=met, num_output=num_output, max_tokens=max_tokens
            )
            if reason:
                return shown + checker.finish(), reason
    return shown + checker.finish(), None


def test_stop_at_each_place_and_length_at_each_place() -> None:
    for place, max_tokens, block, kind in itertools.product(
        range(8), range(1, 9), (1, 2, 7, 8), ("<e>", "##")
    ):
        tokens = [f"{i}." for i in range(8)]
        tokens[place] = kind
        stops_in_time = place + 1 <= max_tokens
        text = "".join(tokens[: place if stops_in_time else max_tokens])
        expected = (text, "stop" if stops_in_time else "length")
        assert answer(tokens, block, ["##"], max_tokens) == expected


def test_no_limit_and_no_stop_go_on() -> None:
    go_on = finish_reason(met_stop_id=False, met_stop_text=False, num_output=9, max_tokens=None)
    assert go_on is None
