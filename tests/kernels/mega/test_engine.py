"""Requests served through the persistent kernel, on the emulator: the engine's own loop, with its
steps run by what `captured.gpu_decode` makes for a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_weights

pytest.importorskip("cutlass")

from packed import packed_tiny_weights

from kernels.mega.harness import SMS, OnEmulator, on_a_device, without_signal
from kernels.mega.test_handoffs import CONFIG
from nanok3 import captured
from nanok3.config import EngineConfig, GenerationDefaults
from nanok3.engine import Engine
from nanok3.graph import Readback
from nanok3.kernels.mega.role import COUNTERS, LIMIT, PROGRAMS
from nanok3.loop import PLACES
from nanok3.mega_ops import Mega
from nanok3.ops import DECODE
from nanok3.reference.kda_records import commit_masked
from nanok3.runner import Runner
from nanok3.sampling import SamplingParams
from nanok3.step import Buffers, Step

PROMPTS = [[5, 90, 17], [200]]
SETTINGS = EngineConfig(dtype="bfloat16", num_blocks=6, num_snapshots=0, ops="mega")


@dataclass(frozen=True)
class Served:
    engine: Engine
    mega: Mega


def plain_engine(max_num_reqs: int) -> Engine:
    weights = tiny_weights(CONFIG, 3, torch.bfloat16)
    settings = replace(SETTINGS, max_num_reqs=max_num_reqs)
    return Engine(CONFIG, weights, None, settings, GenerationDefaults())


def serve(
    on_emulator: OnEmulator,
    monkeypatch: pytest.MonkeyPatch,
    max_num_reqs: int,
    limit: int = LIMIT,
) -> Served:
    """Runs a step ahead, and looks at the kernel's health as on a GPU."""
    made: list[Mega] = []
    decodes: list[captured.GpuDecode] = []

    def make(*args: Any, **options: Any) -> Mega:
        made.append(Mega(*args, **options, limit=limit))
        return made[0]

    def run(self: Runner, step: Step, buf: Buffers) -> None:
        with on_emulator.launches(made[0]):
            decodes[0].forward(step, buf)

    monkeypatch.setattr(captured, "Mega", make)
    chain = SimpleNamespace(record=lambda: DECODE, commit=commit_masked)
    monkeypatch.setattr(captured, "Kernels", lambda *args, **options: chain)

    monkeypatch.setattr(Runner, "_run_on_cpu", run)
    engine = plain_engine(max_num_reqs)
    runner, loop = engine._runner, engine._runner.loop
    packed, blocks = packed_tiny_weights(CONFIG, 3), loop.state.step.block_table.shape[1]
    with on_a_device(SMS):
        made_for = CONFIG, packed, runner.manager.cache, engine.settings, blocks
        decodes.append(captured.gpu_decode(*made_for))
    assert decodes[0].reading == "the persistent kernel"
    loop.runs_ahead, loop._health = True, decodes[0].health
    assert loop._health is not None
    loop._words = Readback(loop._health.words, PLACES)
    return Served(engine, made[0])


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> OnEmulator:
    return OnEmulator(Path(tmp_path_factory.mktemp("ptx")))


def test_replies_are_those_of_torch(
    on_emulator: OnEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=2) for n in (4, 6)]
    plain = [plain_engine(2).generate(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    engine = serve(on_emulator, monkeypatch, 2).engine
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (4, 6)]
    requests = [engine.submit(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    with on_a_device(SMS):
        engine.run(requests)
    for request, right in zip(requests, plain, strict=True):
        found = request.result()
        assert found.error is None and len(found.token_ids) == len(right.token_ids)
        pairs = enumerate(zip(found.token_ids, right.token_ids, strict=True))
        differs = [i for i, (a, b) in pairs if a != b]
        if differs:
            assert right.logprobs is not None
            (_, first), (_, second) = right.logprobs[differs[0]].top
            assert first - second < 0.1, f"parts at {differs[0]} of {right.token_ids}"


def test_a_wait_that_gave_up_ends_the_requests_of_its_step(
    on_emulator: OnEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_emulator.emulator, "races", False)  # it goes on without the data
    served = serve(on_emulator, monkeypatch, 1, limit=30)
    engine, mega = served.engine, served.mega
    params = SamplingParams(temperature=0.0, max_tokens=5)
    with on_a_device(SMS):
        right = [engine.generate(p, params).token_ids for p in PROMPTS]
        running = engine.submit(PROMPTS[0], params)
        while running.num_output < 2:
            engine.step()
        waiting = engine.submit(PROMPTS[1], params)
        signals = mega.space_of(1).program.signals
        ahead = len(signals["start"] + signals["kda"]) + signals["dense"].index("dense_act")
        first = int(mega.sync.view(torch.int32)[0])
        with without_signal(mega.sync, (first + ahead) % COUNTERS):
            engine.step()
        engine.run([running])
        assert mega.sync.count_nonzero() == PROGRAMS and not waiting.done  # the first tags
        engine.run([waiting])
        again = engine.generate(PROMPTS[0], params)
    result = running.result()
    assert result.finish_reason == "error" and result.error is not None
    # who gives up first may be the loader, which waits for a later signal because of this one
    waits = r"dense.down, buffer dense_act: epoch 3|mla, buffer q_latent: epoch 2"
    named = rf"rank 0 of 1, CTA [0-3], layer [01], op ({waits}) expected"
    assert re.search(named, result.error)
    assert result.token_ids == right[0][: len(result.token_ids)]
    assert waiting.result().token_ids == right[1] and again.token_ids == right[0]
