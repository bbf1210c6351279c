"""Company and cuts: a request's ids, text and logits are its own, whoever runs beside it."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from compare import check_close, check_equal
from engines import (
    BLOCK,
    Job,
    check_released,
    follow,
    greedy,
    ids_of,
    job,
    make_engine,
    solo,
    steps,
    submit,
)

from nanok3.engine import RequestError
from nanok3.reply import Event
from nanok3.request import Request, Result
from nanok3.sampling import SamplingParams

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "né 再见?"},
]


def sampled(seed: int, max_tokens: int = 12, **options: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


# ---- cuts of the prompt ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_strict_logits_have_the_same_bits_however_the_prompt_is_cut(dtype: str) -> None:
    ids = ids_of(3 * BLOCK + 1)
    whole = make_engine(dtype=dtype, prefill_chunk=64).logits(ids)
    assert whole.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    for chunk in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        check_equal(make_engine(dtype=dtype, prefill_chunk=chunk).logits(ids), whole, f"{chunk}")
    for length in (1, BLOCK, 2 * BLOCK + 1):  # a row does not know what follows it
        check_equal(make_engine(dtype=dtype).logits(ids[:length]), whole[:length])


def test_chunks_agree_with_single_rows() -> None:
    """The forms for many rows and for one row, in float64 where rounding cannot hide a fault."""
    ids = ids_of(80)
    right = make_engine(dtype="float64").logits(ids)
    for chunk in (2, BLOCK + 1, 63, 64, 65, 80):
        for size in (BLOCK, 16):
            engine = make_engine(
                dtype="float64", strict=False, prefill_chunk=chunk, block_size=size
            )
            check_close(engine.logits(ids), right, 1e-10, f"chunks of {chunk}")


@pytest.mark.parametrize("length", [1, 2, *range(2 * BLOCK - 1, 2 * BLOCK + 3)])
def test_strict_replies_do_not_depend_on_the_cut(length: int) -> None:
    work = job(ids_of(length), sampled(3, 10, logprobs=2))
    expected = solo(work, prefill_chunk=64)
    for chunk in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        assert solo(work, prefill_chunk=chunk) == expected


def test_other_modes_differ_only_where_two_ids_nearly_tie() -> None:
    """A first difference from strict mode needs a float64 gap of the two best logits below 1e-3."""
    prompts = [ids_of(length, seed=length) for length in (1, 5, 30, 64, 65, 90)]
    strict = [solo(job(p, greedy(24)))[0].token_ids for p in prompts]
    judge = make_engine(dtype="float64")
    differences = 0
    for chunk in (1, 7, 64):
        engine = make_engine(strict=False, prefill_chunk=chunk, max_num_reqs=4, num_snapshots=0)
        results = follow(engine, [engine.submit(p, greedy(24)) for p in prompts])
        for prompt, ids, (result, _) in zip(prompts, strict, results, strict=True):
            pairs = zip(ids, result.token_ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if at is None:
                assert len(ids) == len(result.token_ids)
                continue
            differences += 1
            best = judge.logits([*prompt, *ids[:at]])[-1].topk(2).values
            print(f"chunks of {chunk}: first difference at {at}, gap {best[0] - best[1]:.1e}")
            assert best[0] - best[1] < 1e-3
    print(f"{differences} of {3 * len(prompts)} replies differ from strict mode")


# ---- company ----


def mixed_jobs() -> list[Job]:
    """Sixteen requests of every kind."""
    return [
        job("hello", greedy(12)),
        job("hello", sampled(1)),
        job("hello", sampled(1, 30, top_k=5, stop=("a", "e"))),
        job("what is 2 + 2?", sampled(2, top_p=0.8), thinking=False),
        job("say é, 字 and 🙂", sampled(3, 20, min_p=0.05), thinking=False),
        job("call f", sampled(4), thinking=False),
        job(ids_of(3), sampled(4, 25, temperature=0.5, stop=("\ufffd",))),
        Job(TALK, sampled(5, logprobs=3), {"thinking_effort": None}),
        Job(TALK, sampled(6, frequency_penalty=1.5, min_tokens=6), {"thinking": False}),
        job(ids_of(1), sampled(7, 20)),
        job(ids_of(BLOCK), sampled(8, repetition_penalty=1.7)),
        job(ids_of(BLOCK + 1), sampled(8, presence_penalty=-1.0, logprobs=0)),
        job(ids_of(2 * BLOCK - 1), greedy(1)),
        job(ids_of(40), sampled(9, top_k=3, temperature=2.5)),
        job(ids_of(40), sampled(10, stop_token_ids=tuple(range(0, 512, 7)))),
        job(ids_of(41), greedy(16, logprobs=5)),
    ]


@cache
def solo_of_mixed(i: int) -> tuple[Result, list[Event]]:
    return solo(mixed_jobs()[i], prefill_chunk=64)


def test_sixteen_interleaved_requests_equal_their_solo_runs() -> None:
    jobs = mixed_jobs()
    expected = [solo_of_mixed(i) for i in range(16)]
    reasons = {result.finish_reason for result, _ in expected}
    assert reasons >= {"stop", "length"} and all(r.error is None for r, _ in expected)
    engine = make_engine(max_num_reqs=5, num_blocks=130, prefill_chunk=7, num_snapshots=0)
    found = follow(engine, [submit(engine, j) for j in jobs])
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one[0] == other[0], f"request {i}"
        assert one[1] == other[1], f"events of request {i}"
    check_released(engine)


def test_interleaved_streams_lose_no_event() -> None:
    """Each stream's loop moves the others on, even to their end."""
    jobs = mixed_jobs()[:6]
    expected = [[*events, result] for result, events in map(solo_of_mixed, range(6))]
    engine = make_engine(num_snapshots=0)
    streams = [engine.stream(j.prompt, j.params, **j.options) for j in jobs]
    found: list[list[object]] = [[] for _ in jobs]
    left = set(range(len(jobs)))
    chooser = random.Random(0)
    while left:
        i = chooser.choice(sorted(left))
        item = next(streams[i], None)
        if item is None:
            left.remove(i)
        else:
            found[i].append(item)
    assert found == expected
    check_released(engine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 3.0, "top_k": 4},
        {"top_p": 0.3},
        {"min_p": 0.4},
        {"repetition_penalty": 3.0, "frequency_penalty": -1.0, "presence_penalty": 1.0},
        {"min_tokens": 5},
        {"logprobs": 7},
    ],
)
def test_a_seeded_request_ignores_its_neighbours_options(options: dict[str, object]) -> None:
    """Pitfall D-01."""
    mine = job(ids_of(6), sampled(77))
    expected = solo(mine)
    engine = make_engine(num_snapshots=0)
    others = [job(ids_of(n), sampled(n, **options)) for n in (3, 9)]
    requests = [submit(engine, j) for j in (others[0], mine, others[1])]
    assert follow(engine, requests)[1] == expected


def test_an_unseeded_request_is_drawn_anew_and_a_seed_is_kept() -> None:
    params = SamplingParams(max_tokens=12)
    free = {tuple(solo(job(ids_of(4), params))[0].token_ids) for _ in range(4)}
    assert len(free) == 4
    seeds = {tuple(solo(job(ids_of(4), sampled(seed)))[0].token_ids) for seed in range(4)}
    assert len(seeds) == 4


# ---- admission ----


def test_more_requests_than_slots_and_blocks() -> None:
    jobs = [job(ids_of(n, seed=n), sampled(n, 6)) for n in (1, 3, 4, 5, 9, 2, 14, 7)]
    expected = [solo(j) for j in jobs]
    for reqs, blocks in ((1, 5), (8, 5), (8, 6), (3, 100)):  # 14 + 6 need all of 5 blocks
        for snapshots in (0, 3):
            engine = make_engine(
                max_num_reqs=reqs, num_blocks=blocks, num_snapshots=snapshots, prefill_chunk=3
            )
            assert follow(engine, [submit(engine, j) for j in jobs]) == expected
            check_released(engine)


def test_a_request_that_can_never_fit_is_refused_alone() -> None:
    """Pitfall E-11."""
    engine = make_engine(num_blocks=4, max_num_reqs=2)
    fitting = [engine.submit(ids_of(n), greedy(4)) for n in (3, 12)]
    with pytest.raises(RequestError, match="17 tokens, but there is room for 15"):
        engine.submit(ids_of(17), greedy(1))
    with pytest.raises(RequestError, match="16 tokens, but there is room for 15"):
        engine.submit(ids_of(16), greedy(1))
    fitting.append(engine.submit(ids_of(15), greedy(4)))  # room for one id of reply
    results = [result for result, _ in follow(engine, fitting)]
    assert [len(r.token_ids) for r in results] == [4, 4, 1]
    assert [r.finish_reason for r in results] == ["length"] * 3
    check_released(engine)


def test_requests_are_admitted_in_order_and_decoding_goes_on_during_a_long_prefill() -> None:
    engine = make_engine(max_num_reqs=3, prefill_chunk=2)
    short = engine.submit(ids_of(2), greedy(30))
    engine.step()
    long, later = engine.submit(ids_of(40), greedy(2)), engine.submit(ids_of(3), greedy(2))
    before, found = short.num_output, 1  # its first id stands in the short one's snapshot
    for _ in range(10):
        engine.step()
    assert short.num_output == before + 10
    assert long.num_cached == 20 + found and long.num_output == 0  # two a step, none skipped
    done: list[Request] = []
    for _ in steps(engine, [short, long, later]):
        done += [r for r in (short, long, later) if r.done and r not in done]
    assert done.index(long) < done.index(later)
    check_released(engine)


# ---- trash ----


@pytest.mark.parametrize("value", [float("nan"), 1e30, float("-inf")])
@pytest.mark.parametrize("strict", [True, False])
def test_trash_is_never_read_or_written(value: float, strict: bool) -> None:
    """Pitfall F-08."""
    jobs = [job(ids_of(n), sampled(n, 8)) for n in (1, 5, 11)]
    engines = [make_engine(debug=False, strict=strict, prefill_chunk=4) for _ in range(2)]
    clean, dirty = ([submit(e, j) for j in jobs] for e in engines)
    engines[0].run(clean)
    cache = engines[1]._manager.cache
    trash = (cache.state[:, 0], cache.conv_state[:, 0], cache.latent[:, :BLOCK])
    while not all(r.done for r in dirty):
        for tensor in trash:
            tensor.fill_(value)
        before = [tensor.clone() for tensor in trash]
        engines[1].step()
        for tensor, copy in zip(trash, before, strict=True):
            check_equal(tensor, copy)
    assert [r.result() for r in dirty] == [r.result() for r in clean]


@pytest.mark.parametrize("strict", [True, False])
def test_debug_mode_changes_nothing(strict: bool) -> None:
    jobs = mixed_jobs()[8:12]
    results = []
    for debug in (False, True):
        engine = make_engine(debug=debug, strict=strict, num_blocks=130)
        results.append(follow(engine, [submit(engine, j) for j in jobs]))
        check_released(engine)
    assert results[0] == results[1]


# ---- logits ----


def test_logits_while_others_run() -> None:
    ids = ids_of(9, seed=4)
    right = make_engine().logits(ids)
    jobs = [job(ids_of(n), sampled(n, 8)) for n in (3, 12)]
    expected = [solo(j) for j in jobs]
    engine = make_engine(max_num_reqs=2, num_blocks=9, prefill_chunk=2, num_snapshots=0)
    requests = [submit(engine, j) for j in jobs]
    check_equal(engine.logits(ids), right)  # nobody has been admitted yet
    engine.step()
    with pytest.raises(RequestError, match="no room"):  # both slots are taken
        engine.logits(ids)
    assert follow(engine, requests) == expected
    check_equal(engine.logits(ids), right)
    check_released(engine)
    engine = make_engine(max_num_reqs=3, prefill_chunk=2, num_snapshots=0)
    requests = [submit(engine, j) for j in jobs]
    for _ in range(5):
        engine.step()
        check_equal(engine.logits(ids), right)
    assert follow(engine, requests) == expected
    check_released(engine)


def test_logits_of_as_many_ids_as_there_is_room_for() -> None:
    engine = make_engine(num_blocks=3, num_snapshots=2)
    engine.generate(ids_of(5), greedy(2))  # leaves snapshots, which give way
    assert engine.logits(ids_of(12)).shape == (12, 512)
    with pytest.raises(RequestError, match="13 tokens, but there is room for 12"):
        engine.logits(ids_of(13))
    check_released(engine)
