"""MXFP4: 4-bit E2M1 values, two a byte, one E8M0 scale for 32 consecutive inputs. Exact both ways.

packed [..., K / 2] u8    element 2j in the low nibble of byte j, 2j + 1 in the high one
scale  [..., K / 32] u8   value = E2M1[nibble] * 2^(scale - 127); 255 is NaN
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 of a nibble is the sign
MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(E2M1))
LARGEST = E2M1[-1]


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed [..., K / 2] u8, scale [..., K / 32] u8 -> [..., K]; exact in bf16 and wider."""
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float32, device=packed.device)
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)  # [..., K]
    values = table[nibbles.int()].unflatten(-1, (-1, GROUP))
    exponent = scale.to(torch.int32) - 127
    factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    factor = factor.masked_fill(scale == 255, float("nan"))
    return (values * factor.unsqueeze(-1)).flatten(-2).to(dtype)


def scale_of(w: Tensor) -> Tensor:
    """w [..., K] -> [..., K / 32] u8: the smallest power of two with which no value exceeds 6."""
    amax = w.float().unflatten(-1, (-1, GROUP)).abs().amax(-1)
    mantissa, exponent = torch.frexp(
        amax / LARGEST
    )  # amax / 6 = mantissa * 2^exponent, in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).int()
    return (exponent + 127).clamp(0, 254).masked_fill(amax == 0, 127).to(torch.uint8)


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., K] -> (packed [..., K / 2] u8, scale [..., K / 32] u8), to the nearest value."""
    scale = scale_of(w)
    factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), 127 - scale.int())
    grouped = w.float().unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)
    midpoints = torch.tensor(MIDPOINTS, device=w.device)
    code = torch.bucketize(grouped.abs(), midpoints).to(torch.uint8)
    code = (code | (torch.signbit(grouped).to(torch.uint8) << 3)).flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale
