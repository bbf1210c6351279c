"""Prefill on a GPU: what it leaves in the caches, its memory, and that a plan is what is used."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import check_bf16
from torch import Tensor

from nanok3.cache import Cache
from nanok3.config import K3, WHOLE, EngineConfig, GenerationDefaults, ModelConfig, Shard
from nanok3.engine import Engine
from nanok3.plan import make_plan
from nanok3.request import Request
from nanok3.sampling import SamplingParams

pytestmark = pytest.mark.gpu
MINI = Path(__file__).parents[1] / "nanok3" / "models" / "k3_mini"
BF16 = torch.bfloat16
GREEDY = {"temperature": 0.0}
IDS = torch.randint(10, 3000, (300,), generator=torch.Generator().manual_seed(0)).tolist()


# ---- what prefill leaves ----


def caches_of(cache: Cache, slot: int, slots: list[int]) -> dict[str, Tensor]:
    """Of one request, in float32 on the CPU."""
    found = {
        "conv_state": cache.conv_state[:, slot],
        "state": cache.state[:, slot],
        "latent": cache.latent[:, slots],
    }
    return {name: value.float().cpu() for name, value in found.items()}


def prefilled(engine: Engine) -> dict[str, Tensor]:
    request, slots = admitted(engine)
    assert request.slot is not None
    while request.num_cached < len(IDS):
        count = min(engine.settings.prefill_chunk, len(IDS) - request.num_cached)
        engine._runner.prefill(request, count, with_logits=False)
    found = caches_of(engine._manager.cache, request.slot, slots)
    engine._manager.release(request.slot, request.blocks)
    return found


def decoded(engine: Engine) -> dict[str, Tensor]:
    """The same ids one by one through the kernels of decode."""
    from nanok3.kernel_ops import Kernels

    request, slots = admitted(engine)
    assert request.slot is not None
    kernels = Kernels(engine.config, engine.settings.max_num_reqs, engine.settings.device).record()
    for _ in IDS:
        engine._runner._forward([request], 1, 1, kernels)
        request.num_cached += 1
    found = caches_of(engine._manager.cache, request.slot, slots)
    engine._manager.release(request.slot, request.blocks)
    return found


def admitted(engine: Engine) -> tuple[Request, list[int]]:
    taken = engine._manager.admit([], len(IDS))
    assert taken is not None
    request = Request(IDS, SamplingParams(), frozenset(), 1, None, None)
    request.slot, request.blocks, _ = taken
    size = engine.settings.block_size
    return request, [request.blocks[p // size] * size + p % size for p in range(len(IDS))]


def relative(actual: Tensor, right: Tensor) -> float:
    return float((actual - right).norm() / right.norm())


def test_prefill_leaves_what_decode_leaves() -> None:
    settings = EngineConfig(max_num_reqs=2, num_snapshots=0, prefill_chunk=128)
    engine = Engine.load(MINI, device="cuda", settings=settings)
    exact = prefilled(Engine.load(MINI, settings=settings))
    by_prefill, by_decode = prefilled(engine), decoded(engine)
    for name, right in exact.items():
        errors = relative(by_prefill[name], right), relative(by_decode[name], right)
        apart = relative(by_prefill[name], by_decode[name])
        print(f"{name}: prefill {errors[0]:.4f}, decode {errors[1]:.4f}, apart {apart:.4f}")
        assert errors[0] <= 2 * errors[1], name


# ---- memory ----


def used_by(engine: Engine, ids: list[int]) -> int:
    """The most bytes while a prompt and a few ids run, with all that the process holds."""
    params = SamplingParams(max_tokens=6, top_p=0.9, temperature=0.7, seed=1)
    requests = [engine.submit(ids, params), engine.submit(ids[:100], params)]
    engine.run(requests)
    assert all(r.result().finish_reason in ("length", "stop") for r in requests)
    engine.logits(ids[:300])
    return torch.cuda.max_memory_allocated()


def fresh() -> int:
    """Bytes that tests before this one still hold."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def check_plan(used: int, planned: int) -> None:
    print(f"used {used:,} B, planned {planned:,} B, {used / planned - 1:+.2%}")
    assert abs(used - planned) <= 0.01 * planned


def test_a_plan_is_what_k3_mini_uses() -> None:
    """With a large cache: of a few MB of weights a percent would be less than cuBLAS takes."""
    before = fresh()
    settings = EngineConfig(device="cuda", dtype="bfloat16", num_blocks=120_000, num_snapshots=0)
    engine = Engine.load(MINI, device="cuda", settings=settings)
    planned = make_plan(engine.config, WHOLE, settings).total_bytes
    check_plan(used_by(engine, (IDS * 10)[:2000]) - before, planned)


def shard_like() -> ModelConfig:
    """8 layers with the sizes that one of 16 ranks of K3 has, as a whole model."""
    shard = Shard(0, 16)
    layers = {"full_attn_layers": (4, 8), "kda_layers": (1, 2, 3, 5, 6, 7)}
    linear = replace(K3.linear_attn_config, num_heads=6, **layers)
    return replace(
        K3,
        num_hidden_layers=8,
        linear_attn_config=linear,
        num_attention_heads=shard.local(K3.num_attention_heads),
        intermediate_size=shard.local(K3.intermediate_size),
        moe_intermediate_size=shard.local(K3.moe_intermediate_size),
        vocab_size=shard.local(K3.vocab_size),
    )


def test_a_plan_is_what_a_shard_of_k3_uses() -> None:
    from nanok3.rank_weights import packed_weights

    before = fresh()
    config = shard_like()
    settings = EngineConfig(
        device="cuda", dtype="bfloat16", max_num_reqs=4, num_blocks=2000, num_snapshots=0
    )
    assert not settings.problems(config)
    weights = packed_weights(config, WHOLE, "cuda", 0)
    torch.cuda.reset_peak_memory_stats()
    engine = Engine(config, weights, None, settings, GenerationDefaults())
    planned = make_plan(config, WHOLE, settings).total_bytes
    check_plan(used_by(engine, IDS * 2) - before, planned)


def test_what_does_not_fit_is_refused_before_loading() -> None:
    before = fresh()
    settings = EngineConfig(num_blocks=10_000_000)
    with pytest.raises(ValueError, match=r"GB free, but .* GB are needed"):
        Engine.load(MINI, device="cuda", settings=settings)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("num_rows", [3, 256])
def test_a_long_context_of_k3(num_rows: int) -> None:
    """The last rows of 131,000 tokens on one of 16 ranks."""
    from nanok3.packing import empty_layer, packed_layer, put_fields
    from nanok3.prefill_ops import Prefill
    from nanok3.random_weights import random_shard
    from nanok3.reference.mla import MLAWeights, mla_expanded_ref, mla_ref
    from nanok3.workspaces import temporary_bytes

    shard, layer, block, context = Shard(0, 16), 3, 64, 131_000
    heads, blocks = shard.local(K3.num_attention_heads), -(-context // block)
    c = replace(K3, first_k_dense_replace=99)  # no experts: only attention is wanted
    fields = random_shard(c, shard, "cuda", BF16, 1, layers=(layer,))
    places = empty_layer(c, shard, layer, "cuda")
    others = put_fields(places.puts, fields)
    packed = packed_layer(c, (places.packed | others).__getitem__, layer).attn
    torch.manual_seed(2)
    cache = torch.randn((blocks + 1) * block, K3.latent_width, device="cuda").to(BF16)
    table = (1 + torch.randperm(blocks, device="cuda")).unsqueeze(0)
    positions = torch.arange(context - num_rows, context, device="cuda")
    q = torch.randn(num_rows, heads * K3.qk_head_dim, device="cuda").to(BF16)
    gate = heads * K3.v_head_dim
    x = torch.randn(num_rows, K3.q_lora_rank + K3.latent_width + gate, device="cuda").to(BF16)
    out = torch.full((num_rows, gate), float("nan"), dtype=BF16, device="cuda")
    ops = Prefill(K3, shard, num_rows, "cuda")
    before = fresh()
    ops.mla(q, x, packed, cache, table, positions, block, out=out)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{num_rows} rows take {taken / 2**20:.1f} MiB")
    assert taken <= temporary_bytes(K3, shard, num_rows) + (32 << 20)  # cuBLAS
    kv_b = fields[f"layers.{layer}.attn.kv_b"].unflatten(0, (heads, -1))
    norms = packed.q_norm, packed.kv_norm  # type: ignore[union-attr]

    def reference(dtype: torch.dtype) -> Tensor:
        w = MLAWeights(*norms, kv_b.to(dtype), K3.qk_nope_head_dim, K3.rms_norm_eps)
        made = torch.empty(3, gate, dtype=dtype, device="cuda")
        last = slice(num_rows - 3, num_rows)
        where = table, positions[last], block
        form = mla_expanded_ref if dtype == BF16 else mla_ref
        form(q[last].to(dtype), x[last].to(dtype), w, cache.to(dtype), *where, out=made)
        return made

    check_bf16(out[-3:], reference(BF16), reference(torch.float32), "the last rows")
