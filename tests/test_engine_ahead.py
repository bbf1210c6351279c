"""A step queued before the last one is read: the same replies, and caches that are exact.

A CPU does this only here; a GPU always does. Right answers come from the engine that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compare import check_equal
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
    steps,
    submit,
)
from test_engine_batching import mixed_jobs, sampled, solo_of_mixed

from nanok3.cache import Snapshot
from nanok3.engine import Engine
from nanok3.request import Request
from nanok3.sampling import SamplingParams

PROMPT = ids_of(6)


def ahead(**settings: Any) -> Engine:
    return make_engine(runs_ahead=True, **settings)


def caches_of(engine: Engine, snapshot: Snapshot) -> list[torch.Tensor]:
    latent = engine._manager.latent_of(snapshot.blocks)
    return [snapshot.state, snapshot.conv_state, latent[:, : len(snapshot.token_ids)]]


def check_same_snapshots(one: Engine, other: Engine) -> None:
    """The same ids are kept, and bit for bit the same caches of them."""
    pairs = zip(one._manager.snapshots, other._manager.snapshots, strict=True)
    for mine, right in pairs:
        assert mine.token_ids == right.token_ids
        found, expected = caches_of(one, mine), caches_of(other, right)
        for a, b in zip(found, expected, strict=True):
            check_equal(a, b)


# ---- the order of things ----


class Watched:
    """Writes down what a loop does, in order."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.num_copies = self.num_reads = 0
        loop = engine._runner.loop
        readback = loop._readback
        copy, read, compose = readback.copy, readback.read, loop.compose

        def watch_copy(place: int) -> None:
            self.num_copies += 1
            self.done.append(f"queue {self.num_copies}")
            copy(place)

        def watch_read(place: int) -> list[int]:
            self.num_reads += 1
            self.done.append(f"read {self.num_reads}")
            return read(place)

        def watch_compose(requests: Sequence[Request]) -> None:
            self.done.append(f"compose {len(requests)}")
            compose(requests)

        monkeypatch.setattr(readback, "copy", watch_copy)
        monkeypatch.setattr(readback, "read", watch_read)
        monkeypatch.setattr(loop, "compose", watch_compose)

    def take(self) -> list[str]:
        done, self.done = self.done, []
        return done


def test_a_step_is_queued_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead()
    watched = Watched(engine, monkeypatch)
    request = engine.submit(PROMPT, greedy(5))
    seen = []
    while not request.done:
        engine.step()
        seen.append(watched.take())
        assert request.num_output == max(0, len(seen) - 1)
    assert seen == [
        ["compose 1", "queue 1"],
        ["queue 2", "read 1"],
        ["queue 3", "read 2"],
        ["queue 4", "read 3"],
        ["queue 5", "read 4"],
        ["read 5"],  # the host knows that five are all it asked for
    ]
    check_released(engine)


def test_the_batch_is_written_anew_only_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead(prefill_chunk=64)
    watched = Watched(engine, monkeypatch)
    first = engine.submit(PROMPT, greedy(6))
    for _ in range(2):
        engine.step()
    second = engine.submit(ids_of(9, seed=1), greedy(2))
    watched.take()
    seen = []
    while not (first.done and second.done):
        engine.step()
        check_invariants(engine)
        seen.append(watched.take())
    assert seen == [
        ["read 2", "compose 2", "queue 3"],
        ["queue 4", "read 3"],
        ["read 4", "compose 1", "queue 5"],  # the second's last id is known to be queued
        ["queue 6", "read 5"],
        ["read 6"],
    ]


@pytest.mark.parametrize("need", ["logprobs", "gaps", "grammar"])
def test_who_needs_the_host_is_waited_for(monkeypatch: pytest.MonkeyPatch, need: str) -> None:
    """While it runs; then the others run ahead again."""
    engine = ahead(tokenizer=None)
    watched = Watched(engine, monkeypatch)
    params = greedy(2, logprobs=1 if need == "logprobs" else None)
    request, other = engine.submit(PROMPT, params), engine.submit(ids_of(3), greedy(5))
    if need == "gaps":
        request.gaps = []
    if need == "grammar":
        request.grammar = OnlyEven()  # type: ignore[assignment]
    engine.run([request, other])
    assert watched.take() == [
        *("compose 1", "queue 1", "read 1", "compose 2", "queue 2", "read 2"),
        *("compose 1", "queue 3", "queue 4", "read 3", "queue 5", "read 4"),
        *("queue 6", "read 5", "read 6"),
    ]
    right = solo(job(PROMPT, greedy(2)), tokenizer=None)[0].token_ids
    if need == "grammar":
        assert all(i % 2 == 0 for i in request.result().token_ids)
    else:
        assert request.result().token_ids == right


class OnlyEven:
    """A grammar of even ids."""

    warning = None

    def mask(self) -> torch.Tensor:
        return torch.arange(512) % 2 == 0

    def take(self, token: int) -> None:
        assert token % 2 == 0


# ---- the same replies ----


def test_interleaved_requests_equal_their_solo_runs() -> None:
    """Of every kind, log-probabilities, stop strings, penalties and stop ids among them."""
    expected = [solo_of_mixed(i) for i in range(16)]
    engine = ahead(max_num_reqs=5, num_blocks=130, prefill_chunk=7, num_snapshots=0)
    found = follow(engine, [submit(engine, j) for j in mixed_jobs()])
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, f"request {i}"
    check_released(engine)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.9, "frequency_penalty": 1}])
def test_replies_without_strict_mode(options: dict[str, Any]) -> None:
    """Rows share products, in other company than without running ahead; float64, so that no id
    hangs on a last bit."""
    jobs = [job(ids_of(n), sampled(n, 4 + n, **options)) for n in (1, 5, 11, 20)]
    results = []
    for runs_ahead in (False, True):
        engine = make_engine(
            runs_ahead=runs_ahead, strict=False, dtype="float64", max_num_reqs=3, prefill_chunk=4
        )
        results.append([r.token_ids for r, _ in follow(engine, [submit(engine, j) for j in jobs])])
        check_released(engine)
    assert results[0] == results[1]


def test_more_stop_ids_than_a_graph_has_room_for() -> None:
    jobs = [job(PROMPT, sampled(5, stop_token_ids=tuple(range(s, 512, 5)))) for s in (0, 1, 2)]
    expected = [solo(j) for j in jobs]
    assert {r.finish_reason for r, _ in expected} == {"stop"}
    engine = ahead(num_snapshots=0)
    assert follow(engine, [submit(engine, j) for j in jobs]) == expected
    check_released(engine)


# ---- exact caches after an end that the host learns of late ----


def ends() -> list[tuple[str, Job]]:
    free = solo(job(PROMPT, greedy(16)), readable=True)[0]
    stop, text = free.token_ids[6], free.text
    at = free.token_ids.index(stop) + 1
    assert len(text) == 16 and at > 1 and text.index(text[at - 2 : at]) == at - 2
    return [
        ("length", job(PROMPT, greedy(at))),
        ("stop id", job(PROMPT, greedy(16, stop_token_ids=(stop,)))),
        ("stop id at the limit", job(PROMPT, greedy(at, stop_token_ids=(stop,)))),
        ("stop string at the limit", job(PROMPT, greedy(at, stop=(text[at - 1],)))),
        ("stop string", job(PROMPT, greedy(16, stop=(text[at - 2 : at],)))),
    ]


@pytest.mark.parametrize("which", range(5))
def test_what_is_kept_of_a_reply_is_exact(which: int) -> None:
    """At a stop id and at the limit, what is kept without running ahead; at a stop string, which
    the device does not know, one id more, and that is right as well."""
    name, work = ends()[which]
    plain, engine = make_engine(readable=True), ahead(readable=True)
    results = []
    for e in (plain, engine):
        requests = [submit(e, work), submit(e, job(ids_of(9, seed=2), greedy(14)))]
        results.append(follow(e, requests))
    assert results[0] == results[1]
    reply = results[1][0][0]
    assert reply.finish_reason == ("length" if name == "length" else "stop")
    whole = [*PROMPT, *reply.token_ids]
    if name == "stop string":
        kept = [list(s.token_ids) for s in engine._manager.snapshots]
        assert whole in kept and whole[:-1] not in kept
        longer = make_engine(readable=True)  # keeps the same ids as a finished prompt
        longer.generate([*whole, 5], greedy(1))
        (mine,) = [s for s in engine._manager.snapshots if list(s.token_ids) == whole]
        (right,) = [s for s in longer._manager.snapshots if list(s.token_ids) == whole]
        pairs = zip(caches_of(engine, mine), caches_of(longer, right), strict=True)
        for found, expected in pairs:
            check_equal(found, expected)
    else:
        check_same_snapshots(engine, plain)
    params = SamplingParams(seed=1, max_tokens=5, logprobs=2)
    later = engine.generate([*whole, 5, 6], params)  # the conversation goes on
    assert later.usage.cached_tokens == len(whole) - (name != "stop string")
    expected_later = solo(job([*whole, 5, 6], params), readable=True)[0]
    assert later.token_ids == expected_later.token_ids
    assert later.logprobs == expected_later.logprobs  # bit for bit
    check_released(engine)


@pytest.mark.parametrize("strict", [True, False])
def test_a_row_that_ended_writes_only_trash(strict: bool) -> None:
    """Steps go on for its company; its slot and its blocks stay as they are."""
    stop = solo(job(PROMPT, greedy(16)))[0].token_ids[4]
    engine = ahead(debug=False, strict=strict)
    victim = engine.submit(PROMPT, greedy(16, stop_token_ids=(stop,)))
    other = engine.submit(PROMPT, greedy(40))
    engine.step()
    loop, cache = engine._runner.loop, engine._manager.cache
    while not (other.num_output and int(loop.state.step.positions[0]) < 0):
        engine.step()
        assert not victim.done, "the host should not know yet"
    slot, blocks = victim.slot, victim.blocks
    assert slot is not None

    def own() -> list[torch.Tensor]:
        pages = engine._manager.latent_of(blocks)
        return [cache.state[:, slot].clone(), cache.conv_state[:, slot].clone(), pages]

    before = own()
    for _ in range(3):
        loop._compute[2]()
        loop._draw_now()
    for found, expected in zip(own(), before, strict=True):
        check_equal(found, expected)
    assert int(loop.state.step.positions[1]) >= 0, "the other one goes on"


@pytest.mark.parametrize("strict", [True, False])
def test_what_lies_in_trash_reaches_nobody(strict: bool) -> None:
    """A row that has ended reads trash and writes it; those who go on never see it."""
    stop = solo(job(PROMPT, greedy(16)), strict=strict)[0].token_ids[3]
    jobs = [job(PROMPT, greedy(16, stop_token_ids=(stop,))), *mixed_jobs()[9:11]]
    expected = [solo(j, strict=True)[0] for j in jobs]
    for value in (float("nan"), 1e30):
        engine = ahead(debug=False, strict=strict, dtype="float32")
        cache = engine._manager.cache
        requests = [submit(engine, j) for j in jobs]
        while not all(r.done for r in requests):
            for tensor in (cache.state[:, 0], cache.conv_state[:, 0], cache.latent[:, :BLOCK]):
                tensor.fill_(value)
            engine.step()
        assert [r.result().token_ids for r in requests] == [r.token_ids for r in expected]


# ---- cancels and interruptions with a step in flight ----


def test_a_cancel_finds_the_caches_one_id_further() -> None:
    engine = ahead()
    jobs = [job(ids_of(n, seed=n), sampled(n, 14)) for n in (3, 6)]
    right = [solo(j)[0] for j in jobs]
    victim, other = (submit(engine, j) for j in jobs)
    for _ in range(6):
        engine.step()
    assert engine._runner.loop.num_queued == 1
    before = victim.num_output
    engine.cancel(victim)
    check_invariants(engine)
    assert victim.result().token_ids == right[0].token_ids[:before]
    assert engine._runner.loop.num_queued == 0 and not other.done
    engine.run([other])
    assert other.result() == right[1]
    again = engine.generate([*victim.ids, 9], greedy(5))
    assert again.usage.cached_tokens == len(victim.ids)
    assert again.token_ids == solo(job([*victim.ids, 9], greedy(5)))[0].token_ids
    check_released(engine)


@pytest.mark.parametrize("call", range(2, 9))
@pytest.mark.parametrize("what", ["copy", "read"])
def test_an_interrupted_wait_or_queue(
    monkeypatch: pytest.MonkeyPatch, what: str, call: int
) -> None:
    """Ctrl-C while the host waits costs nobody anything; while it queues, those in the step."""
    engine = ahead()
    readback = engine._runner.loop._readback
    original, calls = getattr(readback, what), 0

    def interrupted(place: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(place)

    monkeypatch.setattr(readback, what, interrupted)
    jobs = [job(ids_of(n, seed=n), sampled(n, 7)) for n in (2, 5)]
    right = [solo(j)[0] for j in jobs]
    requests = [submit(engine, j) for j in jobs]
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    engine.run(requests)  # comes back
    for request, expected in zip(requests, right, strict=True):
        result = request.result()
        if what == "read":
            assert result == expected
        elif result.finish_reason == "error":
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
    for j, expected in zip(jobs, right, strict=True):
        assert engine.generate(j.prompt, j.params).token_ids == expected.token_ids
    check_released(engine)


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_composition(
    monkeypatch: pytest.MonkeyPatch, call: int, after: bool
) -> None:
    """Nothing is queued on a batch that is half written."""
    engine = ahead()
    memory = engine._runner.loop._memory
    upload, calls = memory.upload, 0

    def interrupted() -> None:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise KeyboardInterrupt
        upload()
        if calls == call:
            raise KeyboardInterrupt

    monkeypatch.setattr(memory, "upload", interrupted)
    jobs = [job(ids_of(n, seed=n), sampled(n, 3 + n)) for n in (2, 5)]
    requests = [submit(engine, j) for j in jobs]
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    engine.run(requests)  # comes back
    assert [r.result() for r in requests] == [solo(j)[0] for j in jobs]
    check_released(engine)


def test_rows_that_are_not_finite_end_alone() -> None:
    """The id that was drawn before it is kept; the one after it is not drawn."""
    jobs = [job(ids_of(n, seed=n), sampled(n, 14)) for n in (3, 6, 9)]
    right = [solo(j)[0] for j in jobs]
    engine = ahead()
    requests = [submit(engine, j) for j in jobs]
    for _ in range(6):
        engine.step()
    victim = requests[1]
    assert victim.slot is not None
    engine._manager.cache.state[:, victim.slot] = float("nan")
    before = victim.num_output
    for _ in steps(engine, requests):
        pass
    assert victim.error == "the model's logits are not finite" and victim.num_output == before + 1
    for i in (0, 2):
        assert requests[i].result() == right[i]
    assert all(list(s.token_ids[:6]) != jobs[1].prompt for s in engine._manager.snapshots)
    assert engine.generate(jobs[1].prompt, jobs[1].params).token_ids == right[1].token_ids
    check_released(engine)


# ---- padding ----


@pytest.mark.parametrize("strict", [True, False])
def test_rows_of_padding_change_nothing(strict: bool) -> None:
    """As in a graph: steps of 4 rows, however few requests run."""
    jobs = mixed_jobs()[7:12]
    engine = ahead(strict=strict, dtype="float64", max_num_reqs=4, prefill_chunk=5)
    loop = engine._runner.loop
    loop._compute = {4: loop._compute[4]}
    found = follow(engine, [submit(engine, j) for j in jobs])
    right = [solo(j, dtype="float64")[0].token_ids for j in jobs]
    assert [result.token_ids for result, _ in found] == right
    check_released(engine)
