"""What a conversation may not be, and that the refusal says where."""

from __future__ import annotations

from typing import Any

import pytest

from nanok3.messages import Part, read_messages


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
REFUSED: list[tuple[object, str]] = [
    ("hi", "messages must be a list of messages, not str"),
    ({"role": "user", "content": "hi"}, "messages must be a list of messages, not dict"),
    (None, "messages must be a list of messages, not NoneType"),
    (["hi"], r"messages\[0\] must be an object, not str"),
    ([{"content": "hi"}], r"messages\[0\].role must be .* not None"),
    ([{"role": "developer", "content": "hi"}], r"\[0\].role must be .* not 'developer'"),
    ([{"role": "User", "content": "hi"}], r"\[0\].role must be"),
    ([{"role": ["user"], "content": "hi"}], r"\[0\].role must be"),
    ([{"role": "user"}], r"messages\[0\] has no content"),
    ([{"role": "user", "content": 7}], r"\[0\].content must be .* not int"),
    ([{"role": "user", "content": {"type": "text"}}], r"\[0\].content must be .* not dict"),
    ([{"role": "user", "content": ["hi"]}], r"\[0\].content\[0\] must be an object"),
    ([{"role": "user", "content": [{"text": "hi"}]}], r"content\[0\].type must be .* not None"),
    ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\].type must be"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is a text part and must"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"\[0\].text must be a string"),
    ([{"role": "user", "content": [IMAGE]}], "image_prompts has no prompt"),
    ([{"role": "user", "content": "", "name": 3}], r"\[0\].name must be a string"),
    ([{"role": "assistant", "reasoning": ["r"]}], r"\[0\].reasoning must be a string"),
    ([{"role": "assistant", "tool_calls": {}}], r"tool_calls must be a list, not dict"),
    ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] must be an object"),
    ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], r"\[0\].function must be an object"),
    ([call()], r"function.name must name the tool"),
    ([call(name="")], r"function.name must name the tool"),
    ([call(name=1)], r"function.name must be a string"),
    ([call(name="f", arguments=[1])], r"function.arguments must be a JSON string or an object"),
    ([call(name="f", arguments={1: 2})], r"function.arguments must be a JSON string or an object"),
    ([{"role": "tool", "content": "", "tool_call_id": 5}], r"tool_call_id must be a string"),
    ([{"role": "system", "content": "", "tools": "f"}], r"\[0\].tools must be a list"),
]


@pytest.mark.parametrize(("messages", "sentence"), REFUSED)
def test_refused(messages: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_messages(messages)


def test_a_refusal_names_the_message_at_fault() -> None:
    good = {"role": "user", "content": "hi"}
    with pytest.raises(ValueError, match=r"^messages\[2\].content\[1\].type must be"):
        bad = {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "video_url"}]}
        read_messages([good, good, bad])


@pytest.mark.parametrize("prompts", [None, [], ["a"], ["a", "b", "c"], ["a", ""], "ab"])
def test_there_is_one_prompt_an_image(prompts: Any) -> None:
    messages = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "t"}]}] * 2
    with pytest.raises(ValueError, match="image_prompts"):
        read_messages(messages, prompts)
    first, second = read_messages(messages, ["a", "b"])
    assert first.body == [Part("a", is_image=True), Part("t")]
    assert second.body == [Part("b", is_image=True), Part("t")]


def test_what_is_absent_reads_as_empty() -> None:
    (message,) = read_messages(({"role": "assistant", "content": None, "tool_calls": None},))
    assert message.body == [Part("")] and message.reasoning == "" and message.calls == []
    assert message.name is None and message.tool_call_id is None
    (message,) = read_messages(
        [{"role": "assistant", "reasoning_content": None, "reasoning": "r", "refusal": None}]
    )
    assert message.reasoning == "r"
