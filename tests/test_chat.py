"""Prompts against what K3's published encoder wrote for the same conversations."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from nanok3.chat import EFFORTS, Segment, render
from nanok3.tokenizer import Tokenizer

GOLDENS = json.loads((Path(__file__).parent / "data" / "chat_goldens.json").read_text("utf-8"))
CASES = {case["id"]: case for case in GOLDENS["cases"]}
HI = [{"role": "user", "content": "hi"}]
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def joined(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    case = CASES[name]
    if "error" in case:
        with pytest.raises(ValueError, match="name of its tool"):
            render(case["messages"], case["tools"], **case["options"])
        return
    segments = render(case["messages"], case["tools"], **case["options"])
    assert [[segment.kind, segment.text] for segment in segments] == case["segments"]
    assert hashlib.sha256(joined(segments).encode()).hexdigest() == case["prompt_sha256"]


def test_what_people_write_never_becomes_a_control_token() -> None:
    tokenizer = Tokenizer([bytes([byte]) for byte in range(256)])
    specials = [tokenizer.special_name(id) for id in range(256, 512)]
    everything = "".join(name for name in specials if name is not None)
    call = {"id": everything, "function": {"name": everything, "arguments": {everything: [1]}}}

    def conversation(text: str) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": text, "name": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": text, "reasoning": text, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": everything},
        ]

    def specials_of(text: str) -> list[int]:
        segments = render(conversation(text), [{"name": text}], thinking_effort="low")
        return [id for id in tokenizer.encode_segments(segments) if id >= 256]

    assert everything.count("<|open|>") == 1
    assert specials_of(everything) == specials_of("x")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("effort", [*EFFORTS, None, "none", "medium", "", "MAX", 7, True])
def test_effort(effort: Any, thinking: bool) -> None:
    """Thinking off ignores the effort, as published; otherwise nothing is clamped or guessed."""
    if not thinking:
        off = joined(render(HI, thinking=False, thinking_effort=effort))
        assert off == joined(render(HI, thinking=False))
        assert "thinking-effort" not in off and off.endswith("<|open|>response<|sep|>")
    elif effort is None:
        assert "thinking-effort" not in joined(render(HI))
    elif effort in EFFORTS:
        assert joined(render(HI, thinking_effort=effort)).count(f"thinking_effort={effort}`.") == 1
    else:
        with pytest.raises(ValueError, match="low, high or max"):
            render(HI, thinking_effort=effort)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tool_choice": "always"}, "tool_choice must be"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice must be"),
        ({"response_format": "json_object"}, "response_format must be an object"),
        ({"response_format": {}}, "response_format.type must be"),
        ({"response_format": {"type": "grammar"}}, "response_format.type must be"),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "schema must be an obje"),
        ({"tools": {"type": "function"}}, "tools must be a list"),
        ({"tools": ["f"]}, r"tools\[0\] must be an object"),
        ({"tools": [{"f": {1, 2}}]}, "tools cannot be written as JSON"),
        ({"tools": [{"a": 1, 2: 3}]}, "tools cannot be written as JSON"),
    ],
)
def test_refused_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        render(HI, **options)


def test_options_that_say_nothing_write_nothing() -> None:
    plain = render(HI)
    assert render(HI, [], tool_choice="auto", response_format={"type": "text"}) == plain
    assert render(HI, image_prompts=[]) == plain
    assert render([{"role": "system", "content": "s", "tools": []}]) == render(
        [{"role": "system", "content": "s"}]
    )


def test_tool_choice_none_and_json_object() -> None:
    text = joined(render(HI, tool_choice="none", response_format={"type": "json_object"}))
    choice = text.index('type="tool-choice"<|sep|>The system is invoked with `tool_choice=none`.\n')
    form = text.index('type="response-format"<|sep|>The system is invoked with `response_format=js')
    assert text.index("hi<|close|>") < choice < form
    assert "You MUST NOT call any tools in the next message.<|close|>" in text
    assert "code blocks (```json) or any additional formatting.<|close|>" in text


def results(calls: list[str | None], answers: list[tuple[str, dict[str, str]]]) -> list[str]:
    """The headers and bodies of tool results; the call at place i is named t<i>."""
    tool_calls = [
        {"function": {"name": f"t{i}", "arguments": "{}"}} | ({"id": id} if id is not None else {})
        for i, id in enumerate(calls)
    ]
    tools = [{"role": "tool", "content": content, **rest} for content, rest in answers]
    reply = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    text = joined(render([reply, *tools], add_generation_prompt=False))
    parts = text.split('<|open|>message role="tool" ')[1:]
    return [part.removesuffix("<|close|>message<|sep|><|end_of_msg|>") for part in parts]


def test_results_that_answer_no_known_call_keep_their_order() -> None:
    assert results(["a", "b"], [("B", {"tool_call_id": "b"}), ("A", {"tool_call_id": "a"})]) == [
        'tool="t0" index="1"<|sep|>A',
        'tool="t1" index="2"<|sep|>B',
    ]
    strangers = [("B", {"tool_call_id": "b"}), ("X", {"tool_call_id": "x", "name": "n"})]
    assert results(["a", "b"], strangers) == [
        'tool="t1" index="1"<|sep|>B',
        'tool="n" index="2"<|sep|>X',
    ]
    assert results([None, None], [("A", {}), ("B", {"tool": "own", "name": "x"})]) == [
        'tool="t0" index="1"<|sep|>A',
        'tool="own" index="2"<|sep|>B',
    ]
    with pytest.raises(ValueError, match="name of its tool"):
        results(["a"], [("A", {"tool_call_id": "a"}), ("B", {"tool_call_id": "b"})])


def test_results_are_numbered_from_the_last_reply() -> None:
    def turn(id: str) -> list[dict[str, Any]]:
        call = {"id": id, "function": {"name": f"f{id}", "arguments": ""}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": id},
            {"role": "user", "content": "more"},
            {"role": "tool", "content": "r", "tool_call_id": id},
        ]

    text = joined(render([*turn("1"), *turn("2")]))
    heads = [part.split("<|sep|>")[0] for part in text.split('message role="tool" ')[1:]]
    assert heads == [f'tool="f{n}" index="{i}"' for n in (1, 2) for i in (1, 2)]


def test_arguments_that_are_no_object_go_in_a_json_block() -> None:
    def call(arguments: Any) -> str:
        message = {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        text = joined(render([{"role": "assistant", **message}], add_generation_prompt=False))
        return text.split('<|open|>call tool="f" index="1"<|sep|>')[1].split("<|close|>call")[0]

    deep = "[" * 100_000
    for raw in ("[1]", "7", '"s"', "null", "{'a': 1}", "nope", deep):
        assert call(raw) == f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>'
    nothing: list[Any] = ["", " \n", "{}", {}, None]
    for empty in nothing:
        assert call(empty) == ""
    assert call('{"a": 1, "a": 2}') == (
        '<|open|>argument key="a" type="number"<|sep|>2<|close|>argument<|sep|>'
    )
    with pytest.raises(ValueError, match="argument 'a' cannot be written as JSON"):
        call({"a": {1}})


def test_image_prompts_follow_the_messages_even_where_results_are_sorted() -> None:
    image = [{"type": "image_url", "image_url": {"url": "u"}}]
    calls = [{"id": id, "function": {"name": id, "arguments": {}}} for id in "ab"]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": image, "tool_call_id": "b"},
        {"role": "tool", "content": image, "tool_call_id": "a"},
    ]
    segments = render(messages, image_prompts=["<|media_pad|>B", "<|media_pad|>A"])
    images = [s.text for s in segments if s.kind == "control" and s.text not in MARKERS]
    assert images == ["<|media_pad|>A", "<|media_pad|>B"]
