"""Snapshots through the engine: what is reused, and that reusing it changes no bit."""

from __future__ import annotations

import pytest
from compare import check_close, check_equal
from engines import (
    BLOCK,
    check_invariants,
    check_released,
    follow,
    greedy,
    ids_of,
    job,
    make_engine,
    solo,
    steps,
)

from nanok3.cache import Snapshot
from nanok3.engine import Engine
from nanok3.sampling import SamplingParams

PARAMS = SamplingParams(seed=11, max_tokens=6, logprobs=2)


def snapshot_of(engine: Engine, ids: list[int]) -> Snapshot:
    return next(s for s in engine._manager.snapshots if list(s.token_ids) == ids)


@pytest.mark.parametrize("length", [1, 2, *range(2 * BLOCK - 2, 2 * BLOCK + 3), 3 * BLOCK + 1])
def test_what_a_later_prompt_reuses(length: int) -> None:
    """The rule: a finished prompt is kept but for its last id, a finished reply too; a later prompt
    takes the longest that leaves an id to compute. Whatever the length (pitfalls E-01, E-04)."""
    prompt = ids_of(length)
    reply = solo(job(prompt, PARAMS))[0].token_ids
    whole = [*prompt, *reply]
    for later, reused in (
        (prompt, length - 1),
        ([*prompt, 300], length - 1),
        ([*prompt, *reply[:3]], length - 1),
        (whole, len(whole) - 1),
        ([*whole, 300, 301], len(whole) - 1),
        (ids_of(length + 1)[1:], 0),
    ):
        engine = make_engine()
        assert engine.generate(prompt, PARAMS).token_ids == reply
        result = engine.generate(later, PARAMS)
        assert result.usage.cached_tokens == reused, later
        expected = solo(job(later, PARAMS))[0]
        assert result.token_ids == expected.token_ids
        assert result.logprobs == expected.logprobs  # bit for bit
        check_released(engine)


def test_an_edited_turn_is_computed_again() -> None:
    """Latents and states must not come from different places (pitfall E-06)."""
    engine = make_engine(num_snapshots=8)
    prompt = ids_of(3 * BLOCK)
    first = engine.generate(prompt[:BLOCK], PARAMS)
    engine.generate(prompt, PARAMS)
    for place in range(len(prompt)):
        edited = [*prompt[:place], 400, *prompt[place + 1 :]]
        result = engine.generate(edited, PARAMS)
        assert result.usage.cached_tokens in {0, BLOCK - 1, *range(place + 1)}
        assert result.usage.cached_tokens <= place
        assert result.token_ids == solo(job(edited, PARAMS))[0].token_ids
    assert engine.generate(prompt[:BLOCK], PARAMS).token_ids == first.token_ids
    check_released(engine)


@pytest.mark.parametrize("strict, chunk", [(True, 16), (False, 64), (False, 63), (False, 2)])
def test_a_snapshot_is_the_state_at_its_last_id(strict: bool, chunk: int) -> None:
    """130 ids in chunks of 64: not the state after 128, nor after 130 (pitfall F-12)."""
    engine = make_engine(dtype="float64", strict=strict, prefill_chunk=chunk)
    prompt = ids_of(130)
    engine.generate(prompt, greedy(1))
    kept = snapshot_of(engine, prompt[:-1])
    judge = make_engine(dtype="float64", prefill_chunk=1)  # row by row, 129 of them
    request = judge.submit(prompt, greedy(1))
    while request.num_cached < 129:
        judge.step()
    right = snapshot_of(judge, prompt[:-1])
    latents = [
        m.latent_of(s.blocks)[:, :129]
        for m, s in ((engine._manager, kept), (judge._manager, right))
    ]
    pairs = ((kept.state, right.state), (kept.conv_state, right.conv_state), tuple(latents))
    for found, expected in pairs:
        if strict:
            check_equal(found, expected)
        check_close(found, expected, 1e-10)


def test_continuations_of_one_snapshot_at_once_do_not_meet() -> None:
    """A block that is part full is copied; full ones are shared."""
    engine = make_engine()
    prompt = ids_of(2 * BLOCK + 3)
    engine.generate(prompt, PARAMS)
    tails = ([300], [301, 302], [300, 5, 6, 7, 8], [303])
    jobs = [
        job([*prompt, *tail], SamplingParams(seed=i, max_tokens=9)) for i, tail in enumerate(tails)
    ]
    expected = [solo(j)[0].token_ids for j in jobs]
    requests = [engine.submit(j.prompt, j.params) for j in jobs]
    engine.step()
    assert {r.num_reused for r in requests} == {2 * BLOCK + 2}
    tables = [r.blocks for r in requests]
    assert all(t[:2] == tables[0][:2] for t in tables)
    rest = [block for t in tables for block in t[2:]]
    assert len(set(rest)) == len(rest)
    assert [result.token_ids for result, _ in follow(engine, requests)] == expected
    check_released(engine)


def test_a_snapshot_outlives_the_request_that_made_it_and_the_other_way_round() -> None:
    engine = make_engine(num_snapshots=1)
    prompt = ids_of(10)
    long = engine.submit(prompt, SamplingParams(seed=1, max_tokens=30))
    expected = solo(job(prompt, SamplingParams(seed=1, max_tokens=30)))[0].token_ids
    engine.step()
    other = engine.submit(prompt, PARAMS)  # from the first one's snapshot, while that goes on
    engine.step()
    assert other.num_reused == 9 and not long.done
    engine.generate(ids_of(3, seed=9), greedy(1))  # pushes the snapshot out
    assert all(list(s.token_ids) != prompt[:-1] for s in engine._manager.snapshots)
    results = [result for result, _ in follow(engine, [long, other])]
    assert results[0].token_ids == expected
    assert results[1].token_ids == solo(job(prompt, PARAMS))[0].token_ids
    check_released(engine)


def test_memory_of_snapshots_is_bounded_and_gives_way() -> None:
    engine = make_engine(num_snapshots=3, num_blocks=12, max_num_reqs=2)
    for seed in range(8):
        engine.generate(ids_of(7, seed=seed), greedy(4))
        check_invariants(engine)
        assert len(engine._manager.snapshots) <= 3
    whole = engine.generate(ids_of(40), greedy(8))  # needs every block there is
    assert len(whole.token_ids) > 0 and whole.usage.cached_tokens == 0
    check_invariants(engine)
    check_released(engine)
    without = make_engine(num_snapshots=0)
    without.generate(ids_of(7), greedy(4))
    assert without.generate(ids_of(7), greedy(4)).usage.cached_tokens == 0
    assert without._manager.blocks.num_free == without._manager.blocks.size


def test_a_waiting_request_does_not_cost_the_others_their_snapshots() -> None:
    engine = make_engine(num_blocks=12, max_num_reqs=3)
    engine.generate(ids_of(7), greedy(2))
    kept = len(engine._manager.snapshots)
    running = engine.submit(ids_of(4, seed=1), greedy(28))  # 8 of 12 blocks
    waiting = engine.submit(ids_of(4, seed=2), greedy(28))
    for _ in range(5):
        engine.step()
    assert waiting.slot is None and not running.done
    held = [list(s.token_ids) for s in engine._manager.snapshots]
    assert ids_of(7)[:-1] in held and len(held) >= kept
    for _ in steps(engine, [running, waiting]):
        pass
    check_released(engine)


def test_a_conversation_that_goes_on_reuses_what_it_said() -> None:
    engine = make_engine(readable=True)
    talk = [{"role": "user", "content": "hi"}]
    params = greedy(5)
    first = engine.submit(talk, params, thinking=False)
    follow(engine, [first])
    reply = first.result()
    later = [
        *talk,
        {"role": "assistant", "content": reply.text},
        {"role": "user", "content": "and?"},
    ]
    second = engine.submit(later, params, thinking=False)
    alone = solo(job(later, params, thinking=False), readable=True)
    assert follow(engine, [second]) == [(second.result(), alone[1])]
    # All of the first prompt and reply but its last id, which no row has computed yet.
    assert second.num_reused == len(first.ids) - 1
    assert second.result().token_ids == alone[0].token_ids
