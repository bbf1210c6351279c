"""Packed weights of a small model on a CPU, and a stand-in for the kernel of routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tiny import random_fields, tiny_config
from torch import Tensor
from torch.nn.functional import linear

from nanok3.config import WHOLE, ModelConfig
from nanok3.packing import (
    PackedMLA,
    Places,
    empty_kv_b,
    empty_weights,
    packed_weights,
    put_fields,
    put_kv_b,
)
from nanok3.reference.mla import MLAWeights
from nanok3.reference.numerics import situ
from nanok3.weight_table import table
from nanok3.weights import Weights, build

# The tiny K3 with widths that the kernels' layouts can have, also of each of two ranks.
CONFIG = tiny_config(
    num_attention_heads=4,
    intermediate_size=128,
    q_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=16,
    num_heads=4,
    head_dim=32,
    moe_intermediate_size=128,
)


@dataclass(frozen=True)
class Both:
    """The same values packed, and dense in bf16 and float32."""

    packed: Weights
    dense: Weights
    wide: Weights
    experts: dict[int, Tensor]  # dense [E, rows, K] by the address of their tiles


def both_weights(seed: int = 0) -> Both:
    values = random_fields(CONFIG, seed)
    narrow = narrowed(CONFIG, values)
    places, packed = pack_fields(CONFIG, narrow)
    tiles = {
        name: p.tiles.data_ptr()
        for name, p in places.packed.items()
        if name.endswith(("w13", "w2"))
    }
    experts = {address: narrow[name] for name, address in tiles.items()}
    dense, wide = build(CONFIG, narrow.__getitem__), build(CONFIG, values.__getitem__)
    return Both(packed, dense, wide, experts)


def narrowed(config: ModelConfig, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """As they are held where activations are bf16."""
    return {f.name: values[f.name].to(f.dtype(torch.bfloat16)) for f in table(config)}


def pack_fields(config: ModelConfig, fields: dict[str, Tensor]) -> tuple[Places, Weights]:
    places = empty_weights(config, WHOLE, "cpu")
    others = put_fields(places.puts, fields)
    return places, packed_weights(config, (places.packed | others).__getitem__)


def packed_tiny_weights(config: ModelConfig, seed: int) -> Weights:
    """`tiny_weights` in bf16, packed."""
    return pack_fields(config, narrowed(config, random_fields(config, seed)))[1]


def pack_mla(w: MLAWeights, rope_dim: int) -> PackedMLA:
    heads, width, rank = w.kv_b.shape
    device = str(w.kv_b.device)
    kv = empty_kv_b(heads, rank, w.nope_dim, rope_dim, width - w.nope_dim, device)
    put_kv_b(kv, w.nope_dim, 0, "", w.kv_b.flatten(0, 1))
    return PackedMLA(w.q_norm, w.kv_norm, *kv, w.nope_dim, w.eps)


def expert_stand_in(experts: dict[int, Tensor]) -> Any:
    """`expert_prefill` in torch, item by item, with dense experts found by their tiles' address."""

    def expert_prefill(
        x: Tensor,
        items: Tensor,
        x_rows: Tensor,
        packed: Any,
        out_rows: Tensor,
        columns: int,
        betas: tuple[float, float] | None = None,
        *,
        out: Tensor,
    ) -> None:
        assert x.is_contiguous() and out.is_contiguous() and items.dtype == x_rows.dtype
        for expert, first, count in items.tolist():
            assert 0 <= count <= columns
            pairs = slice(first, first + count)
            y = linear(x[x_rows[pairs].long()], experts[packed.tiles.data_ptr()][expert])
            if betas is not None:
                y = situ(*y.chunk(2, dim=-1), *betas).to(x.dtype)
            out[out_rows[pairs].long()] = y

    return expert_prefill
