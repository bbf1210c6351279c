"""Multi-head latent attention without positions, in two ops and two forms.

`mla_latent`  c_q = rms(q_a);  the cache row of each token is [rms(kv_a[:L]) | kv_a[L:]]
`mla`         score[h, s] = Dq^-0.5 (q_n . k_n[s] + q_r . k_r[s]), causal, softmax in float32
              out[h] = sum_s p[s] v[s] * sigmoid(gate)
              with [k_n | v] = kv_b c per head: `mla_ref` keeps the cache in the latent (absorbed,
              decode), `mla_expanded_ref` expands keys and values (prefill, training)

The cache is paged: request r's token at position s lies in slot
`block_table[r, s // block_size] * block_size + s % block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.reference.numerics import acc, rms_norm


@dataclass(frozen=True)
class MLAWeights:
    q_norm: Tensor  # [q_lora]
    kv_norm: Tensor  # [L]
    kv_b: Tensor  # [H, Dn + Dv, L], key rows first
    nope_dim: int
    eps: float


def mla_latent_ref(
    x: Tensor, w: MLAWeights, cache: Tensor, slot_mapping: Tensor, *, out: Tensor
) -> None:
    """x [T, q_a | kv_a | gate] -> out [T, q_lora]; cache [slots, L + Dr] is written at
    slot_mapping [T], where -1 (padding) stands for the trash row 0."""
    q_rank, rank = w.q_norm.shape[0], w.kv_norm.shape[0]
    q_a, kv_a = x[..., :q_rank], x[..., q_rank : q_rank + cache.shape[-1]]
    latent = rms_norm(kv_a[..., :rank], w.kv_norm, w.eps).to(cache.dtype)
    cache[slot_mapping.clamp(min=0)] = torch.cat([latent, kv_a[..., rank:].to(cache.dtype)], dim=-1)
    out.copy_(rms_norm(q_a, w.q_norm, w.eps))


def gather_context(
    cache: Tensor, block_table: Tensor, positions: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """The cached rows of each request and who may see them.

    -> rows [R, S, L + Dr], S = blocks * block_size, zero where no row of the request may look
       (what lies there is never read), visible [R, 1, Q, S] bool.
    """
    offsets = torch.arange(block_size, device=cache.device)
    slots = (block_table.unsqueeze(-1) * block_size + offsets).flatten(1)  # [R, S]
    index = torch.arange(slots.shape[1], device=cache.device)
    visible = index <= positions.unflatten(0, (slots.shape[0], -1)).unsqueeze(-1)  # [R, Q, S]
    rows = acc(cache[slots.long()]).masked_fill(~visible.any(1).unsqueeze(-1), 0.0)
    return rows, visible.unsqueeze(1)


def attend(scores: Tensor, visible: Tensor) -> Tensor:
    """scores [R, H, Q, S] -> probabilities."""
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)


def gated(o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """o [R, H, Q, Dv], gate [T, H * Dv] -> [T, H * Dv]."""
    o = o.transpose(1, 2).flatten(-2).flatten(0, 1).to(dtype)
    return acc(o) * torch.sigmoid(acc(gate))


def mla_absorbed_value(
    q: Tensor, gate: Tensor, w: MLAWeights, rows: Tensor, visible: Tensor
) -> Tensor:
    """q [R, H, Q, Dn + Dr], rows [R, S, L + Dr] -> [T, H * Dv]."""
    rank = w.kv_norm.shape[0]
    kv_b = w.kv_b.to(rows.dtype)
    key, value = kv_b[:, : w.nope_dim], kv_b[:, w.nope_dim :]
    q_full = acc(q)
    q_latent = torch.einsum("rhqn,hnl->rhql", q_full[..., : w.nope_dim], key)
    q_latent = torch.cat([q_latent, q_full[..., w.nope_dim :]], dim=-1)  # [R, H, Q, L + Dr]
    scores = q_latent @ rows.unsqueeze(1).transpose(-1, -2) * q.shape[-1] ** -0.5
    context = attend(scores, visible) @ rows[:, None, :, :rank]  # [R, H, Q, L]
    return gated(torch.einsum("rhql,hvl->rhqv", context, value), gate, q.dtype)


def mla_expanded_value(
    q: Tensor, gate: Tensor, w: MLAWeights, rows: Tensor, visible: Tensor
) -> Tensor:
    """The same with keys and values expanded from the latents."""
    rank = w.kv_norm.shape[0]
    expanded = torch.einsum("rsl,hdl->rhsd", rows[..., :rank].to(q.dtype), w.kv_b)
    key, value = expanded.split([w.nope_dim, w.kv_b.shape[1] - w.nope_dim], dim=-1)
    shared = rows[:, None, :, rank:].to(q.dtype).expand(-1, key.shape[1], -1, -1)
    scores = acc(q @ torch.cat([key, shared], dim=-1).transpose(-1, -2)) * q.shape[-1] ** -0.5
    return gated(attend(scores, visible).to(q.dtype) @ value, gate, q.dtype)


def mla_ref(
    q: Tensor,
    x: Tensor,
    w: MLAWeights,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    out: Tensor,
) -> None:
    """q [T, H * (Dn + Dr)], x [T, q_a | kv_a | gate] (the gate is read), cache [slots, L + Dr],
    block_table [R, blocks], positions [T] -> out [T, H * Dv]."""
    rows, visible = gather_context(cache, block_table, positions, block_size)
    gate = gate_of(x, w)
    out.copy_(mla_absorbed_value(by_head(q, w, rows), gate, w, rows, visible))


def mla_expanded_ref(
    q: Tensor,
    x: Tensor,
    w: MLAWeights,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    out: Tensor,
) -> None:
    rows, visible = gather_context(cache, block_table, positions, block_size)
    gate = gate_of(x, w)
    out.copy_(mla_expanded_value(by_head(q, w, rows), gate, w, rows, visible))


def gate_of(x: Tensor, w: MLAWeights) -> Tensor:
    """The last H * Dv columns of x."""
    return x[..., -w.kv_b.shape[0] * (w.kv_b.shape[1] - w.nope_dim) :]


def by_head(q: Tensor, w: MLAWeights, rows: Tensor) -> Tensor:
    """[R * Q, H * D] -> [R, H, Q, D]."""
    return (
        q[:].unflatten(0, (rows.shape[0], -1)).unflatten(-1, (w.kv_b.shape[0], -1)).transpose(1, 2)
    )
