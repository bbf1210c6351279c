"""The products against plain loops in float64: SiTU, the latent's norm, logits of chosen rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compare import check_bf16, check_close
from numpy.typing import NDArray
from torch import Tensor

from nanok3.reference.linear import (
    GateUpWeights,
    LatentUpWeights,
    gate_up_ref,
    latent_up_ref,
    linear_ref,
    lm_head_ref,
)

F64 = NDArray[np.float64]
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-13}


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def product(x: F64, weight: F64) -> F64:
    out = np.zeros((len(x), len(weight)))
    for t in range(len(x)):
        for o in range(len(weight)):
            out[t, o] = sum(x[t, i] * weight[o, i] for i in range(x.shape[1]))
    return out


def situ(g: float, u: float, beta: float, linear_beta: float) -> float:
    sigmoid = 1 / (1 + math.exp(-g))  # of the gate itself, not of its cap
    return beta * math.tanh(g / beta) * sigmoid * linear_beta * math.tanh(u / linear_beta)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("rows", [1, 3])
def test_linear(dtype: torch.dtype, rows: int) -> None:
    x, weight = random(0, rows, 7).to(dtype), random(1, 5, 7).to(dtype)
    out = poisoned(rows, 5, dtype=dtype)
    linear_ref(x, weight, out=out)
    check_close(out, product(x.double().numpy(), weight.double().numpy()), LIMIT[dtype])


def test_linear_in_bf16_rounds_once() -> None:
    x, weight = random(0, 4, 96).bfloat16(), random(1, 32, 96).bfloat16()
    out = poisoned(4, 32, dtype=torch.bfloat16)
    linear_ref(x, weight, out=out)
    expected = product(x.double().numpy(), weight.double().numpy())
    rounded = torch.from_numpy(expected).bfloat16()
    check_bf16(out, rounded, expected)


# g far past the cap of 4 tells a sigmoid of the gate from one of the capped gate; u past 25
HAND_MADE = [(0.0, 0.0), (0.0, 9.0), (10.0, 2.0), (-10.0, 2.0), (3.0, -60.0), (1e4, 1e4)]


def test_situ_hand_made() -> None:
    gates, ups = (torch.tensor(v, dtype=torch.float64) for v in zip(*HAND_MADE, strict=True))
    weight = torch.cat([torch.diag(gates), torch.diag(ups)])  # a row of ones picks each pair
    out = poisoned(1, len(HAND_MADE), dtype=torch.float64)
    x = torch.ones(1, len(HAND_MADE), dtype=torch.float64)
    gate_up_ref(x, GateUpWeights(weight, 4.0, 25.0), out=out)
    check_close(out[0], [situ(g, u, 4.0, 25.0) for g, u in HAND_MADE], 1e-14)
    # worked out by hand: 4 tanh(2.5) sigmoid(10) * 25 tanh(0.08), and the bound of 100
    check_close(out[0, 2], 4 * 0.98661429815 * 0.99995460213 * 25 * 0.07982976911, 1e-9)
    check_close(out[0, -1], 100.0, 1e-14)
    assert out[0, 0] == 0 and out[0, 1] == 0


@pytest.mark.parametrize("dtype", list(LIMIT))
def test_gate_up(dtype: torch.dtype) -> None:
    x, weight = random(2, 3, 8).to(dtype), random(3, 10, 8, scale=3.0).to(dtype)
    out = poisoned(3, 5, dtype=dtype)
    gate_up_ref(x, GateUpWeights(weight, 2.0, 5.0), out=out)
    both = product(x.double().numpy(), weight.double().numpy())
    expected = [[situ(row[f], row[5 + f], 2.0, 5.0) for f in range(5)] for row in both]
    check_close(out, torch.tensor(expected, dtype=torch.float64), LIMIT[dtype])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("size", [1.0, 3e-3])  # a small latent, where the eps counts
@pytest.mark.parametrize("dtype", list(LIMIT))
def test_latent_up(dtype: torch.dtype, size: float, normed: bool) -> None:
    routed, shared = random(4, 3, 6, scale=size).to(dtype), random(5, 3, 5).to(dtype)
    weight, norm = random(6, 5, 6).to(dtype), random(7, 6).to(dtype)
    out = poisoned(3, 5, dtype=dtype)
    w = LatentUpWeights(norm if normed else None, weight, 1e-5)
    latent_up_ref(routed, shared, w, out=out)
    z = routed.double().numpy()
    if normed:
        sizes = [math.sqrt(sum(v * v for v in row) / len(row) + 1e-5) for row in z]
        z = norm.double().numpy() * z / np.array(sizes)[:, None]
    expected = product(z, weight.double().numpy()) + shared.double().numpy()
    check_close(out, expected, LIMIT[dtype])


def test_latent_up_adds_before_it_rounds_again() -> None:
    """In bf16 the product is rounded once and the sum once, as bf16 torch does."""
    routed, shared = random(8, 5, 32).bfloat16(), random(9, 5, 16).bfloat16()
    weight, norm = random(10, 16, 32).bfloat16(), random(11, 32).bfloat16()
    out = poisoned(5, 16, dtype=torch.bfloat16)
    latent_up_ref(routed, shared, LatentUpWeights(norm, weight, 1e-5), out=out)
    z = torch.nn.functional.rms_norm(routed, (32,), norm, 1e-5)
    plain = z @ weight.T + shared
    r = routed.double()
    exact = r / (r.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    check_bf16(out, plain, exact @ weight.double().T + shared.double())


def test_logits_of_chosen_rows_are_float32() -> None:
    x, weight = random(12, 4, 64).bfloat16(), random(13, 9, 64).bfloat16()
    rows = torch.tensor([3, 0, 3])
    out = poisoned(3, 9, dtype=torch.float32)
    lm_head_ref(x, weight, rows, out=out)
    expected = product(x[rows].double().numpy(), weight.double().numpy())
    check_close(out, expected, 1e-6)  # bf16 logits would err by 4e-3


def test_no_logits_are_wanted() -> None:
    out = torch.empty(0, 9)
    lm_head_ref(torch.ones(4, 8), torch.ones(9, 8), torch.tensor([], dtype=torch.int64), out=out)
