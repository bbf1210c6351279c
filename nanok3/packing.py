"""Weights in the kernels' layouts: empty records, and where the rows of each field go in them.

`empty_layer` and `empty_head` allocate what a rank holds; `Filler` puts checkpoint tensors into it
one by one as they are read, so that nothing is ever held twice. `packed_layer` and `packed_ends`
make the records. Which layout a field has is said here alone; what a layout is, in the kernels'
files. On the device "meta" nothing is allocated, so that a plan can count what would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.kernels.gemv_layout import TILE, Shape, choose_split, empty_gemv, place_rows
from nanok3.kernels.mxfp4_layout import (
    BLOCK,
    DOWN_LAYOUT,
    UP_LAYOUT,
    PackedExperts,
    empty_experts,
    place_experts,
    place_scales,
    place_values,
)
from nanok3.reference import mxfp4
from nanok3.reference.mla import MLAWeights
from nanok3.weight_table import Put, ends_table, layer_table
from nanok3.weights import Get, LayerWeights, MoEWeights, Weights, build_ends, build_layer

# What a product does with its sums, by field; other fields of matrices have layouts of their own.
FINISH = {
    "in_proj": "bf16",
    "q_b": "bf16",
    "o_proj": "bf16",
    "dense.gate_up": "situ",
    "dense.down": "bf16",
    "moe.shared_down": "bf16",
    "moe.latent_up": "add",
}
PUT_VALUES = 32 << 20  # on their way to a place at a time, at most
MOE_IN = ("moe.gate", "moe.latent_down", "moe.shared_gate_up")  # one product, in this order


@dataclass(frozen=True)
class Packed:
    """A matrix in the layout of `gemv`, with the static sizes that its launch needs."""

    tensor: Tensor  # [tiles, K / 32, 16, 32]
    shape: Shape


@dataclass(frozen=True)
class PackedMLA:
    q_norm: Tensor  # [q_lora]
    kv_norm: Tensor  # [L]
    absorb: Packed  # H blocks of [L, Dn]: q_n -> the latent
    value: Packed  # H blocks of [Dv, L]: the latent -> the head, then the gate
    nope_dim: int
    eps: float


@dataclass(frozen=True)
class Places:
    """Packed fields by name, still empty, and how to fill them."""

    packed: dict[str, Any] = field(default_factory=dict)
    puts: dict[str, Put] = field(default_factory=dict)


def tensors_of(packed: Any) -> list[Tensor]:
    """Of a packed field."""
    if isinstance(packed, tuple):
        return [p.tensor for p in packed]
    return [packed.tiles if isinstance(packed, PackedExperts) else packed.tensor]


def layout_problems(c: ModelConfig, shard: Shard) -> list[str]:
    """Reasons, one a line, why the layouts cannot hold this model; empty if they can."""
    value_width = c.num_attention_heads * c.v_head_dim
    widths = (
        ("hidden_size", c.hidden_size),
        ("q_lora_rank", c.q_lora_rank),
        ("kv_lora_rank", c.kv_lora_rank),
        ("qk_nope_head_dim", c.qk_nope_head_dim),
        ("linear_attn_config.num_heads times head_dim", c.linear_attn_config.width // shard.size),
        ("num_attention_heads times v_head_dim", value_width // shard.size),
        ("intermediate_size", c.intermediate_size // shard.size),
        ("moe_intermediate_size", c.moe_intermediate_size // shard.size),
        ("shared experts' moe_intermediate_size", c.shared_intermediate_size // shard.size),
        ("routed_expert_hidden_size", c.routed_expert_hidden_size),
    )
    return [
        f"text_config.{name}: the GPU kernels need a multiple of {BLOCK} on each GPU, found {width}"
        for name, width in widths
        if width % BLOCK
    ]


# ---- putting rows to their places ----


def put_rows(
    tensor: Tensor, num_rows: int, situ: bool, first: int, part: str, rows: Tensor
) -> None:
    """A few at a time, so that a large matrix does not lie on the device twice."""
    assert not part, "only experts are stored as MXFP4"
    for some in rows.split(max(1, PUT_VALUES // rows.shape[1])):
        place_rows(tensor, first, some.to(tensor.device), num_rows, situ)
        first += len(some)


def put_kv_b(kv: tuple[Packed, Packed], nope: int, first: int, part: str, rows: Tensor) -> None:
    """rows [H * (Dn + Dv), L], key rows of each head first: those go in transposed."""
    absorb, value = kv
    heads = absorb.shape.groups
    by_head = rows.to(absorb.tensor.device).unflatten(0, (heads, -1))  # [H, Dn + Dv, L]
    assert first == 0 and not part
    for packed, matrix in ((absorb, by_head[:, :nope].transpose(1, 2)), (value, by_head[:, nope:])):
        matrix = matrix.flatten(0, 1)
        place_rows(packed.tensor, 0, matrix, len(matrix))


def put_experts(experts: PackedExperts, pairs: bool, first: int, part: str, rows: Tensor) -> None:
    """One expert's w1, w3 or w2, or all of whole experts: values, scales, or dense values that are
    MXFP4's. first: the first row among those of all experts; pairs: w1 and w3 share tiles."""
    per_expert = experts.tiles.shape[1] * TILE
    if not part:
        packed, scale = mxfp4.quantize(rows)
        if not torch.equal(mxfp4.dequantize(packed, scale, rows.dtype), rows):
            raise ValueError("these experts are not MXFP4; the GPU kernels serve no others")
        put_experts(experts, pairs, first, "packed", packed)
        put_experts(experts, pairs, first, "scale", scale)
        return
    place = place_values if part == "packed" else place_scales
    expert, rows = first // per_expert, rows.to(experts.tiles.device)
    if len(rows) % per_expert == 0:
        count = len(rows) // per_expert
        tiles = experts.tiles[expert : expert + count]
        place_experts(tiles, rows.unflatten(0, (count, -1)), pairs, place)
    else:
        half_rows = per_expert // 2
        assert pairs and len(rows) == half_rows
        place(experts.tiles[expert], rows, first % per_expert // half_rows)


# ---- what a rank holds ----


def empty_matrix(shape: Shape, device: str) -> Packed:
    situ = shape.finish == "situ"
    return Packed(empty_gemv(shape.rows, shape.k, situ, device), shape)


def plain_shape(c: ModelConfig, rows: int, k: int, finish: str) -> Shape:
    betas = c.activation_situ_beta, c.activation_situ_linear_beta
    shape = Shape(rows=rows, k=k, x_width=k, finish=finish, split=choose_split(rows, k))
    return replace(shape, beta=betas[0], linear_beta=betas[1]) if finish == "situ" else shape


def empty_layer(c: ModelConfig, shard: Shard, i: int, device: str) -> Places:
    """The packed fields of layer i; the others are dense."""
    places, root = Places(), f"layers.{i}."
    shapes = {f.name.removeprefix(root): f.shape for f in layer_table(c, i, shard)}
    for name, finish in FINISH.items():
        if name in shapes:
            rows, k = shapes[name]
            made = empty_matrix(plain_shape(c, rows, k, finish), device)
            places.packed[root + name] = made
            places.puts[root + name] = partial(put_rows, made.tensor, rows, finish == "situ")
    if not c.is_kda(i):
        heads, dims = shard.local(c.num_attention_heads), (c.qk_nope_head_dim, c.qk_rope_head_dim)
        kv = empty_kv_b(heads, c.kv_lora_rank, *dims, c.v_head_dim, device)
        places.packed[f"{root}attn.kv_b"] = kv
        places.puts[f"{root}attn.kv_b"] = partial(put_kv_b, kv, c.qk_nope_head_dim)
    if c.is_moe(i):
        made = empty_moe_in(c, shapes, device)
        places.packed[f"{root}moe.in_proj"] = made
        for name, part in zip(MOE_IN, made.shape.ranges, strict=True):
            tiles = made.tensor[part.first_tile : part.first_tile + part.tiles]
            situ = part.finish == "situ"
            places.puts[root + name] = partial(put_rows, tiles, part.rows, situ)
        for name, layout in (("moe.w13", UP_LAYOUT), ("moe.w2", DOWN_LAYOUT)):
            num_experts, rows, k = shapes[name]
            experts = empty_experts(num_experts, rows, k, layout, device)
            places.packed[root + name] = experts
            places.puts[root + name] = partial(put_experts, experts, layout == UP_LAYOUT)
    return places


def empty_moe_in(c: ModelConfig, shapes: dict[str, tuple[int, ...]], device: str) -> Packed:
    rows, k = [shapes[name][0] for name in MOE_IN], c.hidden_size
    shape = Shape(
        rows=sum(rows),
        k=k,
        x_width=k,
        finish="moe_in",
        beta=c.activation_situ_beta,
        linear_beta=c.activation_situ_linear_beta,
        router_rows=rows[0],
        latent_rows=rows[1],
    )
    shape = replace(shape, split=choose_split(shape.tiles * TILE, k))
    return Packed(empty_gemv(shape.tiles * TILE, k, False, device), shape)


def empty_kv_b(
    heads: int, rank: int, nope: int, rope: int, value: int, device: str
) -> tuple[Packed, Packed]:
    query = nope + rope
    absorb = Shape(heads * rank, nope, heads * query, groups=heads, group_stride=query)
    out = Shape(heads * value, rank, heads * rank, groups=heads, group_stride=rank, finish="gate")
    return empty_matrix(absorb, device), empty_matrix(out, device)


def empty_head(c: ModelConfig, shard: Shard, device: str) -> Places:
    (rows, k) = next(f.shape for f in ends_table(c, shard) if f.name == "lm_head")
    made = empty_matrix(plain_shape(c, rows, k, "f32"), device)
    return Places({"lm_head": made}, {"lm_head": partial(put_rows, made.tensor, rows, False)})


def empty_weights(c: ModelConfig, shard: Shard, device: str) -> Places:
    """All packed fields of a rank."""
    whole = empty_head(c, shard, device)
    for i in range(c.num_hidden_layers):
        layer = empty_layer(c, shard, i, device)
        whole.packed.update(layer.packed)
        whole.puts.update(layer.puts)
    return whole


def put_fields(puts: Mapping[str, Put], fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole fields to their places, experts dense or as `.packed` and `.scale` -> the others."""
    others = {}
    for name, value in fields.items():
        stem, _, last = name.rpartition(".")
        part = last if last in ("packed", "scale") else ""
        put = puts.get(stem if part else name)
        if put is None:
            others[name] = value
        else:
            put(0, part, value.flatten(0, -2))
    return others


# ---- records ----


def packed_layer(c: ModelConfig, get: Get, i: int) -> LayerWeights:
    """get: packed and dense fields by name."""
    root = f"layers.{i}."

    def stand_in(name: str) -> Any:  # for what other records hold here
        field_name = name.removeprefix(root)
        if field_name in MOE_IN:
            return None
        if field_name != "attn.kv_b":
            return get(name)
        absorb, _ = get(name)
        rows = absorb.shape.groups * (c.qk_nope_head_dim + c.v_head_dim)
        return torch.empty(rows, c.kv_lora_rank, device="meta")

    w = build_layer(c, stand_in, i)
    changes: dict[str, Any] = {}
    if isinstance(w.mlp, MoEWeights):
        changes["mlp"] = replace(w.mlp, in_proj=get(f"{root}moe.in_proj"))
    if isinstance(w.attn, MLAWeights):
        norms = w.attn.q_norm, w.attn.kv_norm
        absorb, value = get(f"{root}attn.kv_b")
        changes["attn"] = PackedMLA(*norms, absorb, value, w.attn.nope_dim, w.attn.eps)
    return replace(w, **changes)


def packed_weights(c: ModelConfig, get: Get, shard: Shard = WHOLE) -> Weights:
    layers = tuple(packed_layer(c, get, i) for i in range(c.num_hidden_layers))
    return build_ends(c, get, layers, shard)
