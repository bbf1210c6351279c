"""The engine on a GPU, through either reading of decode: golden values, the CPU's ids, graphs
against eager, changing company, a loop that waits only for results, and a step that gives up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import check_equal
from torch import Tensor

from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.graph import Capture, Run
from nanok3.request import Request, Result
from nanok3.sampling import SamplingParams

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent
MINI = ROOT.parent / "nanok3" / "models" / "k3_mini"
GREEDY = {"temperature": 0.0}
PROMPTS = [
    "What does os.path.join do?",
    "What is 47 + 85?",
    "Hello!",
    "How do I read a JSON file?",
    "Explain str.split",
    "Who are you?",
]


# What `Capture` gave -> the call that it captured.
CAPTURED: dict[Run, Run] = {}


@pytest.fixture(scope="module", autouse=True)
def remember_captures() -> Iterator[None]:
    capture = Capture.__call__

    def remember(self: Capture, run: Run) -> Run:
        replay = capture(self, run)
        CAPTURED[replay] = run
        return replay

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capture, "__call__", remember)
        yield
    CAPTURED.clear()  # with the graphs


@pytest.fixture(scope="module", params=["mega", "chain"])
def ops(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, ops: str) -> Engine:
    path = tmp_path_factory.mktemp("golden")
    script = ROOT / "data" / "make_golden_k3.py"
    subprocess.run([sys.executable, str(script), "golden", str(path)], check=True)
    settings = EngineConfig(max_num_reqs=4, num_snapshots=0, ops=ops)
    return Engine.load(path, device="cuda", settings=settings)


@pytest.fixture(scope="module")
def mini(ops: str) -> Engine:
    return load_mini(ops)


def load_mini(ops: str, max_num_reqs: int = 8) -> Engine:
    settings = EngineConfig(max_num_reqs=max_num_reqs, num_snapshots=0, ops=ops)
    return Engine.load(MINI, device="cuda", settings=settings)


def gap_where_they_part(found: Sequence[int], right: Result) -> float | None:
    """Between the two best logits of `right`, asked for with logprobs; None for the same ids."""
    pairs = enumerate(zip(found, right.token_ids, strict=False))
    differs = [i for i, (a, b) in pairs if a != b]
    if not differs:
        return None
    assert right.logprobs is not None
    (_, first), (_, second) = right.logprobs[differs[0]].top
    print(f"parts at {differs[0]}, gap {first - second:.3f}")
    return first - second


def first_logits(engine: Engine, request: Request) -> Tensor:
    """[V], of the request's first decode step."""
    loop = engine._runner.loop
    while request not in loop.batch:
        engine.step()
    return loop.state.logits[loop.batch.index(request)].clone()


@pytest.mark.parametrize("length", [1, 7, 70, 200])
def test_golden_within_the_stored_tolerances(golden: Engine, length: int) -> None:
    stored = np.load(ROOT / "data" / "golden_expected.npz")
    ids = [int(i) for i in stored[f"ids_{length}"]]
    request = golden.submit(ids, SamplingParams(max_tokens=24, **GREEDY))
    logits = first_logits(golden, request)
    golden.run([request])
    result = request.result()
    right = torch.from_numpy(stored[f"last_logits_{length}"]).double()
    error = float((logits.cpu().double() - right).norm() / right.norm())
    print(f"{length} ids: relative L2 {error:.4f}")
    assert error <= float(stored["tol_bf16_last_rel_l2"])
    wanted = [int(i) for i in stored[f"greedy_{length}"]]
    differs = [i for i, (a, b) in enumerate(zip(result.token_ids, wanted, strict=True)) if a != b]
    if differs:
        gap = float(stored[f"greedy_gap_{length}"][differs[0]])
        print(f"{length} ids: first difference at {differs[0]}, where the gap is {gap:.3f}")
        assert gap < float(stored["tol_bf16_greedy_gap"])


def test_mini_says_what_it_says_on_a_cpu(mini: Engine) -> None:
    """64 greedy ids; bf16 and float32 may part where two ids nearly tie."""
    cpu = Engine.load(MINI)
    same = 0
    for prompt in PROMPTS:
        params = SamplingParams(max_tokens=64, logprobs=2, **GREEDY)
        ours, right = mini.generate(prompt, params), cpu.generate(prompt, params)
        gap = gap_where_they_part(ours.token_ids, right)
        same += gap is None
        assert gap is None or gap < 0.6
    print(f"{same} of {len(PROMPTS)} prompts have the same ids")
    assert same >= len(PROMPTS) // 2


def test_readings_reply_the_same() -> None:
    """One row a step and eight; the order of sums differs, so near ties may part."""
    params = SamplingParams(max_tokens=64, logprobs=2, **GREEDY)
    mega, chain = load_mini("mega"), load_mini("chain")
    assert mega.reading == "the persistent kernel" and chain.reading == "the chain of kernels"
    same = 0
    for at_once in (1, 6):
        for begin in range(0, len(PROMPTS), at_once):
            requests = [
                [engine.submit(p, params) for p in PROMPTS[begin : begin + at_once]]
                for engine in (mega, chain)
            ]
            mega.run(requests[0])
            chain.run(requests[1])
            for found, right in zip(*requests, strict=True):
                gap = gap_where_they_part(found.result().token_ids, right.result())
                same += gap is None
                assert gap is None or gap < 0.3
    print(f"{same} of {2 * len(PROMPTS)} replies have the same ids")
    assert same >= len(PROMPTS)


def test_more_requests_than_the_persistent_kernel_takes() -> None:
    """Steps of up to 8 rows by one reading, of more by the other, over the same caches."""
    engine = load_mini("mega", max_num_reqs=12)
    assert (
        engine.reading == "the persistent kernel for steps up to 8 rows, the chain of kernels above"
    )
    params = [SamplingParams(max_tokens=4 + 4 * i, logprobs=2, **GREEDY) for i in range(12)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(12)]
    alone = [engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
    requests = [engine.submit(p, q) for p, q in zip(prompts, params, strict=True)]
    engine.run(requests)
    for request, right in zip(requests, alone, strict=True):
        gap = gap_where_they_part(request.result().token_ids, right)
        assert gap is None or gap < 0.3


def test_a_step_that_gave_up_ends_its_requests_and_the_next_ones_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counters are pushed to where no wait can find them."""
    from nanok3 import captured

    monkeypatch.setattr(captured, "Mega", partial(captured.Mega, limit=1 << 15))
    engine = load_mini("mega", max_num_reqs=4)
    params = SamplingParams(max_tokens=40, **GREEDY)
    right = [engine.generate(p, params).token_ids for p in PROMPTS]
    requests = [engine.submit(p, params) for p in PROMPTS[:3]]
    while min(r.num_output for r in requests) < 5:
        engine.step()
    health = engine._runner.loop._health
    assert health is not None
    health.words[0::16] += 1 << 20  # the number of the next launch's first signal, of both programs
    engine.run(requests)
    others = [engine.submit(p, params) for p in PROMPTS[3:]]
    engine.run(others)
    for request in requests:
        result = request.result()
        assert result.finish_reason == "error" and result.error is not None
        assert "gave up waiting: rank 0 of 1, CTA " in result.error
    print(requests[0].result().error)
    for request, ids in zip(others, right[3:], strict=True):
        assert request.result().error is None and request.result().token_ids[:8] == ids[:8]
    assert engine.generate(PROMPTS[0], params).token_ids == right[0]


def test_changing_company_changes_nothing(mini: Engine, ops: str) -> None:
    """Requests of different lengths join and leave; each gets what it gets alone. The persistent
    kernel adds up otherwise in a step of one row."""
    params = [SamplingParams(max_tokens=8 + 9 * i, **GREEDY) for i in range(len(PROMPTS))]
    with_gaps = [replace(q, logprobs=2) for q in params]
    solo = [mini.generate(p, q) for p, q in zip(PROMPTS, with_gaps, strict=True)]
    waiting = [mini.submit(p, q) for p, q in zip(PROMPTS[:2], params, strict=False)]
    for prompt, param in zip(PROMPTS[2:], params[2:], strict=True):
        for _ in range(5):
            mini.step()
        waiting.append(mini.submit(prompt, param))
    mini.run(waiting)
    for request, right in zip(waiting, solo, strict=True):
        gap = gap_where_they_part(request.result().token_ids, right)
        assert gap is None or (ops == "mega" and gap < 0.3)


# ---- the loop on the device ----


def start(engine: Engine, **options: Any) -> list[Request]:
    """Three requests in one batch, a few ids into their replies."""
    params = [SamplingParams(seed=i, max_tokens=200, **options) for i in range(3)]
    requests = [engine.submit([300 + i, 20, 40 + i], p) for i, p in enumerate(params)]
    for request in requests:
        request.stop_ids = frozenset()  # they must not end
    while len(engine._runner.loop.batch) < 3 or min(r.num_output for r in requests) < 3:
        engine.step()
    return requests


def stop(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.cancel(request)


OPTIONS: list[dict[str, Any]] = [
    GREEDY,
    {"min_p": 0.01},
    {"top_p": 0.9, "top_k": 20},
    {"frequency_penalty": 0.5},
    {"top_p": 0.9, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_replay_is_bitwise_eager(mini: Engine, options: dict[str, Any]) -> None:
    """The same rows through the graphs and through what was captured in them."""
    requests = start(mini, **options)
    loop, cache = mini._runner.loop, mini._manager.cache
    memory, block = loop._memory, mini.settings.block_size
    live = [memory.mirror.memory, *(getattr(loop.state, n) for n in ("counts", "finite", "result"))]
    live += [cache.state, cache.conv_state, cache.latent]
    before = [t.clone() for t in live]

    def results() -> list[Tensor]:
        own = [cache.state[:, 1:], cache.conv_state[:, 1:], cache.latent[:, block:]]  # not trash
        return [t.clone() for t in (*live[:4], *own, loop.state.logits[:3])]

    def restore() -> None:
        for tensor, old in zip(live, before, strict=True):
            tensor.copy_(old)

    loop._compute[4]()
    loop._draw_now()
    replayed = results()
    restore()
    with torch.inference_mode():
        CAPTURED[loop._compute[4]]()
        CAPTURED[loop._draw_now]()
    for found, expected in zip(results(), replayed, strict=True):
        check_equal(found, expected)
    restore()  # the host has not seen these steps
    stop(mini, requests)


@pytest.mark.parametrize("options", OPTIONS)
def test_steady_steps_wait_for_nothing_and_allocate_nothing(
    mini: Engine, options: dict[str, Any]
) -> None:
    """Twenty steps: no allocation, no call that waits for the device but the wait for a result."""
    requests = start(mini, **options)
    before = [r.num_output for r in requests]
    torch.cuda.synchronize()
    memory = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            mini.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    assert [r.num_output for r in requests] == [n + 20 for n in before]
    for kind in ("allocation.all", "segment.all"):
        for what in ("allocated", "freed"):
            assert after[f"{kind}.{what}"] == memory[f"{kind}.{what}"], f"{kind}.{what}"
    stop(mini, requests)


def test_the_checks_of_the_test_above_can_fail() -> None:
    x = torch.ones(4, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] > before


def test_a_step_is_queued_while_the_last_one_runs(mini: Engine) -> None:
    """The device is busy for a second; the host queues the next step all the same."""
    requests = start(mini, **GREEDY)
    loop = mini._runner.loop
    assert loop.num_queued == 1
    torch.cuda.synchronize()
    torch.cuda._sleep(1_500_000_000)  # clock cycles
    loop.queue()
    newest = loop._readback._events[(loop._num_steps - 1) % 2]
    assert not newest.query() and loop.num_queued == 2
    mini.step()  # reads both, and goes on
    assert newest.query()
    stop(mini, requests)


def jobs_with_ends(engine: Engine) -> list[SamplingParams]:
    """Ends of every kind, from what is said without them."""
    free = engine.generate(PROMPTS[0], SamplingParams(max_tokens=40, **GREEDY), thinking=False)
    ids = free.token_ids
    assert len(ids) > 12 and len(free.text) > 4, free
    return [
        SamplingParams(max_tokens=11, **GREEDY),
        SamplingParams(max_tokens=40, stop_token_ids=(ids[9],), **GREEDY),
        SamplingParams(max_tokens=40, stop=(free.text[2:4],), **GREEDY),
        SamplingParams(max_tokens=40, stop_token_ids=tuple(range(1000, 1100)), **GREEDY),
        SamplingParams(max_tokens=30, seed=5, top_p=0.95, presence_penalty=0.5),
        SamplingParams(max_tokens=30, seed=6, logprobs=1),
    ]


def test_running_ahead_changes_no_reply(mini: Engine, ops: str) -> None:
    """Alone and together, every kind of end, against the same engine waiting for each step."""
    loop, alone, together = mini._runner.loop, [], []
    params = jobs_with_ends(mini)
    for runs_ahead in (False, True):
        loop.runs_ahead = runs_ahead
        try:
            alone.append([mini.generate(PROMPTS[0], p, thinking=False) for p in params])
            requests = [mini.submit(PROMPTS[0], p, thinking=False) for p in params]
            mini.run(requests)
            together.append([r.result().token_ids for r in requests])
        finally:
            loop.runs_ahead = True
    print(*((r.finish_reason, len(r.token_ids)) for r in alone[0]))
    assert alone[0] == alone[1]
    assert together[0] == together[1]
    if ops == "chain":  # whose sums are in one order for any number of rows
        assert together[0] == [r.token_ids for r in alone[0]]


def test_what_is_kept_after_an_end_is_exact_when_running_ahead(ops: str) -> None:
    """At a stop id and at the limit: the same ids and bits of caches as when waiting."""
    settings = EngineConfig(max_num_reqs=2, debug=True, ops=ops)
    engine = Engine.load(MINI, device="cuda", settings=settings)
    loop, manager, kept = engine._runner.loop, engine._manager, []
    for runs_ahead in (False, True):
        loop.runs_ahead = runs_ahead
        snapshots = []
        for params in jobs_with_ends(engine)[:2]:
            for snapshot in list(manager.snapshots):
                manager.drop(snapshot)
            engine.generate(PROMPTS[0], params, thinking=False)
            for s in manager.snapshots:
                pages = manager.latent_of(s.blocks)[:, : len(s.token_ids)]
                snapshots.append((s.token_ids, [s.state, s.conv_state, pages]))
        kept.append(snapshots)
    assert len(kept[0]) == len(kept[1]) == 4
    for (ids, tensors), (right_ids, right) in zip(kept[1], kept[0], strict=True):
        assert ids == right_ids
        for found, expected in zip(tensors, right, strict=True):
            check_equal(found, expected)


def test_strict_mode_computes_rows_one_by_one(ops: str) -> None:
    """In one graph: the same bits in company as alone."""
    settings = EngineConfig(max_num_reqs=3, num_snapshots=0, strict=True, ops=ops)
    engine = Engine.load(MINI, device="cuda", settings=settings)
    params = SamplingParams(max_tokens=8, logprobs=3, **GREEDY)
    prompts = [[5], [90, 91], [40, 41, 42]]
    alone = [engine.generate(p, params) for p in prompts]
    requests = [engine.submit(p, params) for p in prompts]
    engine.run(requests)
    assert [r.result() for r in requests] == alone


def test_prompts_that_begin_alike_share_it_to_the_bit(ops: str) -> None:
    """In strict mode; the first two pages of 64 are computed by the first prompt only."""
    settings = EngineConfig(max_num_reqs=4, num_blocks=64, ops=ops, strict=True, debug=True)
    shared = [int(i) for i in torch.randint(0, 200, (140,), generator=torch.Generator())]
    prompts = [[*shared, 7 * n, *range(n, 9 + n)] for n in range(4)]
    params = SamplingParams(seed=3, max_tokens=12, logprobs=2)
    engine = Engine.load(MINI, device="cuda", settings=settings)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    engine.run(requests)
    assert [r.num_reused for r in requests] == [0, 128, 128, 128]
    fresh = Engine.load(MINI, device="cuda", settings=replace(settings, num_snapshots=0))
    for request, prompt in zip(requests, prompts, strict=True):
        right, found = fresh.generate(prompt, params), request.result()
        assert (found.token_ids, found.logprobs) == (right.token_ids, right.logprobs)
