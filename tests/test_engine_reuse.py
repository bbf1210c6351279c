"""Beginnings that different requests share are computed once, and sharing them changes no bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from compare import check_equal
from drafts import tiny_redhat
from engines import (
    BLOCK,
    Job,
    check_invariants,
    check_released,
    follow,
    greedy,
    ids_of,
    job,
    make_engine,
    solo,
    submit,
)
from tiny import SMALLEST

from nanok3.engine import Engine
from nanok3.reply import Event
from nanok3.request import Result
from nanok3.sampling import SamplingParams

DRAFT = {**tiny_redhat(), "aux_hidden_state_layer_ids": [1, 2]}
PARAMS = SamplingParams(seed=11, max_tokens=4, logprobs=2)
SYSTEM = ids_of(6 * BLOCK + 1)  # ends one id behind a page


def engine_of(**settings: Any) -> Engine:
    return make_engine(config=SMALLEST, **settings)


def alone(asked: Job, **settings: Any) -> tuple[Result, list[Event]]:
    return solo(asked, config=SMALLEST, **settings)


def question(seed: int, length: int = 2) -> list[int]:
    return [*SYSTEM, 300 + seed, *ids_of(length, seed=seed)]


def check_alone(engine: Engine, prompts: list[list[int]], reused: list[int]) -> None:
    """All at once; each has the bits of its lone run, and reuses as many ids as told."""
    requests = [engine.submit(prompt, PARAMS) for prompt in prompts]
    results = [result for result, _ in follow(engine, requests)]
    assert [r.usage.cached_tokens for r in results] == reused
    for prompt, result in zip(prompts, results, strict=True):
        right = alone(job(prompt, PARAMS))[0]
        assert result.token_ids == right.token_ids
        assert result.logprobs == right.logprobs  # bit for bit


def test_two_prompts_with_one_beginning_share_it() -> None:
    """The second question reuses the last page of the first prompt that both have."""
    engine = engine_of()
    check_alone(engine, [question(1)], [0])
    check_alone(engine, [question(2)], [6 * BLOCK])
    check_released(engine)


def test_a_long_tail_is_shared_from_where_two_have_parted() -> None:
    """A third prompt finds the very page; a second one a border of a chunk."""
    engine = engine_of(prefill_chunk=4 * BLOCK + 1)
    check_alone(engine, [question(1, 40)], [0])
    check_alone(engine, [question(2, 40)], [4 * BLOCK])
    check_alone(engine, [question(3, 40)], [6 * BLOCK])
    check_alone(engine, [question(4, 2)], [6 * BLOCK])
    check_released(engine)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("length, chunk", [(20, 16), (7, 64)])
def test_prompts_that_come_at_once_wait_for_what_the_first_computes(
    runs_ahead: bool, length: int, chunk: int
) -> None:
    engine = engine_of(runs_ahead=runs_ahead, prefill_chunk=chunk)
    prompts = [question(n, length) for n in range(4)]
    check_alone(engine, prompts, [0, *[6 * BLOCK] * 3])
    check_released(engine)


def test_reuse_is_monotone_whatever_the_lengths() -> None:
    """A longer common beginning is never reused less (pitfall E-04), and what is computed again
    is less than a page and the ids that differ."""
    reused = []
    for common in range(1, 5 * BLOCK + 2):
        engine = engine_of(num_snapshots=4, prefill_chunk=64)
        beginning = ids_of(common)
        for tail in range(3):
            last = engine.generate([*beginning, 400 + tail], greedy(1))
        reused.append(last.usage.cached_tokens)
        assert common - BLOCK < reused[-1] <= common
        check_released(engine)
    assert all(b >= a for a, b in pairwise(reused))


@pytest.mark.parametrize("strict", [True, False])
def test_a_snapshot_at_a_page_is_the_state_there(strict: bool) -> None:
    """States, windows and latents after a shared beginning are those of a request that ends
    there."""
    engine = engine_of(strict=strict, dtype="float64", prefill_chunk=64)
    for tail in (1, 2):
        engine.generate(question(tail), greedy(1))
    judge = engine_of(strict=strict, dtype="float64", prefill_chunk=1)
    judge.generate(SYSTEM, greedy(1))
    kept, right = (
        next(s for s in e._manager.snapshots if len(s.token_ids) == 6 * BLOCK)
        for e in (engine, judge)
    )
    assert kept.token_ids == right.token_ids
    pairs = [(kept.state, right.state), (kept.conv_state, right.conv_state)]
    pairs.append(tuple(m._manager.latent_of(s.blocks) for m, s in ((engine, kept), (judge, right))))
    for found, expected in pairs:
        if strict:
            check_equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_pages_of_a_shared_beginning_are_held_once() -> None:
    engine = engine_of(num_blocks=24)
    engine.generate(question(0), greedy(1))
    requests = [engine.submit(question(n), greedy(12)) for n in range(1, 4)]
    while any(r.num_output == 0 for r in requests):
        engine.step()
        check_invariants(engine)
    tables = [r.blocks for r in requests]
    assert tables[0][:6] == tables[1][:6] == tables[2][:6]
    own = [block for table in tables for block in table[6:]]
    assert len(set(own)) == len(own)
    assert sum(map(len, tables)) > engine._manager.blocks.size, "they fit because they share"
    follow(engine, requests)
    check_released(engine)


def test_what_is_used_stays_and_the_rest_goes() -> None:
    """The least recently used goes first, so a system prompt outlives what passes by."""
    engine = engine_of(num_snapshots=8)
    engine.generate(question(1), greedy(1))
    for n in range(2, 12):
        assert engine.generate(question(n), greedy(1)).usage.cached_tokens == 6 * BLOCK
        engine.generate(ids_of(5, seed=n), greedy(1))
        check_invariants(engine)
    assert len(engine._manager.snapshots) == 8
    for n in range(20, 28):
        engine.generate(ids_of(5, seed=n), greedy(1))
    assert engine.generate(question(12), greedy(1)).usage.cached_tokens == 0
    check_released(engine)


# ---- what may not be shared ----


def test_a_prompt_that_was_cancelled_leaves_nothing() -> None:
    engine = engine_of(prefill_chunk=BLOCK)
    request = engine.submit(question(1), greedy(1))
    for _ in range(5):
        engine.step()
    assert [len(s.token_ids) for s in engine._manager.snapshots] == [4, 8, 12, 16, 20]
    assert engine.submit(question(2), greedy(1)).num_cached == 0
    engine.cancel(request)
    assert engine._manager.snapshots == []
    check_invariants(engine)


def test_a_beginning_that_went_wrong_is_nobodys() -> None:
    """NaN in one prompt's state, at every step of it: the other computes for itself."""
    right = alone(job(question(2), PARAMS))[0]
    for steps in range(1, 9):
        engine = engine_of(prefill_chunk=BLOCK)
        bad = engine.submit(question(1), PARAMS)
        for _ in range(steps):
            engine.step()
        if bad.num_output:
            break
        assert bad.slot is not None
        engine._manager.cache.state[1, bad.slot] = float("nan")
        good = engine.submit(question(2), PARAMS)
        (failed, _), (result, _) = follow(engine, [bad, good])
        assert failed.finish_reason == "error" and failed.token_ids == []
        assert (result.token_ids, result.logprobs) == (right.token_ids, right.logprobs)
        check_released(engine)
    assert steps > 4


def test_a_prompt_that_raises_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a piece of its own, behind a beginning that it shares."""
    engine = engine_of(prefill_chunk=BLOCK)
    prefill = engine._runner.prefill

    def failing(request: Any, count: int, with_logits: bool) -> Any:
        if 301 in request.ids[request.num_cached : request.num_cached + count]:
            request.in_flight = True
            raise MemoryError("no memory for this one")
        return prefill(request, count, with_logits)

    monkeypatch.setattr(engine._runner, "prefill", failing)
    requests = [engine.submit(question(n, 20), PARAMS) for n in range(3)]
    results = [result for result, _ in follow(engine, requests)]
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert results[1].error == "MemoryError: no memory for this one"
    for n in (0, 2):
        assert results[n].token_ids == alone(job(question(n, 20), PARAMS))[0].token_ids
    check_released(engine)


# ---- with a draft ----


@pytest.mark.parametrize("tail, reused", [(None, 6 * BLOCK), ([7, 8, 9], 6 * BLOCK + 3)])
def test_rows_of_a_draft_come_with_a_shared_beginning(tail: list[int] | None, reused: int) -> None:
    """What the draft has cached of it is what it would have computed, so it proposes the same.
    Of whole pages, and of a page that is part full."""
    settings: dict[str, Any] = {"draft": DRAFT, "break_even": 0.0, "readable": True}
    engine = engine_of(**settings)
    first = engine.generate(question(1), greedy(9))
    assert first.usage.cached_tokens == 0
    prompt = question(2, 9) if tail is None else [*question(1), *tail]
    request = engine.submit(prompt, greedy(9))
    engine.step()
    assert request.num_reused == reused
    fresh = engine_of(**settings, num_snapshots=0)
    twin = fresh.submit(prompt, greedy(9))
    while twin.num_output == 0:
        fresh.step()
    while not request.done:
        for cache, other in zip(rows_of(engine, request), rows_of(fresh, twin), strict=True):
            assert cache.isfinite().all()
            check_equal(cache, other)
        assert request.ids == twin.ids
        engine.step()
        fresh.step()
    right = alone(job(prompt, greedy(9)), readable=True)[0]
    assert request.result().token_ids == twin.result().token_ids == right.token_ids
    check_released(engine)


def rows_of(engine: Engine, request: Any) -> list[torch.Tensor]:
    """Latent rows and draft rows of what a request has cached."""
    places = torch.arange(request.num_cached)
    slots = torch.tensor(request.blocks)[places // BLOCK] * BLOCK + places % BLOCK
    loop: Any = engine._runner.loop
    return [engine._manager.cache.latent[:, slots], loop.drafter.cache[:, slots]]


def test_a_conversation_of_many_shares_its_system_message() -> None:
    engine = engine_of(readable=True, prefill_chunk=64, num_blocks=900)
    system = {"role": "system", "content": "You are a clerk. " * 8}
    talks = [[system, {"role": "user", "content": text}] for text in ("hi", "what?", "add 1 to 2")]
    jobs = [job(talk, greedy(4), thinking=False, thinking_effort=None) for talk in talks]
    requests = [submit(engine, j) for j in jobs]
    results = follow(engine, requests)
    for j, (result, events), n in zip(jobs, results, range(3), strict=True):
        right, right_events = alone(j, readable=True, num_blocks=900)
        assert (result.token_ids, events) == (right.token_ids, right_events)
        assert (result.usage.cached_tokens > 130) == (n > 0), result.usage
    check_released(engine)
