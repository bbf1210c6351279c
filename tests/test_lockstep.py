"""Engines in step, as threads: followers do what rank 0 is asked to do, or all of them end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from compare import check_close, check_equal
from engines import TOKENIZER, greedy, ids_of
from tiny import random_fields, tiny_config

from nanok3.comm.exchange import Exchange, PeerLost, create_memory, map_memory
from nanok3.comm.host import Host, Place, host_store
from nanok3.config import EngineConfig, GenerationDefaults, Shard
from nanok3.engine import Engine, RequestError
from nanok3.lockstep import Leader, _obey, uninterrupted
from nanok3.request import Request
from nanok3.sampling import SamplingParams
from nanok3.weight_table import Filler, to_checkpoint
from nanok3.weights import build

CONFIG = tiny_config(num_heads=4, num_attention_heads=4, moe_intermediate_size=128)
SETTINGS = EngineConfig(dtype="float64", debug=True, block_size=4, num_blocks=100, prefill_chunk=64)


def one_engine(shard: Shard, exchange: Exchange | None) -> Engine:
    filler = Filler(CONFIG, torch.float64, "cpu", shard)
    for name, tensor in to_checkpoint(CONFIG, random_fields(CONFIG, 5)):
        filler.take(name, tensor)
    weights = build(CONFIG, filler.finish().__getitem__, shard)
    return Engine(CONFIG, weights, TOKENIZER, SETTINGS, GenerationDefaults(), None, shard, exchange)


@contextmanager
def in_step(path: Path, size: int = 2) -> Iterator[tuple[list[Engine], list[Future[None]]]]:
    """Rank 0 leads from this thread, the others follow in theirs."""
    store = host_store()
    create_memory(path / "exchange", size)

    def join(rank: int) -> Host:
        place = Place(rank, size, rank, size, "127.0.0.1", store.port, rank == 0)
        return Host(place, store=store if rank == 0 else None, deadline_s=5)

    def engine_of(rank: int) -> Engine:
        memory = map_memory(path / "exchange", size)
        exchange = Exchange(memory, rank, deadline_s=5, check_peers=hosts[rank].check)
        return one_engine(Shard(rank, size), exchange)

    with ThreadPoolExecutor(size) as pool:
        hosts = list(pool.map(join, range(size)))
        engines = list(pool.map(engine_of, range(size)))
        followers = [pool.submit(_obey, hosts[r], engines[r]._moves()) for r in range(1, size)]
        leader = engines[0]._leader = Leader(hosts[0])
        try:
            yield engines, followers
        finally:
            leader.end()


def caches_of(engine: Engine) -> list[object]:
    m = engine._manager
    return [m.slots._free, m.blocks._free, [(s.token_ids, s.blocks) for s in m.snapshots]]


def busy_life(engine: Engine) -> list[Request]:
    """Requests that come and go: shared prefixes, stop strings, cancels before and in a step,
    seeds, log-probabilities, a grammar, and more of them than run at once."""
    free = engine.submit(ids_of(30), greedy(6))
    others = [engine.submit(ids_of(20 + i, i % 3), greedy(4 + i, logprobs=2)) for i in range(4)]
    early = engine.submit(ids_of(9), greedy(9))
    engine.cancel(early)
    engine.step()
    engine.step()
    engine.cancel(others[1])
    engine.run([free])
    text = bytes(t for t in free.ids[30:33] if t < 256).decode("latin-1")
    stop = engine.submit(ids_of(30), greedy(6, stop=(text,)) if text else greedy(6))
    seeded = engine.submit([*free.ids, 7], SamplingParams(seed=3, max_tokens=7, min_tokens=7))
    json_only = engine.submit(
        "x",
        SamplingParams(seed=1, max_tokens=12),
        thinking=False,
        thinking_effort=None,
        response_format={"type": "json_object"},
    )
    json_only.gaps = []
    alike = [engine.submit([*ids_of(25, 7), 300 + i, *ids_of(9, i)], greedy(3)) for i in range(4)]
    requests = [free, *others, early, stop, seeded, json_only, *alike]
    engine.run(requests)
    assert [r.num_reused for r in alike] == [0, 24, 24, 24]  # different prompts, one beginning
    return requests


def test_followers_do_what_rank_0_does(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    alone = one_engine(Shard(0, 1), None)
    right = busy_life(alone)
    with in_step(tmp_path) as (engines, followers):
        got = busy_life(engines[0])
        for one, many in zip(right, got, strict=True):
            assert one.result().token_ids == many.result().token_ids
            assert one.result().text == many.result().text
            assert one.finish_reason == many.finish_reason
            assert one.num_reused == many.num_reused
        leader = engines[0]._leader
        assert leader is not None and leader.end()
        assert [f.result(20) for f in followers] == [None]
        assert caches_of(engines[0]) == caches_of(engines[1]) == caches_of(alone)
        check_equal(engines[0]._manager.cache.latent, engines[1]._manager.cache.latent)
        # Each has kept the states of its own heads (pitfall E-09).
        kept = zip(*(e._manager.snapshots for e in (alone, *engines)), strict=True)
        for whole, *parts in kept:
            check_close(torch.cat([part.state for part in parts], 1), whole.state, 1e-10)


def test_logits_and_what_is_refused(tmp_path: Path) -> None:
    """A refusal is alike on all ranks, and they go on."""
    alone = one_engine(Shard(0, 1), None)
    with in_step(tmp_path) as (engines, followers):
        engine = engines[0]
        check_close(engine.logits(ids_of(20)), alone.logits(ids_of(20)), 1e-11)
        with pytest.raises(RequestError):
            engine.logits([1, 512])  # never reaches the others
        running = engine.submit(ids_of(20), greedy(370))
        engine.step()
        with pytest.raises(RequestError, match="no room"):
            engine.logits(ids_of(30, 1))  # does
        engine.cancel(running)
        assert not followers[0].done()
        check_close(engine.logits(ids_of(3)), alone.logits(ids_of(3)), 1e-11)


def test_a_rank_in_another_place_ends_all(tmp_path: Path) -> None:
    with in_step(tmp_path) as (engines, followers):
        request = engines[0].submit(ids_of(20), greedy(8))
        waiting = engines[0].submit(ids_of(20), greedy(8))
        engines[0].step()
        next(iter(engines[1]._scheduler.running)).ids.append(5)
        with pytest.raises(PeerLost, match="its requests are not where those of rank 0 are"):
            engines[0].run([request])
        assert isinstance(followers[0].exception(20), RuntimeError)
        for ended in (request, waiting):
            assert ended.finish_reason == "error"
            assert "rank 1" in (ended.result().error or "")
        with pytest.raises(PeerLost):  # for good
            engines[0].step()
        start = time.monotonic()
        leader = engines[0]._leader
        assert leader is not None and not leader.end()
        assert time.monotonic() - start < 1, "no empty message waits for those who have gone"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_one_rank_ends_all(tmp_path: Path, rank: int) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    with in_step(tmp_path) as (engines, followers):
        request = engines[0].submit(ids_of(20), greedy(8))
        engines[0].step()
        engines[rank]._runner.loop.queue = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError if rank == 0 else PeerLost, match="no memory"):
            engines[0].run([request])
        assert request.finish_reason == "error" and "no memory" in (request.error or "")
        assert followers[0].exception(20) is not None


def test_ctrl_c_waits_for_the_end_of_a_step() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
        with pytest.raises(KeyError), uninterrupted():
            raise KeyError
        os.kill(os.getpid(), signal.SIGINT)
        assert len(seen) == 2, "the handler is back"
    finally:
        signal.signal(signal.SIGINT, before)
    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()


def in_another_thread() -> None:
    with uninterrupted():
        pass
