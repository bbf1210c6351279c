"""Whole steps of the persistent kernel on the emulator, against the reference of the model.

A grid of four CTAs; sizes as in k3-mini, layers of every kind. Values are judged like a kernel's:
the same text in float32 is right, in bfloat16 torch it is the yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compare import check_bf16, check_close
from packed import packed_tiny_weights
from tiny import tiny_config, tiny_weights
from torch import Tensor

pytest.importorskip("cutlass")

from ptx.memory import Fault

from kernels.mega.harness import OnEmulator
from nanok3.cache import Cache, allocate_cache
from nanok3.config import ModelConfig
from nanok3.kernels.mega.role import LIMIT
from nanok3.mega_ops import Mega, MegaError
from nanok3.model import forward
from nanok3.ops import REFERENCE
from nanok3.step import Buffers, Step, allocate_buffers
from nanok3.weights import Weights

BLOCK, MAX_BLOCKS = 64, 2


def mini_config() -> ModelConfig:
    """KDA and dense, KDA and MoE, MLA and MoE; two res_blocks."""
    return tiny_config(
        hidden_size=160,
        num_hidden_layers=3,
        full_attn_layers=(3,),
        kda_layers=(1, 2),
        num_attention_heads=2,
        num_heads=2,
        head_dim=128,
        intermediate_size=192,
        q_lora_rank=64,
        kv_lora_rank=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        attn_res_block_size=2,
        num_experts=64,
        num_experts_per_token=8,
        moe_intermediate_size=128,
        routed_expert_hidden_size=64,
        num_shared_experts=1,
    )


def filled_cache(config: ModelConfig, dtype: torch.dtype, num_slots: int) -> Cache:
    generator = torch.Generator().manual_seed(7)
    cache = allocate_cache(config, num_slots, 1 + num_slots * MAX_BLOCKS, BLOCK, dtype, "cpu")
    for t in (cache.conv_state, cache.state, cache.latent):
        t.copy_(0.5 * torch.randn(t.shape, generator=generator))
    if dtype == torch.float32:  # the same as bf16 holds
        for t in (cache.conv_state, cache.latent):
            t.copy_(t.bfloat16())
    return cache


def step_of(config: ModelConfig, lengths: list[int], rows: int) -> Step:
    """`rows` rows a request; `lengths`: cached before."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tables = [[1 + i * MAX_BLOCKS + b for b in range(MAX_BLOCKS)] for i in range(len(lengths))]
    positions = [n + q for n in lengths for q in range(rows)]
    slots = [
        tables[i][(n + q) // BLOCK] * BLOCK + (n + q) % BLOCK
        for i, n in enumerate(lengths)
        for q in range(rows)
    ]
    num_rows = len(positions)
    return Step(
        input_ids=torch.randint(config.vocab_size, (num_rows,), generator=generator),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_table=torch.tensor(tables),
        state_slots=torch.arange(1, 1 + len(lengths)),
        logit_rows=torch.arange(num_rows),
        block_size=BLOCK,
    )


def poisoned(config: ModelConfig, num_rows: int, dtype: torch.dtype) -> Buffers:
    buf = allocate_buffers(config, num_rows, num_rows, dtype, "cpu")
    for value in vars(buf).values():
        assert isinstance(value, Tensor)
        value.fill_(-1 if value.dtype == torch.int64 else torch.nan)
    return buf


def by_reference(
    config: ModelConfig, w: Weights, step: Step, dtype: torch.dtype, num_slots: int
) -> tuple[Buffers, Cache]:
    cache, buf = (
        filled_cache(config, dtype, num_slots),
        poisoned(config, len(step.positions), dtype),
    )
    forward(config, w, cache, step, buf, REFERENCE)
    return buf, cache


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnEmulator]:
    yield OnEmulator(Path(tmp_path_factory.mktemp("ptx")))


@pytest.mark.parametrize("lengths, rows", [([5], 1), ([70, 3], 1), ([64], 3)])
def test_a_step_matches_ref(on_emulator: OnEmulator, lengths: list[int], rows: int) -> None:
    config = mini_config()
    weights = tiny_weights(config, 3, torch.bfloat16)
    step, num_slots = step_of(config, lengths, rows), 1 + len(lengths)
    exact, exact_cache = by_reference(
        config, tiny_weights(config, 3), step, torch.float32, num_slots
    )
    plain, plain_cache = by_reference(config, weights, step, torch.bfloat16, num_slots)

    cache = filled_cache(config, torch.bfloat16, num_slots)
    buf = poisoned(config, len(step.positions), torch.bfloat16)
    mega = Mega(config, packed_tiny_weights(config, 3), cache, BLOCK, MAX_BLOCKS)
    on_emulator.step(mega, step, buf)
    for i in range(len(buf.streams)):
        check_bf16(buf.streams[i], plain.streams[i], exact.streams[i], f"stream {i}")
    check_bf16(buf.logits, plain.logits, exact.logits, "logits")
    check_close(cache.state[:, 1:], exact_cache.state[:, 1:], 0.05, "state")
    check_bf16(cache.latent, plain_cache.latent, exact_cache.latent, "latent")


def lost_signal(on_emulator: OnEmulator, limit: int) -> None:
    """A step in which one of the arrivals at the third counter never comes."""
    config = mini_config()
    step = step_of(config, [5], 1)
    cache = filled_cache(config, torch.bfloat16, 2)
    packed = packed_tiny_weights(config, 3)
    mega = Mega(config, packed, cache, BLOCK, MAX_BLOCKS, limit=limit)
    on_emulator.step(mega, step, poisoned(config, 1, torch.bfloat16), lost=2)


def test_a_lost_signal_is_a_deadlock(on_emulator: OnEmulator) -> None:
    with pytest.raises(Fault, match=r"deadlock:\nCTA .* polls, sees 3 in .* of counters"):
        lost_signal(on_emulator, LIMIT)


def test_a_wait_gives_up_and_the_step_is_refused(
    on_emulator: OnEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_emulator.emulator, "races", False)  # it goes on without the data
    with pytest.raises(MegaError, match="4 arrivals expected, 3 seen"):
        lost_signal(on_emulator, 30)
