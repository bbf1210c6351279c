"""A draft's weights: the records, and which checkpoint tensors fill them, for both formats.

`draft_table(config)` lists every field with its tensors, all BF16; from it come the expected
tensors, loading, and the way back when a draft is saved. Inferact's file holds a copy of the
target's embedding, which is never read: that draft shares the target's embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanok3.checkpoint import Checkpoint, TensorSpec
from nanok3.reference.draft import ConfidenceWeights, MarkovWeights
from nanok3.reference.draft_attention import DraftGQAWeights, DraftMLAWeights
from nanok3.reference.embed import EmbedWeights
from nanok3.reference.rope import (
    RopeTable,
    inverse_frequencies,
    yarn_frequencies,
    yarn_mscale,
)
from nanok3.spec.config import DraftConfig, MLAShape, Rope
from nanok3.weight_table import Field, Piece, linear_field, vector_field

EMBED = "embed_tokens.weight"


@dataclass(frozen=True)
class DraftLayer:
    attn_norm: Tensor  # [C]
    q_a: Tensor | None  # [q_lora, C], MLA only
    q_norm: Tensor | None  # [q_lora], MLA only
    q: Tensor  # [H * D, q_lora or C]
    kv: Tensor  # [W, C]: latent and rotary key part, or k and v
    attn: DraftMLAWeights | DraftGQAWeights
    o_proj: Tensor  # [C, H * Dv]
    mlp_norm: Tensor  # [C]
    gate_up: Tensor  # [2F, C], gate rows first
    down: Tensor  # [C, F]


@dataclass(frozen=True)
class DraftWeights:
    embed: EmbedWeights  # [V, C], the target's or its own
    lm_head: Tensor  # [V, C], the target's or its own
    context_proj: Tensor  # [C, n * C], taps in ascending order
    context_norm: Tensor  # [C]
    layers: tuple[DraftLayer, ...]
    final_norm: Tensor  # [C]
    markov: MarkovWeights
    confidence: ConfidenceWeights
    eps: float


# ---- names and shapes ----

# (projection of the taps, its norm, the last norm)
TOP_NAMES = {
    "K3DSparkModel": ("context_proj", "context_norm", "final_norm"),
    "DSparkDraftModel": ("fc", "hidden_norm", "norm"),
}


def draft_table(c: DraftConfig) -> Iterator[Field]:
    """Every field of the draft itself; an embedding and a head only where they are its own."""
    proj, proj_norm, final_norm = TOP_NAMES[c.architecture]
    vocab, hidden, rank = c.vocab_size, c.hidden_size, c.markov_rank
    if c.owns_vocab:
        yield linear_field("embed", "", {"embed_tokens": vocab}, hidden)
        yield linear_field("lm_head", "", {"lm_head": vocab}, hidden)
    yield linear_field("context_proj", "", {proj: hidden}, len(c.taps) * hidden)
    yield vector_field("context_norm", f"{proj_norm}.weight", hidden)
    for i in range(len(c.layers)):
        yield from layer_fields(c, f"layers.{i}.")
    yield vector_field("final_norm", f"{final_norm}.weight", hidden)
    for name in ("w1", "w2"):
        yield linear_field(f"markov.{name}", "markov_head.", {f"markov_{name}": vocab}, rank)
    yield linear_field("confidence.weight", "confidence_head.", {"proj": 1}, hidden + rank)
    yield vector_field("confidence.bias", "confidence_head.proj.bias", 1)


def layer_fields(c: DraftConfig, layer: str) -> Iterator[Field]:
    a, hidden, attn, mlp = c.attention, c.hidden_size, f"{layer}self_attn.", f"{layer}mlp."
    yield vector_field(f"{layer}attn_norm", f"{layer}input_layernorm.weight", hidden)
    if isinstance(a, MLAShape):
        q_lora, kv_lora, heads = a.q_lora_rank, a.kv_lora_rank, a.num_heads
        yield linear_field(f"{layer}q_a", attn, {"q_a_proj": q_lora}, hidden)
        yield vector_field(f"{layer}q_norm", f"{attn}q_a_layernorm.weight", q_lora)
        yield linear_field(f"{layer}q", attn, {"q_b_proj": heads * a.qk_head_dim}, q_lora)
        yield linear_field(f"{layer}kv", attn, {"kv_a_proj_with_mqa": a.cache_width}, hidden)
        yield vector_field(f"{layer}kv_norm", f"{attn}kv_a_layernorm.weight", kv_lora)
        kv_b = {"kv_b_proj": heads * (a.qk_nope_head_dim + a.v_head_dim)}
        yield linear_field(f"{layer}kv_b", attn, kv_b, kv_lora)
        value_width = heads * a.v_head_dim
    else:
        value_width, kv_width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        yield linear_field(f"{layer}q", attn, {"q_proj": value_width}, hidden)
        yield linear_field(f"{layer}kv", attn, {"k_proj": kv_width, "v_proj": kv_width}, hidden)
        for name in ("q_norm", "k_norm"):
            yield vector_field(f"{layer}{name}", f"{attn}{name}.weight", a.head_dim)
    yield linear_field(f"{layer}o_proj", attn, {"o_proj": hidden}, value_width)
    yield vector_field(f"{layer}mlp_norm", f"{layer}post_attention_layernorm.weight", hidden)
    gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
    yield linear_field(f"{layer}gate_up", mlp, gate_up, hidden)
    yield linear_field(f"{layer}down", mlp, {"down_proj": hidden}, c.intermediate_size)


def expected_draft_tensors(c: DraftConfig) -> dict[str, dict[str, TensorSpec]]:
    """Tables of all tensors of the file, by name: one, or with and without the unread embedding."""
    own = {
        piece.name: TensorSpec(piece.shape, "BF16")
        for field in draft_table(c)
        for piece in field.pieces
    }
    if c.owns_vocab:
        return {"own vocabulary": own}
    copy = {EMBED: TensorSpec((c.vocab_size, c.hidden_size), "BF16")}
    return {"with a copy of the embedding": own | copy, "without": own}


# ---- loading and saving ----


def load_draft(
    draft_dir: Path,
    c: DraftConfig,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Fields by name; CheckpointError lists all that is wrong with the files."""
    checkpoint = Checkpoint.open(draft_dir, expected_draft_tensors(c), root="")
    places: dict[str, tuple[Tensor, Piece, int]] = {}
    fields = {}
    for field in draft_table(c):
        fields[field.name] = torch.empty(field.shape, dtype=dtype, device=device)
        row = 0
        for piece in field.pieces:
            places[piece.name] = (fields[field.name], piece, row)
            row += piece.shape[0]

    def take(name: str, tensor: Tensor) -> None:
        target, piece, row = places[name]
        target[row : row + piece.shape[0]].copy_(tensor)

    checkpoint.load(checkpoint.in_file_order(places), take, progress=progress)
    return fields


def draft_to_checkpoint(c: DraftConfig, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """The way back: tensors by checkpoint name, BF16."""
    tensors = {}
    for field in draft_table(c):
        sizes = [piece.shape[0] for piece in field.pieces]
        for piece, rows in zip(field.pieces, fields[field.name].split(sizes), strict=True):
            tensors[piece.name] = rows.detach().to(torch.bfloat16).contiguous()
    return tensors


def rope_table(rope: Rope, dim: int, device: torch.device) -> RopeTable:
    if rope.factor <= 1:
        return RopeTable(inverse_frequencies(rope.theta, dim).to(device), rope.interleaved)
    original, betas = rope.original_max_position_embeddings, (rope.beta_fast, rope.beta_slow)
    frequencies = yarn_frequencies(rope.theta, dim, rope.factor, original, *betas)
    scale = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return RopeTable(frequencies.to(device), rope.interleaved, scale)


def build_draft(
    c: DraftConfig, get: Callable[[str], Tensor], embed: EmbedWeights, lm_head: Tensor
) -> DraftWeights:
    """Records over the fields that `get` returns by name; embed and lm_head are the target's."""
    a, eps, device = c.attention, c.rms_norm_eps, get("final_norm").device

    def layer(i: int) -> DraftLayer:
        name = f"layers.{i}."
        attn: DraftMLAWeights | DraftGQAWeights
        if isinstance(a, MLAShape):
            attn = DraftMLAWeights(
                kv_norm=get(f"{name}kv_norm"),
                kv_b=get(f"{name}kv_b").unflatten(0, (a.num_heads, -1)),
                nope_dim=a.qk_nope_head_dim,
                rope=rope_table(c.rope, a.qk_rope_head_dim, device),
                softmax_scale=a.qk_head_dim**-0.5
                * yarn_mscale(c.rope.factor, c.rope.mscale_all_dim) ** 2,
                eps=eps,
            )
        else:
            attn = DraftGQAWeights(
                get(f"{name}q_norm"),
                get(f"{name}k_norm"),
                a.num_heads,
                a.num_kv_heads,
                rope_table(c.rope, a.head_dim, device),
                eps,
            )
        is_mla = isinstance(a, MLAShape)
        return DraftLayer(
            attn_norm=get(f"{name}attn_norm"),
            q_a=get(f"{name}q_a") if is_mla else None,
            q_norm=get(f"{name}q_norm") if is_mla else None,
            q=get(f"{name}q"),
            kv=get(f"{name}kv"),
            attn=attn,
            o_proj=get(f"{name}o_proj"),
            mlp_norm=get(f"{name}mlp_norm"),
            gate_up=get(f"{name}gate_up"),
            down=get(f"{name}down"),
        )

    return DraftWeights(
        embed=EmbedWeights(get("embed"), 0) if c.owns_vocab else embed,
        lm_head=get("lm_head") if c.owns_vocab else lm_head,
        context_proj=get("context_proj"),
        context_norm=get("context_norm"),
        layers=tuple(layer(i) for i in range(len(c.layers))),
        final_norm=get("final_norm"),
        markov=MarkovWeights(get("markov.w1"), get("markov.w2")),
        confidence=ConfidenceWeights(get("confidence.weight"), get("confidence.bias")),
        eps=eps,
    )
