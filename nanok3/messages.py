"""Reads a conversation in OpenAI's message form into checked records, or says what is wrong in it.

What K3's own encoder would drop in silence (an unknown role) or trip over (a wrong type) is refused
here with its place, as in `messages[2].content`. How a record is written is `chat.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Part:
    """A piece of a message's body: what someone wrote, or the prompt that stands for an image."""

    text: str
    is_image: bool = False


@dataclass(frozen=True)
class Call:
    """One tool call of an assistant message."""

    id: str | None
    name: str
    arguments: dict[str, Any] | str  # a string where they are not a JSON object


@dataclass(frozen=True)
class Message:
    """One message; what its role does not use is empty."""

    role: str
    name: str | None  # of the speaker, or of the tool whose result this is
    body: list[Part]
    reasoning: str
    calls: list[Call]
    tool_call_id: str | None
    tools: list[Mapping[str, Any]]  # declared by this system message, whose body is then ignored


def read_messages(messages: object, image_prompts: Sequence[str] | None = None) -> list[Message]:
    """The records of a conversation; image parts take `image_prompts` in order, one each."""
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of messages, not {type(messages).__name__}.")
    prompts = iter(as_list(image_prompts, "image_prompts"))
    out = [_read_message(item, f"messages[{i}]", prompts) for i, item in enumerate(messages)]
    left = len(list(prompts))
    if left:
        raise ValueError(f"image_prompts has {left} more than the messages have image parts.")
    return out


def read_tools(value: object, where: str) -> list[Mapping[str, Any]]:
    return [as_mapping(tool, f"{where}[{i}]") for i, tool in enumerate(as_list(value, where))]


def as_mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {type(value).__name__}.")
    return value


def as_list(value: object, where: str) -> list[Any]:
    """The items of a list; None reads as no items."""
    if value is not None and not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, not {type(value).__name__}.")
    return list(value or ())


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    """The field's text; absent and null read as empty."""
    value = item.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}.{key} must be a string, not {type(value).__name__}.")
    return value or ""


def _read_message(item: object, where: str, prompts: Iterator[Any]) -> Message:
    message = as_mapping(item, where)
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(
            f"{where}.role must be system, user, assistant or tool, not {role!r}; "
            "write the message under one of these."
        )
    is_reply, is_result = role == "assistant", role == "tool"
    name = _string(message, "name", where)
    calls = as_list(message.get("tool_calls") if is_reply else None, f"{where}.tool_calls")
    new_tools = read_tools(message.get("tools") if role == "system" else None, f"{where}.tools")
    if "content" not in message and not is_reply and not new_tools:
        raise ValueError(f"{where} has no content; give it one, which may be null.")
    # Both spellings are in use for what the model thought.
    thought = [_string(message, key, where) for key in ("reasoning_content", "reasoning")]
    return Message(
        role=role,
        name=(_string(message, "tool", where) if is_result else "") or name or None,
        body=_read_content(message.get("content"), f"{where}.content", prompts),
        reasoning=thought[0] or thought[1],
        calls=[_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)],
        tool_call_id=_string(message, "tool_call_id", where) or None,
        tools=new_tools,
    )


def _read_content(content: object, where: str, prompts: Iterator[Any]) -> list[Part]:
    if content is None or isinstance(content, str):
        return [Part(content or "")]
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"{where} must be a string, null or a list of parts, not {type(content).__name__}."
        )
    return [_read_part(part, f"{where}[{i}]", prompts) for i, part in enumerate(content)]


def _read_part(item: object, where: str, prompts: Iterator[Any]) -> Part:
    part = as_mapping(item, where)
    kind = part.get("type")
    if kind == "text":
        if part.get("text") is None:
            raise ValueError(f"{where} is a text part and must have its text under `text`.")
        return Part(_string(part, "text", where))
    if kind not in ("image", "image_url"):
        raise ValueError(f"{where}.type must be text, image_url or image, not {kind!r}.")
    prompt = next(prompts, None)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where} is an image, but image_prompts has no prompt text for it.")
    return Part(prompt, is_image=True)


def _read_call(item: object, where: str) -> Call:
    call = as_mapping(item, where)
    function = as_mapping(call.get("function"), f"{where}.function")
    name = _string(function, "name", f"{where}.function")
    if not name:
        raise ValueError(f"{where}.function.name must name the tool, but it is empty or absent.")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        arguments = _arguments_from_json(arguments or "")
    elif not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        raise ValueError(
            f"{where}.function.arguments must be a JSON string or an object with string keys, "
            f"not {type(arguments).__name__}."
        )
    return Call(_string(call, "id", where) or None, name, arguments)


def _arguments_from_json(text: str) -> dict[str, Any] | str:
    """The arguments as an object, or the text itself where it holds none."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
