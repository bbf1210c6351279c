"""Checkpoint names -> the model's weight records: one table, read in both directions.

`table(config)` lists every field of the records with the checkpoint tensors that fill it; from it
come the expected tensors, the filling of fields at load, and the way back when k3-mini is saved.
Knows names, shapes and packing; leaves files to `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from nanok3.checkpoint import TensorSpec
from nanok3.config import ModelConfig
from nanok3.reference import mxfp4
from nanok3.reference.attn_res import AttnResWeights
from nanok3.reference.experts import ExpertWeights
from nanok3.reference.kda import KDAWeights
from nanok3.reference.linear import GateUpWeights, LatentUpWeights
from nanok3.reference.mla import MLAWeights
from nanok3.reference.router import RouterWeights

ROOT = "language_model.model."


@dataclass(frozen=True)
class MoEWeights:
    router: RouterWeights
    latent_down: Tensor  # [Z, C]
    experts: ExpertWeights
    latent_up: LatentUpWeights
    shared_gate_up: GateUpWeights  # [2F, C]
    shared_down: Tensor  # [C, F]


@dataclass(frozen=True)
class DenseWeights:
    gate_up: GateUpWeights  # [2F, C]
    down: Tensor  # [C, F]


@dataclass(frozen=True)
class LayerWeights:
    attn_res: AttnResWeights
    in_proj: Tensor  # [q|k|v|gate|f_a|b, C] or [q_a|kv_a|gate, C]
    attn: KDAWeights | MLAWeights
    q_b: Tensor | None  # [H * (Dn + Dr), q_lora], MLA only
    o_proj: Tensor  # [C, H * D]
    mlp_res: AttnResWeights
    mlp: DenseWeights | MoEWeights


@dataclass(frozen=True)
class Weights:
    embed: Tensor  # [V, C]
    layers: tuple[LayerWeights, ...]
    output_res: AttnResWeights
    lm_head: Tensor  # [V, C]


# ---- the table ----


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of the records and the checkpoint tensors that fill it, stacked by rows.

    `kind`: "rows" stacks the pieces; "product" multiplies them (AttnRes: norm * proj);
    "heads" keeps the first rows of a tensor stored longer, whose tail must be zero (A_log);
    "experts" stacks [E] of the stacked pieces, each stored as MXFP4 (or bf16).
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, tuple[int, ...]], ...]  # name, stored shape
    stored: str = "BF16"
    kind: str = "rows"


def linear_field(name: str, root: str, pieces: dict[str, int], columns: int) -> Field:
    named = tuple((f"{root}{p}.weight", (r, columns)) for p, r in pieces.items())
    return Field(name, (sum(pieces.values()), columns), named)


def vector_field(name: str, source: str, size: int, stored: str = "BF16") -> Field:
    return Field(name, (size,), ((source, (size,)),), stored)


def res_fields(name: str, source: str, norm: str, hidden: int) -> Iterator[Field]:
    pieces = ((f"{source}_norm.weight", (hidden,)), (f"{source}_proj.weight", (1, hidden)))
    yield Field(f"{name}.score", (hidden,), pieces, kind="product")
    yield vector_field(f"{name}.norm", norm, hidden)


def kda_fields(c: ModelConfig, layer: str, source: str) -> Iterator[Field]:
    a = c.linear_attn_config
    width, heads, dim, taps = a.width, a.num_heads, a.head_dim, a.short_conv_kernel_size
    ins = {f"{p}_proj": width for p in "qkvg"} | {"f_a_proj": dim, "b_proj": heads}
    yield linear_field(f"{layer}in_proj", source, ins, c.hidden_size)
    conv = tuple((f"{source}{p}_conv1d.weight", (width, 1, taps)) for p in "qkv")
    yield Field(f"{layer}attn.conv", (3 * width, taps), conv, "F32")
    yield linear_field(f"{layer}attn.f_b", source, {"f_b_proj": width}, dim)
    yield Field(f"{layer}attn.A_log", (heads,), ((f"{source}A_log", (dim,)),), "F32", "heads")
    yield vector_field(f"{layer}attn.dt_bias", f"{source}dt_bias", width, "F32")
    yield vector_field(f"{layer}attn.o_norm", f"{source}o_norm.weight", dim, "F32")
    yield linear_field(f"{layer}o_proj", source, {"o_proj": c.hidden_size}, width)


def mla_fields(c: ModelConfig, layer: str, source: str) -> Iterator[Field]:
    heads, value_width = c.num_attention_heads, c.num_attention_heads * c.v_head_dim
    ins = {"q_a_proj": c.q_lora_rank, "kv_a_proj_with_mqa": c.latent_width, "g_proj": value_width}
    yield linear_field(f"{layer}in_proj", source, ins, c.hidden_size)
    yield vector_field(f"{layer}attn.q_norm", f"{source}q_a_layernorm.weight", c.q_lora_rank)
    yield vector_field(f"{layer}attn.kv_norm", f"{source}kv_a_layernorm.weight", c.kv_lora_rank)
    kv_b = {"kv_b_proj": heads * (c.qk_nope_head_dim + c.v_head_dim)}
    yield linear_field(f"{layer}attn.kv_b", source, kv_b, c.kv_lora_rank)
    yield linear_field(f"{layer}q_b", source, {"q_b_proj": heads * c.qk_head_dim}, c.q_lora_rank)
    yield linear_field(f"{layer}o_proj", source, {"o_proj": c.hidden_size}, value_width)


def mlp_fields(name: str, source: str, hidden: int, width: int) -> Iterator[Field]:
    yield linear_field(f"{name}gate_up", source, {"gate_proj": width, "up_proj": width}, hidden)
    yield linear_field(f"{name}down", source, {"down_proj": hidden}, width)


def moe_fields(c: ModelConfig, layer: str, source: str) -> Iterator[Field]:
    hidden, latent, width, n = (
        c.hidden_size,
        c.routed_expert_hidden_size,
        c.moe_intermediate_size,
        c.num_experts,
    )
    yield linear_field(f"{layer}moe.gate", source, {"gate": n}, hidden)
    yield vector_field(f"{layer}moe.bias", f"{source}gate.e_score_correction_bias", n, "F32")
    down = {"routed_expert_down_proj": latent}
    yield linear_field(f"{layer}moe.latent_down", source, down, hidden)
    experts = [f"{source}experts.{e}." for e in range(n)]
    w13 = tuple((f"{e}{p}", (width, latent)) for e in experts for p in ("w1", "w3"))
    yield Field(f"{layer}moe.w13", (n, 2 * width, latent), w13, kind="experts")
    w2 = tuple((f"{e}w2", (latent, width)) for e in experts)
    yield Field(f"{layer}moe.w2", (n, latent, width), w2, kind="experts")
    if c.latent_moe_use_norm:
        yield vector_field(f"{layer}moe.norm", f"{source}routed_expert_norm.weight", latent)
    yield linear_field(f"{layer}moe.latent_up", source, {"routed_expert_up_proj": hidden}, latent)
    shared = c.shared_intermediate_size
    yield from mlp_fields(f"{layer}moe.shared_", f"{source}shared_experts.", hidden, shared)


def layer_fields(c: ModelConfig, i: int) -> Iterator[Field]:
    layer, source = f"layers.{i}.", f"{ROOT}layers.{i}."
    hidden = c.hidden_size
    attn_norm, mlp_norm = f"{source}input_layernorm", f"{source}post_attention_layernorm"
    attn_source, mlp_source = f"{source}self_attention_res", f"{source}mlp_res"
    yield from res_fields(f"{layer}attn_res", attn_source, f"{attn_norm}.weight", hidden)
    attention = kda_fields if c.is_kda(i) else mla_fields
    yield from attention(c, layer, f"{source}self_attn.")
    yield from res_fields(f"{layer}mlp_res", mlp_source, f"{mlp_norm}.weight", hidden)
    if c.is_moe(i):
        yield from moe_fields(c, layer, f"{source}block_sparse_moe.")
    else:
        yield from mlp_fields(f"{layer}dense.", f"{source}mlp.", hidden, c.intermediate_size)


def table(c: ModelConfig) -> Iterator[Field]:
    """Every field of the records, in the order of the layers."""
    yield linear_field("embed", ROOT, {"embed_tokens": c.vocab_size}, c.hidden_size)
    for i in range(c.num_hidden_layers):
        yield from layer_fields(c, i)
    output, norm = f"{ROOT}output_attn_res", f"{ROOT}norm.weight"
    yield from res_fields("output_res", output, norm, c.hidden_size)
    yield linear_field("lm_head", "language_model.", {"lm_head": c.vocab_size}, c.hidden_size)


def expected_tensors(c: ModelConfig, experts: str = "mxfp4") -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint must hold, by name; experts as "mxfp4" or "bf16"."""
    expected: dict[str, TensorSpec] = {}
    for field in table(c):
        for name, shape in field.pieces:
            if field.kind != "experts":
                expected[name] = TensorSpec(shape, field.stored)
            elif experts == "mxfp4":
                rows, columns = shape
                expected[f"{name}.weight_packed"] = TensorSpec((rows, columns // 2), "U8")
                scale = (rows, columns // mxfp4.GROUP)
                expected[f"{name}.weight_scale"] = TensorSpec(scale, "U8")
            else:
                expected[f"{name}.weight"] = TensorSpec(shape, "BF16")
    return expected


# ---- filling ----


class Filler:
    """Takes checkpoint tensors in any order and leaves filled fields."""

    def __init__(self, c: ModelConfig, dtype: torch.dtype, device: str) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.fields: dict[str, Tensor] = {}
        self.places: dict[str, tuple[Field, int]] = {}  # piece -> its field, first row
        self.halves: dict[str, Tensor] = {}  # of an MXFP4 pair, the one that came first
        for field in table(c):
            is_wide = field.stored == "F32" or field.kind == "product"
            target = torch.empty(field.shape, dtype=wide if is_wide else dtype, device=device)
            self.fields[field.name] = target.fill_(1) if field.kind == "product" else target
            row = 0
            for name, shape in field.pieces:
                self.places[name] = (field, row)
                row += shape[0]

    def take(self, name: str, tensor: Tensor) -> None:
        stem, _, suffix = name.rpartition(".")
        if suffix in ("weight_packed", "weight_scale"):
            if stem not in self.halves:
                self.halves[stem] = tensor
                return
            other = self.halves.pop(stem)
            packed, scale = (tensor, other) if suffix == "weight_packed" else (other, tensor)
            name, tensor = stem, mxfp4.dequantize(packed, scale, torch.float32)
        elif suffix == "weight" and stem in self.places:
            name = stem
        field, row = self.places.pop(name)
        self._fill(field, name, row, tensor)

    def _fill(self, field: Field, name: str, row: int, tensor: Tensor) -> None:
        target = self.fields[field.name]
        if field.kind == "product":
            target.mul_(tensor.reshape(target.shape).to(target.device))
            return
        if field.kind == "heads":
            if tensor[target.shape[0] :].any():
                raise ValueError(f"{name}: entries past the {target.shape[0]} heads must be zero")
            tensor = tensor[: target.shape[0]]
        elif field.kind == "experts":
            target = target.flatten(0, 1)
        tensor = tensor.reshape(-1, *target.shape[1:])
        target[row : row + tensor.shape[0]].copy_(tensor)

    def finish(self) -> dict[str, Tensor]:
        assert not self.places and not self.halves, "a checkpoint was checked before it was read"
        return self.fields


def to_checkpoint(c: ModelConfig, fields: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The way back, for saving: official names and tensors as they are stored, experts as MXFP4.

    A product is stored as its first factor 1 and its second factor the product.
    """
    stored = {"BF16": torch.bfloat16, "F32": torch.float32}
    for field in table(c):
        value = fields[field.name].detach()
        rows = value.flatten(0, 1) if field.kind == "experts" else value
        start = 0
        for k, (name, shape) in enumerate(field.pieces):
            if field.kind == "product":
                piece = value.reshape(shape) if k else torch.ones(shape)
            elif field.kind == "heads":
                piece = torch.nn.functional.pad(value, (0, shape[0] - value.shape[0]))
            else:
                count = prod(shape) // prod(rows.shape[1:])
                piece = rows[start : start + count].reshape(shape)
                start += count
            if field.kind == "experts":
                packed, scale = mxfp4.quantize(piece)
                yield f"{name}.weight_packed", packed.contiguous()
                yield f"{name}.weight_scale", scale.contiguous()
            else:
                yield name, piece.to(stored[field.stored]).contiguous()


# ---- records ----


def build(c: ModelConfig, get: Callable[[str], Tensor]) -> Weights:
    """Records over the fields that `get` returns by name."""

    def res(name: str) -> AttnResWeights:
        return AttnResWeights(get(f"{name}.score"), get(f"{name}.norm"), c.rms_norm_eps)

    def gate_up(name: str) -> GateUpWeights:
        betas = c.activation_situ_beta, c.activation_situ_linear_beta
        return GateUpWeights(get(name), *betas)

    def kda(name: str) -> KDAWeights:
        return KDAWeights(
            conv=get(f"{name}.conv"),
            f_b=get(f"{name}.f_b"),
            A_log=get(f"{name}.A_log"),
            dt_bias=get(f"{name}.dt_bias"),
            o_norm=get(f"{name}.o_norm"),
            lower_bound=c.linear_attn_config.gate_lower_bound,
            eps=c.rms_norm_eps,
        )

    def mla(name: str) -> MLAWeights:
        kv_b = get(f"{name}.kv_b").unflatten(0, (c.num_attention_heads, -1))
        norms = get(f"{name}.q_norm"), get(f"{name}.kv_norm")
        return MLAWeights(*norms, kv_b, c.qk_nope_head_dim, c.rms_norm_eps)

    def moe(name: str) -> MoEWeights:
        norm = get(f"{name}norm") if c.latent_moe_use_norm else None
        betas = c.activation_situ_beta, c.activation_situ_linear_beta
        return MoEWeights(
            router=RouterWeights(
                get(f"{name}gate"),
                get(f"{name}bias"),
                c.num_experts_per_token,
                c.num_expert_group,
                c.topk_group,
                c.moe_renormalize,
                c.routed_scaling_factor,
            ),
            latent_down=get(f"{name}latent_down"),
            experts=ExpertWeights(get(f"{name}w13"), get(f"{name}w2"), *betas),
            latent_up=LatentUpWeights(norm, get(f"{name}latent_up"), c.rms_norm_eps),
            shared_gate_up=gate_up(f"{name}shared_gate_up"),
            shared_down=get(f"{name}shared_down"),
        )

    def layer(i: int) -> LayerWeights:
        name = f"layers.{i}."
        is_kda = c.is_kda(i)
        dense = not c.is_moe(i)
        return LayerWeights(
            attn_res=res(f"{name}attn_res"),
            in_proj=get(f"{name}in_proj"),
            attn=kda(f"{name}attn") if is_kda else mla(f"{name}attn"),
            q_b=None if is_kda else get(f"{name}q_b"),
            o_proj=get(f"{name}o_proj"),
            mlp_res=res(f"{name}mlp_res"),
            mlp=DenseWeights(gate_up(f"{name}dense.gate_up"), get(f"{name}dense.down"))
            if dense
            else moe(f"{name}moe."),
        )

    layers = tuple(layer(i) for i in range(c.num_hidden_layers))
    return Weights(get("embed"), layers, res("output_res"), get("lm_head"))
