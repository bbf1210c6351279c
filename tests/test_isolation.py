"""Thirty-two requests at once, one of them poisoned: the others keep the bits of their lone runs.

One canary of each kind: values that are not finite in a state, in latents and in logits, an
overflow, a cancel, exceptions in a prompt's pass, in the text and in a grammar. In strict mode and
debug mode, with shared beginnings, with and without a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from drafts import tiny_redhat
from engines import BLOCK, check_invariants, check_released, count_ends, ids_of, make_engine
from tiny import SMALLEST

from nanok3.engine import Engine
from nanok3.grammar import build_grammar
from nanok3.request import Request, Result
from nanok3.sampling import SamplingParams

NUM_REQUESTS = 32
DRAFT = {**tiny_redhat(), "aux_hidden_state_layer_ids": [1, 2]}
SHARED = ids_of(2 * BLOCK + 1, seed=50)
WITH_GRAMMAR = (5, 21)
VARIANTS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.7, "top_p": 0.8},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"top_k": 5, "min_p": 0.1, "logprobs": 0},
    {"stop_token_ids": tuple(range(100, 130)), "min_tokens": 2},
    {"stop": ("a", "bc", "\n")},
]


def canary_engine(with_draft: bool) -> Engine:
    return make_engine(
        config=SMALLEST,
        draft=DRAFT if with_draft else None,
        max_num_reqs=NUM_REQUESTS,
        num_blocks=400,
        **({"break_even": 0.0, "num_drafts": 2} if with_draft else {}),
    )


def start(engine: Engine, i: int) -> Request:
    """Request i; every other one begins as the others do."""
    own = ids_of(1 + i % 6, seed=i)
    prompt = [*SHARED, 300 + i, *own] if i % 2 else [300 + i, *own]
    options = VARIANTS[i % len(VARIANTS)]
    params = SamplingParams(**{"seed": i, "max_tokens": 5 + i % 3} | options)
    grammar = None
    if i in WITH_GRAMMAR:
        pytest.importorskip("llguidance")
        grammar = build_grammar(
            lambda: engine._token_table,
            tools=[],
            thinking=False,
            tool_choice=None,
            response_format={"type": "json_object"},
        )
    return engine.submit_ids(prompt, params, False, grammar)


@cache
def alone(i: int, with_draft: bool) -> Result:
    engine = canary_engine(with_draft)
    request = start(engine, i)
    engine.run([request])
    check_released(engine)
    return request.result()


def same(result: Result, right: Result) -> bool:
    """All but what was reused; floats to the bit."""
    return replace(result, usage=right.usage) == right and (
        result.usage.completion_tokens == right.usage.completion_tokens
    )


# ---- poisons: put into the victim when it decodes, or laid out before it begins ----


@dataclass(frozen=True)
class Poison:
    apply: Callable[[Engine, Request, pytest.MonkeyPatch], None]
    reason: str  # in how it ends
    early: bool = False  # it is for the victim's prompt


def _in_state(value: float) -> Callable[[Engine, Request, pytest.MonkeyPatch], None]:
    def apply(engine: Engine, victim: Request, patch: pytest.MonkeyPatch) -> None:
        assert victim.slot is not None
        engine._manager.cache.state[0, victim.slot] = value

    return apply


def _in_latents(engine: Engine, victim: Request, patch: pytest.MonkeyPatch) -> None:
    place = victim.num_cached - 1  # in a block that nobody shares
    row = victim.blocks[place // BLOCK] * BLOCK + place % BLOCK
    engine._manager.cache.latent[:, row] = float("nan")


def _in_text(engine: Engine, victim: Request, patch: pytest.MonkeyPatch) -> None:
    def fail(token: int) -> Any:
        raise RuntimeError("bad text")

    patch.setattr(victim, "_read", fail)


def _in_prompt(engine: Engine, victim: Request, patch: pytest.MonkeyPatch) -> None:
    prefill = engine._runner.prefill

    def failing(request: Request, count: int, with_logits: bool) -> Any:
        if request is victim and request.num_cached:
            request.in_flight = True
            raise MemoryError("no memory for this one")
        return prefill(request, count, with_logits)

    patch.setattr(engine._runner, "prefill", failing)


def _in_grammar(engine: Engine, victim: Request, patch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("broken matcher")

    assert victim.grammar is not None
    victim.grammar._matcher = Broken()


def _cancel(engine: Engine, victim: Request, patch: pytest.MonkeyPatch) -> None:
    engine.cancel(victim)


POISONS = {
    "nan in the state": Poison(_in_state(float("nan")), "logits are not finite"),
    "overflow": Poison(_in_state(3e38), "logits are not finite"),
    "nan in latents": Poison(_in_latents, "logits are not finite"),
    "bad text": Poison(_in_text, "RuntimeError: bad text"),
    "no memory": Poison(_in_prompt, "MemoryError: no memory for this one", early=True),
    "grammar": Poison(_in_grammar, "broken matcher"),
    "cancel": Poison(_cancel, "cancelled"),
}


@pytest.mark.parametrize(
    ("name", "with_draft"),
    [(name, False) for name in POISONS]
    + [(name, True) for name in ("nan in latents", "overflow", "bad text", "cancel")],
)
def test_a_poisoned_request_touches_no_other(
    name: str, with_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison, engine = POISONS[name], canary_engine(with_draft)
    order = list(POISONS).index(name)
    victim_number = WITH_GRAMMAR[0] if name == "grammar" else 7 + 2 * order
    ends = count_ends(monkeypatch)
    requests: list[Request] = []
    victim: Request | None = None
    is_in = False
    while len(requests) < NUM_REQUESTS or not all(r.done for r in requests):
        for _ in range(min(6, NUM_REQUESTS - len(requests))):  # while the first ones decode
            requests.append(start(engine, len(requests)))
            if len(requests) - 1 == victim_number:
                victim = requests[-1]
        if victim is not None and not is_in and (poison.early or victim.num_output >= 2):
            assert not victim.done
            poison.apply(engine, victim, monkeypatch)
            is_in = True
        engine.step()
        check_invariants(engine)
    assert is_in and victim is not None
    for i, request in enumerate(requests):
        if request is not victim:
            assert same(request.result(), alone(i, with_draft)), i
    result = victim.result()
    told = f"{result.finish_reason} {result.error} {result.warnings}"
    assert poison.reason in told, told
    reply = alone(victim_number, with_draft).token_ids
    assert name == "grammar" or result.token_ids == reply[: len(result.token_ids)] != reply
    assert {r: ends.get(r) for r in requests} == dict.fromkeys(requests, 1), "each ends once"
    # Where the victim was, its own request finds nothing of it.
    monkeypatch.undo()
    again = start(engine, victim_number)
    engine.run([again])
    assert same(again.result(), alone(victim_number, with_draft))
    check_released(engine)


EXTREMES: dict[str, list[Any]] = {
    "temperature": [5e-324, 1.7e308],
    "top_p": [5e-324],
    "top_k": [1, 513, 2**31 - 1],
    "min_p": [1.0, 5e-324],
    "seed": [-(2**63), 2**63 - 1],
    "presence_penalty": [-2, 2],
    "repetition_penalty": [0.001, 1000],
    "max_tokens": [1, 2**31 - 1],
    "min_tokens": [3],
    "stop_token_ids": [(0, 511, 512, 2**31 - 1), tuple(range(600))],
    "stop": [("\ud800", "a" * 100_000), tuple(chr(i) for i in range(32, 2000))],
    "logprobs": [0, 513, 2**31 - 1],
}


def test_options_at_their_ends_are_nobody_elses_matter() -> None:
    """What may be asked for is served, whatever it is, in one batch; its company never notices."""
    engine = make_engine(config=SMALLEST, max_num_reqs=40, num_blocks=800, max_context=24)
    odd = []
    for name, values in EXTREMES.items():
        for value in values:
            params = SamplingParams(**{"seed": 1, "max_tokens": 3, name: value})
            odd.append(engine.submit_ids([300, 1, 2], params, None))
    company = [start(engine, i) for i in range(8)]
    while not all(r.done for r in (*odd, *company)):
        engine.step()
        check_invariants(engine)
    for request in odd:
        assert request.finish_reason in ("length", "stop") and request.error is None
    for i, request in enumerate(company):
        assert same(request.result(), alone(i, False)), i
    check_released(engine)
