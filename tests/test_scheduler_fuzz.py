"""The scheduler under arrivals, cancels, faults and pools too small, at random.

After every step each slot and block has the owners that the pools say and nothing was written where
nobody is; in the end nothing is held, every request has ended exactly once, and every reply is that
of its lone run, whole or up to where it was cut off (pitfall E-12).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from drafts import tiny_redhat
from engines import BLOCK, check_invariants, check_released, count_ends, ids_of, make_engine
from tiny import SMALLEST

from nanok3.engine import Engine, RequestError
from nanok3.grammar import Grammar, build_grammar
from nanok3.request import Request
from nanok3.sampling import SamplingParams

NUM_ACTIONS = 60
DRAFT = {**tiny_redhat(), "aux_hidden_state_layer_ids": [1, 2]}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"runs_ahead": True},
    "draft": {"draft": DRAFT, "break_even": 0.0, "num_drafts": 3},
}
POOLS = [  # requests at once, blocks, snapshots, ids a chunk
    *((1, 6, 1, 3), (2, 24, 4, 1), (4, 9, 4, 16), (4, 40, 2, 3), (3, 8, 0, 16), (3, 13, 8, 1)),
    *((6, 60, 16, 8), (2, 11, 16, 5)),
]
PARAMS = [
    SamplingParams(seed=1, max_tokens=5),
    SamplingParams(temperature=0.0, seed=2, max_tokens=4, logprobs=1),
    SamplingParams(seed=3, max_tokens=7, top_k=9, repetition_penalty=1.3),
    SamplingParams(seed=4, max_tokens=6, stop=("a", "b"), stop_token_ids=tuple(range(60, 90))),
    SamplingParams(seed=5, max_tokens=1),
]


def engine_of(mode: str, reqs: int, blocks: int, snapshots: int, chunk: int) -> Engine:
    return make_engine(
        config=SMALLEST,
        max_num_reqs=reqs,
        num_blocks=blocks,
        num_snapshots=snapshots,
        prefill_chunk=chunk,
        **MODES[mode],
    )


def form(engine: Engine) -> Grammar | None:
    return build_grammar(
        lambda: engine._token_table,
        tools=[],
        thinking=False,
        tool_choice=None,
        response_format={"type": "json_object"},
    )


@dataclass
class Fuzz:
    engine: Engine
    chooser: random.Random
    requests: list[Request] = field(default_factory=list)
    forms: set[Request] = field(default_factory=set)  # with a grammar
    victims: set[Request] = field(default_factory=set)
    raising: set[Request] = field(default_factory=set)

    def act(self) -> None:
        chance = self.chooser.random()
        if chance < 0.2:
            self._submit()
        elif chance < 0.25 and self.requests:
            request = self.chooser.choice(self.requests)
            if request not in self.victims:  # or what it left would not have been looked at
                self.engine.cancel(request)
        elif chance < 0.27:
            try:
                self.engine.logits(ids_of(self.chooser.randrange(1, 20)))
            except RequestError as error:
                assert "no room" in str(error)
        elif chance < 0.29:
            self._poison()
        elif chance < 0.31 and self.engine._scheduler.waiting:
            self.raising.add(self.chooser.choice(list(self.engine._scheduler.waiting)))
        else:
            self.engine.step()

    def _submit(self) -> None:
        length = self.chooser.choice([1, 3, 4, 5, 8, 9, 12])
        prompt = [*ids_of(length), *ids_of(self.chooser.choice([0, 0, 1, 4]), seed=1)]
        if self.chooser.random() < 0.6 and self.requests:  # go on from an earlier one
            earlier = self.chooser.choice(self.requests).ids
            prompt = [*earlier[: self.chooser.choice([4, 6, 9, 30])], 9][:18]
        grammar = form(self.engine) if self.chooser.random() < 0.1 else None
        params = self.chooser.choice(PARAMS)
        thinking = None if grammar is None else False
        try:
            request = self.engine.submit_ids(prompt, params, thinking, grammar)
        except RequestError as error:
            assert "there is room for" in str(error)
            return
        self.requests.append(request)
        if grammar is not None:
            self.forms.add(request)

    def _poison(self) -> None:
        """Only where a row is still to come that sees it."""
        running = [r for r in self.engine._scheduler.running if r.slot is not None and not r.done]
        if not running or self.engine._runner.loop.num_queued:
            return
        victim = self.chooser.choice(running)
        assert victim.slot is not None
        self.engine._manager.cache.state[0, victim.slot] = float("nan")
        self.victims.add(victim)


def fail_prompts(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = fuzz.engine._runner
    prefill = runner.prefill

    def failing(request: Request, count: int, with_logits: bool) -> Any:
        if request in fuzz.raising:
            request.in_flight = True
            raise RuntimeError("a pass that fails")
        return prefill(request, count, with_logits)

    monkeypatch.setattr(runner, "prefill", failing)


@pytest.mark.parametrize("mode", MODES)
def test_fuzz(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    ends = count_ends(monkeypatch)
    judge = Judge(engine_of(mode, 1, 60, 0, 16))
    chooser = random.Random(7)
    reused = num_victims = num_raising = num_requests = 0
    for pool in POOLS:
        fuzz = Fuzz(engine_of(mode, *pool), chooser)
        fail_prompts(fuzz, monkeypatch)
        for _ in range(NUM_ACTIONS):
            fuzz.act()
            check_invariants(fuzz.engine)
        steps = 0
        while fuzz.engine.num_unfinished:
            fuzz.engine.step()
            check_invariants(fuzz.engine)
            steps += 1
            assert steps < 3000, "no progress"
        for request in fuzz.requests:
            judge.check(request, fuzz)
        assert [ends[r] for r in fuzz.requests] == [1] * len(fuzz.requests)
        check_released(fuzz.engine)
        reused += sum(r.num_reused for r in fuzz.requests)
        num_requests += len(fuzz.requests)
        num_victims += sum(r.error is not None for r in fuzz.victims)
        num_raising += sum(r.error is not None for r in fuzz.raising)
    counts = (reused, num_victims, num_raising, num_requests)
    assert all(n > least for n, least in zip(counts, (100, 1, 1, 60), strict=True)), counts


class Judge:
    """Lone runs, each once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[Any, ...], Request] = {}

    def check(self, request: Request, fuzz: Fuzz) -> None:
        prompt = tuple(request.ids[: request.num_prompt])
        params, has_form = request.params, request in fuzz.forms
        key = (prompt, params, request.max_tokens, has_form)
        if key not in self._known:
            grammar = form(self._engine) if has_form else None
            alone = Request(
                list(prompt),
                params,
                request.stop_ids,
                request.max_tokens,
                self._engine.tokenizer,
                False if has_form else None,
                grammar,
            )
            self._engine._scheduler.waiting.append(alone)
            self._engine.run([alone])
            self._known[key] = alone
        right, found = self._known[key].result(), request.result()
        if found.finish_reason == "error":
            assert request in fuzz.victims | fuzz.raising, found.error
        if found.finish_reason in ("error", "cancelled"):
            assert found.token_ids == right.token_ids[: len(found.token_ids)]
            return
        assert (found.token_ids, found.text, found.finish_reason, found.logprobs) == (
            right.token_ids,
            right.text,
            right.finish_reason,
            right.logprobs,
        )


def test_a_leak_would_be_found() -> None:
    """The invariants see a block that is kept, a slot that is kept, and one given twice."""
    for spoil in ("block", "slot", "twice"):
        engine = engine_of("plain", 2, 12, 2, 8)
        request = engine.submit_ids(ids_of(BLOCK), PARAMS[0], None)
        engine.step()
        manager = engine._manager
        if spoil == "block":
            manager.blocks.take(1)
        elif spoil == "slot":
            manager.slots.take(1)
        else:
            request.blocks[-1] = request.blocks[0]
        with pytest.raises(AssertionError):
            check_invariants(engine)
