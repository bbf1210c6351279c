"""Decoding with drafts as the engine sets it up for a GPU, on the emulator of `tests/ptx`.

    python scripts/emulate_drafts.py        (some minutes on one core)

A model of three layers (KDA with a dense and with a routed MLP, MLA) and drafts that a script
writes. What graphs would replay is called instead; all else is what a GPU runs: the chain over Q
rows, the taps, the records and their commit, prompts, the loop that queues a step before the last
is read. Fails where an id, a state or a cached row is not that of decoding without drafts.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from compare import check_close
from drafts import draft_weights, tiny_inferact
from kernels.conftest import KERNELS
from packed import narrowed, pack_fields
from ptx.launch import CudaIsCpu, Emulator
from scripted_drafts import follows, script_drafts
from tiny import random_fields, tiny_config

from nanok3 import runner, speculation
from nanok3.config import EngineConfig, GenerationDefaults
from nanok3.engine import Engine
from nanok3.sampling import SamplingParams
from nanok3.spec.config import draft_config
from nanok3.spec_loop import SpecLoop

CONFIG = tiny_config(
    num_hidden_layers=3,
    kda_layers=(1, 2),
    full_attn_layers=(3,),
    num_heads=1,
    head_dim=128,
    num_attention_heads=1,
    intermediate_size=64,
    q_lora_rank=32,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    num_experts=8,
    vocab_size=512,
)
RAW = tiny_inferact(
    target_num_hidden_layers=3, target_layer_ids=[0, 1], num_target_layers=2, kv_lora_rank=32
)
PROMPT, LENGTH = [7, 9, 11], 13


def make_engine(draft: bool) -> Engine:
    fields = narrowed(CONFIG, random_fields(CONFIG, 3))
    _, weights = pack_fields(CONFIG, fields)
    c = draft_config(RAW)
    assert not c.problems(CONFIG)
    settings = EngineConfig(
        device="cuda", dtype="bfloat16", ops="chain", max_num_reqs=2, block_size=4, num_blocks=16,
        prefill_chunk=4, break_even=0.0,
    )  # fmt: skip
    w = c, draft_weights(c, 1, weights, torch.bfloat16)
    return Engine(CONFIG, weights, None, settings, GenerationDefaults(), w if draft else None)


def as_it_is() -> Any:
    return lambda run: run


def check() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    plain = make_engine(draft=False)
    right = plain.submit_ids(list(PROMPT), params, None)
    plain.run([right])
    truth = {PROMPT[0]: [*right.ids, *[7] * 20]}
    engine = make_engine(draft=True)
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop) and loop.runs_ahead
    script_drafts(engine, follows(truth, lambda place: (7, 2, 0, 3, 1)[place % 5]), truth)
    request = engine.submit_ids(list(PROMPT), params, None)
    engine.run([request])
    assert request.ids == right.ids
    assert loop.acceptance.mean_length > 2
    mine, theirs = (  # the prompt's and the reply's are kept
        max(e._manager.snapshots, key=lambda s: len(s.token_ids)) for e in (engine, plain)
    )
    assert mine.token_ids == theirs.token_ids == tuple(right.ids[:-1])
    check_close(mine.state, theirs.state, 0.02, "states")
    check_close(mine.conv_state, theirs.conv_state, 0.02, "windows")
    latents = [
        e._manager.latent_of(s.blocks)[:, : len(s.token_ids)]
        for e, s in ((engine, mine), (plain, theirs))
    ]
    check_close(*latents, 0.02, "latents")
    print(f"{loop.acceptance.mean_length:.2f} tokens a step, all as without drafts")


def main() -> None:
    patch = pytest.MonkeyPatch()
    for module in (speculation, runner):
        patch.setattr(module, "Capture", as_it_is)
    with tempfile.TemporaryDirectory() as folder, CudaIsCpu():
        emulator = Emulator(folder)
        for name, weights in KERNELS.items():
            emulator.install(patch, importlib.import_module(f"nanok3.kernels.{name}"), weights)
        check()


if __name__ == "__main__":
    main()
