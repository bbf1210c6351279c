"""A DSpark draft, once: which op is called on which buffers, in which order.

`keep_context` takes the target's taps of committed rows into the draft's cache; `window` runs a
draft window, `[anchor, mask, mask, ...]`, over that cache and leaves base logits and hidden rows,
row i for the token after its own. As in `nanok3/model.py` every line is one call of an op and what
a call does is the reading that was passed in (`REFERENCE`; formulas in `nanok3/reference/draft.py`
and `draft_attention.py`). Drawing tokens from the logits is for `propose.py`.

T context rows; R requests with Q window rows each; S cached tokens; C hidden; W values a token and
layer in the cache; n taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanok3.comm.exchange import Exchange
from nanok3.reference.draft import (
    add_norm_ref,
    confidence_ref,
    markov_ref,
    norm_ref,
    silu_up_ref,
)
from nanok3.reference.draft_attention import draft_attention_ref, keep_ref
from nanok3.reference.embed import EmbedWeights, embed_ref
from nanok3.reference.linear import linear_ref, lm_head_ref
from nanok3.spec.config import DraftConfig, GQAShape, MLAShape
from nanok3.spec.draft_weights import DraftLayer, DraftWeights


@dataclass(frozen=True)
class DraftOps:
    """One row an op: what it reads -> what it writes."""

    embed: Callable[..., None]  # ids, table -> out
    linear: Callable[..., None]  # x, weight -> out
    norm: Callable[..., None]  # x, weight -> out
    add_norm: Callable[..., None]  # delta, stream, weight -> stream, out
    keep: Callable[..., None]  # kv, w -> cache rows
    attention: Callable[..., None]  # q, kv, w, cache -> out
    silu_up: Callable[..., None]  # x, weight -> out
    lm_head: Callable[..., None]  # x, weight, rows -> out
    markov: Callable[..., None]  # logits, w, previous -> out
    confidence: Callable[..., None]  # hidden, w, markov, previous -> out


REFERENCE = DraftOps(
    embed=embed_ref,
    linear=linear_ref,
    norm=norm_ref,
    add_norm=add_norm_ref,
    keep=keep_ref,
    attention=draft_attention_ref,
    silu_up=silu_up_ref,
    lm_head=lm_head_ref,
    markov=markov_ref,
    confidence=confidence_ref,
)


def between_ranks(ops: DraftOps, exchange: Exchange | None) -> DraftOps:
    """The reading `ops` of a draft that shares the vocabulary of a target with peers: each rank has
    its part of the embedding and of the head, and all of the rest. For one without, as it is."""
    if exchange is None:
        return ops

    def embed(ids: Tensor, w: EmbedWeights, *, out: Tensor) -> None:
        ops.embed(ids, w, out=out)
        exchange.all_reduce(out, out=out)

    def lm_head(x: Tensor, weight: Tensor, rows: Tensor, *, out: Tensor) -> None:
        part = out.new_empty(len(rows), weight.shape[0])
        ops.lm_head(x, weight, rows, out=part)
        exchange.all_gather((part,), out=(out,))

    return replace(ops, embed=embed, lm_head=lm_head)


@dataclass(frozen=True)
class Window:
    """The integers of one draft window for each of R requests; rows lie as [R, Q]."""

    input_ids: Tensor  # [R * Q] i64, the anchor, then the mask token
    positions: Tensor  # [R * Q] i64
    anchors: Tensor  # [R] i64, position of each request's first row: its context lies before it
    block_table: Tensor  # [R, blocks] i64, the target's
    rows: Tensor  # [R * Q] i64, 0, 1, ...: all of them have logits
    block_size: int  # tokens of a cache block


@dataclass(frozen=True)
class DraftBuffers:
    """Activations of a draft."""

    features: Tensor  # [T, C], the taps' projection
    context: Tensor  # [T, C], normalised
    context_kv: Tensor  # [T, W]
    stream: Tensor  # [R * Q, C]
    delta: Tensor  # [R * Q, C], the last sub-layer's output, not yet added to the stream
    x: Tensor  # [R * Q, C], normalised input of a sub-layer; the hidden rows at the end
    q_a: Tensor  # [R * Q, q_lora], MLA only
    q_latent: Tensor  # [R * Q, q_lora], MLA only
    q: Tensor  # [R * Q, H * D]
    kv: Tensor  # [R * Q, W]
    heads: Tensor  # [R * Q, H * Dv]
    act: Tensor  # [R * Q, F]
    logits: Tensor  # [R * Q, V] f32


CONTEXT_BUFFERS = frozenset({"features", "context", "context_kv"})


def widths(c: DraftConfig) -> dict[str, int]:
    """Columns of each buffer."""
    a, hidden, kv = c.attention, c.hidden_size, c.attention.cache_width
    if isinstance(a, MLAShape):
        q_lora, q, heads = a.q_lora_rank, a.num_heads * a.qk_head_dim, a.num_heads * a.v_head_dim
    else:
        q_lora, q, heads = 0, a.num_heads * a.head_dim, a.num_heads * a.head_dim
    return {
        **{"features": hidden, "context": hidden, "context_kv": kv},
        **{"stream": hidden, "delta": hidden, "x": hidden, "q_a": q_lora, "q_latent": q_lora},
        **{"q": q, "kv": kv, "heads": heads, "act": c.intermediate_size, "logits": c.vocab_size},
    }


def allocate_draft_buffers(
    c: DraftConfig, max_context_rows: int, max_window_rows: int, dtype: torch.dtype, device: str
) -> DraftBuffers:
    """Uninitialised."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return DraftBuffers(
        **{
            name: torch.empty(
                max_context_rows if name in CONTEXT_BUFFERS else max_window_rows,
                width,
                dtype=wide if name == "logits" else dtype,
                device=device,
            )
            for name, width in widths(c).items()
        }
    )


def draft_rows(buffers: DraftBuffers, num_rows: int) -> DraftBuffers:
    """Views of the first rows."""
    return DraftBuffers(**{name: t[:num_rows] for name, t in vars(buffers).items()})


def allocate_draft_cache(
    c: DraftConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: str
) -> Tensor:
    """[layers, blocks * block_size, W]: a row is written, from taps, before it is read."""
    shape = len(c.layers), num_blocks * block_size, c.attention.cache_width
    return torch.empty(shape, dtype=dtype, device=device)


def keep_context(
    w: DraftWeights,
    taps: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor | Sequence[Tensor],
    buf: DraftBuffers,
    ops: DraftOps,
) -> None:
    """taps [T, n * C] of committed rows, each at its position -> cache at slot_mapping [T]."""
    ops.linear(taps, w.context_proj, out=buf.features)  # [T, C]
    ops.norm(buf.features, w.context_norm, w.eps, out=buf.context)  # [T, C]
    for i, layer in enumerate(w.layers):
        ops.linear(buf.context, layer.kv, out=buf.context_kv)  # [T, W]
        ops.keep(buf.context_kv, layer.attn, positions, slot_mapping, cache=cache[i])


def window(
    c: DraftConfig,
    w: DraftWeights,
    cache: Tensor | Sequence[Tensor],
    step: Window,
    buf: DraftBuffers,
    ops: DraftOps,
) -> None:
    """The window's rows -> `buf.x`, hidden rows, and `buf.logits`."""
    ops.embed(step.input_ids, w.embed, out=buf.delta)  # [T, C]
    for i, layer in enumerate(w.layers):
        ops.add_norm(buf.delta, buf.stream, layer.attn_norm, w.eps, i == 0, out=buf.x)
        queries(c, w, layer, buf, ops)
        ops.linear(buf.x, layer.kv, out=buf.kv)  # [T, W]
        ops.attention(
            buf.q,
            buf.kv,
            layer.attn,
            cache[i],
            step.block_table,
            step.positions,
            step.anchors,
            step.block_size,
            c.layers[i].causal,
            c.layers[i].window,
            out=buf.heads,
        )  # [T, H * Dv]
        ops.linear(buf.heads, layer.o_proj, out=buf.delta)  # [T, C]
        ops.add_norm(buf.delta, buf.stream, layer.mlp_norm, w.eps, False, out=buf.x)
        ops.silu_up(buf.x, layer.gate_up, out=buf.act)  # [T, F]
        ops.linear(buf.act, layer.down, out=buf.delta)  # [T, C]
    ops.add_norm(buf.delta, buf.stream, w.final_norm, w.eps, False, out=buf.x)
    ops.lm_head(buf.x, w.lm_head, step.rows, out=buf.logits)  # [T, V] f32


def queries(
    c: DraftConfig, w: DraftWeights, layer: DraftLayer, buf: DraftBuffers, ops: DraftOps
) -> None:
    if isinstance(c.attention, GQAShape):
        ops.linear(buf.x, layer.q, out=buf.q)  # [T, H * D]
        return
    ops.linear(buf.x, layer.q_a, out=buf.q_a)  # [T, q_lora]
    ops.norm(buf.q_a, layer.q_norm, w.eps, out=buf.q_latent)
    ops.linear(buf.q_latent, layer.q, out=buf.q)  # [T, H * (Dn + Dr)]
