"""What a reply says: where it stops and why, log-probabilities, counts, penalties, defaults."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engines import (
    EOS,
    check_released,
    follow,
    greedy,
    ids_of,
    job,
    make_engine,
    solo,
    submit,
)

from nanok3.config import EngineConfig, GenerationDefaults
from nanok3.engine import Engine
from nanok3.reply import ContentDelta
from nanok3.request import Result, Usage
from nanok3.sampling import SamplingParams

PROMPT = ids_of(6)


def generate(params: SamplingParams, **settings: Any) -> Result:
    return solo(job(PROMPT, params), **settings)[0]


# ---- where a reply ends ----


def test_a_stop_id_ends_the_reply_and_beats_the_limit() -> None:
    free = generate(greedy(12), readable=True)
    assert free.finish_reason == "length" and len(free.token_ids) == len(free.text) == 12
    for n in (1, 2, 6, 12):
        stop = free.token_ids[n - 1]
        first = free.token_ids.index(stop) + 1
        for limit in (first, 12):
            result = generate(greedy(limit, stop_token_ids=(stop,)), readable=True)
            assert result.finish_reason == "stop"
            assert result.token_ids == free.token_ids[:first]
            assert result.text == free.text[: first - 1]  # a stop id has no text


def test_a_stop_string_ends_the_reply_where_it_begins() -> None:
    free = generate(greedy(16), readable=True)
    for begin, end in ((0, 1), (3, 4), (2, 6), (9, 12), (12, 16)):
        stop = free.text[begin:end]
        first = free.text.index(stop)
        params = greedy(first + len(stop), stop=("never", stop))
        result, events = solo(job(PROMPT, params), readable=True)
        assert result.finish_reason == "stop", "a stop at the last allowed id is a stop"
        assert result.text == free.text[:first]
        assert result.token_ids == free.token_ids[: first + len(stop)]
        assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == result.text
        if len(stop) > 1:  # cut off within the stop string: what was held back comes out
            short = generate(greedy(first + len(stop) - 1, stop=(stop,)), readable=True)
            assert short.finish_reason == "length"
            assert short.text == free.text[: first + len(stop) - 1]


def test_the_models_own_ends_stop_it(tmp_path: Path) -> None:
    """[EOS], <|end_of_msg|> and what generation_config.json lists."""
    free = generate(greedy(6), readable=True)
    config = tiny.tiny_config(eos_token_id=free.token_ids[2])
    by_config = make_engine(config=config, readable=True).generate(PROMPT, greedy(6))
    assert by_config.token_ids == free.token_ids[:3] and by_config.finish_reason == "stop"
    listed = GenerationDefaults(eos_token_id=(511, free.token_ids[1]))
    by_list = make_engine(defaults=listed, readable=True).generate(PROMPT, greedy(6))
    assert by_list.token_ids == free.token_ids[:2] and by_list.finish_reason == "stop"


@pytest.mark.parametrize("low", [1, 3, 8])
def test_min_tokens_bans_every_end(low: int) -> None:
    free = generate(greedy(12))
    stops = (free.token_ids[0], 258)
    result = generate(greedy(12, min_tokens=low, stop_token_ids=stops))
    assert not {*result.token_ids[:low]} & {*stops, EOS} and len(result.token_ids) >= low
    assert generate(greedy(12, stop_token_ids=stops)).token_ids == free.token_ids[:1]


def test_the_end_of_the_context_is_a_length() -> None:
    config = tiny.tiny_config(max_position_embeddings=20)
    for settings, most in (
        ({"config": config}, 20),  # what the model has been made for
        ({"num_blocks": 3}, 12),  # what the cache holds
    ):
        for limit in (None, 100, most):
            engine = make_engine(readable=True, **settings)
            assert engine.max_context == most
            params = SamplingParams(temperature=0.0, max_tokens=limit)
            result = engine.generate(PROMPT, params)
            assert result.finish_reason == "length"
            assert result.usage == Usage(len(PROMPT), 0, most - len(PROMPT))
            check_released(engine)


# ---- numbers ----


@pytest.mark.parametrize("strict", [True, False])  # rows sampled alone, rows sampled together
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logprobs_are_those_of_the_logits(dtype: str, strict: bool) -> None:
    """Before temperature, penalties and filters, for whatever was drawn."""
    params = SamplingParams(
        seed=5, max_tokens=8, logprobs=3, temperature=2.0, top_k=40, frequency_penalty=1.0
    )
    engine = make_engine(dtype=dtype, strict=strict)
    limit = 1e-5 if strict else 1e-4  # products of several rows round otherwise
    others = [engine.submit(PROMPT, greedy(8, logprobs=n)) for n in (0, 700)]
    request = engine.submit(PROMPT, params)
    engine.run([request, *others])
    result = request.result()
    logits = engine.logits([*PROMPT, *result.token_ids])[len(PROMPT) - 1 : -1]
    right = torch.log_softmax(logits.double(), -1)
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids) == 8
    for token, entry, row in zip(result.token_ids, result.logprobs, right, strict=True):
        assert entry.token_id == token
        assert abs(entry.logprob - row[token]) < limit
        best = row.topk(3)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        for (_, value), expected in zip(entry.top, best.values, strict=True):
            assert abs(value - expected) < limit
    assert {len(e.top) for e in others[0].result().logprobs or ()} == {0}
    assert {len(e.top) for e in others[1].result().logprobs or ()} == {512}


def test_a_seeded_draw_belongs_to_its_place_in_the_sequence() -> None:
    """A prompt that holds the beginning of a reply goes on as that reply did."""
    params = SamplingParams(seed=8, max_tokens=10, temperature=1.5)
    whole = generate(params).token_ids
    for n in (1, 4, 9):
        rest = solo(job([*PROMPT, *whole[:n]], params))[0].token_ids
        assert rest[: 10 - n] == whole[n:]


def test_usage_counts_every_id() -> None:
    engine = make_engine()
    request = engine.submit("hi", greedy(5), thinking_effort=None)
    follow(engine, [request])
    result = request.result()
    assert result.usage == Usage(request.num_prompt, 0, len(result.token_ids))
    again = engine.generate("hi", greedy(5), thinking_effort=None)
    assert again.usage == Usage(request.num_prompt, request.num_prompt - 1, len(again.token_ids))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "presence_penalty": 0.5},
    ],
)
def test_penalties_reach_the_ids(options: dict[str, float]) -> None:
    """Against a plain loop over `logits`, beside a neighbour without penalties."""
    engine = make_engine(readable=True)
    alone = engine.generate(PROMPT, greedy(12, **options))
    neighbour = engine.submit(PROMPT, greedy(12))
    beside = engine.submit(PROMPT, greedy(12, **options))
    engine.run([neighbour, beside])
    repetition = options.get("repetition_penalty", 1.0)
    ids: list[int] = []
    for _ in range(12):
        row = engine.logits([*PROMPT, *ids])[-1].double()
        counts = Counter(ids)
        for token in {*PROMPT, *ids}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token, count in counts.items():
            row[token] -= options.get("frequency_penalty", 0.0) * count
            row[token] -= options.get("presence_penalty", 0.0)
        ids.append(int(row.argmax()))
    assert alone.token_ids == beside.result().token_ids == ids
    assert neighbour.result().token_ids != ids


# ---- defaults ----


def test_sampling_takes_options_then_the_checkpoint_then_its_own(tmp_path: Path) -> None:
    """Pitfall D-05."""
    path = tiny.make_checkpoint(tmp_path / "tiny", tiny.TINY, 0)
    assert Engine.load(path).sampling() == SamplingParams()
    proposed = {"temperature": 0.0, "top_p": 0.9, "top_k": 7, "eos_token_id": [5, 258]}
    (path / "generation_config.json").write_text(json.dumps(proposed))
    engine = Engine.load(path, settings=EngineConfig(strict=True, num_blocks=8))
    assert engine.sampling() == SamplingParams(temperature=0.0, top_p=0.9, top_k=7)
    chosen = engine.sampling(temperature=0.5, seed=3, max_tokens=4)
    assert chosen == SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=3, max_tokens=4)
    assert engine.sampling(top_k=0).top_k == 0
    # Without parameters a request has the checkpoint's, here greedy, and its ends.
    first, second = (engine.submit([1, 2, 3]) for _ in range(2))
    engine.run([first, second])
    assert first.ids == second.ids and first.params.temperature == 0
    assert {5, 257, 258} <= first.stop_ids
    with pytest.raises(TypeError, match="heat"):
        engine.sampling(heat=1)


def test_a_stream_is_its_result_in_pieces() -> None:
    engine = make_engine(readable=True)
    work = job("hello", greedy(12), thinking=False)
    *events, result = engine.stream(work.prompt, work.params, **work.options)
    assert isinstance(result, Result) and len(events) > 1
    assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == result.text
    request = submit(engine, work)
    assert follow(engine, [request])[0][0].token_ids == result.token_ids
