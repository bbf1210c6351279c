"""What goes wrong in one request stays in it: refusals, NaN, cancels, interruptions, bad text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from compare import check_equal
from engines import (
    BLOCK,
    EOS,
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

from nanok3 import decode as decode_module
from nanok3 import runner as runner_module
from nanok3.checkpoint import CheckpointError
from nanok3.config import ConfigError, EngineConfig
from nanok3.engine import Engine, RequestError
from nanok3.graph import Health, Readback
from nanok3.loop import PLACES
from nanok3.request import Request, Result
from nanok3.sampling import SamplingParams

JOBS = [job(ids_of(n, seed=n), SamplingParams(seed=n, max_tokens=14)) for n in (3, 6, 9)]


def expected_ids() -> list[list[int]]:
    return [solo(j)[0].token_ids for j in JOBS]


def start(engine: Engine, num_steps: int = 6) -> list[Request]:
    """The three jobs, all of them decoding."""
    requests = [submit(engine, j) for j in JOBS]
    for _ in range(num_steps):
        engine.step()
    assert all(r.num_output and not r.done for r in requests)
    return requests


# ---- refusals of requests ----


@pytest.mark.parametrize(
    "prompt, sentence",
    [
        ([], "no tokens"),
        ([512], "id 512 is outside the vocabulary of 512"),
        ([3, -1], "id -1 is outside"),
        (ids_of(256) * 4, "1024 tokens, but there is room for 799"),
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        (5, "must be text, a list of messages or of ids, not int"),
        (None, "not NoneType"),
        (b"abc", "not bytes"),
        (torch.tensor([1]), "not Tensor"),
        ({"role": "user", "content": "x"}, "not dict"),
        ([1, "a"], r"messages\[0\]"),
        ([1.5], r"messages\[0\]"),
        ([True], r"messages\[0\]"),
        (["hello"], r"messages\[0\]"),
        ([None], r"messages\[0\]"),
        ([{"role": "pirate", "content": "x"}], "pirate"),
        ([{"role": "user", "content": 7}], "content"),
        ([{"role": "user"}], "content"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt: Any, sentence: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=sentence):
        engine.generate(prompt, greedy(1))
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    "ids, sentence",
    [
        ([], "no tokens"),
        ([512], "id 512 is outside the vocabulary of 512"),
        ([3, -1], "id -1 is outside"),
        ([1, "a"], "id 'a' is outside"),
        (ids_of(256) * 4, "1024 tokens, but there is room for 800"),
    ],
)
def test_ids_without_logits_are_refused(ids: Any, sentence: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=sentence):
        engine.logits(ids)
    check_released(engine)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"thinking_effort": "medium"}, "thinking_effort must be"),
        ({"tools": 5}, "tools must be a list"),
        ({"tools": ["f"]}, r"tools\[0\] must be an object"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
def test_options_of_a_conversation_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        make_engine().generate("hi", greedy(1), **options)


def test_parameters_out_of_range_are_refused_all_at_once() -> None:
    engine = make_engine()
    bad = SamplingParams(temperature=-1.0, top_p=0.0, max_tokens=0)
    with pytest.raises(RequestError, match=r"temperature must be .*; top_p must be .*; max_tokens"):
        engine.generate([1], bad)
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens"):
        engine.generate([1], SamplingParams(min_tokens=5, max_tokens=4))


def test_without_a_tokenizer_only_ids_are_served() -> None:
    engine = make_engine(tokenizer=None)
    assert engine.generate([1, 2], greedy(3)).text == ""
    for prompt in ("hi", [{"role": "user", "content": "hi"}]):
        with pytest.raises(RequestError, match=r"no tiktoken.model; give ids"):
            engine.generate(prompt)
    with pytest.raises(RequestError, match=r"no tiktoken.model; stop strings"):
        engine.generate([1, 2], greedy(3, stop=("a",)))


# ---- refusals of checkpoints ----


def edit(path: Path, name: str, **changes: Any) -> None:
    raw = json.loads((path / name).read_text())
    raw["text_config"] |= changes
    (path / name).write_text(json.dumps(raw))


def test_load_refuses_before_it_reads(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        Engine.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        Engine.load(tmp_path)
    path = tiny.make_checkpoint(tmp_path / "tiny", tiny.TINY, 0)
    for dtype in ("float16", "int8", "bf16"):
        with pytest.raises(ValueError, match=f"dtype: expected .* found '{dtype}'"):
            Engine.load(path, dtype=dtype)
    with pytest.raises(ValueError, match=r"device: expected .*'tpu'"):
        Engine.load(path, device="tpu")
    with pytest.raises(ValueError, match=r"max_num_reqs.*\n.*prefill_chunk"):
        Engine.load(path, settings=EngineConfig(max_num_reqs=0, prefill_chunk=0))
    ranks = (path / "tiktoken.model").read_text()
    (path / "tiktoken.model").write_text(ranks + "YWI= 256\n")
    with pytest.raises(ValueError, match=r"513 ids .* vocab_size of 512"):
        Engine.load(path)
    (path / "tiktoken.model").write_text(ranks)
    (path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature"):
        Engine.load(path)
    (path / "generation_config.json").unlink()
    edit(path, "config.json", kv_lora_rank=64)
    with pytest.raises(CheckpointError, match="kv_a_layernorm"):
        Engine.load(path)
    edit(path, "config.json", kv_lora_rank=32)
    assert Engine.load(path).generate([1], greedy(1)).token_ids


def test_a_loaded_checkpoint_computes_what_its_weights_in_memory_do(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path / "tiny", tiny.TINY, 5)
    seen: list[tuple[int, int]] = []
    loaded = Engine.load(
        path,
        settings=EngineConfig(strict=True, block_size=BLOCK),
        progress=lambda done, total: seen.append((done, total)),
    )
    check_equal(loaded.logits(ids_of(9)), make_engine().logits(ids_of(9)))
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)


# ---- values that are not finite ----


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("place", ["state", "conv_state", "latent"])
def test_a_poisoned_request_ends_alone(place: str, debug: bool, strict: bool) -> None:
    plain = make_engine(strict=strict, debug=debug)
    right = follow(plain, start(plain))
    engine = make_engine(strict=strict, debug=debug)
    requests = start(engine)
    victim = requests[1]
    slot, blocks = victim.slot, victim.blocks
    assert slot is not None
    cache = engine._manager.cache
    if place == "latent":
        cache.latent[:, blocks[0] * BLOCK] = float("nan")
    else:
        getattr(cache, place)[:, slot] = float("inf") if place == "state" else float("nan")
    before = len(victim.ids)
    results = follow(engine, requests)
    bad = results[1][0]
    assert bad.finish_reason == "error" and bad.error == "the model's logits are not finite"
    assert len(victim.ids) == before, "no id is made of a row without a distribution"
    for i in (0, 2):
        assert results[i][0] == right[i][0]
    prompt = JOBS[1].prompt
    assert all(list(s.token_ids[:6]) != prompt[:6] for s in engine._manager.snapshots)
    # The slot and the blocks serve the next request as if nothing had been.
    again = engine.generate(prompt, JOBS[1].params)
    assert again.usage.cached_tokens == 0 and again.token_ids == right[1][0].token_ids
    check_released(engine)


def test_a_row_of_minus_infinity_is_no_distribution_either(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    forward = runner_module.model.forward

    def broken(config: Any, w: Any, cache: Any, step: Any, buf: Any, *others: Any) -> None:
        forward(config, w, cache, step, buf, *others)
        if len(buf.logits) and int(step.input_ids[0]) == 77:
            buf.logits[0, 5] = float("-inf")

    monkeypatch.setattr(runner_module.model, "forward", broken)
    bad, good = engine.submit([1, 77], greedy(4)), engine.submit([1, 78], greedy(4))
    engine.run([bad, good])
    assert (bad.result().finish_reason, good.result().finish_reason) == ("error", "length")


def test_nan_in_a_prompt_leaves_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is bad before the first row of logits tells."""
    engine = make_engine()
    embed = engine._runner.weights.embed.table.clone()
    engine._runner.weights.embed.table[300] = float("nan")
    try:
        requests = [engine.submit(p, greedy(3)) for p in ([1, 2, 300, 4, 5], [1, 2, 3, 4, 5])]
        results = [result for result, _ in follow(engine, requests)]
    finally:
        engine._runner.weights.embed.table.copy_(embed)
    assert [r.finish_reason for r in results] == ["error", "length"]
    assert results[0].token_ids == []
    assert all(300 not in s.token_ids for s in engine._manager.snapshots)
    result = engine.generate([1, 2, 300, 4, 5], greedy(3))
    assert result.token_ids == solo(job([1, 2, 300, 4, 5], greedy(3)))[0].token_ids
    check_released(engine)


def test_a_bad_snapshot_fails_once() -> None:
    """Who goes on from it ends with an error, and it is gone."""
    engine = make_engine()
    right = engine.generate(ids_of(9), greedy(3)).token_ids
    for snapshot in engine._manager.snapshots:
        snapshot.state.fill_(float("nan"))
    assert engine.generate(ids_of(9), greedy(3)).finish_reason == "error"
    assert engine.generate(ids_of(9), greedy(3)).token_ids == right
    check_released(engine)


def test_a_ban_of_every_id_is_an_error_of_that_request() -> None:
    engine = make_engine()
    everything = SamplingParams(
        seed=1, max_tokens=4, min_tokens=2, stop_token_ids=tuple(range(512))
    )
    results = follow(engine, [engine.submit([1], everything), engine.submit([1], greedy(4))])
    assert results[0][0].error == "min_tokens and the stop ids leave no id to draw"
    assert len(results[1][0].token_ids) == 4
    check_released(engine)


# ---- cancels and interruptions ----


def test_cancel_while_waiting_in_prefill_and_in_decode() -> None:
    right = expected_ids()
    engine = make_engine(max_num_reqs=2, prefill_chunk=2)
    requests = [submit(engine, j) for j in (JOBS[0], JOBS[1], JOBS[2])]
    waiting = requests[2]
    engine.step()
    engine.step()
    prefill = requests[1]
    assert waiting.slot is None and prefill.num_pending > 1
    engine.cancel(waiting)
    engine.cancel(prefill)
    check_invariants(engine)
    for request in (waiting, prefill):
        result = request.result()
        assert (result.finish_reason, result.token_ids) == ("cancelled", [])
        engine.cancel(request)  # once more changes nothing
    # Half a prompt, which no row of logits has vouched for, is not kept.
    assert all(
        list(s.token_ids) != prefill.ids[: len(s.token_ids)] for s in engine._manager.snapshots
    )
    again = submit(engine, JOBS[1])
    for _ in range(5):
        engine.step()
    running = requests[0]
    assert running.num_output and not running.done
    engine.cancel(running)
    result = running.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == right[0][: len(result.token_ids)] != []
    engine.run([again])
    assert again.result().token_ids == right[1]
    # What was cancelled in decode is kept, and is right.
    go_on = [*running.ids, 9]
    resumed = engine.generate(go_on, greedy(4))
    assert resumed.usage.cached_tokens == len(running.ids) - 1
    assert resumed.token_ids == solo(job(go_on, greedy(4)))[0].token_ids
    check_released(engine)


def test_leaving_a_stream_early_cancels() -> None:
    engine = make_engine(readable=True)
    stream = engine.stream(ids_of(5), greedy(20))
    events = [next(stream), next(stream)]
    assert engine.num_unfinished == 1
    stream.close()
    assert engine.num_unfinished == 0 and len(events) == 2
    for _ in engine.stream(ids_of(5), greedy(20)):
        break
    assert engine.num_unfinished == 0
    engine.stream(ids_of(5), greedy(20))  # never started: nothing was submitted
    assert engine.num_unfinished == 0
    check_released(engine)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("call", [1, 3, 9, 12, 13])  # in the prefill, in the decode of either
def test_an_interrupted_step_leaves_no_half_step_behind(
    monkeypatch: pytest.MonkeyPatch, when: str, call: int, runs_ahead: bool
) -> None:
    """Ctrl-C falls anywhere in a forward: some layers have moved on, some have not, and nobody may
    go on from there."""
    engine = make_engine(prefill_chunk=3, runs_ahead=runs_ahead)
    forward, layer = runner_module.model.forward, runner_module.model.mla_layer
    calls = 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            raise KeyboardInterrupt
        forward(*args)
        if calls == call and when == "after":
            raise KeyboardInterrupt

    def half(*args: Any) -> None:
        if calls == call and when == "half":
            raise KeyboardInterrupt
        layer(*args)

    monkeypatch.setattr(runner_module.model, "forward", interrupted)
    monkeypatch.setattr(runner_module.model, "mla_layer", half)
    other = engine.submit(ids_of(2, seed=3), greedy(20))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(ids_of(7), greedy(6))
    assert engine.num_unfinished == 1  # the one that was generated is gone
    kept = [[*s.token_ids, 9] for s in engine._manager.snapshots]
    for prompt in reversed(kept):  # before others push the newest out
        result = engine.generate(prompt, greedy(6))
        assert result.token_ids == solo(job(prompt, greedy(6)))[0].token_ids
    engine.run([other])
    torn = other.result()
    whole = solo(job(ids_of(2, seed=3), greedy(20)))[0]
    if torn.finish_reason == "error":  # it was in that step
        assert torn.error == "the step that this request was in was interrupted"
        assert torn.token_ids == whole.token_ids[: len(torn.token_ids)]
    else:
        assert torn.token_ids == whole.token_ids
    for prompt in (ids_of(7), ids_of(2, seed=3)):
        result = engine.generate(prompt, greedy(6))
        assert result.token_ids == solo(job(prompt, greedy(6)))[0].token_ids
    check_released(engine)


def test_an_interruption_between_the_row_and_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    sample, calls = decode_module.sample, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return sample(*args)

    monkeypatch.setattr(decode_module, "sample", interrupted)
    request = engine.submit(ids_of(3), greedy(6))
    with pytest.raises(KeyboardInterrupt):
        engine.run([request])
    engine.run([request])  # comes back
    assert request.result().finish_reason == "error" and request.num_output == 2
    check_released(engine)


# ---- text ----


@pytest.mark.parametrize("in_finish", [False, True])
def test_a_failure_in_one_requests_text_ends_that_one(in_finish: bool) -> None:
    right = [solo(j) for j in JOBS]
    engine = make_engine()
    requests = [submit(engine, j) for j in JOBS]
    parser: Any = requests[1]._parser
    push, count = parser.push, 0

    def broken(token: int) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise UnicodeError("bad text")
        return push(token)

    def fail() -> Any:
        raise UnicodeError("bad end")

    if in_finish:
        parser.finish = fail
    else:
        parser.push = broken
    results = follow(engine, requests)
    assert results[0] == right[0] and results[2] == right[2]
    bad: Result = results[1][0]
    assert bad.finish_reason == "error"
    assert bad.error == ("UnicodeError: bad end" if in_finish else "UnicodeError: bad text")
    assert bad.token_ids == right[1][0].token_ids[: len(bad.token_ids)]
    assert EOS not in bad.token_ids[:-1]
    check_released(engine)


# ---- kernels that gave up ----


def watch(engine: Engine) -> torch.Tensor:
    """Words that stand for what a device's kernels leave: a step fails while one is not zero."""
    words = torch.zeros(2, dtype=torch.int32)

    def failure(found: list[int]) -> str | None:
        return "gave up in a step" if found[1] else None

    def clear() -> None:
        assert engine._runner.loop.num_queued == 0
        words.zero_()

    loop = engine._runner.loop
    loop._health, loop._words = Health(words, failure, clear), Readback(words, PLACES)
    return words


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_gave_up_ends_its_requests_and_no_others(runs_ahead: bool) -> None:
    engine = make_engine(runs_ahead=runs_ahead, max_num_reqs=4)
    words, expected = watch(engine), expected_ids()
    running = start(engine)
    long = job(ids_of(90, seed=1), greedy(4))  # it is still prefilled when the step fails
    waiting = [submit(engine, long), submit(engine, JOBS[0])]
    engine.step()
    words[1] = 1  # of the next step that is queued, and all later ones
    while not all(r.done for r in running):
        engine.step()
    for request, right in zip(running, expected, strict=True):
        result = request.result()
        assert result.finish_reason == "error" and result.error == "gave up in a step"
        assert result.token_ids and result.token_ids == right[: len(result.token_ids)]
    assert words.tolist() == [0, 0] and not waiting[0].done
    check_invariants(engine)
    again = [submit(engine, j) for j in JOBS]
    follow(engine, [*waiting, *again])
    assert waiting[0].result().token_ids == solo(long)[0].token_ids
    assert waiting[1].result().token_ids == expected[0]
    assert [r.result().token_ids for r in again] == expected
    check_released(engine)
