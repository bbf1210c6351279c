"""Whole steps of the persistent kernel on the emulator, against the reference of the model.

A grid of four CTAs; sizes as in k3-mini, layers of every kind. Values are judged like a kernel's:
the same text in float32 is right, in bfloat16 torch it is the yardstick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compare import check_bf16, check_close
from tiny import tiny_config
from torch import Tensor

pytest.importorskip("cutlass")

from kernels.mega.harness import SMS, OnEmulator, on_a_device, without_signal
from nanok3.cache import Cache, allocate_cache
from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.kernels.mega.role import PROGRAMS
from nanok3.mega_ops import Mega, MegaError
from nanok3.model import forward, one_layer
from nanok3.ops import REFERENCE
from nanok3.rank_weights import (
    packed_ends,
    packed_layer,
    packed_weights,
    plain_layer,
    plain_weights,
)
from nanok3.step import Buffers, Step, allocate_buffers, without_parts

BLOCK, MAX_BLOCKS = 64, 2
SEED = 5


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


def filled_cache(
    config: ModelConfig, dtype: torch.dtype, num_slots: int, shard: Shard = WHOLE
) -> Cache:
    generator = torch.Generator().manual_seed(7)
    num_blocks = 1 + num_slots * MAX_BLOCKS
    cache = allocate_cache(config, num_slots, num_blocks, BLOCK, dtype, "cpu", shard)
    for t in (cache.conv_state, cache.state, cache.latent):
        t.copy_(0.5 * torch.randn(t.shape, generator=generator))
    if dtype == torch.float32:  # the same as bf16 holds
        for t in (cache.conv_state, cache.latent):
            t.copy_(t.bfloat16())
    return cache


def step_of(config: ModelConfig, lengths: list[int], rows: int) -> Step:
    """`rows` rows a request; `lengths`: cached before, -1: a request that is padding."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tables = [[1 + i * MAX_BLOCKS + b for b in range(MAX_BLOCKS)] for i in range(len(lengths))]
    positions = [-1 if n < 0 else n + q for n in lengths for q in range(rows)]
    owners = [i for i in range(len(lengths)) for _ in range(rows)]
    slots = [
        -1 if p < 0 else tables[i][p // BLOCK] * BLOCK + p % BLOCK
        for i, p in zip(owners, positions, strict=True)
    ]
    num_rows = len(positions)
    return Step(
        input_ids=torch.randint(config.vocab_size, (num_rows,), generator=generator),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_table=torch.tensor(tables),
        state_slots=torch.tensor([0 if n < 0 else 1 + i for i, n in enumerate(lengths)]),
        logit_rows=torch.arange(num_rows),
        block_size=BLOCK,
    )


def poisoned(
    config: ModelConfig, num_rows: int, dtype: torch.dtype, shard: Shard = WHOLE
) -> Buffers:
    buf = allocate_buffers(config, num_rows, num_rows, dtype, "cpu", shard)
    for value in vars(buf).values():
        assert isinstance(value, Tensor)
        value.fill_(-1 if value.dtype == torch.int64 else torch.nan)
    return buf


@dataclass(frozen=True)
class Reading:
    """What steps in a row left."""

    buf: Buffers  # of the last step
    cache: Cache


def by_reference(
    config: ModelConfig, steps: list[Step], dtype: torch.dtype, num_slots: int
) -> Reading:
    w = plain_weights(config, WHOLE, "cpu", dtype, SEED)
    cache = filled_cache(config, dtype, num_slots)
    for step in steps:
        buf = poisoned(config, len(step.positions), dtype)
        forward(config, w, cache, step, buf, REFERENCE)
    return Reading(buf, cache)


def check_caches(found: Cache, plain: Cache, exact: Cache) -> None:
    """All but the trash."""
    check_close(found.state[:, 1:], exact.state[:, 1:], 0.05, "state")
    conv = (plain.conv_state[:, 1:], exact.conv_state[:, 1:])
    check_bf16(found.conv_state[:, 1:], *conv, "conv_state")
    latent = (plain.latent[:, BLOCK:], exact.latent[:, BLOCK:])
    check_bf16(found.latent[:, BLOCK:], *latent, "latent")


def check_steps(on_emulator: OnEmulator, steps: list[Step], num_slots: int) -> None:
    """In a row, on one `Mega`, against the reference in float32: real rows of the last step."""
    config = mini_config()
    exact = by_reference(config, steps, torch.float32, num_slots)
    plain = by_reference(config, steps, torch.bfloat16, num_slots)
    cache = filled_cache(config, torch.bfloat16, num_slots)
    mega = Mega(config, packed_weights(config, WHOLE, "cpu", SEED), cache, BLOCK, MAX_BLOCKS)
    for step in steps:
        buf = poisoned(config, len(step.positions), torch.bfloat16)
        on_emulator.step(mega, step, buf)
    real = steps[-1].positions >= 0
    for i in range(len(buf.streams)):
        streams = [r.buf.streams[i][real] for r in (plain, exact)]
        check_bf16(buf.streams[i][real], *streams, f"stream {i}")
    check_bf16(buf.logits[real], plain.buf.logits[real], exact.buf.logits[real], "logits")
    check_caches(cache, plain.cache, exact.cache)


@pytest.fixture(scope="module")
def on_emulator(tmp_path_factory: pytest.TempPathFactory) -> OnEmulator:
    return OnEmulator(Path(tmp_path_factory.mktemp("ptx")))


def test_rows_of_requests_of_any_length_and_padding(on_emulator: OnEmulator) -> None:
    lengths = [70, -1, 3, 63, 64, 0, 17, 126]  # two rows of padding would race for the trash
    check_steps(on_emulator, [step_of(mini_config(), lengths, 1)], 1 + len(lengths))


def test_launches_in_a_row_of_one_row_and_of_three(on_emulator: OnEmulator) -> None:
    """Two programs, one set of counters: the epochs go on."""
    steps = [step_of(mini_config(), [length], rows) for length, rows in ((5, 1), (6, 3), (9, 1))]
    check_steps(on_emulator, steps, 2)


@pytest.mark.parametrize("layer", [1, 2])  # KDA, MLA
def test_a_layer_of_a_rank_of_two(on_emulator: OnEmulator, layer: int) -> None:
    """Its own columns; what the other rank would add lies in the buffers as for the reference."""
    config, shard, step = mini_config(), Shard(1, 2), step_of(mini_config(), [30, 2], 1)

    def state(dtype: torch.dtype) -> Reading:
        cache, buf = filled_cache(config, dtype, 3, shard), poisoned(config, 2, dtype, shard)
        generator = torch.Generator().manual_seed(3)
        for tensor in without_parts(buf).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).bfloat16())
        return Reading(buf, cache)

    readings = []
    for dtype in (torch.float32, torch.bfloat16):
        made = state(dtype)
        w = plain_layer(config, shard, "cpu", dtype, SEED, layer)
        one_layer(config, layer, w, made.cache, step, made.buf, REFERENCE)
        readings.append(made)
    exact, plain = readings
    found = state(torch.bfloat16)
    packed = (packed_layer(config, shard, "cpu", SEED, layer),)
    ends = packed_ends(config, shard, "cpu", SEED, packed)
    options = {"shard": shard, "whole": False, "layers": (layer,)}
    mega = Mega(config, ends, found.cache, BLOCK, MAX_BLOCKS, **options)
    on_emulator.step(mega, step, found.buf)
    check_bf16(found.buf.delta_part, plain.buf.delta_part, exact.buf.delta_part, "delta")
    for i in range(len(found.buf.streams)):
        streams = [r.buf.streams[i] for r in (plain, exact)]
        check_bf16(found.buf.streams[i], *streams, f"stream {i}")
    check_caches(found.cache, plain.cache, exact.cache)


# ---- what goes wrong ----


def test_more_ctas_than_sms_are_refused(on_emulator: OnEmulator) -> None:
    config = mini_config()
    cache = filled_cache(config, torch.bfloat16, 2)
    mega = Mega(config, packed_weights(config, WHOLE, "cpu", SEED), cache, BLOCK, MAX_BLOCKS)
    with on_a_device(SMS):
        mega.space(1)
    with on_a_device(SMS - 1), pytest.raises(ValueError, match="for 4 SMs and this GPU has 3"):
        mega.run(step_of(config, [5], 1), poisoned(config, 1, torch.bfloat16))


def test_a_wait_that_gave_up_is_told_and_the_next_step_is_right(
    on_emulator: OnEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal of a middle layer is left out of a step."""
    monkeypatch.setattr(on_emulator.emulator, "races", False)  # it goes on without the data
    config, step = mini_config(), step_of(mini_config(), [5], 1)
    packed = packed_weights(config, WHOLE, "cpu", SEED)
    cache = filled_cache(config, torch.bfloat16, 2)
    mega = Mega(config, packed, cache, BLOCK, MAX_BLOCKS, limit=30)
    on_emulator.step(mega, step, poisoned(config, 1, torch.bfloat16))
    program = mega.space(1).program
    names = [
        (layer, name) for block, layer in mega.blocks(program) for name in program.signals[block]
    ]
    mega.clear()
    buf = poisoned(config, 1, torch.bfloat16)
    sentence = (
        r"rank 0 of 1, CTA [0-3], layer 1, op route, buffer moe_in: epoch 1 expected, "
        r"0 seen, and 0 of 4 CTAs arrived"
    )
    with (
        without_signal(mega.sync, names.index((1, "moe_in"))),
        pytest.raises(MegaError, match=sentence),
    ):
        on_emulator.step(mega, step, buf)
    assert mega.sync.count_nonzero() == PROGRAMS  # the first tags
    for name, tensor in vars(filled_cache(config, torch.bfloat16, 2)).items():
        getattr(cache, name).copy_(tensor)
    on_emulator.step(mega, step, buf)
    exact = by_reference(config, [step], torch.float32, 2).buf
    plain = by_reference(config, [step], torch.bfloat16, 2).buf
    check_bf16(buf.logits, plain.logits, exact.logits, "logits")
