"""k3-mini with its draft on a GPU: the ids of decoding without drafts, acceptance by a script with
caches of decoding one id at a time, rows that must not matter, a loop that waits only for results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import check_close, check_equal
from test_engine_cuda import CAPTURED, GREEDY, PROMPTS, gap_where_they_part, start, stop
from test_engine_cuda import remember_captures as remember_captures
from torch import Tensor

from nanok3.config import EngineConfig
from nanok3.engine import Engine
from nanok3.request import Request
from nanok3.sampling import SamplingParams
from nanok3.spec.drafter import Drafter
from nanok3.spec.propose import Proposal
from nanok3.spec.target import Target
from nanok3.spec_loop import SpecLoop
from nanok3.step import Step

pytestmark = pytest.mark.gpu
MODELS = Path(__file__).parent.parent / "nanok3" / "models"
K, BLOCK = 7, 64
PATTERN = (0, 7, 3, 1, 7, 2, 5, 0, 6, 4)  # drafts that stand, by the anchor's position


def load(draft: bool = True, **settings: Any) -> Engine:
    chosen = {"max_num_reqs": 4, "num_snapshots": 0, "ops": "chain", "break_even": 0.0} | settings
    return Engine.load(
        MODELS / "k3_mini",
        device="cuda",
        settings=EngineConfig(**chosen),
        draft=MODELS / "k3_mini_draft" if draft else None,
    )


def loop_of(engine: Engine) -> SpecLoop:
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop)
    return loop


@pytest.fixture(scope="module")
def drafted() -> Engine:
    return load()


@pytest.fixture(scope="module")
def plain() -> Engine:
    return load(draft=False)


@pytest.mark.parametrize("at_once", [1, 4])
def test_greedy_ids_are_those_without_drafts(drafted: Engine, plain: Engine, at_once: int) -> None:
    """Sums of several rows have the order of one row's in the chain, but KDA's rows differ in their
    last bits, so near ties may part."""
    params = SamplingParams(max_tokens=64, logprobs=2, **GREEDY)
    free = SamplingParams(max_tokens=64, **GREEDY)
    same = 0
    seen = loop_of(drafted).acceptance
    for begin in range(0, len(PROMPTS), at_once):
        some = PROMPTS[begin : begin + at_once]
        right = [plain.generate(p, params) for p in some]
        requests = [drafted.submit(p, free) for p in some]
        drafted.run(requests)
        for request, expected in zip(requests, right, strict=True):
            gap = gap_where_they_part(request.result().token_ids, expected)
            same += gap is None
            assert gap is None or gap < 0.6
    print(f"{same} of {len(PROMPTS)} prompts the same, {seen.mean_length:.2f} tokens a step")
    assert same >= len(PROMPTS) // 2 and seen.mean_length > 2


@pytest.mark.parametrize("options", [GREEDY, {"top_p": 0.95}, {"presence_penalty": 0.5}])
def test_running_ahead_changes_no_reply(drafted: Engine, options: dict[str, Any]) -> None:
    loop, replies = loop_of(drafted), []
    params = [SamplingParams(max_tokens=40 - 5 * i, seed=i, **options) for i in range(len(PROMPTS))]
    for runs_ahead in (False, True):
        loop.runs_ahead = runs_ahead
        try:
            requests = [drafted.submit(p, o) for p, o in zip(PROMPTS, params, strict=True)]
            drafted.run(requests)
            replies.append([r.result() for r in requests])
        finally:
            loop.runs_ahead = True
    assert replies[0] == replies[1]


def test_grammar_and_logprobs_run_with_drafts_beside_them(drafted: Engine, plain: Engine) -> None:
    """An attended batch: one request with a form, one with log-probabilities, one with neither."""
    params = SamplingParams(max_tokens=40, **GREEDY)
    wanted = [
        (PROMPTS[0], params, {"response_format": {"type": "json_object"}}),
        (PROMPTS[1], SamplingParams(max_tokens=40, logprobs=2, **GREEDY), {}),
        (PROMPTS[2], params, {}),
    ]
    results = []
    for engine in (drafted, plain):
        requests = [engine.submit(p, o, **more) for p, o, more in wanted]
        engine.run(requests)
        results.append([r.result() for r in requests])
    assert all(a.error is None for a in results[0])
    assert results[0][1].logprobs is not None and results[1][1].logprobs is not None
    for a, b in zip(results[0][1].logprobs, results[1][1].logprobs, strict=False):
        if a.token_id != b.token_id:
            break
        assert a.logprob == pytest.approx(b.logprob, abs=0.1)


# ---- acceptance by a script ----


class Script:
    """Writes the target's logits and the drafts from known ids, on the device: `right(position)`
    drafts after an anchor stand. A request is known by its first block."""

    def __init__(self, truth: Sequence[Sequence[int]], right: Callable[[int], int]) -> None:
        self.most = max(map(len, truth))
        rows = [[*ids, *[7] * (self.most + K + 2 - len(ids))] for ids in truth]
        self.ids = torch.tensor(rows, device="cuda")
        good = [right(position) for position in range(self.most + K + 2)]
        self.good = torch.tensor(good, device="cuda")
        self.request_of = torch.zeros(4096, dtype=torch.int64, device="cuda")

    def install(self, patch: pytest.MonkeyPatch, poison: bool) -> None:
        script, run, commit = self, Target.run, Target.commit

        def scripted_run(self: Target, step: Step) -> None:
            run(self, step)
            num_rows = len(step.input_ids) // len(step.state_slots)
            owner = script.request_of[step.block_table[:, 0]].repeat_interleave(num_rows, 0)
            place = step.positions.clamp(min=0) + 1
            following = script.ids[owner, place.clamp(max=script.ids.shape[1] - 1)]
            logits = self.logits[: len(step.input_ids)]
            logits.zero_().scatter_(1, following[:, None], 9.0)

        def propose(
            self: Drafter, anchors: Tensor, positions: Tensor, table: Tensor, *others: Any
        ) -> Proposal:
            index = torch.arange(K, device="cuda")
            owner = script.request_of[table[:, 0]][:, None]
            place = positions[:, None] + 1 + index
            drafts = script.ids[owner, place.clamp(max=script.ids.shape[1] - 1)]
            wrong = index >= script.good[positions.clamp(max=script.most)][:, None]
            drafts = (drafts + wrong) % self.config.vocab_size
            shape = (*drafts.shape, self.config.vocab_size)
            law = torch.zeros(shape, dtype=torch.float64, device="cuda")
            law.scatter_(2, drafts[..., None], 1.0)
            return Proposal(drafts, torch.full_like(anchors, K), law, torch.ones(shape[:2]).cuda())

        def poisoned_commit(self: Target, slots: Tensor, counts: Tensor) -> None:
            records = self.records
            falls = torch.arange(records.qkv.shape[2], device="cuda") >= counts[:, None]
            taps = self.taps[: falls.numel()]
            taps.masked_fill_(falls.flatten()[:, None], float("nan"))
            for t in vars(records).values():
                if isinstance(t, Tensor):
                    mask = falls.view(1, *falls.shape, *[1] * (t.dim() - 3))
                    t[:, slots] = t[:, slots].masked_fill(mask, float("nan"))
            commit(self, slots, counts)

        patch.setattr(Target, "run", scripted_run)
        patch.setattr(Drafter, "propose", propose)
        if poison:
            patch.setattr(Target, "commit", poisoned_commit)


def cached(engine: Engine, request: Request) -> dict[str, Tensor]:
    """Copies of what a running request has in the caches."""
    m, loop = engine._manager, loop_of(engine)
    while loop.num_queued:
        engine._scheduler._hand_out()
    torch.cuda.synchronize()
    places = torch.arange(request.num_cached, device="cuda")
    blocks = torch.tensor(request.blocks, device="cuda")
    slots = blocks[places // m.block_size] * m.block_size + places % m.block_size
    assert request.slot is not None
    return {
        "states": m.cache.state[:, request.slot].clone(),
        "windows": m.cache.conv_state[:, request.slot].clone(),
        "latents": m.cache.latent[:, slots].clone(),
        "draft": loop.drafter.cache[:, slots].clone(),
    }


def scripted(
    patch: pytest.MonkeyPatch,
    truth: list[list[int]],
    prompts: list[int],
    right: Callable[[int], int],
    lengths: Sequence[int],
    poison: bool = False,
    **settings: Any,
) -> list[dict[int, dict[str, Tensor]]]:
    """What is cached of each request when its ids are so many, or more by what a step gave."""
    script = Script(truth, right)
    with patch.context() as inner:
        script.install(inner, poison)
        engine = load(prefill_chunk=24, **settings)
    found: list[dict[int, dict[str, Tensor]]] = [{} for _ in truth]
    requests = []
    for i, (ids, count) in enumerate(zip(truth, prompts, strict=True)):
        params = SamplingParams(max_tokens=len(ids) - count, **GREEDY)
        requests.append(engine.submit_ids(ids[:count], params, None))
        while not requests[i].blocks:
            engine.step()
        script.request_of[requests[i].blocks[0]] = i
    while not all(r.done for r in requests):
        engine.step()
        for i, r in enumerate(requests):
            if not r.done and any(n not in found[i] and r.num_cached >= n for n in lengths):
                at = cached(engine, r)
                found[i][r.num_cached] = at
    for r, ids in zip(requests, truth, strict=True):
        assert r.ids == ids, r.error
    return found


def truth_of(num: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(num)
    return torch.randint(40, 3000, (num, length), generator=generator).tolist()


def test_scripted_acceptance_leaves_the_caches_of_one_id_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over borders of blocks (64) and of prefill's chunks (24), with every number standing; what is
    recorded of rows that do not is NaN in one of the runs, which must not show."""
    truth, prompts = truth_of(3, 150), [50, 23, 62]
    every = range(50, 150)
    one = scripted(monkeypatch, truth, prompts, lambda place: 0, every)
    for poison in (False, True):
        found = scripted(
            monkeypatch, truth, prompts, lambda p: PATTERN[p % len(PATTERN)], every, poison
        )
        compared = 0
        for mine, theirs in zip(found, one, strict=True):
            for length in mine.keys() & theirs.keys():
                for name, right in theirs[length].items():
                    check_close(mine[length][name], right, 0.02, name)
                compared += 1
        assert compared > 20


def test_an_end_inside_a_block_keeps_what_one_id_at_a_time_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop id at each place of a block, near the border of a page."""
    truth = truth_of(1, 90)
    for place in (61, 63, 64, 65, 70):
        kept = []
        for right in (lambda p: 0, lambda p: 7):
            script = Script(truth, right)
            with monkeypatch.context() as patch:
                script.install(patch, poison=False)
                engine = load(num_snapshots=4)
            stop_id = truth[0][place]
            assert stop_id not in truth[0][58:place]
            params = SamplingParams(max_tokens=30, stop_token_ids=(stop_id,), **GREEDY)
            request = engine.submit_ids(truth[0][:58], params, None)
            while not request.blocks:
                engine.step()
            engine.run([request])
            assert request.ids == truth[0][: place + 1]
            longest = max(engine._manager.snapshots, key=lambda s: len(s.token_ids))
            assert longest.token_ids == tuple(truth[0][:place])
            kept.append(longest)
        check_close(kept[1].state, kept[0].state, 0.02, "states")
        check_close(kept[1].conv_state, kept[0].conv_state, 0.02, "windows")


# ---- the loop on the device ----


@pytest.mark.parametrize("options", [GREEDY, {"top_p": 0.9, "top_k": 20}, {"min_p": 0.01}])
def test_steady_steps_wait_for_nothing_and_allocate_nothing(
    drafted: Engine, options: dict[str, Any]
) -> None:
    """Twenty steps: no allocation, no call that waits for the device but the wait for a result."""
    params = [SamplingParams(seed=i, max_tokens=400, **options) for i in range(3)]
    requests = [drafted.submit([300 + i, 20, 40 + i], p) for i, p in enumerate(params)]
    for request in requests:
        request.stop_ids = frozenset()  # they must not end
    while len(loop_of(drafted).batch) < 3 or min(r.num_output for r in requests) < 3:
        drafted.step()
    torch.cuda.synchronize()
    memory = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            drafted.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    assert not any(r.done for r in requests)
    for kind in ("allocation.all", "segment.all"):
        for what in ("allocated", "freed"):
            assert after[f"{kind}.{what}"] == memory[f"{kind}.{what}"], f"{kind}.{what}"
    stop(drafted, requests)


def test_replay_is_bitwise_eager(drafted: Engine) -> None:
    """The calls of a step as graphs and as what was captured in them."""
    requests = start(drafted, **GREEDY)
    loop, cache = loop_of(drafted), drafted._manager.cache
    steps, size, q, block = loop._steps, loop._size, loop.num_drafts + 1, BLOCK
    calls = [
        steps.commit(size, q),
        steps.propose(size, True),
        steps.compute(size, q),
        steps.accept(size, q, False, False),
    ]
    state = loop.state
    live = [loop._memory.mirror.memory, cache.state, cache.conv_state, cache.latent]
    live += [loop.drafter.cache, *(getattr(state, n) for n in ("stand", "following", "lengths"))]
    live += [state.result, state.drafts, state.limits]
    live += [t for t in vars(loop.target.records).values() if isinstance(t, Tensor)]
    live += [getattr(state.rows, n) for n in ("input_ids", "positions", "slot_mapping")]
    live += [loop.target.taps]
    before = [t.clone() for t in live]

    def results() -> list[Tensor]:
        own = [cache.state[:, 1:], cache.conv_state[:, 1:], cache.latent[:, block:]]  # not trash
        own += [loop.drafter.cache[:, block:], state.result, state.drafts, state.lengths]
        return [t.clone() for t in (live[0], *own, state.logits[: 3 * q])]

    for call in calls:
        call()
    replayed = results()
    for tensor, old in zip(live, before, strict=True):
        tensor.copy_(old)
    with torch.inference_mode():
        for call in calls:
            CAPTURED[call]()
    for found, expected in zip(results(), replayed, strict=True):
        check_equal(found, expected)
    for tensor, old in zip(live, before, strict=True):  # the host has not seen these steps
        tensor.copy_(old)
    stop(drafted, requests)
