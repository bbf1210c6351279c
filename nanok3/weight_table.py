"""Checkpoint names <-> fields of the weight records: one table, read in both directions.

`table(config, shard)` lists every field with the checkpoint tensors that fill it and the axis along
which ranks split each of them; from it come the expected tensors, the filling of fields at load,
and the way back when k3-mini is saved. A rank takes its slice of each tensor and then stacks, so
that q, k and v of its heads lie together. Knows names, shapes and packing; leaves files to
`checkpoint.py` and records to `weights.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from nanok3.checkpoint import Part, TensorSpec
from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.reference import mxfp4

ROOT = "language_model.model."
ROWS, COLUMNS, REPLICATED = 0, 1, None  # the axis that ranks split
SHARED_BY_HEADS = ("f_a_proj", "q_a_proj", "kv_a_proj_with_mqa")  # so every rank needs all of it


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tensor that goes into a field."""

    name: str
    shape: tuple[int, ...]  # as stored, whole
    axis: int | None

    def local_rows(self, shard: Shard) -> int:
        return shard.local(self.shape[0]) if self.axis == ROWS else self.shape[0]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of the records and the checkpoint tensors that fill it, stacked by rows.

    `kind`: "rows" stacks the pieces; "product" multiplies them (AttnRes: norm * proj);
    "heads" keeps the first rows of a tensor stored longer, whose tail must be zero (A_log);
    "experts" stacks [E] of the stacked pieces, each stored as MXFP4 (or bf16).
    """

    name: str
    shape: tuple[int, ...]  # of what a rank holds
    pieces: tuple[Piece, ...]
    stored: str = "BF16"
    kind: str = "rows"

    def local(self, shard: Shard) -> Field:
        """The same field on one rank."""
        first, axis = self.shape[0], self.pieces[0].axis
        if self.kind == "experts":  # w1 and w3 split alike
            n, rows, columns = self.shape
            rows = shard.local(rows) if axis == ROWS else rows
            columns = shard.local(columns) if axis == COLUMNS else columns
            return replace(self, shape=(n, rows, columns))
        if axis == COLUMNS:
            return replace(self, shape=(first, shard.local(self.shape[1])))
        if self.kind == "rows":
            first = sum(piece.local_rows(shard) for piece in self.pieces)
        elif self.kind == "heads":
            first = shard.local(first)
        return replace(self, shape=(first, *self.shape[1:]))

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """How it is held where activations are of `dtype`: what is stored in F32 stays wide."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return wide if self.stored == "F32" or self.kind == "product" else dtype


def linear_field(
    name: str, root: str, pieces: dict[str, int], columns: int, axis: int = ROWS
) -> Field:
    """Matrices of these numbers of rows, split along `axis` but for SHARED_BY_HEADS."""
    named = tuple(
        Piece(f"{root}{p}.weight", (r, columns), REPLICATED if p in SHARED_BY_HEADS else axis)
        for p, r in pieces.items()
    )
    return Field(name, (sum(pieces.values()), columns), named)


def vector_field(
    name: str, source: str, size: int, stored: str = "BF16", axis: int | None = REPLICATED
) -> Field:
    return Field(name, (size,), (Piece(source, (size,), axis),), stored)


def res_fields(name: str, source: str, norm: str, hidden: int) -> Iterator[Field]:
    shapes = (f"{source}_norm.weight", (hidden,)), (f"{source}_proj.weight", (1, hidden))
    pieces = tuple(Piece(piece, shape, REPLICATED) for piece, shape in shapes)
    yield Field(f"{name}.score", (hidden,), pieces, kind="product")
    yield vector_field(f"{name}.norm", norm, hidden)


def kda_fields(c: ModelConfig, layer: str, source: str) -> Iterator[Field]:
    a = c.linear_attn_config
    width, heads, dim, taps = a.width, a.num_heads, a.head_dim, a.short_conv_kernel_size
    ins = {f"{p}_proj": width for p in "qkvg"} | {"f_a_proj": dim, "b_proj": heads}
    yield linear_field(f"{layer}in_proj", source, ins, c.hidden_size)
    conv = tuple(Piece(f"{source}{p}_conv1d.weight", (width, 1, taps), ROWS) for p in "qkv")
    yield Field(f"{layer}attn.conv", (3 * width, taps), conv, "F32")
    yield linear_field(f"{layer}attn.f_b", source, {"f_b_proj": width}, dim)
    a_log = Piece(f"{source}A_log", (dim,), ROWS)
    yield Field(f"{layer}attn.A_log", (heads,), (a_log,), "F32", "heads")
    yield vector_field(f"{layer}attn.dt_bias", f"{source}dt_bias", width, "F32", ROWS)
    yield vector_field(f"{layer}attn.o_norm", f"{source}o_norm.weight", dim, "F32")
    yield linear_field(f"{layer}o_proj", source, {"o_proj": c.hidden_size}, width, COLUMNS)


def mla_fields(c: ModelConfig, layer: str, source: str) -> Iterator[Field]:
    heads, value_width = c.num_attention_heads, c.num_attention_heads * c.v_head_dim
    ins = {"q_a_proj": c.q_lora_rank, "kv_a_proj_with_mqa": c.latent_width, "g_proj": value_width}
    yield linear_field(f"{layer}in_proj", source, ins, c.hidden_size)
    yield vector_field(f"{layer}attn.q_norm", f"{source}q_a_layernorm.weight", c.q_lora_rank)
    yield vector_field(f"{layer}attn.kv_norm", f"{source}kv_a_layernorm.weight", c.kv_lora_rank)
    kv_b = {"kv_b_proj": heads * (c.qk_nope_head_dim + c.v_head_dim)}
    yield linear_field(f"{layer}attn.kv_b", source, kv_b, c.kv_lora_rank)
    yield linear_field(f"{layer}q_b", source, {"q_b_proj": heads * c.qk_head_dim}, c.q_lora_rank)
    yield linear_field(f"{layer}o_proj", source, {"o_proj": c.hidden_size}, value_width, COLUMNS)


def mlp_fields(name: str, source: str, hidden: int, width: int) -> Iterator[Field]:
    yield linear_field(f"{name}gate_up", source, {"gate_proj": width, "up_proj": width}, hidden)
    yield linear_field(f"{name}down", source, {"down_proj": hidden}, width, COLUMNS)


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
    w13 = tuple(Piece(f"{e}{p}", (width, latent), ROWS) for e in experts for p in ("w1", "w3"))
    yield Field(f"{layer}moe.w13", (n, 2 * width, latent), w13, kind="experts")
    w2 = tuple(Piece(f"{e}w2", (latent, width), COLUMNS) for e in experts)
    yield Field(f"{layer}moe.w2", (n, latent, width), w2, kind="experts")
    if c.latent_moe_use_norm:
        yield vector_field(f"{layer}moe.norm", f"{source}routed_expert_norm.weight", latent)
    yield linear_field(f"{layer}moe.latent_up", source, {"routed_expert_up_proj": hidden}, latent)
    shared = c.shared_intermediate_size
    yield from mlp_fields(f"{layer}moe.shared_", f"{source}shared_experts.", hidden, shared)


def layer_fields(c: ModelConfig, i: int) -> Iterator[Field]:
    """Of the whole layer."""
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


def embed_field(c: ModelConfig) -> Field:
    return linear_field("embed", ROOT, {"embed_tokens": c.vocab_size}, c.hidden_size)


def head_fields(c: ModelConfig) -> Iterator[Field]:
    output, norm = f"{ROOT}output_attn_res", f"{ROOT}norm.weight"
    yield from res_fields("output_res", output, norm, c.hidden_size)
    yield linear_field("lm_head", "language_model.", {"lm_head": c.vocab_size}, c.hidden_size)


def table(c: ModelConfig, shard: Shard = WHOLE) -> Iterator[Field]:
    """Every field of the records as one rank holds it, in the order of the layers."""
    yield embed_field(c).local(shard)
    for i in range(c.num_hidden_layers):
        yield from layer_table(c, i, shard)
    yield from (field.local(shard) for field in head_fields(c))


def layer_table(c: ModelConfig, i: int, shard: Shard = WHOLE) -> Iterator[Field]:
    return (field.local(shard) for field in layer_fields(c, i))


def ends_table(c: ModelConfig, shard: Shard = WHOLE) -> Iterator[Field]:
    """What belongs to no layer."""
    return (field.local(shard) for field in (embed_field(c), *head_fields(c)))


def expected_tensors(c: ModelConfig, experts: str = "mxfp4") -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint must hold, by name; experts as "mxfp4" or "bf16"."""
    expected: dict[str, TensorSpec] = {}
    for field in table(c):
        for piece in field.pieces:
            name, shape = piece.name, piece.shape
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


# Puts rows of a field to their place: (the first one's number, "" or which part of MXFP4, the rows)
Put = Callable[[int, str, Tensor], None]
PARTS = {"weight_packed": "packed", "weight_scale": "scale"}


class Filler:
    """Takes checkpoint tensors in any order and leaves the filled fields of one rank.

    puts: where the rows of some fields go; the others become dense tensors, experts unpacked.
    """

    def __init__(
        self,
        c: ModelConfig,
        dtype: torch.dtype,
        device: str,
        shard: Shard = WHOLE,
        puts: Mapping[str, Put] | None = None,
    ) -> None:
        self.shard = shard
        self.puts = puts or {}
        self.fields: dict[str, Tensor] = {}
        self.places: dict[str, tuple[Field, Piece, int]] = {}  # by piece; its first row
        self.halves: dict[str, Tensor | None] = {}  # of an MXFP4 pair, the one that came first
        for field in table(c, shard):
            if field.name not in self.puts:
                target = torch.empty(field.shape, dtype=field.dtype(dtype), device=device)
                self.fields[field.name] = target.fill_(1) if field.kind == "product" else target
            row = 0
            for piece in field.pieces:
                self.places[piece.name] = (field, piece, row)
                row += piece.local_rows(shard)

    def part_of(self, name: str, spec: TensorSpec) -> Part | None:
        """What of a stored tensor `take_part` wants; None: all of it."""
        field, piece, _ = self.places[self._key(name)]
        if field.kind == "heads" or piece.axis == REPLICATED or self.shard.size == 1:
            return None  # of heads the tail is checked
        own = self.shard.slice(spec.shape[piece.axis])  # columns are whole MXFP4 groups
        return Part(piece.axis, own.start, own.stop)

    def take(self, name: str, tensor: Tensor) -> None:
        """A whole tensor."""
        part = self.part_of(name, TensorSpec(tuple(tensor.shape), ""))
        self.take_part(name, tensor if part is None else part.of(tensor))

    def take_part(self, name: str, tensor: Tensor) -> None:
        suffix, key = name.rpartition(".")[2], self._key(name)
        field, _, row = self.places[key]
        if field.kind == "heads":
            tensor = self._heads(field, name, tensor)
        part = PARTS.get(suffix, "")
        if put := self.puts.get(field.name):
            try:
                put(row, part, tensor)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if part and key not in self.halves:
                self.halves[key] = None  # the other one is still to come
                return
            self.halves.pop(key, None)
            del self.places[key]
            return
        if part:
            if key not in self.halves:
                self.halves[key] = tensor
                return
            other = self.halves.pop(key)
            assert other is not None
            packed, scale = (tensor, other) if part == "packed" else (other, tensor)
            tensor = mxfp4.dequantize(packed, scale, torch.float32)
        del self.places[key]
        self._fill(field, row, tensor)

    def _key(self, name: str) -> str:
        """The halves of an MXFP4 pair have one place."""
        stem = name.rpartition(".")[0]
        return stem if stem in self.places else name

    def _heads(self, field: Field, name: str, tensor: Tensor) -> Tensor:
        """The entries of this rank's heads."""
        count = field.shape[0] * self.shard.size
        if tensor[count:].any():
            raise ValueError(f"{name}: entries past the {count} heads must be zero")
        return tensor[self.shard.slice(count)]

    def _fill(self, field: Field, row: int, tensor: Tensor) -> None:
        target = self.fields[field.name]
        if field.kind == "product":
            target.mul_(tensor.reshape(target.shape).to(target.device))
            return
        if field.kind == "experts":
            target = target.flatten(0, 1)
        tensor = tensor.reshape(-1, *target.shape[1:])
        target[row : row + tensor.shape[0]].copy_(tensor)

    def finish(self) -> dict[str, Tensor]:
        assert not self.places and not self.halves, "a checkpoint was checked before it was read"
        return self.fields


def to_checkpoint(c: ModelConfig, fields: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The way back, for saving: official names and tensors as they are stored, experts as MXFP4.

    Fields of the whole model. A product is stored as its first factor 1 and its second factor the
    product.
    """
    stored = {"BF16": torch.bfloat16, "F32": torch.float32}
    for field in table(c):
        value = fields[field.name].detach()
        rows = value.flatten(0, 1) if field.kind == "experts" else value
        start = 0
        for k, stored_piece in enumerate(field.pieces):
            name, shape = stored_piece.name, stored_piece.shape
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
