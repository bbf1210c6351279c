"""A plan is what is allocated, to the byte; K3's is what is published."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from packed import CONFIG
from test_weight_table import k3_rank_bytes
from tiny import tiny_config, tiny_weights

from nanok3 import cli
from nanok3.cache import CacheManager, allocate_cache
from nanok3.config import K3, WHOLE, EngineConfig, Shard
from nanok3.decode import StateMemory
from nanok3.packing import empty_weights, tensors_of
from nanok3.plan import (
    BUFFERS,
    DECODING,
    LATENTS,
    PREFILLING,
    SAMPLING_BYTES,
    SNAPSHOTS,
    STATES,
    WEIGHTS,
    Plan,
    longest_context,
    make_plan,
    nbytes_of,
    verdict,
)
from nanok3.runner import DTYPES, Runner
from nanok3.step import allocate_buffers, without_parts
from nanok3.weight_table import Filler, table
from nanok3.workspaces import allocate, decode_spaces

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
    assert DECODING not in on_cpu.nbytes and PREFILLING not in on_cpu.nbytes
    second = allocate_buffers(CONFIG, 2, 2, dtype, "cpu", shard)
    memory = StateMemory(7, settings.block_size, second.logits)
    state, v = memory.state, CONFIG.vocab_size
    small = (memory._device, state.step.logit_rows, state.finite, state.result)
    spaces = allocate(decode_spaces(CONFIG, shard, 2), "cpu").values()
    in_all = nbytes_of((*small, state.counts, state.prompt_seen, *spaces))
    in_all += nbytes_of(without_parts(second).values()) + SAMPLING_BYTES * 2 * v
    assert on_gpu.nbytes[DECODING] == in_all


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
    assert chosen.nbytes[SNAPSHOTS] == 4 * slot
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


def settings_of(context: int, requests: int) -> EngineConfig:
    base = replace(GPU, max_num_reqs=requests)
    return replace(base, num_blocks=base.blocks_for(context), max_context=context)


def k3_plan(size: int, context: int) -> Plan:
    return make_plan(K3, Shard(0, size), settings_of(context, 8))


def test_the_context_that_is_advised_is_the_longest_that_fits() -> None:
    memory = 141_000_000_000
    asked = k3_plan(16, 1_048_576)
    assert asked.total_bytes > memory
    longest = longest_context(asked, memory)
    assert f"use --context {longest}" in verdict(K3, asked, memory)
    assert k3_plan(16, longest).total_bytes <= memory < k3_plan(16, longest + 64).total_bytes


def test_verdicts() -> None:
    memory = 141_000_000_000
    on_8 = k3_plan(8, 32768)
    said = verdict(K3, on_8, memory)
    assert said.startswith("does not fit by ") and said.endswith("use 16 GPUs")
    assert f"{(on_8.total_bytes - memory) / 1e9:.1f} GB" in said
    on_16 = k3_plan(16, 32768)
    assert verdict(K3, on_16, on_16.total_bytes) == "fits with 0.0 GB to spare on each GPU"
    assert "does not fit" in verdict(K3, on_16, on_16.total_bytes - 1)
    nothing = verdict(K3, on_8, 24_000_000_000)
    assert nothing.endswith(f"use GPUs with {on_8.total_bytes / 1e9:.1f} GB")
    both = verdict(K3, k3_plan(16, 262_144), memory)
    assert "use 32 GPUs or --context" in both


def test_a_model_without_latents_is_not_helped_by_a_shorter_context() -> None:
    linear = CONFIG.linear_attn_config
    linear = replace(linear, kda_layers=tuple(range(1, 8)), full_attn_layers=())
    config = replace(CONFIG, linear_attn_config=linear)
    chosen = make_plan(config, WHOLE, GPU)
    assert chosen.nbytes[LATENTS] == longest_context(chosen, 1000) == 0
    assert "use GPUs with" in verdict(config, chosen, 1000)


# ---- the command ----


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(["plan", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_eight_gpus_cannot_hold_k3_and_sixteen_can(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", "k3", "--gpus", "8")
    assert code == 0 and not err and "does not fit by" in out.splitlines()[-1]
    code, out, err = run(capsys, "--model", "k3", "--gpus", "16", "--gpu-memory", "141GB")
    assert code == 0 and not err and out.splitlines()[-1].startswith("fits with ")
    assert "90,403,504,128 B" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "k3", "--gpus", "16", "--context", "4096", "--requests", "2")
    code, out, _ = run(capsys, *arguments, "--gpu-memory", "139.5GiB", "--json")
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    chosen = make_plan(K3, Shard(0, 16), settings_of(4096, 2))
    assert report["bytes_a_gpu"] == chosen.nbytes and report["fits"] is True
    assert report["total_bytes_a_gpu"] == chosen.total_bytes
    assert report["gpu_memory_bytes"] == 149_786_984_448
    assert (report["gpus"], report["context"], report["requests"]) == (16, 4096, 2)


def test_the_packaged_model_and_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys)
    assert code == 0 and out.startswith("k3_mini, GPUs: 1, requests: 8 of 8192 tokens")
    code, out, err = run(capsys, "--gpus", "8")
    assert code == 2 and not out and "moe_intermediate_size: expected a multiple of 256" in err
    assert run(capsys, "--gpus", "3")[0] == 2
    code, _, err = run(capsys, "--gpu-memory", "lots")
    assert code == 2 and "a size such as 141GB" in err
    code, _, err = run(capsys, "--context", "8193")
    assert code == 2 and "max_context" in err
    code, _, err = run(capsys, "--model", str(tmp_path))
    assert code == 3 and "config.json" in err
