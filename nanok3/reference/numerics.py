"""What several reference ops share: the arithmetic dtype, RMSNorm, SiTU. Torch only."""

from __future__ import annotations

import torch
from torch import Tensor


def acc_dtype(x: Tensor) -> torch.dtype:
    """float64 stays float64; everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def acc(x: Tensor) -> Tensor:
    return x.to(acc_dtype(x))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in the arithmetic dtype.

    The normalised value is rounded to the weight's dtype first, as the published code does.
    """
    x = acc(x)
    normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)
    return acc(normed) * acc(weight)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`[beta tanh(g / beta) sigmoid(g)] [linear_beta tanh(u / linear_beta)]`.

    The sigmoid takes the uncapped gate (K3's SiTU-GLU).
    """
    gate, up = acc(gate), acc(up)
    capped = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return capped * (linear_beta * torch.tanh(up / linear_beta))
