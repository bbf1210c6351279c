"""Replies written out by hand, replies that `chat` renders, and replies that are broken.

The vocabulary is 256 single bytes and K3's special tokens, so every marker and every character is
cut at each of its bytes. In `ids` below, OP CL SP EM stand for the four markers.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.channels import ChannelParser, parse
from nanok3.chat import render
from nanok3.reply import (
    ContentDelta,
    Event,
    ParseWarning,
    ReasoningDelta,
    Reply,
    ToolCall,
    message_from_reply,
)
from nanok3.tokenizer import Tokenizer

TOKENIZER = Tokenizer([bytes([byte]) for byte in range(256)])
OP, CL = TOKENIZER.special_id("<|open|>"), TOKENIZER.special_id("<|close|>")
SP, EM = TOKENIZER.special_id("<|sep|>"), TOKENIZER.special_id("<|end_of_msg|>")
EOS, PAD = TOKENIZER.special_id("[EOS]"), TOKENIZER.special_id("[PAD]")
NASTY = (
    '<|open|>message role="system"<|sep|>x<|close|>think<|sep|><|end_of_msg|>[EOS]&quot;&amp;é🙂'
)

END = [CL, "message", SP, EM]
TO_RESPONSE = [CL, "think", SP, OP, "response", SP]
SHUT = [CL, "response", SP]  # the response's close
CALL_F = [OP, 'call tool="f" index="1"', SP]
N_IS_1 = [OP, 'argument key="n" type="number"', SP, "1", CL, "argument", SP]
CLOSE_CALL = [CL, "call", SP]
OPEN_TOOLS, CLOSE_TOOLS = [OP, "tools", SP], [CL, "tools", SP]


def ids(*parts: Any) -> list[int]:
    """Ids of markers, texts, byte strings and lists of them."""
    out: list[int] = []
    for part in parts:
        if isinstance(part, list):
            out += ids(*part)
        else:
            out += (
                [part]
                if isinstance(part, int)
                else part.encode()
                if isinstance(part, str)
                else part
            )
    return out


def read(*parts: Any, thinking: bool = True) -> Reply:
    return parse(TOKENIZER, ids(*parts), thinking)


def fold(events: list[Event]) -> tuple[str, str, list[ToolCall], list[str]]:
    """What a caller that streams ends up with."""
    return (
        "".join(e.text for e in events if isinstance(e, ReasoningDelta)),
        "".join(e.text for e in events if isinstance(e, ContentDelta)),
        [e for e in events if isinstance(e, ToolCall)],
        [e.text for e in events if isinstance(e, ParseWarning)],
    )


def fields(reply: Reply) -> tuple[str, str, list[ToolCall], list[str]]:
    return reply.reasoning, reply.content, reply.tool_calls, reply.warnings


def rendered(message: dict[str, Any], thinking: bool = True) -> list[int]:
    """The ids of an assistant message that follow its generation prompt."""
    prompt = TOKENIZER.encode_segments(render([], thinking=thinking))
    whole = render([message], thinking=thinking, add_generation_prompt=False)
    out = TOKENIZER.encode_segments(whole)
    assert out[: len(prompt)] == prompt
    return out[len(prompt) :]


SAMPLE = ids("réason 🙂", TO_RESPONSE, "cöntent", SHUT, OPEN_TOOLS, CALL_F, N_IS_1, CLOSE_CALL)
SAMPLE += ids(OP, 'call tool="g" index="2"', SP, CLOSE_CALL, CLOSE_TOOLS, END)


# ---- replies as they should be ----


def test_thinking() -> None:
    assert read("why", TO_RESPONSE, "so", SHUT, END) == Reply("why", "so", [], [], True)
    assert read(TO_RESPONSE, SHUT, END) == Reply("", "", [], [], True)


def test_not_thinking() -> None:
    assert read("so", SHUT, END, thinking=False) == Reply("", "so", [], [], True)


def test_calls() -> None:
    first, second = ToolCall(0, "call_0", "f", '{"n": 1}'), ToolCall(1, "call_1", "g", "{}")
    assert parse(TOKENIZER, SAMPLE, True) == Reply(
        "réason 🙂", "cöntent", [first, second], [], True
    )


def arguments(*parts: Any) -> tuple[str, list[str]]:
    reply = read(SHUT, OPEN_TOOLS, CALL_F, *parts, CLOSE_CALL, CLOSE_TOOLS, END, thinking=False)
    assert reply.well_formed and reply.content == ""
    return reply.tool_calls[0].arguments, reply.warnings


def argument(kind: str, value: str, key: str = "k") -> list[Any]:
    return [OP, f'argument key="{key}" type="{kind}"', SP, value, CL, "argument", SP]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "1", "1"),
        ("string", "", ""),
        ("string", ' "quoted"\n&amp; ', ' "quoted"\n&amp; '),
        ("number", "-2.5", -2.5),
        ("number", " 7\n", 7),
        ("boolean", "true", True),
        ("null", "null", None),
        ("array", '[1, {"q": "ü"}]', [1, {"q": "ü"}]),
        ("object", '{"z":1,"a":[]}', {"z": 1, "a": []}),
        ("object", '"a string after all"', "a string after all"),
    ],
)
def test_argument_types(kind: str, value: str, expected: object) -> None:
    text, warnings = arguments(argument(kind, value))
    assert json.loads(text) == {"k": expected} and warnings == []


@pytest.mark.parametrize("value", ["", "True", "{a: 1}", "NaN", "-Infinity", "[" * 50_000, "1 2"])
def test_an_argument_that_is_not_json_stays_a_string(value: str) -> None:
    text, warnings = arguments(argument("number", value))
    assert json.loads(text) == {"k": value}
    assert warnings == ["argument k of f is not JSON and was kept as a string"]


def test_numbers_are_not_rewritten() -> None:
    assert arguments(argument("number", "1e400"))[0] == '{"k": 1e400}'
    assert arguments(argument("number", "0.10"))[0] == '{"k": 0.10}'


def test_attributes_are_unescaped_once() -> None:
    text, warnings = arguments(argument("string", "v", key="&amp;quot;&quot;&amp;amp;<>"))
    assert json.loads(text) == {'&quot;"&amp;<>': "v"} and warnings == []


def test_an_argument_that_comes_twice() -> None:
    text, warnings = arguments(argument("number", "1"), argument("number", "2"))
    assert text == '{"k": 2}' and warnings == ["argument k of f came twice; the last one counts"]


def test_json_block() -> None:
    def block(text: str) -> list[Any]:
        return [OP, 'json type="object"', SP, text, CL, "json", SP]

    assert arguments(block('{"a": [1]}')) == ('{"a": [1]}', [])
    for raw in ("{oops", "[1]", ""):
        text, warnings = arguments(block(raw))
        assert text == raw
        assert warnings == ["the arguments of a call of f are not a JSON object"]


# ---- there and back ----

VALUES: dict[str, Any] = {
    "string": NASTY, "number": 7, "float": -2.5, "boolean": True, "null": None,
    "object": {"z": 1, "a": [1, {"q": "ü"}]}, "array": [], 'a"&k': "", "": NASTY,
}  # fmt: skip


@pytest.mark.parametrize("thinking", [True, False])
def test_round_trip(thinking: bool) -> None:
    calls = [
        {"id": "x", "function": {"name": 'R&D "lab" &quot;', "arguments": VALUES}},
        {"id": "y", "function": {"name": "g", "arguments": {}}},
        {"id": "z", "function": {"name": "h", "arguments": "{not json"}},
    ]
    message = {"role": "assistant", "content": NASTY, "reasoning": NASTY, "tool_calls": calls}
    reply = parse(TOKENIZER, rendered(message, thinking), thinking)
    assert reply.well_formed and reply.content == NASTY
    assert reply.reasoning == (NASTY if thinking else "")
    assert [call.name for call in reply.tool_calls] == ['R&D "lab" &quot;', "g", "h"]
    assert list(json.loads(reply.tool_calls[0].arguments).items()) == list(VALUES.items())
    assert reply.tool_calls[1].arguments == "{}" and reply.tool_calls[2].arguments == "{not json"
    assert rendered(message_from_reply(reply), thinking) == rendered(message, thinking)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(), st.text(), st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=4))
def test_round_trip_of_anything(thought: str, said: str, name: str, values: dict[str, Any]) -> None:
    call = {"function": {"name": name, "arguments": values}}
    message = {"role": "assistant", "content": said, "reasoning": thought, "tool_calls": [call]}
    reply = parse(TOKENIZER, rendered(message), True)
    assert (reply.reasoning, reply.content, reply.well_formed) == (thought, said, True)
    assert reply.tool_calls[0].name == name
    assert json.loads(reply.tool_calls[0].arguments) == values


# ---- replies that were cut off ----


def test_every_beginning_of_a_reply() -> None:
    """Each text and each list of calls only ever grows, and half a marker is never shown."""
    whole = parse(TOKENIZER, SAMPLE, True)
    ends = [i + 1 for i in range(len(SAMPLE)) if SAMPLE[: i + 1][-6:] == ids(CL, "call", SP)]
    for size in range(len(SAMPLE)):
        reply = parse(TOKENIZER, SAMPLE[:size], True)
        assert whole.reasoning.startswith(reply.reasoning.removesuffix("\ufffd"))
        assert whole.content.startswith(reply.content.removesuffix("\ufffd"))
        assert reply.tool_calls == whole.tool_calls[: sum(end <= size for end in ends)]
        assert not reply.well_formed
        assert all("cut off in a call" in warning for warning in reply.warnings)


def test_cut_off_before_think_closes_all_is_reasoning() -> None:
    assert read("a", CL, "thi") == Reply("a", "", [], [], False)
    assert read(b"a\xc3") == Reply("a\ufffd", "", [], [], False)
    assert read() == Reply("", "", [], [], False)


def test_a_call_that_was_cut_off_is_no_call() -> None:
    for tail in ([], N_IS_1, [N_IS_1, CL, "call"], [OP, 'argument key="n" type="number"', SP, "1"]):
        reply = read("so", SHUT, OPEN_TOOLS, CALL_F, tail, thinking=False)
        lost = ["the reply was cut off in a call of f, which is lost"]
        assert reply == Reply("", "so", [], lost, False)


# ---- replies that leave the grammar ----


def test_elided_separator_of_think() -> None:
    """After tool results K3 may leave out the separator of the think close."""
    missing = ["the separator of close think was missing"]
    reply = read("why", CL, "think", OP, "response", SP, "so", SHUT, END)
    assert reply == Reply("why", "so", [], missing, False)
    reply = read("why", CL, "think", "so it is", SHUT, END)
    assert (reply.reasoning, reply.content) == ("why", "so it is")
    assert reply.warnings[0] == missing[0]
    reply = read("why", CL, "think", "\n\n", OP, "response", SP, "so", SHUT, END)
    assert (reply.reasoning, reply.content) == ("why", "so")


def test_elided_separators_elsewhere() -> None:
    """Any marker may go without, but for one whose attributes a value follows."""

    def bare(*parts: Any) -> list[int]:
        return [id for id in ids(*parts) if id != SP]

    response, tools = bare(TO_RESPONSE, "so", SHUT), bare(OPEN_TOOLS, CALL_F)
    end = bare(CL, "argument", CLOSE_CALL, CLOSE_TOOLS, END)
    reply = read("why", response, tools, OP, 'argument key="n" type="number"', SP, "1", end)
    assert (reply.reasoning, reply.content, reply.well_formed) == ("why", "so", False)
    assert reply.tool_calls == [ToolCall(0, "call_0", "f", '{"n": 1}')]
    reply = read("why", response, tools, OP, 'argument key="n" type="number"', "1", end)
    assert reply.tool_calls == [] and reply.content.endswith('argument key="n" type="number"1')


def test_response_without_a_close_of_think() -> None:
    reply = read(OP, "response", SP, "so", SHUT, END)
    assert (reply.reasoning, reply.content, reply.well_formed) == ("", "so", False)
    # Reasoning that a stream has already shown stays reasoning.
    reply = read("why", OP, "response", SP, "so", SHUT, END)
    assert (reply.reasoning, reply.content) == ("why", "so")


def test_think_opened_again() -> None:
    for thinking in (True, False):
        reply = read(OP, "think", SP, "why", TO_RESPONSE, "so", SHUT, END, thinking=thinking)
        assert (reply.reasoning, reply.content, reply.well_formed) == ("why", "so", False)


def test_constrained_json_without_channels_is_text() -> None:
    """An answer that was forced to be JSON may come without any marker."""
    text = '{"answer": [1, 2]}'
    assert read(text, EM, thinking=False).content == text
    assert read(text, EOS, thinking=False).content == text
    assert read(text, SHUT, EM, thinking=False).content == text
    assert read(TO_RESPONSE, text, EM).content == text


def test_ends() -> None:
    whole = read("so", SHUT, END, thinking=False)
    assert whole.well_formed
    assert not read("so", SHUT, CL, "message", SP, EOS, thinking=False).well_formed
    assert not read("so", SHUT, CL, "message", SP, thinking=False).well_formed
    assert not read("so", SHUT, EM, thinking=False).well_formed
    reply = read("so", SHUT, END, "more", CL, EM, thinking=False)
    assert (reply.content, reply.well_formed) == ("so", True)
    assert reply.warnings == ["ids after the end of the reply were ignored"]
    parser = ChannelParser(TOKENIZER, thinking=False)
    assert not parser.ended
    parser.push(EOS)
    assert parser.ended and parser.finish() == [] and parser.finish() == []


@pytest.mark.parametrize(
    ("parts", "content"),
    [
        (["a", OP, "foo", SP, "b"], "afoob"),
        (["a", OP, "foo bar", EM], "afoo bar"),
        (["a", CL, "foo", SP, "b"], "afoob"),
        (["a", SP, "b"], "ab"),
        (["a", OP, SP, "b"], "ab"),
        (["a", OP, OP, CL, CL, SP, SP, "b"], "ab"),
        (["a", PAD, "b", 300, "c"], "abc"),
        (["a", CL, "think", SP, "b"], "ab"),
        (["a", OP, 'call tool="f" index="1"', SP, "b"], 'acall tool="f" index="1"b'),
        (["a", OP, 'message role="user"', SP, "b"], 'amessage role="user"b'),
        (["a", OP, 'call tool="f', SP, "b"], 'acall tool="fb'),
        (["a", OP, "call " + "x" * 5000, "b"], "acall " + "x" * 5000 + "b"),
        (["a", SHUT, "\n b"], "ab"),
        (["a", SHUT, " ", "b", " c"], "ab c"),
        (["a", CL, "message", SP, EM], "a"),
        ([b"\xf0\x9f", PAD, b"\x99\x82"], "\ufffd\ufffd\ufffd"),
    ],
)  # fmt: skip
def test_malformed_channels_are_text(parts: list[Any], content: str) -> None:
    reply = read(*parts, thinking=False)
    assert reply.content == content and reply.reasoning == "" and reply.tool_calls == []
    assert reply.warnings and not reply.well_formed


@pytest.mark.parametrize(
    ("parts", "content"),
    [
        ([CALL_F, "loose", CLOSE_CALL], 'call tool="f" index="1"\nloose'),
        ([CALL_F, N_IS_1, END], 'call tool="f" index="1"\nargument key="n" type="number"\n1\n'),
        ([CALL_F, OP, 'argument key="n"', SP, "1", CL, "argument", SP, CLOSE_CALL],
         'call tool="f" index="1"\nargument key="n"1'),
        ([CALL_F, OP, 'argument key="s" type="string"', SP, "x", PAD, "y", CL, "argument", SP,
          CLOSE_CALL],
         'call tool="f" index="1"\nargument key="s" type="string"\nxy'),
        ([CALL_F, N_IS_1, OP, 'json type="object"', SP, "{}", CL, "json", SP, CLOSE_CALL],
         'call tool="f" index="1"\nargument key="n" type="number"\n1\njson type="object"{}'),
        ([OP, 'call index="1"', SP, CLOSE_CALL], 'call index="1"'),
        ([OP, 'call tool="" index="1"', SP, CLOSE_CALL], 'call tool="" index="1"'),
    ],
)  # fmt: skip
def test_malformed_calls_are_text(parts: list[Any], content: str) -> None:
    """A call is whole or it is no call; the good one after it is not lost."""
    reply = read(SHUT, OPEN_TOOLS, parts, thinking=False)
    assert reply.content == content and reply.tool_calls == [] and not reply.well_formed
    if EM not in ids(*parts):
        reply = read(SHUT, OPEN_TOOLS, parts, CALL_F, N_IS_1, CLOSE_CALL, CLOSE_TOOLS, END)
        assert reply.tool_calls == [ToolCall(0, "call_0", "f", '{"n": 1}')]


def test_the_next_call_may_come_too_early() -> None:
    reply = read(SHUT, OPEN_TOOLS, CALL_F, CALL_F, N_IS_1, CLOSE_CALL, CLOSE_TOOLS, END)
    assert [call.arguments for call in reply.tool_calls] == ['{"n": 1}']
    assert not reply.well_formed


def test_a_wrong_number_is_only_a_warning() -> None:
    reply = read(SHUT, OPEN_TOOLS, OP, 'call tool="f"', SP, CLOSE_CALL, CLOSE_TOOLS, END)
    assert [call.name for call in reply.tool_calls] == ["f"] and not reply.well_formed


# ---- one parser for all callers ----

ALPHABET = [OP, OP, CL, CL, SP, SP, SP, EM, EOS, PAD, 300, 0xC3, 0xA9, 0xF0, *ids(' ="\n')]
WORDS = [ids(word) for word in (
    "think", "response", "tools", "message", "call", "argument", "json", "é🙂", "plain text",
    'call tool="f" index="1"', 'argument key="k" type="number"', 'json type="object"', "{}",
)]  # fmt: skip


def random_ids(rng: random.Random) -> list[int]:
    """A reply cut into pieces and put together wrongly, or noise rich in markers."""
    if rng.random() < 0.5:
        out = SAMPLE.copy()
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(out))
            end = place + rng.choice([0, 1, 1, 2, 20])
            out[place:end] = rng.choice([[], [rng.choice(ALPHABET)], rng.choice(WORDS), out[:9]])
            out = out or SAMPLE.copy()
        return out
    pieces = [rng.choice([[rng.choice(ALPHABET)], rng.choice(WORDS)]) for _ in range(60)]
    out = [id for piece in pieces for id in piece]
    return [id for id in out if id not in (EM, EOS)] + [EM] if rng.random() < 0.7 else out


def test_broken_replies_never_raise_and_never_leak() -> None:
    rng = random.Random(0)
    seen_calls = 0
    for _ in range(1500):
        broken = random_ids(rng)
        thinking = rng.random() < 0.5
        parser = ChannelParser(TOKENIZER, thinking)
        events = [event for id in broken for event in parser.push(id)] + parser.finish()
        reply = parse(TOKENIZER, broken, thinking)
        assert fold(events) == fields(reply) == fields(parser.reply())
        shown = reply.reasoning + reply.content + "".join(c.arguments for c in reply.tool_calls)
        assert not any(name in shown for name in ("<|", "[EOS]", "[PAD]", "reserved"))
        assert reply.well_formed or reply.warnings or not {EM, EOS} & set(broken)
        for call in reply.tool_calls:
            assert call.name
        seen_calls += len(reply.tool_calls)
    assert seen_calls > 100  # else the replies are too broken to test anything


def test_no_text_is_lost_without_a_call() -> None:
    """Whatever the markers, letters that are no tag come out once and in order."""
    rng = random.Random(1)
    for _ in range(500):
        letters = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        parts: list[Any] = []
        for _ in range(25):
            parts += [rng.choice([OP, CL, SP, PAD, TO_RESPONSE, SHUT, OPEN_TOOLS]), next(letters)]
        reply = read(*parts)
        shown = [letter for letter in reply.reasoning + reply.content if letter.isupper()]
        assert sorted(shown) == sorted(set(shown)) == list("ABCDEFGHIJKLMNOPQRSTUVWXY")


@pytest.mark.parametrize("group", [1, 2, 3, 7, 1000])
def test_grouping_changes_nothing(group: int) -> None:
    """A step that brings several ids, and a caller that folds deltas, see the same reply."""
    parser = ChannelParser(TOKENIZER, thinking=True)
    events: list[Event] = []
    for begin in range(0, len(SAMPLE), group):
        for id in SAMPLE[begin : begin + group]:
            events += parser.push(id)
    events += parser.finish()
    assert fold(events) == fields(parse(TOKENIZER, SAMPLE, True))
    assert parser.reply() == parse(TOKENIZER, SAMPLE, True)


def test_calls_are_reported_when_they_close() -> None:
    parser = ChannelParser(TOKENIZER, thinking=True)
    end = len(SAMPLE) - len(ids(OP, 'call tool="g" index="2"', SP, CLOSE_CALL, CLOSE_TOOLS, END))
    before = [event for id in SAMPLE[: end - 1] for event in parser.push(id)]
    assert not any(isinstance(event, ToolCall) for event in before)
    assert parser.push(SAMPLE[end - 1]) == [ToolCall(0, "call_0", "f", '{"n": 1}')]


def test_interleaved_replies_equal_their_solo_runs() -> None:
    """Sixteen requests in one process share nothing."""
    rng = random.Random(2)
    replies = [SAMPLE if i % 2 else random_ids(rng) for i in range(16)]
    parsers = [ChannelParser(TOKENIZER, thinking=True) for _ in replies]
    events: list[list[Event]] = [[] for _ in replies]
    waiting = [list(reply) for reply in replies]
    while any(waiting):
        i = rng.choice([i for i, rest in enumerate(waiting) if rest])
        for _ in range(rng.randint(1, 4)):
            if waiting[i]:
                events[i] += parsers[i].push(waiting[i].pop(0))
    for reply, parser, seen in zip(replies, parsers, events, strict=True):
        seen += parser.finish()
        solo = parse(TOKENIZER, reply, True)
        assert parser.reply() == solo and fold(seen) == fields(solo)
