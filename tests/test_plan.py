"""A plan is what is allocated, to the byte; K3's is what is published."""

from __future__ import annotations

import gc
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from drafts import INFERACT, REDHAT, random_draft_fields, tiny_inferact, tiny_redhat
from live_bytes import LiveBytes
from packed import CONFIG
from test_weight_table import k3_rank_bytes
from tiny import TINY, tiny_config, tiny_weights

from nanok3.cache import CacheManager, allocate_cache
from nanok3.capacity import settings_for
from nanok3.config import K3, WHOLE, EngineConfig, Shard
from nanok3.decode import StateMemory
from nanok3.device import SPARE_BYTES
from nanok3.kernels.mega.fields import ENTRIES
from nanok3.mega_sizes import SYNC_BYTES, sizes_of
from nanok3.packing import empty_weights, tensors_of
from nanok3.plan import (
    BUFFERS,
    DECODING,
    DRAFT_BUFFERS,
    DRAFT_CACHE,
    DRAFT_RECORDS,
    DRAFT_WEIGHTS,
    GRAPHS,
    LATENTS,
    MEGA,
    PREFILLING,
    SAMPLING_BYTES,
    SNAPSHOTS,
    STATES,
    WEIGHTS,
    make_plan,
    nbytes_of,
)
from nanok3.runner import DTYPES, Runner
from nanok3.spec.config import draft_config
from nanok3.spec.draft_weights import build_draft
from nanok3.step import allocate_buffers, without_parts
from nanok3.weight_table import Filler, table
from nanok3.workspaces import SMS, allocate, decode_spaces

GPU = EngineConfig(device="cuda", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("num_blocks", [None, 5])
def test_a_plan_is_what_the_engine_allocates(dtype: str, num_blocks: int | None) -> None:
    config = tiny_config()
    settings = EngineConfig(
        dtype=dtype, max_num_reqs=3, num_blocks=num_blocks, block_size=16, prefill_chunk=10
    )
    chosen = make_plan(config, WHOLE, settings)
    runner = Runner(config, tiny_weights(config, 0, DTYPES[dtype]), settings)
    fields = Filler(config, DTYPES[dtype], "cpu").fields
    cache = runner.manager.cache
    assert chosen.weight_bytes == nbytes_of(fields.values())
    assert chosen.nbytes[STATES] == nbytes_of((cache.conv_state, cache.state))
    assert chosen.nbytes[LATENTS] == cache.latent.nbytes
    assert chosen.nbytes[BUFFERS] == nbytes_of(without_parts(runner._buffers).values())
    assert chosen.num_blocks == runner.manager.blocks.size
    assert chosen.total_bytes == sum(chosen.nbytes.values())


@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_is_what_a_rank_allocates(size: int) -> None:
    """Weights on a CPU, where experts are unpacked, and on a GPU, where all of them are packed."""
    shard, dtype = Shard(size - 1, size), torch.bfloat16
    settings = EngineConfig(dtype="bfloat16", max_num_reqs=2, num_blocks=7, prefill_chunk=9)
    on_cpu = make_plan(CONFIG, shard, settings)
    on_gpu = make_plan(CONFIG, shard, replace(settings, device="cuda"))
    assert on_cpu.weight_bytes == nbytes_of(Filler(CONFIG, dtype, "cpu", shard).fields.values())
    places = empty_weights(CONFIG, shard, "cpu")
    dense = Filler(CONFIG, dtype, "cpu", shard, places.puts).fields
    packed = {name: nbytes_of(tensors_of(value)) for name, value in places.packed.items()}
    assert on_gpu.weight_bytes == nbytes_of(dense.values()) + sum(packed.values())
    experts = [field for field in table(CONFIG, shard) if field.kind == "experts"]
    values = sum(prod(field.shape) for field in experts)
    assert on_gpu.nbytes["experts"] == values // 2 + values // 32
    heads = 4 // size
    cache = allocate_cache(CONFIG, 3, 8, settings.block_size, dtype, "cpu", shard)
    assert cache.state.shape[2] == heads and cache.conv_state.shape[3] == 3 * heads * 32
    buffers = allocate_buffers(CONFIG, 9, 9, dtype, "cpu", shard)
    for chosen in (on_cpu, on_gpu):
        assert chosen.nbytes[STATES] == nbytes_of((cache.conv_state, cache.state))
        assert chosen.nbytes[LATENTS] == cache.latent.nbytes
        assert chosen.nbytes[BUFFERS] == nbytes_of(without_parts(buffers).values())
    gpu_only = (DECODING, MEGA, GRAPHS, PREFILLING)
    assert not any(kind in on_cpu.nbytes for kind in gpu_only) and on_cpu.reserve == 0
    assert on_gpu.reserve == SPARE_BYTES
    assert on_gpu.needed_bytes == on_gpu.total_bytes + SPARE_BYTES
    second = allocate_buffers(CONFIG, 2, 2, dtype, "cpu", shard)
    memory = StateMemory(7, settings.block_size, second.logits)
    state, v = memory.state, CONFIG.vocab_size
    small = (memory.mirror.memory, state.step.logit_rows, state.finite, state.result)
    spaces = allocate(decode_spaces(CONFIG, shard, 2), "cpu").values()
    in_all = nbytes_of((*small, state.counts, state.prompt_seen))
    in_all += nbytes_of(without_parts(second).values()) + SAMPLING_BYTES * 2 * v
    assert on_gpu.nbytes[GRAPHS] == in_all
    assert on_gpu.nbytes[DECODING] == nbytes_of(spaces)


def test_snapshots_are_counted() -> None:
    settings = EngineConfig(max_num_reqs=2, num_blocks=9, num_snapshots=3)
    config = tiny_config()
    cache = allocate_cache(config, 3, 10, settings.block_size, torch.float32, "cpu")
    manager = CacheManager(cache, settings.block_size, settings.num_snapshots)
    for i in range(5):
        admitted = manager.admit([i, 1, 2], 64)
        assert admitted is not None
        slot, blocks, _ = admitted
        manager.snapshot([i, 1, 2], slot, blocks)
        manager.release(slot, blocks)
    held = nbytes_of(t for s in manager.snapshots for t in (s.conv_state, s.state))
    assert make_plan(config, WHOLE, settings).nbytes[SNAPSHOTS] == held > 0


@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_k3_by_kind(size: int) -> None:
    chosen = make_plan(K3, Shard(0, size), GPU)
    right = k3_rank_bytes(size)
    right["attention"] += 69 * 2 * 7168 * (-(96 // size) % 16)  # rows of b, the last of in_proj
    right["rest of MoE"] += 92 * 2 * 7168 * (-(896 // size) % 16)  # rows of the router
    assert {kind: chosen.nbytes[kind] for kind in WEIGHTS} == right
    slot = 69 * (96 // size * 128 * 128 * 4 + 3 * 3 * 12288 // size * 2)
    assert chosen.nbytes[STATES] == (8 + 1) * slot
    assert chosen.nbytes[SNAPSHOTS] == GPU.num_snapshots * slot
    assert chosen.nbytes[LATENTS] == (8 * 4096 + 64) * 27_648


def test_k3_as_published() -> None:
    """The whole model's bytes by part; A_log's unused entries are not held."""
    nbytes = make_plan(K3, WHOLE, GPU).nbytes
    assert nbytes["experts"] == 1_446_456_066_048
    assert nbytes["attention"] == 69 * (887_800_832 - 32 * 4) + 24 * 464_392_192
    assert nbytes["rest of MoE"] == 92 * 379_857_408
    assert nbytes["dense MLP"] == 1_453_326_336
    tables_and_last, norms = 2_348_831_744, 3_999_744  # values; the first has 3 vectors of norms
    assert nbytes["embedding and head"] + nbytes["norms"] == 2 * (tables_and_last + norms)


# ---- the persistent kernel ----


@pytest.mark.parametrize("size", [8, 16])
def test_the_persistent_kernel_is_counted(size: int) -> None:
    """Both of its workspaces: of steps of one row, and of more."""
    shard = Shard(0, size)
    one, more = (sizes_of(K3, shard, rows, SMS, 64).work_bytes for rows in (1, 8))
    beside = SYNC_BYTES + 8 * 32 * 94

    def counted(**changes: Any) -> int:
        return make_plan(K3, shard, replace(GPU, **changes)).nbytes[MEGA]

    assert counted() == counted(ops="mega") == counted(max_num_reqs=64) == one + more + beside
    assert counted(max_num_reqs=1) == counted(strict=True) == one + beside
    assert counted(ops="chain") == 0
    assert 12e6 < sizes_of(K3, Shard(0, 16), 8, 132, 64).work_bytes + 5_000_000 < 17e6


def test_a_model_that_the_persistent_kernel_refuses_has_no_workspace() -> None:
    assert make_plan(replace(CONFIG, num_experts=1056), WHOLE, GPU).nbytes[MEGA] == 0


def test_the_persistent_kernel_allocates_that_much() -> None:
    pytest.importorskip("cutlass")
    from nanok3.kernels.mega.launch import sync_of, work_of
    from nanok3.kernels.mega.sizes import Sizes

    class Program:
        def __init__(self, sizes: Sizes) -> None:
            self.sizes = sizes

    sizes = [sizes_of(K3, Shard(0, 16), rows, SMS, 64) for rows in (1, 8)]
    work: list[Any] = [work_of(Program(each), "meta") for each in sizes]  # type: ignore[arg-type]
    held = nbytes_of([*work, sync_of("meta")]) + 94 * ENTRIES * 8
    assert make_plan(K3, Shard(0, 16), GPU).nbytes[MEGA] == held


# ---- drafts ----


@pytest.mark.parametrize("raw", [tiny_inferact(), tiny_redhat()], ids=["inferact", "redhat"])
@pytest.mark.parametrize("changes", [{}, {"num_drafts": 3, "num_blocks": 9, "max_num_reqs": 3}])
def test_a_draft_is_what_the_engine_allocates(raw: dict[str, Any], changes: Any) -> None:
    """All that lives once a runner is made, whoever holds it."""
    settings = replace(EngineConfig(prefill_chunk=10, block_size=16, max_num_reqs=2), **changes)
    draft, weights = draft_config(raw), tiny_weights(TINY, 0, torch.float32)
    fields = random_draft_fields(draft, seed=1)
    drafts = draft, build_draft(draft, fields.__getitem__, weights.embed, weights.lm_head)
    chosen = make_plan(TINY, WHOLE, settings, draft)
    assert chosen.nbytes[DRAFT_WEIGHTS] == nbytes_of(fields.values())
    with LiveBytes() as live:
        runner = Runner(TINY, weights, settings, drafts)
        gc.collect()
    assert runner.manager.snapshots == []
    later = chosen.nbytes[SNAPSHOTS] + chosen.weight_bytes + chosen.nbytes[DRAFT_WEIGHTS]
    assert live.now == chosen.total_bytes - later
    without = make_plan(TINY, WHOLE, replace(settings, num_drafts=0), draft)
    assert without.total_bytes == make_plan(TINY, WHOLE, settings).total_bytes


def test_the_published_drafts() -> None:
    """Their weights as published, but for the embedding that Inferact's file repeats; caches of a
    token and layer as their shapes say."""
    settings, plain = settings_for(32768, 8), make_plan(K3, Shard(0, 16), settings_for(32768, 8))
    tokens = (plain.num_blocks + 1) * 64
    for raw, weights, row in ((INFERACT, 4_775_815_682, 576), (REDHAT, 9_489_800_962, 2048)):
        chosen = make_plan(K3, Shard(0, 16), settings, draft_config(raw))
        assert chosen.nbytes[DRAFT_WEIGHTS] == weights
        assert chosen.nbytes[DRAFT_CACHE] == tokens * 5 * row * 2
        num_rows = 1 + draft_config(raw).block_size
        assert chosen.nbytes[DRAFT_RECORDS] == 69 * 9 * num_rows * 6 * 128 * (3 * 2 + 3 * 4)
        assert chosen.nbytes[DRAFT_BUFFERS] > 0
        assert chosen.nbytes[BUFFERS] == plain.nbytes[BUFFERS] + 256 * 5 * 7168 * 2
        taken = sum(n for kind, n in chosen.nbytes.items() if kind not in plain.nbytes)
        assert chosen.cache_bytes == plain.cache_bytes + chosen.nbytes[DRAFT_CACHE]
        assert chosen.total_bytes == plain.total_bytes + taken + 256 * 5 * 7168 * 2
