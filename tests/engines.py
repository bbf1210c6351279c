"""Engines over the tiny K3 for the engine's tests, and what must hold of one between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from drafts import draft_weights
from tiny import TINY, tiny_weights

from nanok3.cache import TRASH
from nanok3.config import EngineConfig, GenerationDefaults, ModelConfig
from nanok3.engine import Engine
from nanok3.reply import Event
from nanok3.request import Request, Result
from nanok3.runner import DTYPES
from nanok3.sampling import SamplingParams
from nanok3.spec.config import draft_config
from nanok3.spec_loop import SpecLoop
from nanok3.tokenizer import Tokenizer
from nanok3.weights import Weights

BLOCK = 4
EOS, END_OF_MSG = 257, 258
TOKENIZER = Tokenizer([bytes([i]) for i in range(256)])
PRINTABLE = range(32, 127)


@cache
def weights_of(config: ModelConfig, dtype: str, readable: bool) -> Weights:
    weights = tiny_weights(config, 5, DTYPES[dtype])
    if readable:  # greedy replies are ASCII letters and signs, never a special token
        others = [i for i in range(config.vocab_size) if i not in PRINTABLE]
        weights.lm_head[others] = 0
    return weights


def make_engine(
    *,
    config: ModelConfig = TINY,
    readable: bool = False,
    defaults: GenerationDefaults | None = None,
    tokenizer: Tokenizer | None = TOKENIZER,
    runs_ahead: bool = False,
    draft: dict[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """Strict, in debug mode, with room for many requests, unless told otherwise.

    runs_ahead: queue a step before the last one is read, as on a GPU. draft: config.json of a
    draft, which gets random weights.
    """
    chosen = EngineConfig(
        **(
            {"strict": True, "debug": True, "block_size": BLOCK, "num_blocks": 200}
            | {"prefill_chunk": 16}
            | settings
        )
    )
    assert not chosen.problems(config)
    weights = weights_of(config, chosen.dtype, readable)
    drafts = None
    if draft is not None:
        c = draft_config(draft)
        assert not c.problems(config)
        drafts = c, draft_weights(c, 11, weights, DTYPES[chosen.dtype])
    engine = Engine(config, weights, tokenizer, chosen, defaults or GenerationDefaults(), drafts)
    engine._runner.loop.runs_ahead = runs_ahead
    return engine


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def ids_of(length: int, seed: int = 0) -> list[int]:
    """Ids of bytes, the same for every length up to their number."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (512,), generator=generator)[:length].tolist()


def check_invariants(engine: Engine) -> None:
    """Owners are as the pools say; a running request has room for what it has cached; in debug mode
    nothing was written where nobody is."""
    m = engine._manager
    running = engine._scheduler.running
    assert all(r.slot is not None and not r.done for r in running)
    m.audit([(r.slot or TRASH, r.blocks) for r in running])
    for r in running:
        assert 0 <= r.num_cached < len(r.ids) <= r.num_prompt + r.max_tokens
        assert len(r.blocks) * m.block_size >= r.num_prompt + r.max_tokens
    assert all(r.slot is None and not r.blocks and not r.done for r in engine._scheduler.waiting)
    assert len(m.snapshots) <= m.max_snapshots
    for s in m.snapshots:
        assert len(s.blocks) == m.blocks_for(len(s.token_ids))
    if engine.settings.debug:
        slots = {r.slot for r in running}
        # Trash is nobody's, but a row that has ended on the device, or is past a request's drafts,
        # writes there.
        loop = engine._runner.loop
        first = TRASH + (loop.runs_ahead or isinstance(loop, SpecLoop))
        free = [slot for slot in range(first, m.slots.size + 1) if slot not in slots]
        assert m.cache.state[:, free].isnan().all() and m.cache.conv_state[:, free].isnan().all()
        held = {b for r in running for b in r.blocks} | {b for s in m.snapshots for b in s.blocks}
        pages = m.cache.latent.unflatten(1, (-1, m.block_size))
        unheld = [block for block in range(first, m.blocks.size + 1) if block not in held]
        assert pages[:, unheld].isnan().all()


def check_released(engine: Engine) -> None:
    """Nobody runs: all that is held is a snapshot's, and without the snapshots all is free."""
    assert engine.num_unfinished == 0
    check_invariants(engine)
    m = engine._manager
    assert m.slots.num_free == m.slots.size
    for snapshot in list(m.snapshots):
        m.drop(snapshot)
    check_invariants(engine)
    assert m.blocks.num_free == m.blocks.size


@dataclass(frozen=True)
class Job:
    """A prompt and what is asked of it."""

    prompt: Any
    params: SamplingParams
    options: dict[str, Any]


def job(prompt: Any, params: SamplingParams, **options: Any) -> Job:
    if isinstance(prompt, str):
        options = {"thinking_effort": None} | options  # the effort's text is long
    return Job(prompt, params, options)


def submit(engine: Engine, job: Job) -> Request:
    return engine.submit(job.prompt, job.params, **job.options)


def solo(job: Job, **settings: Any) -> tuple[Result, list[Event]]:
    """The job alone in an engine of its own, and its events."""
    engine = make_engine(**{"num_snapshots": 0} | settings)
    return follow(engine, [submit(engine, job)])[0]


def follow(engine: Engine, requests: Sequence[Request]) -> list[tuple[Result, list[Event]]]:
    """Steps until all are done, with the invariants after each -> results and events."""
    events: list[list[Event]] = [[] for _ in requests]
    for _ in steps(engine, requests):
        for request, mine in zip(requests, events, strict=True):
            mine += request.take_events()
    return [(r.result(), mine) for r, mine in zip(requests, events, strict=True)]


def steps(engine: Engine, requests: Sequence[Request]) -> Iterator[int]:
    """One number a step until all are done."""
    number = 0
    while not all(r.done for r in requests):
        engine.step()
        check_invariants(engine)
        number += 1
        assert number < 10_000, "no progress"
        yield number


def count_ends(monkeypatch: pytest.MonkeyPatch) -> dict[Request, int]:
    """How often each request goes from running to done."""
    ends: dict[Request, int] = {}
    finish = Request.finish

    def counted(self: Request, reason: str, error: str | None = None) -> None:
        was_done = self.done
        finish(self, reason, error)
        ends[self] = ends.get(self, 0) + (not was_done)

    monkeypatch.setattr(Request, "finish", counted)
    return ends
