"""Decoding with drafts as a GPU does it, on a CPU: a step is queued before the last one is read,
for sizes that are recorded ahead of time, with padding. Replies and what is kept after an end must
be those of a loop that waits for every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import check_close
from drafts import tiny_inferact, tiny_redhat
from engines import check_invariants, check_released, greedy, ids_of, make_engine
from scripted_drafts import follows, script_drafts

from nanok3.cache import Snapshot
from nanok3.engine import Engine
from nanok3.graph import Health, buckets
from nanok3.request import Result
from nanok3.sampling import SamplingParams
from nanok3.spec.budget import CostCurve, Costs
from nanok3.spec_loop import SpecLoop
from nanok3.spec_steps import SpecSteps

LENGTH = 24
DRAFTS = {"inferact": tiny_inferact(), "redhat": tiny_redhat()}


def prompt(n: int) -> list[int]:
    return [n, *ids_of(2 + n % 5, seed=n)]


def as_on_a_gpu(engine: Engine) -> Engine:
    runner, settings = engine._runner, engine.settings
    old = runner.loop
    assert isinstance(old, SpecLoop)
    steps = SpecSteps(
        old._memory,
        old.target,
        old.drafter,
        settings,
        lambda run: run,
        buckets(settings.max_num_reqs),
    )
    runner.loop = engine._scheduler._loop = SpecLoop(steps, True)
    return engine


def ahead_engine(draft: str = "inferact", **settings: Any) -> Engine:
    chosen = {"break_even": 0.0, "strict": False, "dtype": "float64"} | settings
    return as_on_a_gpu(make_engine(draft=DRAFTS[draft], **chosen))


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Result]:
    requests = [engine.submit_ids(p, o, None) for p, o in zip(prompts, params, strict=True)]
    while any(not r.done for r in requests):
        engine.step()
        check_invariants(engine)
    results = [r.result() for r in requests]
    check_released(engine)
    return results


@pytest.fixture(scope="module")
def truth() -> dict[int, list[int]]:
    prompts = [prompt(n) for n in range(1, 7)]
    plain = make_engine(readable=True, strict=False, dtype="float64")
    results = run(plain, prompts, [greedy(LENGTH)] * len(prompts))
    return {p[0]: p + r.token_ids for p, r in zip(prompts, results, strict=True)}


def mixed(place: int) -> int:
    return (0, 7, 3, 1, 2, 5)[place % 6]


@pytest.mark.parametrize("max_num_reqs", [1, 3, 8])
def test_greedy_replies_are_those_without_drafts(
    max_num_reqs: int, truth: dict[int, list[int]]
) -> None:
    """Ends of all kinds, raggedly, beside each other and alone."""
    engine = ahead_engine(readable=True, max_num_reqs=max_num_reqs)
    plain = make_engine(readable=True, strict=False, dtype="float64", max_num_reqs=max_num_reqs)
    prompts, params = [], []
    for n in range(1, 7):
        reply = truth[n][len(prompt(n)) :]
        text = bytes(reply).decode()
        options: list[dict[str, Any]] = [
            {},
            {"stop_token_ids": (reply[5],)},
            {"stop": (text[9:11],)},
            {"min_tokens": 3, "stop": (text[12],)},
            {"stop_token_ids": (*range(400, 440), reply[7])},
            {"logprobs": 2},
        ]
        prompts.append(prompt(n))
        params.append(greedy(LENGTH - n, **options[n - 1]))
    right = run(plain, prompts, params)
    script_drafts(engine, follows(padded(truth), mixed), padded(truth))
    found = run(engine, prompts, params)
    for a, b in zip(found, right, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
    assert [r.finish_reason for r in found] == ["length", *["stop"] * 4, "length"]
    seen = engine._runner.loop
    assert isinstance(seen, SpecLoop) and seen.acceptance.mean_length > 2


def padded(truth: dict[int, list[int]]) -> dict[int, list[int]]:
    """A step that is queued at an end drafts past what is known."""
    return {n: [*whole, *[7] * 40] for n, whole in truth.items()}


@pytest.mark.parametrize("draft", DRAFTS)
def test_sampled_replies_do_not_depend_on_the_path(draft: str) -> None:
    """The draft's own laws, both temperatures in a batch, penalties, filters."""
    stops = tuple(range(0, 512, 3))
    params = [
        SamplingParams(temperature=1.7, top_k=3, seed=1, max_tokens=LENGTH),
        SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=9),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=LENGTH),
        SamplingParams(temperature=1.0, seed=4, presence_penalty=1.0, max_tokens=5),
        SamplingParams(seed=5, min_tokens=8, stop_token_ids=stops, max_tokens=LENGTH),
    ]
    prompts = [prompt(n) for n in range(1, 6)]
    waiting = make_engine(
        draft=DRAFTS[draft], break_even=0.0, strict=False, dtype="float64", max_num_reqs=4
    )
    right = run(waiting, prompts, params)
    found = run(ahead_engine(draft, max_num_reqs=4), prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in right]
    alone = run(ahead_engine(draft, max_num_reqs=1), prompts[:2], params[:2])
    assert [r.token_ids for r in alone] == [r.token_ids for r in right[:2]]


def kept(engine: Engine) -> list[Snapshot]:
    return sorted(engine._manager.snapshots, key=lambda s: s.token_ids)


def test_what_is_kept_after_an_end_is_exact(truth: dict[int, list[int]]) -> None:
    """At a stop id inside a block, at the limit, after a cancel, after a stop string that the host
    meets one step late: what a snapshot holds is what its ids leave when they are computed."""
    whole = truth[3]
    n = len(prompt(3))
    reply, text = whole[n:], bytes(whole[n:]).decode()
    ends = [
        greedy(LENGTH, stop_token_ids=(reply[3],)),
        greedy(11),
        greedy(LENGTH, stop=(text[4:6],)),
        greedy(LENGTH),
    ]
    for params in ends:
        engine = ahead_engine(readable=True)
        script_drafts(engine, follows(padded(truth), lambda place: 7), padded(truth))
        request = engine.submit_ids(prompt(3), params, None)
        while not request.done:
            engine.step()
            if params is ends[-1] and request.num_output > 8:
                engine.cancel(request)
        m = engine._manager
        longest = max(kept(engine), key=lambda s: len(s.token_ids))
        if not params.stop:
            assert len(longest.token_ids) == len(request.ids) - 1
        for s in kept(engine):
            fresh = make_engine(
                draft=DRAFTS["inferact"], strict=False, dtype="float64", readable=True
            )
            other = fresh.submit_ids([*s.token_ids, 65], greedy(1), None)
            fresh.run([other])
            same = next(x for x in fresh._manager.snapshots if x.token_ids == s.token_ids)
            check_close(s.state, same.state, 1e-11)
            check_close(s.conv_state, same.conv_state, 1e-11)
            for mine, theirs in zip(m._paged, fresh._manager._paged, strict=True):
                rows = [
                    torch.cat([t[:, e._manager.rows_of(b)] for b in x.blocks], 1)
                    for t, e, x in ((mine, engine, s), (theirs, fresh, same))
                ]
                count = len(s.token_ids)
                check_close(rows[0][:, :count], rows[1][:, :count], 1e-11)


def test_rejected_rows_may_be_anything(truth: dict[int, list[int]]) -> None:
    """Records, taps and logits of rows that do not stand are NaN before the commit."""
    engine = make_engine(
        draft=DRAFTS["inferact"], break_even=0.0, strict=False, readable=True, max_num_reqs=2
    )
    loop: Any = engine._runner.loop
    target = loop.target
    commit, poisoned = target.commit, []

    def poison(slots: torch.Tensor, counts: torch.Tensor) -> None:
        num_rows = target.records.log_decay.shape[2]
        for i, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            poisoned.append(num_rows - count)
            target.taps[i * num_rows + count : (i + 1) * num_rows] = float("nan")
            for t in vars(target.records).values():
                if isinstance(t, torch.Tensor):
                    t[:, slot, count:] = float("nan")
        commit(slots, counts)

    target.commit = poison
    as_on_a_gpu(engine)
    script_drafts(engine, follows(padded(truth), mixed), padded(truth))
    requests = [engine.submit_ids(prompt(n), greedy(LENGTH), None) for n in (1, 2)]
    engine.run(requests)
    assert sum(poisoned) > 20
    for r in requests:
        assert r.ids == truth[r.ids[0]]


def test_a_budget_is_of_older_confidences(truth: dict[int, list[int]]) -> None:
    """Costs with which a few drafts pay, then none: a step without rows for drafts still drafts, so
    that the budget can grow again."""
    engine = ahead_engine(readable=True, max_num_reqs=3, adaptive_drafts=True)
    loop: Any = engine._runner.loop
    budgets = []
    for per_row in (0.05, 10.0):
        rows = CostCurve.of([(1, 1.0), (25, 1.0 + 24 * per_row)], 0)
        loop._costs = Costs(rows, CostCurve.of([(1, 0.01)], 0))
        requests = [engine.submit_ids(prompt(n), greedy(LENGTH), None) for n in (1, 2, 3)]
        while any(not r.done for r in requests):
            engine.step()
            if loop.batch:
                budgets.append((per_row, int(loop.state.budget)))
                assert int(loop.state.lengths[: len(loop.batch)].sum()) <= budgets[-1][1]
        for r in requests:
            assert r.ids == truth[r.ids[0]]
        check_released(engine)
    assert {b for per_row, b in budgets if per_row == 10} == {0}
    assert max(b for per_row, b in budgets if per_row < 1) > 3


def test_a_rest_is_known_one_step_late(truth: dict[int, list[int]]) -> None:
    """Drafts that are never right: then steps have one row, and the reply is the same."""
    engine = ahead_engine(readable=True, break_even=1.5)
    script_drafts(engine, follows(padded(truth), lambda place: 0), padded(truth))
    loop: Any = engine._runner.loop
    request = engine.submit_ids(prompt(1), greedy(LENGTH), None)
    widths = []
    while not request.done:
        engine.step()
        widths += [queued.num_rows for queued in loop._queued]
    assert request.ids == truth[1]
    assert widths[:16] == [8] * 16 and set(widths[17:]) == {1}


def test_a_step_that_gave_up_ends_its_requests_and_the_next_ones_are_served(
    truth: dict[int, list[int]],
) -> None:
    engine = ahead_engine(readable=True, max_num_reqs=2)
    words, cleared = torch.zeros(1, dtype=torch.int64), []

    def clear() -> None:
        words.zero_()
        cleared.append(True)

    def failure(found: list[int], *others: int) -> str | None:
        return "a wait gave up" if found[0] else None

    old: Any = engine._runner.loop
    loop = SpecLoop(old._steps, True, Health(words, failure, clear))
    engine._runner.loop = engine._scheduler._loop = loop
    script_drafts(engine, follows(padded(truth), mixed), padded(truth))
    requests = [engine.submit_ids(prompt(n), greedy(LENGTH), None) for n in (1, 2)]
    while min(r.num_output for r in requests) < 3:
        engine.step()
    words.fill_(1)
    engine.run(requests)
    for r in requests:
        assert (r.finish_reason, r.error) == ("error", "a wait gave up")
        assert r.ids == truth[r.ids[0]][: len(r.ids)]
    assert cleared == [True]
    after = run(engine, [prompt(3)], [greedy(LENGTH)])
    assert prompt(3) + after[0].token_ids == truth[3]
