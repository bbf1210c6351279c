"""One request's ids, text and end, from ids written by hand (a tokenizer of bytes)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nanok3.channels import ChannelParser, parse
from nanok3.reply import ContentDelta, Event, ReasoningDelta, ToolCall
from nanok3.request import PlainText, Request, Result
from nanok3.sampling import SamplingParams
from nanok3.tokenizer import StreamDecoder, Tokenizer

TOKENIZER = Tokenizer([bytes([i]) for i in range(256)])
EOS, END_OF_MSG = TOKENIZER.special_id("[EOS]"), TOKENIZER.special_id("<|end_of_msg|>")


def encode(text: str) -> list[int]:
    """Specials by name."""
    ids = []
    for i, part in enumerate(TOKENIZER._special.split(text)):
        ids += [TOKENIZER.special_id(part)] if i % 2 else list(part.encode())
    return ids


THOUGHT = "so<|close|>think<|sep|><|open|>response<|sep|>"
CALL = (
    "<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
END = "<|close|>message<|sep|><|end_of_msg|>"


def make(
    thinking: bool | None = None,
    max_tokens: int = 1000,
    tokenizer: Tokenizer | None = TOKENIZER,
    stop_ids: Sequence[int] = (),
    **options: Any,
) -> Request:
    params = SamplingParams(**options)
    ends = frozenset({EOS, END_OF_MSG, *stop_ids})
    return Request([1, 2, 3], params, ends, max_tokens, tokenizer, thinking)


def feed(request: Request, ids: Sequence[int]) -> tuple[Result, list[Event]]:
    """Ids one by one, as long as the request takes them, and the events as they came."""
    events: list[Event] = []
    for token in ids:
        if request.done:
            break
        request.take(token)
        events += request.take_events()
    if not request.done:
        request.finish("cancelled")
        events += request.take_events()
    assert not request.take_events()
    return request.result(), events


def text_of(events: list[Event], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(e.text for e in events if isinstance(e, kind))


def test_bare_ids_are_content_and_counted() -> None:
    ids = [*encode("né"), EOS, *encode("more")]
    result, events = feed(make(), ids)
    assert result.text == text_of(events, ContentDelta) == "né"
    assert result.token_ids == ids[:4]  # the stop id counts, its name is no text
    assert (result.finish_reason, result.error, result.logprobs) == ("stop", None, None)
    usage = result.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 0, 4)
    assert all(event != ContentDelta("") for event in events)


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    result, events = feed(make(tokenizer=None, stop_ids=[7]), [5, 300, 7, 9])
    assert (result.token_ids, result.text, events) == ([5, 300, 7], "", [])
    assert result.finish_reason == "stop" and result.well_formed


def test_a_conversation_is_read_in_channels() -> None:
    ids = encode(THOUGHT + "yes" + CALL + END)
    result, events = feed(make(thinking=True), ids)
    assert (result.reasoning, result.text) == ("so", "yes")
    assert text_of(events, ReasoningDelta) == "so" and text_of(events, ContentDelta) == "yes"
    assert result.tool_calls == [e for e in events if isinstance(e, ToolCall)]
    assert [c.name for c in result.tool_calls] == ["f"]
    assert result.finish_reason == "tool_calls"
    assert result.well_formed and not result.warnings
    whole = parse(TOKENIZER, ids, thinking=True)
    assert (whole.content, whole.tool_calls) == (result.text, result.tool_calls)
    plain, _ = feed(make(thinking=False), encode("yes<|close|>response<|sep|>" + END))
    assert (plain.text, plain.finish_reason, plain.well_formed) == ("yes", "stop", True)


def test_a_cut_off_reply_is_length_and_not_well_formed() -> None:
    result, _ = feed(make(thinking=True, max_tokens=5), encode(THOUGHT))
    assert (result.finish_reason, result.well_formed, len(result.token_ids)) == ("length", False, 5)


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("end", range(1, 9))
def test_a_stop_beats_the_limit_wherever_both_lie(limit: int, end: int) -> None:
    """A stop id or a stop string as id number `end`, at most `limit` ids (pitfall H-01)."""
    expected = "stop" if end <= limit else "length"
    shown = min(end - 1, limit)
    text = "abcdefgh"
    by_id, _ = feed(make(max_tokens=limit), [*encode(text)[: end - 1], EOS])
    assert (by_id.finish_reason, by_id.text) == (expected, text[:shown])
    by_text, _ = feed(make(max_tokens=limit, stop=(text[end - 1],)), encode(text))
    assert (by_text.finish_reason, by_text.text) == (expected, text[:shown])
    assert len(by_text.token_ids) == min(end, limit)


@pytest.mark.parametrize(
    "stop, text, num_ids",
    [
        (("e t",), "on", 1),  # inside one id
        (("two th",), "one ", 2),  # across two
        (("o three f", "three"), "one two ", 2),  # the one that is complete first
        (("two three four!",), "one two three four", 3),  # held back, and given out at the end
    ],
)
def test_a_stop_string_in_ids_of_many_characters(
    stop: tuple[str, ...], text: str, num_ids: int
) -> None:
    words = Tokenizer([*(bytes([i]) for i in range(256)), b"one two", b" three", b" four"])
    request = Request([1], SamplingParams(stop=stop), frozenset(), 3, words, None)
    result, events = feed(request, [256, 257, 258])
    assert result.text == text_of(events, ContentDelta) == text
    assert result.token_ids == [256, 257, 258][:num_ids]
    assert result.finish_reason == ("length" if num_ids == 3 else "stop")


def test_stop_strings_are_for_content_not_for_reasoning() -> None:
    result, _ = feed(make(thinking=True, stop=("o",)), encode(THOUGHT + "yes or no"))
    assert (result.reasoning, result.text, result.finish_reason) == ("so", "yes ", "stop")


def test_stop_strings_are_off_until_min_tokens() -> None:
    for low, text in ((0, ""), (1, "x"), (2, "xx"), (3, "xxx")):
        result, _ = feed(make(min_tokens=low, stop=("x",)), encode("xxxxx"))
        assert (result.text, result.finish_reason) == (text, "stop")


def test_a_stop_id_of_the_caller_is_no_text_anywhere() -> None:
    bang = ord("!")
    for thinking in (None, False, True):
        result, _ = feed(make(thinking, stop_ids=[bang]), encode("ab!cd"))
        shown = result.reasoning if thinking else result.text
        assert (shown, result.finish_reason, result.token_ids[-1]) == ("ab", "stop", bang)


def test_half_a_character_comes_out_once_at_every_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder is finished once, however the answer ends (pitfall C-04)."""
    calls = []
    finish = StreamDecoder.finish

    def counted(self: StreamDecoder) -> str:
        calls.append(self)
        return finish(self)

    monkeypatch.setattr(StreamDecoder, "finish", counted)
    half = encode("aé")[:2]
    for ids, options, text in (
        ([*half, EOS], {}, "a\ufffd"),
        (half, {"max_tokens": 2}, "a\ufffd"),
        (half, {}, "a\ufffd"),  # cancelled
        (encode("aé"), {"stop": ("é",)}, "a"),
    ):
        result, events = feed(make(**options), ids)
        assert result.text == text_of(events, ContentDelta) == text
        assert len(calls) <= 1
        calls.clear()


class Broken:
    """A parser that fails at one id, and from then on."""

    def __init__(self, at: int) -> None:
        self.parser, self.at, self.count = ChannelParser(TOKENIZER, False), at, 0

    def push(self, token: int) -> list[Event]:
        self.count += 1
        return self.parser.push(token) if self.count < self.at else self.fail()

    def finish(self) -> list[Event]:
        return self.parser.finish() if self.count < self.at else self.fail()

    def reply(self) -> Any:
        return self.parser.reply()

    def fail(self) -> Any:
        raise KeyError("odd")


@pytest.mark.parametrize("limit", [2, 3, 9])  # it fails in `finish` only; in both; before the limit
def test_a_failure_in_the_text_is_an_error_of_the_request(limit: int) -> None:
    request = make(thinking=False, max_tokens=limit)
    broken = Broken(at=3)
    request._parser = broken  # type: ignore[assignment]
    if limit == 2:
        broken.finish = broken.fail  # type: ignore[method-assign]
    result, _ = feed(request, encode("abcdef"))
    assert (result.text, result.finish_reason) == ("ab", "error")
    assert result.error == "KeyError: 'odd'" and not result.well_formed


def test_finish_happens_once() -> None:
    request = make()
    request.take(ord("a"))
    request.finish("error", "first")
    request.finish("stop")
    request.finish("error", "second")
    assert (request.finish_reason, request.error) == ("error", "first")
    assert request.take_events() == [ContentDelta("a")] and request.take_events() == []
    assert request.result().text == "a"


def test_only_a_request_that_asked_has_logprobs() -> None:
    assert feed(make(logprobs=0), [EOS])[0].logprobs == []
    assert feed(make(), [EOS])[0].logprobs is None


def test_plain_text_has_no_channels() -> None:
    result, _ = feed(make(thinking=None), encode(THOUGHT))
    assert result.text == THOUGHT and not result.reasoning
    assert PlainText(TOKENIZER).reply().well_formed
