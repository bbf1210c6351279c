"""What prefill takes for a while: counted without a device, at K3's sizes, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor

pytest.importorskip("cutlass")
from nanok3 import prefill_ops
from nanok3.config import K3, Shard
from nanok3.ops import PREFILL
from nanok3.packing import empty_head, empty_layer, packed_layer
from nanok3.prefill_ops import Prefill
from nanok3.step import allocate_buffers
from nanok3.weight_table import layer_table
from nanok3.workspaces import temporary_bytes

BF16, META, BLOCK = torch.bfloat16, "meta", 64
KDA_LAYER, MLA_LAYER = 1, 3


def test_live_bytes() -> None:
    with LiveBytes() as live:
        a = torch.empty(1000, device=META)
        b = (a + 1).view(10, 100)
        assert live.now == 8000
        del a
        assert live.now == 4000
        b[2] += 1
        del b
    assert live.now == 0 and live.peak == 8000


def peaks(shard: Shard, num_rows: int, context: int) -> dict[str, int]:
    """The most bytes that live at once in each op, by name."""
    c, found = K3, {}

    def measure(name: str, call: Callable[[], None]) -> None:
        with LiveBytes() as live:
            call()
        found[name] = live.peak

    def values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def layer(i: int) -> Any:
        places = empty_layer(c, shard, i, META)
        fields = {f.name: values(*f.shape, dtype=f.dtype(BF16)) for f in layer_table(c, i, shard)}
        return packed_layer(c, (fields | places.packed).__getitem__, i)

    def ints(*shape: int) -> Tensor:
        return values(*shape, dtype=torch.int64)

    ops = Prefill(c, shard, num_rows, META).record(PREFILL)
    buf = allocate_buffers(c, num_rows, num_rows, BF16, META, shard)
    w, heads = layer(KDA_LAYER), shard.local(c.linear_attn_config.num_heads)
    conv, state = values(2, 3, 3 * heads * 128), values(2, heads, 128, 128, dtype=torch.float32)
    x, moe = buf.x, w.mlp
    measure("kda", lambda: ops.kda(buf.kda_in, w.attn, conv, state, ints(1), out=buf.kda_heads))
    measure("in_proj", lambda: ops.linear(x, w.in_proj, out=buf.kda_in))
    parts = buf.router_part, buf.latent_part, buf.shared_act
    measure("moe_in", lambda: ops.moe_in(x, moe.in_proj, out=parts))
    chosen = buf.topk_ids, buf.topk_weights
    measure("route", lambda: ops.route(buf.router_logits, moe.router, out=chosen))
    measure("experts", lambda: ops.experts(buf.latent, *chosen, moe.experts, out=buf.routed_sum))
    shared = buf.shared_part
    measure(
        "latent_up", lambda: ops.latent_up(buf.routed, shared, moe.latent_up, out=buf.delta_part)
    )
    dense = layer(0).mlp
    measure("gate_up", lambda: ops.gate_up(x, dense.gate_up, out=buf.dense_act))
    head = empty_head(c, shard, META).packed["lm_head"]
    measure("lm_head", lambda: ops.lm_head(x, head, ints(num_rows), out=buf.logits_part))
    mla, cache = layer(MLA_LAYER).attn, values(context + BLOCK, c.latent_width)
    where = cache, ints(1, context // BLOCK), ints(num_rows), BLOCK
    measure("mla", lambda: ops.mla(buf.q, buf.mla_in, mla, *where, out=buf.mla_heads))
    return found


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_ops, "expert_prefill", lambda *args, **options: None)


@pytest.mark.parametrize("size", [1, 8, 16, 32])
@pytest.mark.parametrize("num_rows", [1, 256, 1000])
def test_the_plan_counts_the_largest_op(size: int, num_rows: int) -> None:
    found = peaks(Shard(0, size), num_rows, 32768)
    planned = temporary_bytes(K3, Shard(0, size), num_rows)
    print(planned, found)
    assert max(found.values()) <= planned <= 1.3 * max(found.values())


def test_context_takes_no_more() -> None:
    short, long = (peaks(Shard(0, 16), 256, n)["mla"] for n in (32768, 1_048_576))
    assert long <= 1.02 * short


def test_rows_take_no_more_where_state_or_scores_would_be_large() -> None:
    some, many = (peaks(Shard(0, 16), n, 32768) for n in (512, 4096))
    assert many["kda"] <= 1.05 * some["kda"] + 2**20
    width = replace(K3).num_attention_heads // 16 * K3.v_head_dim
    assert many["mla"] <= 1.05 * some["mla"] + 4096 * width * 14
