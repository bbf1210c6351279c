"""MXFP4 against a decoder of single bytes in Python, and the properties of quantisation."""

from __future__ import annotations

import math

import pytest
import torch
from compare import check_equal

from nanok3.reference.mxfp4 import dequantize, quantize


def decode_nibble(nibble: int) -> float:
    """E2M1: a sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = nibble >> 3, (nibble >> 1) & 3, nibble & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(size, -1 if sign else 1)


ALL_BYTES = torch.arange(256).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_all_bytes_at_all_scales(dtype: torch.dtype) -> None:
    """256 bytes are 16 groups; each gets every scale. Scales of 0 and 254 stay in float32's range
    only as far as the value does."""
    for scale in (*range(1, 252), 0, 252, 253, 254):
        packed, scales = ALL_BYTES, torch.full((16,), scale, dtype=torch.uint8)
        values = [decode_nibble(b & 0xF if low else b >> 4) for b in range(256) for low in (1, 0)]
        expected = torch.tensor(values, dtype=torch.float64) * 2.0 ** (scale - 127)
        in_range = expected.abs() <= torch.finfo(torch.float32).max
        got = dequantize(packed, scales, dtype)
        assert got.shape == (512,)
        check_equal(got[in_range], expected[in_range].to(dtype), f"scale {scale}")
        check_equal(got.double()[in_range], expected[in_range], f"{dtype} is exact, scale {scale}")


def test_each_group_has_its_own_scale_along_the_last_axis() -> None:
    packed = torch.full((2, 3, 32), 0x72, dtype=torch.uint8)  # 1 then 6
    scale = torch.tensor([[[127, 128], [126, 127], [120, 130]]] * 2, dtype=torch.uint8)
    scale[1] += 1
    got = dequantize(packed, scale, torch.float32)
    assert got.shape == (2, 3, 64)
    for i in range(2):
        for j in range(3):
            for k in range(64):
                factor = 2.0 ** (int(scale[i, j, k // 32]) - 127)
                assert got[i, j, k] == (6.0 if k % 2 else 1.0) * factor


def test_a_scale_of_255_is_nan_for_its_group_only() -> None:
    packed = torch.zeros(32, dtype=torch.uint8)  # even of zeros
    got = dequantize(packed, torch.tensor([255, 127], dtype=torch.uint8), torch.bfloat16)
    assert got[:32].isnan().all() and (got[32:] == 0).all()


def test_round_trip_of_representable_values_is_exact() -> None:
    """Every byte in every place, with a 6 in each group so that the scale is the one to find."""
    for scale in (1, 100, 127, 140, 250):
        packed = torch.stack([ALL_BYTES.roll(-i) for i in range(16)], dim=-1)  # [256, 16]
        packed[:, 5] = packed[:, 5] & 0xF0 | 0x7
        scales = torch.full((256, 1), scale, dtype=torch.uint8)
        values = dequantize(packed, scales, torch.float32)
        again = quantize(values)
        check_equal(again[1], scales, "scale")
        check_equal(again[0], packed, "packed")
        check_equal(dequantize(*again, torch.float32), values, "values")


def test_quantised_values_are_the_nearest() -> None:
    w = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    w = w * torch.logspace(-20, 20, 40, base=2).unsqueeze(1)
    packed, scale = quantize(w)
    assert packed.dtype == scale.dtype == torch.uint8
    assert packed.shape == (40, 48) and scale.shape == (40, 3)
    got = dequantize(packed, scale, torch.float64)
    levels = sorted({decode_nibble(n) for n in range(16)})
    for row in range(40):
        for k in range(96):
            factor = 2.0 ** (int(scale[row, k // 32]) - 127)
            best = min(abs(float(w[row, k]) - level * factor) for level in levels)
            assert abs(float(w[row, k]) - float(got[row, k])) == best


def test_the_largest_value_of_a_group_uses_the_top_of_the_range() -> None:
    """amax / scale in (3, 6]: no value is cut off, and no finer scale would do."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(200, 32, generator=generator) * 2.0 ** torch.randint(
        -60, 60, (200, 1), generator=generator
    )
    edges = torch.tensor([3.0, 6.0, 6.0 * (1 + 2**-20), 3.0 * (1 + 2**-20), 4.0, 2.0**-100])
    w[: len(edges)] = 0.0
    w[: len(edges), 7] = -edges  # negative, and alone in its group
    _, scale = quantize(w)
    for row in range(200):
        ratio = float(w[row].abs().max()) / 2.0 ** (int(scale[row, 0]) - 127)
        assert 3 < ratio <= 6, f"row {row}: {ratio}"
    assert scale[:5, 0].tolist() == [126, 127, 128, 127, 127]


def test_zeros_and_signs() -> None:
    w = torch.zeros(2, 64)
    w[1, 40], w[1, 41] = -0.0, -1.0
    packed, scale = quantize(w)
    got = dequantize(packed, scale, torch.float32)
    check_equal(got, w, "zeros, the sign of one among them")
    assert not (scale == 255).any() and (packed[0] == 0).all()


def test_bf16_weights_are_quantised_as_their_values() -> None:
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for got, expected in zip(quantize(w), quantize(w.float()), strict=True):
        check_equal(got, expected)
