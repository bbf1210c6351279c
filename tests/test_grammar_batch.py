"""Enforced forms among other requests: plain, with steps queued ahead, and beside drafts.

A small random model, so that nothing but the grammar makes a reply well formed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from drafts import tiny_redhat
from engines import check_released, ids_of, make_engine
from tiny import SMALLEST

from nanok3.engine import Engine, RequestError
from nanok3.grammar import Grammar, build_grammar
from nanok3.request import Request, Result
from nanok3.sampling import SamplingParams

pytest.importorskip("llguidance")

DRAFT = {**tiny_redhat(), "aux_hidden_state_layer_ids": [1, 2]}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"runs_ahead": True},
    "draft": {"draft": DRAFT, "break_even": 0.0, "num_drafts": 3},
    "draft, shared products": {"draft": DRAFT, "break_even": 0.0, "strict": False},
}
VALUES = [1, "é", None]
LIST = {"type": "array", "items": {"enum": VALUES}, "minItems": 1, "maxItems": 3}
TOOL = {"type": "function", "function": {"name": "f"}}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


FORMS: dict[str, dict[str, Any]] = {
    "list": {"response_format": json_schema(LIST)},
    "call": {  # with a value, for free text would go on for long
        **{"tools": [TOOL], "tool_choice": "required"},
        "response_format": json_schema({"const": 1}),
    },
    "free": {},
}


def engine_of(mode: str) -> Engine:
    return make_engine(config=SMALLEST, num_blocks=900, **MODES[mode])


def form(engine: Engine, kind: str) -> Grammar | None:
    asked = {"tools": [], "tool_choice": None, "response_format": None} | FORMS[kind]
    return build_grammar(lambda: engine._token_table, thinking=False, **asked)


def start(engine: Engine, i: int, kind: str, params: SamplingParams) -> Request:
    return engine.submit_ids([300 + i, *ids_of(3, seed=i)], params, False, form(engine, kind))


def hot(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**({"seed": seed, "max_tokens": 800} | options))


def check_form(kind: str, result: Result) -> None:
    if kind == "free":
        return
    assert result.well_formed and not result.warnings, result
    if kind == "list":
        value = json.loads(result.text)
        assert result.finish_reason == "stop" and 1 <= len(value) <= 3
        assert all(item in VALUES for item in value)
    else:
        assert result.finish_reason == "tool_calls"
        assert result.tool_calls
        assert {(call.name, call.arguments) for call in result.tool_calls} == {("f", "{}")}


JOBS = [
    ("list", hot(1, logprobs=2)),
    ("free", hot(2, max_tokens=40)),
    ("list", hot(3, temperature=0.0, repetition_penalty=1.3)),
    ("call", hot(4, temperature=2.0, min_tokens=250, stop=("a",), stop_token_ids=(97, 34))),
    ("free", hot(5, temperature=0.0, max_tokens=40)),
    ("call", hot(6, temperature=0.0, presence_penalty=1.0)),
    ("list", hot(7, top_k=4, min_p=0.2)),
    ("free", hot(8, max_tokens=30, min_tokens=30, logprobs=1)),
]


@pytest.mark.parametrize("mode", MODES)
def test_a_mixed_batch_keeps_every_form(mode: str) -> None:
    """In strict mode each request has its lone run's bits too, whoever drafts beside it."""
    engine = engine_of(mode)
    requests = [start(engine, i, *one) for i, one in enumerate(JOBS[:4])]
    for _ in range(6):  # the others come while these decode
        engine.step()
    requests += [start(engine, 4 + i, *one) for i, one in enumerate(JOBS[4:])]
    engine.run(requests)
    for i, (request, (kind, params)) in enumerate(zip(requests, JOBS, strict=True)):
        result = request.result()
        check_form(kind, result)
        assert all(token >= 0 for token in result.token_ids)
        if not engine.settings.strict:
            continue
        for other in {"plain", mode} if mode == "draft" and params.temperature == 0 else {mode}:
            alone = engine_of(other)
            twin = start(alone, i, kind, params)
            alone.run([twin])
            right = twin.result()
            assert (result.token_ids, result.logprobs) == (right.token_ids, right.logprobs)
            assert (result.text, result.tool_calls) == (right.text, right.tool_calls)
    if "draft" in mode:
        seen: Any = engine._runner.loop
        assert seen.acceptance.num_steps > 30, "the free ones have drafted beside the others"
        # Rows past a request's own drafts write to trash.
        engine._manager.cache.latent[:, : engine._manager.block_size] = float("nan")
    check_released(engine)


@pytest.mark.parametrize("mode", ["plain", "draft"])
@pytest.mark.parametrize("kind", ["list", "call"])
def test_a_reply_may_be_cut_at_every_length(mode: str, kind: str) -> None:
    """max_tokens counts as ever: the beginning of the whole reply, and "length"."""
    engine = engine_of(mode)
    params = hot(3, temperature=0.0)
    whole = start(engine, 0, kind, params)
    engine.run([whole])
    check_form(kind, whole.result())
    ids = whole.result().token_ids
    cuts = sorted({1, 2, 3, *range(5, len(ids), 8), len(ids) - 1, len(ids)})
    requests = [start(engine, 0, kind, hot(3, temperature=0.0, max_tokens=cut)) for cut in cuts]
    engine.run(requests)
    for cut, request in zip(cuts, requests, strict=True):
        result = request.result()
        assert result.token_ids == ids[:cut]
        assert not any("enforced" in warning for warning in result.warnings)
        # The last id ends the message itself.
        assert (result.finish_reason == "length") == (cut < len(ids))
    check_released(engine)


def test_a_form_goes_on_from_a_shared_beginning() -> None:
    """What is reused is the prompt's; how far a reply has come in its form is its own."""
    engine = engine_of("plain")
    prompt = ids_of(30)
    for kind in ("list", "free", "call", "list"):
        request = engine.submit_ids(prompt, hot(9), False, form(engine, kind))
        engine.run([request])
        check_form(kind, request.result())
    assert request.num_reused == 29


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"anyOf": [{"$ref": "#"}]},
        {"enum": []},
        {"type": "integer", "multipleOf": 0},
        {"type": "string", "pattern": "("},
        {"type": "string", "minLength": 10**3000},
        {"const": "\ud800"},
        {"type": "array", "items": {"x-unheard-of": 1, "if": {}}},
        {"type": ["integer", 7]},
        {"properties": [1]},
    ],
)
def test_a_schema_that_nothing_satisfies_or_nobody_can_read_is_refused(schema: Any) -> None:
    """In one sentence, before anything runs; the engine goes on."""
    engine = engine_of("plain")
    asked = {"thinking": False, "thinking_effort": None, "response_format": json_schema(schema)}
    with pytest.raises(RequestError, match="response_format") as caught:
        engine.submit("x", hot(1), **asked)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert engine.num_unfinished == 0
    request = start(engine, 0, "list", hot(1))
    engine.run([request])
    check_form("list", request.result())
