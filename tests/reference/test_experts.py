"""Routed experts: three forms against one loop over rows and experts in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from compare import check_bf16, check_close
from numpy.typing import NDArray
from torch import Tensor

from nanok3.reference.experts import (
    FEW_ROWS,
    ExpertWeights,
    experts_gathered,
    experts_grouped,
    experts_grouped_ref,
    experts_ref,
    experts_value,
)
from nanok3.reference.one_row import experts_one_row

Form = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]
FORMS: list[Form] = [experts_value, experts_gathered, experts_grouped]
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-13}
Z, F, E, A = 16, 24, 6, 3


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def expert_weights(dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(
        random(0, E, 2 * F, Z, scale=0.7).to(dtype),
        random(1, E, Z, F, scale=0.2).to(dtype),
        4.0,
        25.0,
    )


def loop(latent: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> NDArray[np.float64]:
    """One row, one expert at a time: the weight after w2."""
    w13, w2 = w.w13.double().numpy(), w.w2.double().numpy()
    width = w2.shape[2]
    out = np.zeros((len(latent), w2.shape[1]))
    for t, z in enumerate(latent.double().numpy()):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = w13[e, :width] @ z, w13[e, width:] @ z
            capped = w.beta * np.tanh(gate / w.beta) / (1 + np.exp(-gate))
            act = capped * (w.linear_beta * np.tanh(up / w.linear_beta))
            out[t] += weight * (w2[e] @ act)
    return out


def routing(rows: int, dtype: torch.dtype, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Distinct ids a row, in any order, and weights that sum to 1."""
    ids = random(seed, rows, E).argsort(-1)[:, :A].contiguous()
    weights = random(seed + 1, rows, A).sigmoid()
    return ids, (weights / weights.sum(-1, keepdim=True)).to(dtype)


@pytest.mark.parametrize(
    "form, dtype",
    [(form, torch.float32) for form in FORMS]
    + [(form, torch.float64) for form in FORMS[:2]],  # torch has no grouped product in float64
)
@pytest.mark.parametrize("rows", [1, 5, 23])
def test_forms(form: Form, dtype: torch.dtype, rows: int) -> None:
    latent, w = random(4, rows, Z).to(dtype), expert_weights(dtype)
    ids, weights = routing(rows, dtype)
    check_close(form(latent, ids, weights, w), loop(latent, ids, weights, w), LIMIT[dtype])


@pytest.mark.parametrize("form", FORMS)
def test_loads_at_the_extremes(form: Form) -> None:
    """An expert with no rows at either end and in the middle; one that takes all; all of them."""
    latent, w = random(5, 9, Z).float(), expert_weights(torch.float32)
    middle = torch.tensor([[1, 3, 4]] * 9)  # 0, 2 and 5 idle
    one = torch.full((9, 1), 5)
    everything = torch.arange(E).repeat(9, 1)
    for ids in (middle, one, everything):
        weights = random(6, *ids.shape).float()
        check_close(form(latent, ids, weights, w), loop(latent, ids, weights, w), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_bf16(form: Form) -> None:
    rows = 17
    latent, w = random(7, rows, Z).bfloat16(), expert_weights(torch.bfloat16)
    ids, weights = routing(rows, torch.float32)
    plain = torch.zeros(rows, Z).bfloat16()
    for t in range(rows):
        for a in range(A):
            gate, up = (w.w13[ids[t, a]] @ latent[t]).chunk(2)
            act = 4 * torch.tanh(gate / 4) * gate.sigmoid() * (25 * torch.tanh(up / 25))
            plain[t] += weights[t, a].bfloat16() * (w.w2[ids[t, a]] @ act)
    got = form(latent, ids, weights, w)
    assert got.dtype == torch.float32, "rounded once, at the store"
    check_bf16(got.bfloat16(), plain, loop(latent, ids, weights, w))


@pytest.mark.parametrize("form", FORMS)
def test_partials_that_cancel_are_summed_in_float32(form: Form) -> None:
    """Experts 0 and 2 answer +-256 times what expert 1 does, with weights that nearly cancel.

    A sum in bf16 loses expert 1, and rounding weighted partials leaves what is not there.
    """
    base = expert_weights(torch.bfloat16)
    signs = torch.tensor([256.0, 1.0, -256.0, 0, 0, 0]).bfloat16()[:, None, None]
    w = replace(
        base, w13=base.w13[:1].repeat(E, 1, 1), w2=(base.w2[:1] * signs).contiguous()
    )  # powers of two: every expert's rounding is the same
    latent = random(8, 4, Z).bfloat16()
    ids = torch.tensor([[0, 1, 2]] * 4)
    weights = torch.tensor([[0.4, 0.2, 0.4], [0.3, 0.5, 0.3], [0.4001, 0.2, 0.4], [0.1, 1, 0.1]])
    single = form(latent, torch.full((4, 1), 1), torch.ones(4, 1), w).double()  # expert 1 alone
    share = 256 * (weights[:, 0].double() - weights[:, 2].double()) + weights[:, 1].double()
    check_close(form(latent, ids, weights, w), share.unsqueeze(1) * single, 1e-4)


def test_the_weight_comes_after_the_activation() -> None:
    """SiTU is not linear: weighting its input would give half of this and not double."""
    latent, w = random(9, 2, Z).float(), expert_weights(torch.float32)
    ids, one = torch.tensor([[2], [4]]), torch.ones(2, 1)
    for form in FORMS:
        check_close(form(latent, ids, 3 * one, w), 3 * form(latent, ids, one, w), 1e-6)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("op", [experts_ref, experts_grouped_ref, experts_one_row])
def test_ops_write_their_output(op: Callable[..., None], rows: int) -> None:
    """On both sides of the row count at which the form changes."""
    latent, w = random(10, rows, Z).float(), expert_weights(torch.float32)
    ids, weights = routing(rows, torch.float32)
    out = torch.full((rows, Z), float("nan"))
    op(latent, ids, weights, w, out=out)
    check_close(out, loop(latent, ids, weights, w), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_row_spoils_only_itself(form: Form) -> None:
    latent, w = random(11, 10, Z).float(), expert_weights(torch.float32)
    ids, weights = routing(10, torch.float32)
    latent[3], weights[3] = float("nan"), float("nan")
    others = [t for t in range(10) if t != 3]
    got = form(latent, ids, weights, w)
    assert got[3].isnan().all()
    check_close(got[others], loop(latent[others], ids[others], weights[others], w), 1e-5)
