"""The lines of a batch: what a line of the input asks for, and the line that answers it.

A line is OpenAI's batch form, {"custom_id", "method", "url", "body": {...}}, or plain: the fields
of such a body at its top, with `prompt` (a text) or `messages`. Every line that is not blank gives
one record, in the order of the input; a line that cannot be read gives one that says why. A field
that may change the answer and is not known here is such a reason, never ignored.

Records hold nothing that depends on time or on the requests that ran beside, so that two runs of
seeded requests write the same bytes.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanok3.batch_input import MAX_LINE_BYTES, SeenIds
from nanok3.chat import EFFORTS
from nanok3.console import TextError, decode_text, parse_json
from nanok3.reply import Reply, message_from_reply
from nanok3.request import Result, TokenLogprob
from nanok3.tokenizer import Tokenizer

URL = "/v1/chat/completions"
# Passed on to the sampler by the same name; it says what is wrong with a value.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
READ = (
    *("messages", "stop", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "response_format", "reasoning_effort"),
)
# Fields that change no answer, whatever they hold, and those that change none with this value.
HARMLESS = (
    *("model", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key"),
)
NEUTRAL = {"stream": False, "n": 1, "logit_bias": {}, "parallel_tool_calls": True}


@dataclass(frozen=True)
class Ask:
    """What a line asks of the engine; None: the line leaves it open."""

    prompt: str | list[Any]
    sampling: dict[str, Any]  # options of SamplingParams
    tools: list[Any] | None
    tool_choice: str | None
    response_format: dict[str, Any] | None
    thinking: bool | None
    effort: str | None
    model: str | None  # echoed in the record


@dataclass(frozen=True)
class Line:
    """A line of the input: either `ask`, or `problem`, says what is to be done about it."""

    place: int  # among the lines that are not blank, from 0; its record has the same place
    number: int  # in the file, from 1
    end: int  # bytes of the file up to here
    custom_id: str | None
    is_openai: bool
    digest: str  # of its place and its bytes: the ids in its record
    ask: Ask | None = None
    problem: str | None = None


class LineReader:
    """Takes the lines of a file one after the other."""

    def __init__(self) -> None:
        self._place = self._number = self._end = 0
        self._seen = SeenIds()

    def read(self, raw: bytes) -> Line | None:
        """None: it is blank. A custom_id that came before is a problem of the later line."""
        self._number += 1
        self._end += len(raw)
        if self._number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            return None
        digest = hashlib.sha256(b"%d %s" % (self._place, raw.strip())).hexdigest()[:24]
        custom_id, is_openai, ask, problem = _read_line(raw)
        if custom_id is not None:
            first = self._seen.first(custom_id, self._number)
            if first != self._number:
                ask, problem = None, f"custom_id {custom_id!r} stands on line {first} already"
        number, place = self._number, self._place
        self._place += 1
        return Line(place, number, self._end, custom_id, is_openai, digest, ask, problem)


def read_lines(raw_lines: Iterable[bytes]) -> Iterator[Line]:
    """The lines that are not blank."""
    reader = LineReader()
    return (line for raw in raw_lines if (line := reader.read(raw)) is not None)


def _read_line(raw: bytes) -> tuple[str | None, bool, Ask | None, str | None]:
    """(custom_id, whether it is OpenAI's form, what it asks, or what is wrong with it)."""
    custom_id, is_openai = None, False
    if len(raw) > MAX_LINE_BYTES:
        return None, False, None, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
    try:
        value = parse_json(decode_text(raw, "the line"), "the line")
        if not isinstance(value, dict):
            raise TextError(f"the line must be a JSON object, not {type(value).__name__}")
        is_openai = any(key in value for key in ("body", "url", "method"))
        found = value.get("custom_id")
        if found is not None and (not isinstance(found, str) or not found):
            raise TextError(f"custom_id must be a string that is not empty, not {found!r}")
        custom_id = found
        fields = {key: item for key, item in value.items() if key != "custom_id"}
        return custom_id, is_openai, _ask(_body(fields, custom_id) if is_openai else fields), None
    except TextError as error:
        return custom_id, is_openai, None, str(error)


def _body(value: Mapping[str, Any], custom_id: str | None) -> dict[str, Any]:
    if custom_id is None:
        raise TextError("custom_id is missing; a line with a body needs one")
    if value.get("method", "POST") != "POST" or value.get("url", URL) != URL:
        raise TextError(
            f"expected POST {URL}, found {value.get('method', 'POST')} {value.get('url', URL)}"
        )
    if unknown := sorted(value.keys() - {"method", "url", "body"}):
        raise TextError(f"unknown field {unknown[0]!r} beside the body; remove it")
    body = value.get("body")
    if not isinstance(body, dict):
        raise TextError(f"body must be an object, not {type(body).__name__}")
    if "prompt" in body:
        raise TextError(f"{URL} takes messages, but the body has a prompt")
    return body


def _ask(fields: Mapping[str, Any]) -> Ask:
    """The request that a body makes; null reads as absent, as everywhere in OpenAI's form."""
    given = {key: value for key, value in fields.items() if value is not None}
    for key, value in given.items():
        if key in NEUTRAL:
            if value != NEUTRAL[key] or type(value) is not type(NEUTRAL[key]):
                raise TextError(f"{key} must be {json.dumps(NEUTRAL[key])} or absent here")
        elif key not in (*SAMPLING, *READ, *HARMLESS, "prompt"):
            raise TextError(f"unknown field {key!r}; it may change the answer, so remove it")
    prompt = _prompt(given)
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise TextError(f"model must be a string, not {model!r}")
    effort = given.get("reasoning_effort")
    if effort is not None and effort not in ("none", *EFFORTS):
        raise TextError(f"reasoning_effort must be none, low, high or max, not {effort!r}")
    is_off = effort == "none"
    tools, tool_choice = _tools(given)
    return Ask(
        prompt=prompt,
        sampling=_sampling(given),
        tools=tools,
        tool_choice=tool_choice,
        response_format=given.get("response_format"),
        thinking=None if effort is None else not is_off,
        effort=None if is_off else effort,
        model=model,
    )


def _prompt(given: Mapping[str, Any]) -> str | list[Any]:
    if ("prompt" in given) == ("messages" in given):
        raise TextError("a request needs messages, or on a plain line a prompt, and not both")
    prompt, messages = given.get("prompt"), given.get("messages")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise TextError(f"prompt must be a string, not {type(prompt).__name__}")
        return prompt
    if not isinstance(messages, list) or not messages:
        raise TextError("messages must be a list of at least one message")
    if not all(isinstance(message, dict) for message in messages):
        raise TextError("messages must be a list of objects")  # numbers would be taken for ids
    return messages


def _tools(given: Mapping[str, Any]) -> tuple[list[Any] | None, str | None]:
    """Tools and tool_choice; a tool that is named is the only one that the model is told of."""
    tools, choice = given.get("tools"), given.get("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise TextError(f"tools must be a list of tools, not {type(tools).__name__}")
    if not isinstance(choice, dict):
        return tools, choice
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise TextError('tool_choice must be a word or {"type": "function", "function": {"name"}}')
    named = [tool for tool in tools or [] if _name_of(tool) == name]
    if not named:
        raise TextError(f"tool_choice names {name!r}, which is none of the tools")
    return named, "required"


def _name_of(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    out = {name: given[name] for name in SAMPLING if name in given}
    limits = [given[key] for key in ("max_tokens", "max_completion_tokens") if key in given]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise TextError("max_tokens and max_completion_tokens differ; give one of them")
    if limits:
        out["max_tokens"] = limits[0]
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise TextError("stop must be a string or a list of strings, none of them empty")
    if stop:
        out["stop"] = tuple(stop)
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool) or (top is not None and not wanted):
        raise TextError("logprobs must be true or false, and true where top_logprobs is given")
    if wanted:
        out["logprobs"] = top or 0
    return out


# ---- records ----


def result_record(line: Line, result: Result, model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "total_tokens": result.usage.prompt_tokens + result.usage.completion_tokens,
    }
    reply = Reply(result.reasoning, result.text, result.tool_calls, [], result.well_formed)
    message = message_from_reply(reply)
    logprobs = None
    if result.logprobs is not None:
        logprobs = {"content": [_logprob(entry, tokenizer) for entry in result.logprobs]}
    warnings = {"warnings": result.warnings} if result.warnings else {}
    if not line.is_openai:
        record = {
            **_name(line),
            "text": result.text,
            "reasoning": result.reasoning,
            "tool_calls": message.get("tool_calls", []),
            "finish_reason": result.finish_reason,
            "usage": usage,
        }
        return record | ({"logprobs": logprobs} if logprobs else {}) | warnings
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": result.finish_reason,
    }
    assert line.ask is not None
    body = {
        "id": f"chatcmpl-{line.digest}",
        "object": "chat.completion",
        "created": 0,  # a clock would make two runs differ
        "model": line.ask.model or model,
        "choices": [choice],
        "usage": usage,
    }
    response = {"status_code": 200, "request_id": f"req_{line.digest}", "body": body | warnings}
    return {**_name(line), "response": response, "error": None}


def error_record(line: Line, code: str, message: str) -> dict[str, Any]:
    """`code`: "bad_line" (it is no request), "refused" (nor one that can run) or "failed"."""
    error = {"code": code, "message": message, "line": line.number}
    response = {"response": None} if line.is_openai else {}
    return {**_name(line), **response, "error": error}


def names(record: object, line: Line) -> bool:
    """Whether a record of an earlier run can be the answer to this line."""
    return isinstance(record, dict) and all(
        record.get(key) == value for key, value in _name(line).items() if key != "id"
    )


def failed(record: Mapping[str, Any]) -> bool:
    return record.get("error") is not None


def _name(line: Line) -> dict[str, Any]:
    """How a record says which line it answers."""
    if line.is_openai:
        return {"id": f"batch_req_{line.digest}", "custom_id": line.custom_id}
    custom_id = {} if line.custom_id is None else {"custom_id": line.custom_id}
    return {"index": line.place, **custom_id}


def _logprob(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """Every id of the reply has one, those of thinking and of markers too."""

    def of(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    top = [of(token, logprob) for token, logprob in entry.top]
    return {**of(entry.token_id, entry.logprob), "top_logprobs": top}
