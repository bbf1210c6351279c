"""Attention residuals (AttnRes): add the pending delta, mix the streams, normalise.

    p     = delta if fresh else streams[-1] + delta                   rounded to the stream's dtype
    V     = [streams[0], ..., streams[-2], p]                          [n, T, C]
    a     = (V . score) * rsqrt(mean(V^2) + eps)                       [n, T]
    out   = rms_norm(softmax(a) . V, norm, eps)

A finished res_block's last running sum is its own snapshot: the next one sums into the next stream,
so that nothing is ever copied. `score` is the product of the checkpoint's norm and projection rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.reference.numerics import acc, rms_norm


@dataclass(frozen=True)
class AttnResWeights:
    score: Tensor  # [C] f32, res_norm * res_proj
    norm: Tensor  # [C], of the sub-layer that follows
    eps: float


def attn_res_value(
    delta: Tensor, streams: Tensor | Sequence[Tensor], w: AttnResWeights, fresh: bool
) -> tuple[Tensor, Tensor]:
    """delta [T, C], streams n x [T, C] -> (new last stream [T, C], out [T, C])."""
    prefix = delta if fresh else (acc(streams[-1]) + acc(delta)).to(delta.dtype)
    sources = torch.stack([acc(s[:]) for s in streams[:-1]] + [acc(prefix[:])])  # [n, T, C]
    rstd = torch.rsqrt(sources.pow(2).mean(-1) + w.eps)  # [n, T]
    weights = torch.softmax((sources @ w.score.to(sources.dtype)) * rstd, dim=0)
    mixed = (weights.unsqueeze(-1) * sources).sum(0)
    return prefix, rms_norm(mixed, w.norm, w.eps)


def attn_res_ref(
    delta: Tensor,
    streams: Tensor | Sequence[Tensor],
    w: AttnResWeights,
    fresh: bool,
    *,
    out: Tensor,
) -> None:
    prefix, normed = attn_res_value(delta, streams, w, fresh)
    streams[-1].copy_(prefix)
    out.copy_(normed)


def tap_ref(delta: Tensor, streams: Tensor | Sequence[Tensor], *, out: Tensor) -> None:
    """The running sum with the pending delta, as the next `attn_res` of it will leave it."""
    out.copy_(acc(streams[-1]) + acc(delta))
