"""Turns a conversation into K3's prompt: a list of segments, each encoded on its own.

A "control" segment is written by this file (one of the four markers) or by the caller (an image's
prompt) and is encoded with special tokens allowed. A "text" segment holds everything else and is
encoded with them disallowed, so nothing that a user, a tool or a model wrote can become a marker.
Checking messages is `messages.py`; the way back, from ids to a reply, is `channels.py`.

    open(tag, k1=v1, ..)  = <|open|> tag ( ' k' '="' escaped v '"' )* <|sep|>
    close(tag)            = <|close|> tag <|sep|>
    message               = open(message, role=.., ..) body close(message) <|end_of_msg|>
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from nanok3.messages import Call, Message, Part, as_mapping, read_messages, read_tools

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
DEFAULT_EFFORT = "max"  # of the engine and the commands; `render` adds none by itself
EFFORTS = ("low", "high", "max")  # the prompt's own text names medium too, but K3 refuses it

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_JSON_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without "
    "markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


@dataclass(frozen=True)
class Segment:
    """A piece of the prompt that is encoded on its own."""

    kind: Literal["control", "text"]
    text: str


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    image_prompts: Sequence[str] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """The prompt of a conversation in OpenAI's message form, as K3's own encoder writes it.

    With `thinking` off the effort is ignored and past reasoning is left out. Without an effort no
    effort message is written; a default is the caller's. `image_prompts` holds one prompt for each
    image part, in the order of the messages. What cannot be rendered raises ValueError.
    """
    conversation = read_messages(messages, image_prompts)
    out: list[Segment] = []
    if declared := read_tools(tools, "tools"):
        out += _system("tool-declare", _TOOLS.format(_json(declared, "tools", compact=True)))
    if thinking and thinking_effort is not None:
        if thinking_effort not in EFFORTS:
            raise ValueError(
                f"thinking_effort must be low, high or max, not {thinking_effort!r}; "
                "to answer without thinking, turn thinking off instead."
            )
        out += _system("thinking-effort", _EFFORT.format(thinking_effort))
    for message, call_name, index in _with_call_names(conversation):
        if message.tools:
            new_tools = _json(message.tools, "tools of a system message", compact=True)
            out += _system("tool-declare", _NEW_TOOLS.format(new_tools))
            continue
        if message.role == "tool":
            attributes = {"role": "tool", "tool": call_name, "index": str(index)}
        else:
            attributes = {"role": message.role} | ({"name": message.name} if message.name else {})
        is_reply = message.role == "assistant"
        out += _message(_reply(message, thinking) if is_reply else _body(message.body), attributes)
    out += _tool_choice(tool_choice)
    out += _response_format(response_format)
    if add_generation_prompt:
        out += _open("message", {"role": "assistant"})
        out += _open("think" if thinking else "response")
    return out


# ---- markup ----


def _text(text: str) -> list[Segment]:
    """No segment for an empty text: a segment stands for at least one token."""
    return [Segment("text", text)] if text else []


def _open(tag: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    out = [Segment("control", OPEN), *_text(tag)]
    for key, value in (attributes or {}).items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        out += [*_text(f" {key}"), *_text('="'), *_text(escaped), *_text('"')]
    return [*out, Segment("control", SEP)]


def _element(
    tag: str, body: Sequence[Segment], attributes: Mapping[str, str] | None = None
) -> list[Segment]:
    close = [Segment("control", CLOSE), *_text(tag), Segment("control", SEP)]
    return [*_open(tag, attributes), *body, *close]


def _message(body: Sequence[Segment], attributes: Mapping[str, str]) -> list[Segment]:
    return [*_element("message", body, attributes), Segment("control", END_OF_MSG)]


def _system(kind: str, body: str) -> list[Segment]:
    return _message(_text(body), {"role": "system", "type": kind})


def _body(parts: Sequence[Part]) -> list[Segment]:
    out: list[Segment] = []
    for part in parts:
        out += [Segment("control", part.text)] if part.is_image else _text(part.text)
    return out


def _reply(message: Message, thinking: bool) -> list[Segment]:
    """An assistant's channels; think is there even when empty, tools only when something is."""
    out = _element("think", _text(message.reasoning)) if thinking else []
    out += _element("response", _body(message.body))
    calls: list[Segment] = []
    for index, call in enumerate(message.calls, start=1):
        calls += _call(call, index)
    return out + (_element("tools", calls) if calls else [])


def _call(call: Call, index: int) -> list[Segment]:
    body: list[Segment] = []
    if isinstance(call.arguments, str):
        body = _element("json", _text(call.arguments), {"type": "object"})
    else:
        for key, value in call.arguments.items():
            written = value if isinstance(value, str) else _json(value, f"argument {key!r}")
            body += _element("argument", _text(written), {"key": key, "type": _json_type(value)})
    return _element("call", body, {"tool": call.name, "index": str(index)})


def _tool_choice(choice: object) -> list[Segment]:
    if choice is None or choice == "auto":
        return []
    if not isinstance(choice, str) or choice not in _TOOL_CHOICE:
        raise ValueError(f"tool_choice must be auto, required or none, not {choice!r}.")
    return _system("tool-choice", _TOOL_CHOICE[choice])


def _response_format(wanted: Mapping[str, Any] | None) -> list[Segment]:
    kind = "text" if wanted is None else as_mapping(wanted, "response_format").get("type")
    if wanted is None or kind == "text":
        return []
    if kind == "json_object":
        return _system("response-format", _JSON_FORMAT.format(kind))
    if kind == "json_schema":
        holder = as_mapping(wanted.get("json_schema"), "response_format.json_schema")
        schema = as_mapping(holder.get("schema"), "response_format.json_schema.schema")
        text = _SCHEMA.format(_json(schema, "response_format.json_schema.schema", compact=True))
        return _system("response-format", _JSON_FORMAT.format(kind) + text)
    raise ValueError(
        f"response_format.type must be text, json_object or json_schema, not {kind!r}."
    )


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):  # before the numbers: a bool is an int
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def _json(value: object, where: str, *, compact: bool = False) -> str:
    """`compact` also sorts keys at every depth: how tools and schemas are written."""
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=compact)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}.") from None


# ---- tool results ----


def _with_call_names(conversation: list[Message]) -> Iterator[tuple[Message, str, int]]:
    """Each message with, for a tool result, the name of its call and its number since the reply.

    A run of results comes in the order of the calls, unless one of them answers no known call.
    """
    calls: list[Call] = []
    index = 0
    for is_result, group in groupby(conversation, key=lambda message: message.role == "tool"):
        run = list(group)
        if is_result:
            run = _in_order_of_calls(run, calls)
        for message in run:
            if message.role == "assistant":
                calls, index = message.calls, 0
            if not is_result:
                yield message, "", 0
                continue
            index += 1
            yield message, _call_name(message, index, calls), index


def _in_order_of_calls(run: list[Message], calls: list[Call]) -> list[Message]:
    places: dict[str | None, int] = {
        call.id: place for place, call in enumerate(calls) if call.id is not None
    }
    if not all(result.tool_call_id in places for result in run):
        return run
    return sorted(run, key=lambda result: places[result.tool_call_id])


def _call_name(result: Message, index: int, calls: list[Call]) -> str:
    for call in calls:
        if call.id is not None and call.id == result.tool_call_id:
            return call.name
    if result.name is not None:
        return result.name
    if index <= len(calls):
        return calls[index - 1].name
    raise ValueError(
        "a tool message needs the name of its tool: give it a name, or the tool_call_id of a call "
        "in the assistant message before it."
    )
