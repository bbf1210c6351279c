"""What one pass of the model reads and writes besides weights and caches: `Step` and `Buffers`.

Rows lie as [R, Q]: Q rows of each of R requests, T = R * Q. The buffers are allocated once for the
most rows a pass may have; `rows(n)` gives views of their first rows.

What ranks exchange has two names, this rank's part and the whole, over the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3.config import WHOLE, ModelConfig, Shard
from nanok3.reference.kda_records import KDARecords


@dataclass(frozen=True)
class Step:
    """The integers of one pass."""

    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] i64, of each row in its request
    slot_mapping: Tensor  # [T] i64, latent slot each row writes; block 0 is trash
    block_table: Tensor  # [R, blocks] i64, as many columns as the longest request needs
    state_slots: Tensor  # [R] i64, KDA slot of each request; slot 0 is trash
    logit_rows: Tensor  # [N] i64, rows whose logits are wanted
    block_size: int
    # Of rows that may be rolled back: KDA states are read, and what would move them noted here.
    records: KDARecords | None = None


@dataclass(frozen=True)
class Buffers:
    """Activations of one pass, of a rank of P. `_sum`: its summand of a sum over ranks; `_part`:
    its columns of what ranks gather. Both are views (see `with_parts`)."""

    streams: Tensor | Sequence[Tensor]  # [res blocks, T, C], the AttnRes streams
    delta: Tensor  # [T, C], the last sub-layer's output, not yet added to its stream
    delta_sum: Tensor  # [T, C], is delta
    delta_part: Tensor  # [T, C / P] of delta
    x: Tensor  # [T, C], normalised input of a sub-layer
    kda_in: Tensor  # [T, q|k|v|gate|f_a|b]
    kda_heads: Tensor  # [T, H * D]
    mla_in: Tensor  # [T, q_a|kv_a|gate]
    q_latent: Tensor  # [T, q_lora]
    q: Tensor  # [T, H * (Dn + Dr)]
    mla_heads: Tensor  # [T, H * Dv]
    dense_act: Tensor  # [T, F]
    router_logits: Tensor  # [T, E] f32
    router_part: Tensor  # [T, E / P] of router_logits
    topk_ids: Tensor  # [T, A] i64
    topk_weights: Tensor  # [T, A] f32
    latent: Tensor  # [T, Z], input of the routed experts
    latent_part: Tensor  # [T, Z / P] of latent
    routed: Tensor  # [T, Z], their sum
    routed_sum: Tensor  # [T, Z], is routed
    shared_act: Tensor  # [T, F]
    shared_sum: Tensor  # [T, C], output of the shared experts
    shared_part: Tensor  # [T, C / P] of shared_sum: there the sum over ranks is left
    logits: Tensor  # [N, V] f32
    logits_part: Tensor  # [N, V / P] of logits
    taps: Tensor  # [T, taps * C], what a draft reads of the target


LOGITS = ("logits", "logits_part")  # buffers of N rows

# part -> the whole that it is a view of
SUMS = {"delta_sum": "delta", "routed_sum": "routed"}
COLUMNS = {
    "delta_part": "delta",
    "router_part": "router_logits",
    "latent_part": "latent",
    "shared_part": "shared_sum",
    "logits_part": "logits",
}


def with_parts(wholes: dict[str, Any], shard: Shard = WHOLE) -> Any:
    """Buffers of `streams` and what `widths` names, whatever stands for tensors: the parts are
    views of the wholes, and with one rank the same object."""

    def columns(whole: Any) -> Any:
        return whole if shard.size == 1 else whole[:, shard.slice(whole.shape[1])]

    sums = {part: wholes[whole] for part, whole in SUMS.items()}
    parts = {part: columns(wholes[whole]) for part, whole in COLUMNS.items()}
    return Buffers(**wholes, **sums, **parts)


def without_parts(buffers: Buffers) -> dict[str, Any]:
    """By name, what has memory of its own."""
    return {name: b for name, b in vars(buffers).items() if name not in SUMS | COLUMNS}


def widths(config: ModelConfig, shard: Shard = WHOLE, num_taps: int = 0) -> dict[str, int]:
    """Columns of each activation buffer of a rank that is no view of another: of its own heads and
    its part of F, else whole."""
    c, kda = config, config.linear_attn_config
    num_local_heads, kda_width = shard.local(c.num_attention_heads), shard.local(kda.width)
    gate_width = num_local_heads * c.v_head_dim
    return {
        "delta": c.hidden_size,
        "x": c.hidden_size,
        "kda_in": 4 * kda_width + kda.head_dim + shard.local(kda.num_heads),
        "kda_heads": kda_width,
        "mla_in": c.q_lora_rank + c.latent_width + gate_width,
        "q_latent": c.q_lora_rank,
        "q": num_local_heads * c.qk_head_dim,
        "mla_heads": gate_width,
        "dense_act": shard.local(c.intermediate_size),
        "router_logits": c.num_experts,
        "topk_ids": c.num_experts_per_token,
        "topk_weights": c.num_experts_per_token,
        "latent": c.routed_expert_hidden_size,
        "routed": c.routed_expert_hidden_size,
        "shared_act": shard.local(c.shared_intermediate_size),
        "shared_sum": c.hidden_size,
        "logits": c.vocab_size,
        "taps": num_taps * c.hidden_size,
    }


def buffer_dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The buffers that are not of the activations' dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    of_wide = dict.fromkeys(("router_logits", "topk_weights", "logits"), wide)
    return {"topk_ids": torch.int64} | of_wide


def allocate_buffers(
    config: ModelConfig,
    max_rows: int,
    max_logit_rows: int,
    dtype: torch.dtype,
    device: str,
    shard: Shard = WHOLE,
    num_taps: int = 0,
) -> Buffers:
    """Uninitialised buffers: an op may read only what an op of the same pass wrote."""
    special = buffer_dtypes(dtype)
    tensors = {
        name: torch.empty(
            max_logit_rows if name == "logits" else max_rows,
            width,
            dtype=special.get(name, dtype),
            device=device,
        )
        for name, width in widths(config, shard, num_taps).items()
    }
    streams = torch.empty(
        config.num_res_blocks, max_rows, config.hidden_size, dtype=dtype, device=device
    )
    buffers: Buffers = with_parts({"streams": streams} | tensors, shard)
    return buffers


def rows(buffers: Buffers, num_rows: int, num_logit_rows: int) -> Buffers:
    """Views of the first rows."""
    views = {
        name: getattr(buffers, name)[: num_logit_rows if name in LOGITS else num_rows]
        for name in Buffers.__dataclass_fields__
        if name != "streams"
    }
    streams = buffers.streams
    assert isinstance(streams, Tensor)
    return Buffers(streams=streams[:, :num_rows], **views)
