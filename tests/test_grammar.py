"""Enforced forms: whatever the model would draw, a finished reply parses and satisfies its schema.

Judged by a validator of its own, by the channel parser and by stepping through whole replies.
"""

from __future__ import annotations

import json
import math
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TOKENIZER, follow, job, make_engine, solo, submit

from nanok3.channels import parse
from nanok3.chat import CLOSE, END_OF_MSG, OPEN, SEP, render
from nanok3.config import EngineConfig
from nanok3.engine import Engine, RequestError
from nanok3.grammar import Grammar, TokenTable, build_grammar
from nanok3.request import Result
from nanok3.sampling import SamplingParams
from nanok3.tokenizer import Tokenizer

pytest.importorskip("llguidance")

MINI = Path(__file__).parent.parent / "nanok3" / "models" / "k3_mini"

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "nick": {"type": ["string", "null"], "maxLength": 5},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", 'gr"een', "blé\n", 3, None]},
        "grid": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
        },
        "either": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/n"}]},
    },
    "required": ["kind", "grid", "either"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "number", "minimum": -5, "maximum": 5, "multipleOf": 0.25}},
}
LIST = {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 2, "maxItems": 4}
CONST = {"const": {"a": [1, "x"]}}
SCHEMAS = {"person": PERSON, "nested": NESTED, "list": LIST, "const": CONST}

SUM = {
    "type": "function",
    "function": {
        "name": 'add "&" numbers',
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "mode": {"type": "string", "enum": ["fast", "slow"]},
                "note": {"type": ["string", "null"], "maxLength": 6},
                "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
            },
            "required": ["a", "mode"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [SUM, NOW]


@cache
def mini() -> Engine:
    return Engine.load(MINI)


@cache
def mini_table() -> TokenTable:
    return TokenTable(Tokenizer.load(MINI))


def wanted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def hot(seed: int, temperature: float, **options: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": temperature, "seed": seed, "max_tokens": 400} | options)
    )


def valid(value: Any, schema: Any, root: Any) -> bool:
    """As the schemas here need it."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema and not any(valid(value, s, root) for s in schema["anyOf"]):
        return False
    same = [v for v in [*schema.get("enum", []), schema.get("const")] if same_json(v, value)]
    if ("enum" in schema or "const" in schema) and not same:
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_kind(value, kind) for kind in kinds):
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
    if isinstance(value, list):
        size_ok = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)
        return size_ok and all(valid(v, schema.get("items", True), root) for v in value)
    if isinstance(value, dict):
        others, known = schema.get("additionalProperties", True), schema.get("properties", {})
        complete = set(schema.get("required", [])) <= value.keys()
        return complete and all(valid(v, known.get(k, others), root) for k, v in value.items())
    if is_kind(value, "number"):
        return schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    return True


def same_json(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if kind == "integer":
        return isinstance(value, int | float) and value == int(value)
    types = {"string": str, "number": (int, float), "array": list, "object": dict}
    return kind in types and isinstance(value, types[kind])


def check_calls(result: Result) -> None:
    functions = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
    assert result.finish_reason == "tool_calls" and result.well_formed, result
    assert result.tool_calls and not result.warnings
    for call in result.tool_calls:
        schema = functions[call.name].get("parameters", {"additionalProperties": False})
        assert valid(json.loads(call.arguments), schema, schema), call


def test_the_validator_tells_right_from_wrong() -> None:
    good = {"name": "x", "age": 3}
    assert valid(good, PERSON, PERSON) and valid(good | {"nick": None}, PERSON, PERSON)
    for wrong in ({"name": "x"}, good | {"age": 151}, good | {"x": 1}, good | {"nick": 1}, []):
        assert not valid(wrong, PERSON, PERSON)
    assert not valid({"kind": "pink", "grid": [[1]], "either": 1}, NESTED, NESTED)
    assert not valid({"kind": 3, "grid": [[9]], "either": 1}, NESTED, NESTED)


# ---- whole replies ----


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_every_finished_reply_satisfies_its_schema(name: str, temperature: float) -> None:
    schema, finished = SCHEMAS[name], 0
    asked = {"thinking": False, "response_format": wanted(schema)}
    requests = [mini().submit("Who are you?", hot(i, temperature), **asked) for i in range(3)]
    mini().run(requests)
    for result in [request.result() for request in requests]:
        if result.finish_reason == "length":
            continue
        finished += 1
        assert result.finish_reason == "stop" and result.well_formed and not result.warnings
        assert valid(json.loads(result.text), schema, schema), result.text
        names = [mini_tokenizer().special_name(id) for id in result.token_ids]
        specials = [name for name in names if name is not None]
        assert specials == [CLOSE, SEP, CLOSE, SEP, END_OF_MSG], "a special token inside the JSON"
    assert finished >= 2


def mini_tokenizer() -> Tokenizer:
    tokenizer = mini().tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.5, "min_tokens": 200},
        {"top_k": 3, "repetition_penalty": 1.3, "presence_penalty": 2.0},
        {"min_p": 0.5, "frequency_penalty": 2.0, "logprobs": 3},
        {"stop": ("{", '"', "a"), "stop_token_ids": (123, 34, 65)},
        {"temperature": 0.0},
    ],
)
def test_under_every_option_of_the_sampler(options: dict[str, Any]) -> None:
    result = mini().generate(
        "Hello",
        hot(5, **({"temperature": 1.5} | options)),
        thinking=False,
        response_format=wanted(PERSON),
    )
    assert result.finish_reason == "stop" and result.well_formed
    assert valid(json.loads(result.text), PERSON, PERSON)
    for entry in result.logprobs or []:
        assert math.isfinite(entry.logprob) and all(math.isfinite(p) for _, p in entry.top)


def test_thinking_is_free_and_ends_before_the_value() -> None:
    engine = mini()
    result = engine.generate(
        "What is 2 plus 3?", hot(1, 0.7), response_format={"type": "json_object"}
    )
    assert result.finish_reason == "stop" and result.well_formed and result.reasoning
    assert isinstance(json.loads(result.text), dict)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("thinking", [False, True])
def test_required_tools_are_called(temperature: float, thinking: bool) -> None:
    finished = 0
    for seed in range(2):
        result = mini().generate(
            "What is 17 plus 25?",
            hot(seed, 0.7 if thinking else temperature),  # else it thinks for too long
            tools=TOOLS,
            thinking=thinking,
            tool_choice="required",
            response_format=None if temperature == 1 else wanted(CONST),  # or it talks for long
        )
        if result.finish_reason != "length":
            finished += 1
            check_calls(result)
    assert finished >= 1


def test_a_value_or_calls_where_tools_may_be_called() -> None:
    kinds = set()
    for seed in range(6):
        result, _ = solo(
            job("x", hot(seed, 1.0), tools=[NOW], thinking=False, response_format=wanted(CONST)),
            strict=False,
        )
        assert result.well_formed and not result.warnings
        kinds.add(result.finish_reason)
        if result.finish_reason == "tool_calls":
            assert {call.name for call in result.tool_calls} == {"now"}
            assert result.text == "" or json.loads(result.text) == CONST["const"]
        else:
            assert json.loads(result.text) == CONST["const"]
    assert kinds == {"tool_calls", "stop"}


def test_a_random_model_cannot_leave_the_form() -> None:
    """Nearly even odds for all ids, specials included."""
    engine = make_engine(strict=False, prefill_chunk=512, num_blocks=600)
    options = {"thinking": False, "response_format": wanted(NESTED)}
    calls = {"thinking": False, "tools": TOOLS, "tool_choice": "required"}
    jobs = [job("x", hot(seed, 2.0, max_tokens=600), **options) for seed in range(4)]
    jobs += [job("x", hot(seed, 2.0, max_tokens=600), **calls) for seed in range(2)]
    finished = 0
    for j, (result, _) in zip(jobs, follow(engine, [submit(engine, j) for j in jobs]), strict=True):
        if result.finish_reason == "length":
            continue
        finished += 1
        if "tools" not in j.options:
            assert result.finish_reason == "stop" and result.well_formed
            assert valid(json.loads(result.text), NESTED, NESTED)
        else:
            check_calls(result)
    assert finished >= 3


def test_cut_off_is_length_and_keeps_the_text() -> None:
    result, _ = solo(
        job("x", hot(1, 1.0, max_tokens=6), thinking=False, response_format=wanted(PERSON))
    )
    assert result.finish_reason == "length" and result.text.startswith("{")


# ---- company ----


def test_mixed_rows_equal_the_same_requests_alone() -> None:
    free = {"thinking_effort": None}
    json_only = free | {"thinking": False}
    jobs = [
        job("Hi", hot(1, 1.3, max_tokens=40), **json_only, response_format=wanted(LIST)),
        job("Hi", hot(2, 1.3, max_tokens=30), **free),
        job("Hi", hot(3, 1.3, max_tokens=40), **json_only, tools=[NOW], tool_choice="required"),
        job([1, 2, 3], hot(4, 1.3, max_tokens=30, logprobs=2)),
        job("Hi", hot(5, 0.0, max_tokens=40), **json_only, response_format=wanted(CONST)),
    ]
    engine = Engine.load(MINI, settings=EngineConfig(strict=True, num_snapshots=0))
    alone = []
    for one in jobs:
        request = submit(engine, one)
        engine.run([request])
        alone.append(request.result())
    together = [submit(engine, one) for one in jobs]
    engine.run(together)
    for before, request in zip(alone, together, strict=True):
        assert request.result() == before
    plain = Engine.load(MINI, settings=EngineConfig(strict=True, num_snapshots=0))
    request = submit(plain, jobs[1])
    plain.run([request])  # where no grammar has ever been
    assert request.result() == alone[1]


# ---- speculation ----


def reply_ids(tokenizer: Tokenizer, message: dict[str, Any], thinking: bool) -> list[int]:
    """A whole reply as K3's encoder would write it, without the tags that the prompt ends in."""
    whole = tokenizer.encode_segments(
        render([message], thinking=thinking, add_generation_prompt=False)
    )
    begin = tokenizer.encode_segments(render([], thinking=thinking, add_generation_prompt=True))
    assert whole[: len(begin)] == begin
    return whole[len(begin) :]


CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": 'so {"a"',
    "tool_calls": [
        {
            "function": {
                "name": 'add "&" numbers',
                "arguments": {"a": 7, "mode": "slow", "note": "é<"},
            }
        },
        {"function": {"name": "now", "arguments": {}}},
    ],
}
VALUE = {"role": "assistant", "content": '{"name": "A\\"\\né", "age": 7}', "reasoning": "hm 😀"}


def grammar_of(is_call: bool, thinking: bool = True) -> Grammar:
    grammar = build_grammar(
        mini_table,
        tools=TOOLS if is_call else [],
        thinking=thinking,
        tool_choice="required" if is_call else None,
        response_format=None if is_call else wanted(PERSON),
    )
    assert grammar is not None
    return grammar


def mask_of(grammar: Grammar) -> torch.Tensor:
    mask = grammar.mask()
    assert mask is not None, grammar.warning
    return mask


@pytest.mark.parametrize("is_call", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_what_k3_writes_is_allowed_and_windows_give_the_same_masks(
    is_call: bool, thinking: bool
) -> None:
    tokenizer = Tokenizer.load(MINI)
    ids = reply_ids(tokenizer, CALL if is_call else VALUE, thinking)
    assert parse(tokenizer, ids, thinking).well_formed
    plain = grammar_of(is_call, thinking)
    step_by_step = []
    for id in ids:
        step_by_step.append(mask_of(plain))
        assert step_by_step[-1][id], f"{tokenizer.token_bytes(id)!r} is not allowed"
        plain.take(id)
    assert plain.warning is None
    # Windows of right drafts with wrong ones behind them, as after a rejection.
    grammar, done, chooser = grammar_of(is_call, thinking), 0, random.Random(0)
    while done < len(ids):
        right = ids[done : done + chooser.randrange(6)]
        wrong = [chooser.randrange(tokenizer.vocab_size) for _ in range(chooser.randrange(3))]
        before = mask_of(grammar)
        rows = grammar.masks(right + wrong)
        assert rows.shape == (len(right) + len(wrong) + 1, tokenizer.vocab_size)
        for i in range(min(len(right) + 1, len(ids) - done)):
            assert torch.equal(rows[i], step_by_step[done + i])
        assert torch.equal(mask_of(grammar), before), "drafts moved the state"
        for id in ids[done : done + len(right) + 1]:  # accepted, and the id after them
            grammar.take(id)
        done += len(right) + 1
    assert grammar.warning is None


def test_copies_are_independent() -> None:
    tokenizer = Tokenizer.load(MINI)
    ids = reply_ids(tokenizer, VALUE, thinking=False)
    grammar = grammar_of(False, thinking=False)
    for id in ids[:3]:
        grammar.take(id)
    before, twin = mask_of(grammar), grammar.copy()
    for id in ids[3:]:
        twin.take(id)
    assert torch.equal(mask_of(grammar), before)
    for id in ids[3:]:
        assert mask_of(grammar)[id]
        grammar.take(id)
    assert torch.equal(grammar.masks([])[0], twin.masks([])[0])


def test_an_id_against_the_grammar_degrades_to_a_warning() -> None:
    grammar = grammar_of(False, thinking=False)
    grammar.take(0 if not mask_of(grammar)[0] else 1)
    assert grammar.mask() is None and grammar.warning is not None
    assert "\n" not in grammar.warning and grammar.copy().warning == grammar.warning
    assert grammar.masks([1, 2]).all()


def test_a_failed_grammar_leaves_raw_text_and_a_warning() -> None:
    request = mini().submit(
        "x", hot(1, 1.0, max_tokens=5), thinking=False, response_format=wanted(PERSON)
    )
    assert request.grammar is not None
    request.grammar.take(0 if not mask_of(request.grammar)[0] else 1)
    mini().run([request])
    result = request.result()
    assert result.finish_reason in ("stop", "length") and result.error is None
    assert request.grammar.warning in result.warnings


# ---- bytes ----


@pytest.mark.parametrize("is_mini", [False, True])
def test_the_table_has_the_bytes_of_every_id(is_mini: bool) -> None:
    tokenizer = Tokenizer.load(MINI) if is_mini else TOKENIZER
    table = TokenTable(tokenizer)
    assert table.tokens.vocab_size == tokenizer.vocab_size
    for id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(id)
        assert table.tokens.is_special_token(id) == (id >= tokenizer.num_ranks)
        if id < tokenizer.num_ranks:
            # No UTF-8 has a byte FF: such an id is in no mask, as the tests of masks see.
            assert b"\xff" in raw or table.tokens.decode_bytes([id]) == raw
        assert tokenizer.decode([id]) == raw.decode("utf-8", "replace")


def test_masks_follow_bytes_alone() -> None:
    """Inside a string any id is allowed whose bytes keep it JSON in UTF-8, but the byte 7F."""
    tokenizer = Tokenizer.load(MINI)
    grammar = build_grammar(
        mini_table,
        tools=[],
        thinking=False,
        tool_choice=None,
        response_format=wanted({"type": "string"}),
    )
    assert grammar is not None
    opened = tokenizer.encode('"')
    for id in opened:
        grammar.take(id)
    mask = mask_of(grammar)
    assert not mask[tokenizer.num_ranks :].any()
    for id in range(tokenizer.num_ranks):
        raw = tokenizer.token_bytes(id)
        if b'"' in raw or b"\\" in raw:
            continue
        cut = raw.decode("utf-8", "ignore").encode()
        whole = cut == raw or (raw.startswith(cut) and may_begin(raw[len(cut) :]))
        assert bool(mask[id]) == (whole and all(b >= 32 and b != 127 for b in raw)), raw


def may_begin(rest: bytes) -> bool:
    """Whether bytes are the beginning of one character."""
    for tail in (b"\x80", b"\xbf", b"\x90", b"\x80\x80", b"\x90\x80", b"\xbf\xbf",
                 b"\x80\x80\x80", b"\x90\x80\x80", b"\xbf\xbf\xbf"):  # fmt: skip
        try:
            (rest + tail).decode()
        except UnicodeDecodeError:
            continue
        return len((rest + tail).decode()) == 1
    return False


def test_the_masks_of_thinking_and_of_the_end() -> None:
    tokenizer = Tokenizer.load(MINI)
    grammar = grammar_of(False)
    close, end = tokenizer.special_id(CLOSE), tokenizer.special_id(END_OF_MSG)
    assert mask_of(grammar).nonzero().flatten().tolist() == [*range(tokenizer.num_ranks), close]
    ids = reply_ids(tokenizer, VALUE, thinking=True)
    closes = [i for i, id in enumerate(ids) if id == close]
    opened = ids.index(tokenizer.special_id(OPEN))
    for i, id in enumerate(ids):
        mask = mask_of(grammar)
        if closes[1] <= i or closes[0] < i <= opened:  # nothing but the markers
            allowed = {tokenizer.token_bytes(j) for j in mask.nonzero().flatten().tolist()}
            assert all(tokenizer.token_bytes(id)[:1] == raw[:1] for raw in allowed)
        grammar.take(id)
    assert ids[-1] == end


# ---- refusals ----


@pytest.mark.parametrize(
    "options, wanted_words",
    [
        ({"response_format": wanted({"type": "strin"})}, "strin"),
        ({"response_format": wanted({"not": {"type": "string"}})}, "not"),
        ({"response_format": wanted({"type": "object", "propertyNames": {}})}, "propertyNames"),
        ({"response_format": wanted({"type": "string", "pattern": "(?=a)"})}, "look-around"),
        ({"response_format": wanted({"$ref": "#/$defs/none"})}, "none"),
        ({"response_format": wanted({"$ref": "http://a.b/c"})}, "http://a.b/c"),
        ({"response_format": wanted({"type": "integer", "minimum": 2, "maximum": 1})}, "minimum"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "function"),
    ],
)
def test_what_cannot_be_enforced_is_refused(options: dict[str, Any], wanted_words: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=wanted_words) as caught:
        engine.submit("x", **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    "schema, wanted_words",
    [
        ({"type": "array"}, "type object"),
        ({"anyOf": []}, "anyOf"),
        ({"properties": {"k": {"type": "string", "pattern": "a"}}}, "k of tool f.*pattern"),
        ({"properties": {"k": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
         "k of tool f.*itself"),
        ({"properties": {"k": {"$ref": "#/x"}}}, "#/x"),
        ({"properties": {"k": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"k": False}, "required": ["k"]}, "k of tool f.*no value"),
        ({"properties": {"k": {"oneOf": [{"type": "string"}, {"enum": ["a"]}]}}}, "oneOf"),
        ({"properties": {"k": 3}}, "k of tool f"),
        ({"properties": {"k": {"type": 3}}}, "k of tool f"),
        ({"properties": {"k": {"anyOf": 3}}}, "k of tool f"),
        ({"properties": {"k": {"enum": 3}}}, "k of tool f"),
        ({"properties": {"k": {"enum": []}}, "required": ["k"]}, "k of tool f.*no value"),
        ({"properties": {"k": {"type": "string", "maxLength": "3"}}}, "k of tool f"),
        ({"properties": {"k": {"type": "string", "minLength": 3, "maxLength": 2}},
          "required": ["k"]}, "form of the reply"),
        ({"properties": 3}, "tool f"),
        ({"required": "k"}, "tool f"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_enforced_are_refused(
    schema: dict[str, Any], wanted_words: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(RequestError, match=wanted_words) as caught:
        make_engine().submit("x", tools=[tool], tool_choice="required")
    assert "\n" not in str(caught.value)


def test_tools_of_a_system_message_can_be_required() -> None:
    messages = [{"role": "system", "tools": [NOW]}, {"role": "user", "content": "x"}]
    result, _ = solo(job(messages, hot(1, 1.0), thinking=False, tool_choice="required"))
    if result.finish_reason != "length":
        assert {call.name for call in result.tool_calls} == {"now"}


def test_a_request_without_a_form_has_no_grammar() -> None:
    engine = mini()
    for options in ({}, {"tools": TOOLS}, {"response_format": {"type": "text"}}):
        request = engine.submit("x", **options)
        assert request.grammar is None
        engine.cancel(request)
    request = engine.submit([1], response_format=wanted(PERSON))
    assert request.grammar is None
    engine.cancel(request)


def test_without_llguidance_only_enforcing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = make_engine()
    engine.cancel(engine.submit("x", thinking=False))
    with pytest.raises(RequestError, match="pip install llguidance"):
        engine.submit("x", thinking=False, response_format={"type": "json_object"})
