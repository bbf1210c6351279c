"""Decoding with drafts gives what decoding without them gives, in strict mode to the bit.

Drafts of a random model, drafts that are always wrong, always right, or right for a scripted number
of places; ends of every kind inside a block; penalties and log-probabilities; what is left in the
caches after every step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from compare import check_close, check_equal
from drafts import tiny_inferact, tiny_redhat
from engines import check_invariants, check_released, greedy, ids_of, make_engine
from scripted_drafts import follows, script_drafts
from torch import Tensor

from nanok3.engine import Engine
from nanok3.request import Request, Result
from nanok3.sampling import SamplingParams
from nanok3.spec.budget import Fallback
from nanok3.spec_loop import SpecLoop

LENGTH = 24
DRAFTS = {"inferact": tiny_inferact(), "redhat": tiny_redhat()}


def prompt(n: int) -> list[int]:
    return [n, *ids_of(2 + n % 5, seed=n)]


def spec_engine(draft: str = "inferact", **settings: Any) -> Engine:
    """Never stops drafting, unless told otherwise."""
    return make_engine(draft=DRAFTS[draft], **({"break_even": 0.0} | settings))


def loop_of(engine: Engine) -> SpecLoop:
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop)
    return loop


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Result]:
    requests = [engine.submit_ids(p, params, None) for p in prompts]
    while any(not r.done for r in requests):
        engine.step()
        check_invariants(engine)
    results = [r.result() for r in requests]
    check_released(engine)
    return results


@pytest.fixture(scope="module")
def truth() -> dict[int, list[int]]:
    """Prompts and their greedy replies, by first id."""
    prompts = [prompt(n) for n in range(1, 13)]
    results = run(make_engine(readable=True), prompts, greedy(LENGTH))
    return {p[0]: p + r.token_ids for p, r in zip(prompts, results, strict=True)}


SCRIPTS: dict[str, Any] = {
    "wrong": lambda place: 0,
    "right": lambda place: 7,
    "mixed": lambda place: (0, 7, 3, 1, 2, 5)[place % 6],
}


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["inferact", "redhat", *SCRIPTS])
def test_greedy_replies_are_those_without_drafts(
    k: int, kind: str, truth: dict[int, list[int]]
) -> None:
    engine = spec_engine(kind if kind in DRAFTS else "redhat", num_drafts=k, readable=True)
    if kind in SCRIPTS:
        script_drafts(engine, follows(truth, SCRIPTS[kind]))
    first = (k * 3 + len(kind)) % 9 + 1  # spread the prompts over the combinations
    prompts = [prompt(n) for n in range(first, first + 3)]
    for p, result in zip(prompts, run(engine, prompts, greedy(LENGTH)), strict=True):
        assert p + result.token_ids == truth[p[0]]
        assert result.finish_reason == "length"
    seen = loop_of(engine).acceptance
    assert seen.num_steps > 0
    if kind == "wrong":
        assert seen.mean_length == 1
    if kind == "right":
        assert seen.mean_length > 0.8 * (k + 1)


def test_the_best_draft_takes_the_fewest_steps(truth: dict[int, list[int]]) -> None:
    engine = spec_engine(readable=True)
    script_drafts(engine, follows(truth, SCRIPTS["right"]))
    request = engine.submit_ids(prompt(1), greedy(LENGTH), None)
    steps = 0
    while not request.done:
        engine.step()
        steps += 1
    assert steps == LENGTH / 8  # the prompt's in the first of them


# ---- caches ----


def cached(engine: Engine, request: Request) -> list[Tensor]:
    """States, windows, latent rows and draft rows of what a request has cached."""
    m, loop = engine._manager, loop_of(engine)
    places = torch.arange(request.num_cached)
    blocks = torch.tensor(request.blocks)
    slots = blocks[places // m.block_size] * m.block_size + places % m.block_size
    cache = m.cache
    assert request.slot is not None
    return [
        cache.state[:, request.slot],
        cache.conv_state[:, request.slot],
        cache.latent[:, slots],
        loop.drafter.cache[:, slots],
    ]


@pytest.mark.parametrize(
    ("strict", "dtype", "limit"),
    [(True, "float32", 0.0), (False, "float64", 1e-11)],
)
def test_caches_after_each_commit_are_those_of_a_fresh_prefill(
    strict: bool, dtype: str, limit: float
) -> None:
    settings: dict[str, Any] = {"strict": strict, "dtype": dtype, "readable": True}
    plain = run(make_engine(**settings), [prompt(4)], greedy(LENGTH))[0]
    whole = prompt(4) + plain.token_ids
    engine, fresh = spec_engine(**settings), spec_engine(**settings, num_snapshots=0)
    script_drafts(engine, follows({whole[0]: whole}, SCRIPTS["mixed"]))
    request = engine.submit_ids(prompt(4), greedy(LENGTH), None)
    commits = 0
    while True:
        engine.step()
        if request.done:
            break
        commits += 1
        assert request.num_pending == 1
        other = Request(request.ids, greedy(1), frozenset(), 1, None, None)
        other.slot, other.blocks, _ = fresh._manager.admit([], len(other.ids)) or (0, [], 0)
        while other.num_pending > 1:
            fresh._runner.prefill(other, min(other.num_pending - 1, 16), with_logits=False)
        for a, b in zip(cached(engine, request), cached(fresh, other), strict=True):
            assert a.isfinite().all()
            if limit:
                check_close(a, b, limit)
            else:
                check_equal(a, b)
        fresh._manager.release(other.slot, other.blocks)
    assert request.ids == whole and commits >= 4


def test_a_folded_state_is_close_to_the_sequential_one() -> None:
    settings: dict[str, Any] = {"dtype": "float32", "readable": True}
    whole = prompt(4) + run(make_engine(**settings), [prompt(4)], greedy(LENGTH))[0].token_ids
    states = []
    for strict in (True, False):
        engine = spec_engine(strict=strict, **settings)
        script_drafts(engine, follows({whole[0]: whole}, SCRIPTS["right"]))
        request = engine.submit_ids(prompt(4), greedy(LENGTH), None)
        engine.step()
        engine.step()
        assert request.num_output == 16 and request.slot is not None
        states.append(engine._manager.cache.state[:, request.slot].clone())
    # Inputs of the rows differ too, by what single precision does to their products.
    check_close(states[1], states[0], 1e-5)


# ---- ends inside a block ----


@pytest.mark.parametrize("strict", [True, False])
def test_a_reply_ends_at_every_place_of_a_block(strict: bool, truth: dict[int, list[int]]) -> None:
    """A stop id, a stop string and max_tokens at each place, all drafts right."""
    whole = truth[2]
    reply = whole[len(prompt(2)) :]
    text = bytes(reply).decode()
    for place in (0, 1, 4, 6, 7, 8):  # the first block is places 0 to 7
        limits = (place + 1, place + 2, LENGTH)
        wanted = [greedy(n, stop_token_ids=(reply[place],)) for n in limits]
        wanted += [greedy(n, stop=(text[place : place + 2],)) for n in limits]
        wanted += [greedy(place + 1), greedy(LENGTH, min_tokens=3, stop=(text[place],))]
        plain, spec = make_engine(readable=True), spec_engine(readable=True, strict=strict)
        script_drafts(spec, follows(truth, SCRIPTS["right"]))
        for params in wanted:
            right, found = (run(e, [prompt(2)], params)[0] for e in (plain, spec))
            usage = replace(found.usage, cached_tokens=right.usage.cached_tokens)
            assert replace(found, usage=usage) == right, params


def test_a_snapshot_at_an_end_inside_a_block_goes_on_as_without_drafts(
    truth: dict[int, list[int]],
) -> None:
    """What is kept of a reply that stopped at its third id holds no row past it."""
    whole = truth[3]
    n = len(prompt(3))
    stop = whole[n + 2]
    assert stop not in whole[n : n + 2]
    plain, spec = make_engine(readable=True), spec_engine(readable=True)
    script_drafts(spec, follows(truth, SCRIPTS["right"]))
    for engine in (plain, spec):
        engine.generate(prompt(3), greedy(LENGTH, stop_token_ids=(stop,)))
    again = [e.generate([*whole[: n + 3], 65, 66], greedy(6)) for e in (plain, spec)]
    assert again[0].token_ids == again[1].token_ids
    assert again[0].usage.cached_tokens == again[1].usage.cached_tokens > n


# ---- what single requests ask for ----

PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.2},
    {"repetition_penalty": 1.6},
    {"min_tokens": 9},
]


@pytest.mark.parametrize("options", PENALTIES, ids=[next(iter(o)) for o in PENALTIES])
def test_penalties_count_the_drafts_before_each_row(options: dict[str, Any]) -> None:
    params = greedy(LENGTH, stop_token_ids=(65,), **options)
    right = run(make_engine(readable=True), [prompt(5)], params)[0]
    whole = prompt(5) + right.token_ids
    padded = whole + [7] * 8
    for kind in ("right", "mixed"):
        engine = spec_engine(readable=True)
        script_drafts(engine, follows({whole[0]: padded}, SCRIPTS[kind]))
        assert run(engine, [prompt(5)], params)[0].token_ids == right.token_ids
    if "min_tokens" not in options:
        free = run(make_engine(readable=True), [prompt(5)], greedy(LENGTH))[0]
        assert free.token_ids != right.token_ids, "the penalty changes nothing here"


def test_logprobs_of_accepted_ids_are_the_targets(truth: dict[int, list[int]]) -> None:
    for strict in (True, False):
        results = []
        for engine in (make_engine(readable=True), spec_engine(readable=True, strict=strict)):
            if engine._runner._drafter is not None:
                script_drafts(engine, follows(truth, SCRIPTS["mixed"]))
            results.append(run(engine, [prompt(6)], greedy(LENGTH, logprobs=3))[0].logprobs)
        for right, found in zip(*results, strict=True):
            if strict:
                assert right == found
            assert [t for t, _ in right.top] == [t for t, _ in found.top]
            assert found.logprob == pytest.approx(right.logprob, abs=1e-4)


def test_a_batch_drafts_and_ends_raggedly(truth: dict[int, list[int]]) -> None:
    """Different numbers of drafts and of accepted ones side by side, some without any."""

    def right(place: int) -> int:
        return (3, 0, 7, 1)[place % 4]

    def script(ids: list[int], num_drafts: int) -> list[int]:
        return follows(truth, right)(ids, num_drafts)[: ids[0] % 4 * 3]

    for strict in (True, False):
        engine = spec_engine(readable=True, strict=strict, max_num_reqs=5)
        script_drafts(engine, script)
        prompts = [prompt(n) for n in range(1, 9)]
        lengths = [5 + 2 * n for n in range(8)]
        requests = [
            engine.submit_ids(p, greedy(n), None) for p, n in zip(prompts, lengths, strict=True)
        ]
        while any(not r.done for r in requests):
            engine.step()
            check_invariants_but_trash(engine)
        for p, n, r in zip(prompts, lengths, requests, strict=True):
            assert r.ids == truth[p[0]][: len(p) + n]


def check_invariants_but_trash(engine: Engine) -> None:
    """Rows past a request's own drafts write to trash."""
    engine._manager.cache.latent[:, : engine._manager.block_size] = float("nan")
    check_invariants(engine)


def test_an_error_ends_one_request_and_its_block(truth: dict[int, list[int]]) -> None:
    """Logits that are not finite past the rows that stand are nobody's; else they end it."""
    engine = spec_engine(readable=True, strict=False)
    script_drafts(engine, follows(truth, SCRIPTS["right"]))
    target: Any = loop_of(engine).target
    passed, calls = target.run, []

    def run_broken(step: Any) -> None:
        passed(step)
        calls.append(step)
        if len(calls) == 2:
            target.logits[3].fill_(float("nan"))

    target.run = run_broken
    requests = [engine.submit_ids(prompt(n), greedy(LENGTH), None) for n in (1, 2)]
    engine.run(requests)
    bad, good = (r.result() for r in requests)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    n = len(prompt(1))
    assert bad.token_ids == truth[1][n : n + len(bad.token_ids)] and len(bad.token_ids) >= 3
    assert prompt(2) + good.token_ids == truth[2]


# ---- when not to draft ----


def test_drafting_rests_where_it_does_not_pay_and_begins_again(
    truth: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanok3.spec_steps.Fallback", partial(Fallback, window=4, rest=6))
    engine = spec_engine(readable=True, strict=False, break_even=1.5)
    drafted: list[int] = []

    def script(ids: list[int], num_drafts: int) -> list[int]:
        drafted.append(len(ids))
        return follows(truth, SCRIPTS["wrong"])(ids, num_drafts)

    script_drafts(engine, script)
    request = engine.submit_ids(prompt(1), greedy(LENGTH), None)
    engine.run([request])
    assert request.ids == truth[1]
    places = [at - len(prompt(1)) for at in drafted]
    gaps = [b - a for a, b in pairwise(places)]
    assert gaps.count(7) >= 1 and gaps.count(1) >= 6, "four steps that draft, six that do not"


def test_no_drafts_is_plain_decoding() -> None:
    engine = spec_engine(num_drafts=0)
    assert engine._runner._drafter is None


def test_adaptive_drafts_change_no_greedy_reply(truth: dict[int, list[int]]) -> None:
    engine = spec_engine(readable=True, strict=False, adaptive_drafts=True, debug=False)
    prompts = [prompt(n) for n in range(1, 7)]
    requests = [engine.submit_ids(p, greedy(LENGTH), None) for p in prompts]
    engine.run(requests)
    for p, r in zip(prompts, requests, strict=True):
        assert r.ids == truth[p[0]]
    assert loop_of(engine)._costs is not None
