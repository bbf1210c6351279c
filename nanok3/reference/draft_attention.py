"""Attention of a DSpark draft: rows of a draft window over cached context and over each other.

    context rows   kept in the draft cache once, from the target's taps: `keep`
    window rows    keys and values of this pass alone, never cached
    softmax        over {context s: anchor - window <= s < anchor} and {window rows j: j <= i where
                   causal, all where not}; every row of a window has the same context

`anchors[r]` is the position of request r's first window row, so also the length of its context. The
cache is paged like the target's (`mla.py`), by the same block table. Two forms:

MLA   cache row [rms(kv[:L]) | rope(kv[L:])]; the queries' last Dr values turn; in the latent
GQA   cache row [rope(rms(k)) per head | v]; queries rope(rms(q)) per head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.reference.numerics import acc, rms_norm
from nanok3.reference.rope import RopeTable, rotate


@dataclass(frozen=True)
class DraftMLAWeights:
    kv_norm: Tensor  # [L]
    kv_b: Tensor  # [H, Dn + Dv, L], key rows first
    nope_dim: int
    rope: RopeTable
    softmax_scale: float
    eps: float


@dataclass(frozen=True)
class DraftGQAWeights:
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]
    num_heads: int
    num_kv_heads: int
    rope: RopeTable
    eps: float


# ---- what is kept of a row ----


def mla_rows(kv: Tensor, w: DraftMLAWeights, positions: Tensor) -> Tensor:
    """kv [T, L + Dr] -> cache rows [T, L + Dr]."""
    rank = w.kv_norm.shape[0]
    latent = rms_norm(kv[..., :rank], w.kv_norm, w.eps)
    return torch.cat([latent, rotate(kv[..., rank:], positions, w.rope)], dim=-1)


def gqa_rows(kv: Tensor, w: DraftGQAWeights, positions: Tensor) -> Tensor:
    """kv [T, k|v] -> cache rows [T, k|v]."""
    k, v = kv[:].chunk(2, dim=-1)
    k = rms_norm(k.unflatten(-1, (w.num_kv_heads, -1)), w.k_norm, w.eps)
    return torch.cat([rotate(k, positions, w.rope).flatten(-2), acc(v)], dim=-1)


def rows_of(kv: Tensor, w: DraftMLAWeights | DraftGQAWeights, positions: Tensor) -> Tensor:
    if isinstance(w, DraftMLAWeights):
        return mla_rows(kv, w, positions)
    return gqa_rows(kv, w, positions)


def keep_ref(
    kv: Tensor,
    w: DraftMLAWeights | DraftGQAWeights,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    cache: Tensor,
) -> None:
    """kv [T, W] of context rows -> cache [slots, W] at slot_mapping [T]."""
    cache[slot_mapping] = rows_of(kv, w, positions).to(cache.dtype)


# ---- what a row sees ----


def gather(
    cache: Tensor,
    own: Tensor,
    block_table: Tensor,
    anchors: Tensor,
    block_size: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Context and window rows of each request, and who may see them.

    own [R, Q, W] -> rows [R, S + Q, W], zero where the context is out of sight (what lies there is
    never read), visible [R, 1, Q, S + Q] bool.
    """
    offsets = torch.arange(block_size, device=own.device)
    slots = (block_table.unsqueeze(-1) * block_size + offsets).flatten(1)  # [R, S]
    index = torch.arange(slots.shape[1], device=own.device)
    context = index < anchors.unsqueeze(-1)  # [R, S]
    if window is not None:
        context = context & (index >= anchors.unsqueeze(-1) - window)
    rows = acc(cache[slots.long()]).masked_fill(~context.unsqueeze(-1), 0.0)
    num_reqs, num_rows = own.shape[:2]
    within = torch.ones(num_rows, num_rows, dtype=torch.bool, device=own.device)
    if causal:
        within = within.tril()
    seen = (context.unsqueeze(1).expand(-1, num_rows, -1), within.expand(num_reqs, -1, -1))
    visible = torch.cat(seen, dim=-1)
    return torch.cat([rows, own.to(rows.dtype)], dim=1), visible.unsqueeze(1)


def softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)


def mla_attend(
    q: Tensor, w: DraftMLAWeights, rows: Tensor, visible: Tensor, positions: Tensor
) -> Tensor:
    """q [R * Q, H * (Dn + Dr)], rows [R, S + Q, L + Dr] -> [R * Q, H * Dv]."""
    rank, heads = w.kv_norm.shape[0], w.kv_b.shape[0]
    q = acc(q[:]).unflatten(-1, (heads, -1))  # [T, H, Dn + Dr]
    turned = rotate(q[..., w.nope_dim :], positions, w.rope)
    kv_b = w.kv_b.to(rows.dtype)
    key, value = kv_b[:, : w.nope_dim], kv_b[:, w.nope_dim :]
    q_latent = torch.einsum("thn,hnl->thl", q[..., : w.nope_dim], key)
    q_latent = torch.cat([q_latent, turned], dim=-1).unflatten(0, (len(rows), -1))
    q_latent = q_latent.transpose(1, 2)  # [R, H, Q, L + Dr]
    scores = q_latent @ rows.unsqueeze(1).transpose(-1, -2) * w.softmax_scale
    context = softmax(scores, visible) @ rows[:, None, :, :rank]  # [R, H, Q, L]
    return torch.einsum("rhql,hvl->rqhv", context, value).flatten(2).flatten(0, 1)


def gqa_attend(
    q: Tensor, w: DraftGQAWeights, rows: Tensor, visible: Tensor, positions: Tensor
) -> Tensor:
    """q [R * Q, H * D], rows [R, S + Q, k|v] -> [R * Q, H * D]."""
    normed = rms_norm(q[:].unflatten(-1, (w.num_heads, -1)), w.q_norm, w.eps)
    turned = rotate(normed, positions, w.rope).unflatten(0, (len(rows), -1))  # [R, Q, H, D]
    share = w.num_heads // w.num_kv_heads
    k, v = (
        part.unflatten(-1, (w.num_kv_heads, -1)).transpose(1, 2).repeat_interleave(share, 1)
        for part in rows.chunk(2, dim=-1)
    )  # [R, H, S + Q, D]
    scores = turned.transpose(1, 2) @ k.transpose(-1, -2) * turned.shape[-1] ** -0.5
    return (softmax(scores, visible) @ v).transpose(1, 2).flatten(2).flatten(0, 1)


def draft_attention_ref(
    q: Tensor,
    kv: Tensor,
    w: DraftMLAWeights | DraftGQAWeights,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    anchors: Tensor,
    block_size: int,
    causal: bool,
    window: int | None,
    *,
    out: Tensor,
) -> None:
    """q [R * Q, H * D], kv [R * Q, W], cache [slots, W], block_table [R, blocks], positions
    [R * Q], anchors [R] -> out [R * Q, H * Dv]."""
    own = rows_of(kv, w, positions).to(kv.dtype).unflatten(0, (len(anchors), -1))
    rows, visible = gather(cache, own, block_table, anchors, block_size, causal, window)
    if isinstance(w, DraftMLAWeights):
        out.copy_(mla_attend(q, w, rows, visible, positions))
    else:
        out.copy_(gqa_attend(q, w, rows, visible, positions))
