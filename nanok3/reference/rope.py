"""Rotary positions, plain and YaRN, for the drafts (K3 itself has none).

    out = x rotated by position * inv_freq, pair by pair, times `scale`

Pairs are neighbours (interleaved, GPT-J) or halves (NeoX). YaRN divides the frequencies that turn
less than `beta_slow` times over the original context by `factor`, leaves those that turn more than
`beta_fast` times, and ramps between them. Angles are float64: at a million tokens a float32 product
is off by 0.06 rad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanok3.reference.numerics import acc


@dataclass(frozen=True)
class RopeTable:
    inv_freq: Tensor  # [D / 2] f64
    interleaved: bool
    scale: float = 1.0  # of cosine and sine


def inverse_frequencies(theta: float, dim: int) -> Tensor:
    """[dim / 2] f64, of the plain form."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(
    theta: float, dim: int, factor: float, original: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """[dim / 2] f64."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: kept, 1: divided
    plain = inverse_frequencies(theta, dim)
    return plain * (1 - ramp) + plain / factor * ramp


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much YaRN sharpens attention at this factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
    """x [T, ..., D], positions [T] -> the same shape, in the arithmetic dtype."""
    x = acc(x)
    angles = positions.double().unsqueeze(-1) * table.inv_freq.to(x.device)  # [T, D / 2]
    angles = angles.view(len(angles), *[1] * (x.dim() - 2), angles.shape[-1])
    cos, sin = (angles.cos() * table.scale).to(x.dtype), (angles.sin() * table.scale).to(x.dtype)
    if table.interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
