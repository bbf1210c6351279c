"""Routing against a plain sort in Python: ties, NaN, bias, groups, and any number of experts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from compare import check_close, check_equal
from torch import Tensor

from nanok3.reference.router import RouterWeights, router_ref

Routing = tuple[list[list[int]], list[list[float]]]


def by_hand(scores: list[list[float]], w: RouterWeights) -> Routing:
    """kimi-k3.md 2.8 and 2.10 for given sigmoid scores, one row and one group at a time."""
    bias, num_experts = w.bias.tolist(), w.gate.shape[0]
    size = num_experts // w.num_groups
    ids, weights = [], []
    for row in scores:
        pick = [s + b for s, b in zip(row, bias, strict=True)]
        groups = [pick[g * size : (g + 1) * size] for g in range(w.num_groups)]
        rank = [sum(sorted(group)[-2:]) for group in groups]
        kept = sorted(range(w.num_groups), key=lambda g: (-rank[g], g))[: w.topk_groups]
        allowed = [e for e in range(num_experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-pick[e], e))[: w.top_k]
        raw = [row[e] for e in chosen]
        total = sum(raw) + 1e-20 if w.renormalize else 1.0
        ids.append(chosen)
        weights.append([s / total * w.scaling for s in raw])
    return ids, weights


def sigmoids(x: Tensor, gate: Tensor) -> list[list[float]]:
    return [
        [
            1 / (1 + math.exp(-sum(a * b for a, b in zip(row, g, strict=True))))
            for g in gate.tolist()
        ]
        for row in x.tolist()
    ]


def route(x: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    ids = torch.full((x.shape[0], w.top_k), -1)
    weights = torch.full((x.shape[0], w.top_k), float("nan"), dtype=wide)
    router_ref(x, w, out=(ids, weights))
    return ids, weights


def random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def router(gate: Tensor, bias: Tensor | None = None, top_k: int = 3) -> RouterWeights:
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    bias = torch.zeros(gate.shape[0], dtype=wide) if bias is None else bias.to(wide)
    return RouterWeights(gate, bias, top_k, 1, 1, True, 1.0)


def of_logits(logits: list[float], bias: list[float], top_k: int) -> tuple[Tensor, RouterWeights]:
    """One row with chosen logits: the identity reads them off."""
    x = torch.tensor([[1.0]], dtype=torch.float64)
    gate = torch.tensor(logits, dtype=torch.float64).unsqueeze(1)
    return x, router(gate, torch.tensor(bias, dtype=torch.float64), top_k)


# K3's 896, more than any power of two below it holds, the smallest, and all chosen
@pytest.mark.parametrize("experts, top_k", [(896, 16), (1024, 16), (2, 1), (5, 5)])
@pytest.mark.parametrize("rows", [1, 3])
def test_against_a_sort(rows: int, experts: int, top_k: int) -> None:
    x, w = random(0, rows, 32), router(random(1, experts, 32) / 5, random(2, experts) / 4, top_k)
    ids, weights = route(x, w)
    expected = by_hand(sigmoids(x, w.gate), w)
    check_equal(ids, torch.tensor(expected[0]), "ids")
    check_close(weights, expected[1], 1e-13, "weights")


def test_the_last_expert_can_be_chosen() -> None:
    for experts in (896, 1024):
        bias = torch.zeros(experts, dtype=torch.float64)
        bias[-16:] = 1.0
        ids, _ = route(random(3, 2, 32), router(random(4, experts, 32) / 9, bias, 16))
        assert all(sorted(row) == [*range(experts - 16, experts)] for row in ids.tolist())


def test_a_large_bias_chooses_but_does_not_weigh() -> None:
    x, w = of_logits([0.0, 1.0, 2.0, -1.0], [0.0, 0.0, -50.0, 50.0], 2)
    ids, weights = route(x, w)
    assert ids.tolist() == [[3, 1]]
    low, high = 1 / (1 + math.exp(1)), 1 / (1 + math.exp(-1))  # raw scores of -1 and 1; sum is 1
    check_close(weights, [[low, high]], 1e-14)


def test_ties_at_the_cut_go_to_the_lower_id() -> None:
    x, w = of_logits([0.5, 2.0, 0.5, 0.5, 2.0, 0.5], [0.0] * 6, 4)
    assert route(x, w)[0].tolist() == [[1, 4, 0, 2]]
    x, w = of_logits([0.0] * 20, [0.0] * 20, 16)
    assert route(x, w)[0].tolist() == [[*range(16)]]
    # scores of bf16 inputs that tie at places 16 and 17, in a row of 896
    gate = torch.zeros(896, 1).bfloat16()
    gate[100:115], gate[[7, 800, 5]] = 2.0, 1.0
    ids, _ = route(torch.ones(1, 1).bfloat16(), router(gate, top_k=16))
    assert ids.tolist() == [[*range(100, 115), 5]]


def test_logits_are_float32_for_bf16_inputs() -> None:
    """1 and 1 + 2^-13 are one number in bf16; the later expert has the larger one."""
    x = torch.tensor([[1.0, 2.0**-6]]).bfloat16()
    gate = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 2.0**-7]]).bfloat16()
    ids, weights = route(x, router(gate, top_k=2))
    assert ids.tolist() == [[2, 0]]
    assert weights.dtype == torch.float32
    check_close(
        weights, by_hand(sigmoids(x.double(), gate.double()), router(gate, top_k=2))[1], 1e-6
    )


@pytest.mark.parametrize("renormalize", [True, False])
def test_renormalising_and_scaling(renormalize: bool) -> None:
    x, w = random(5, 4, 8), router(random(6, 12, 8), random(7, 12) / 4, 3)
    w = replace(w, renormalize=renormalize, scaling=2.5)
    ids, weights = route(x, w)
    expected = by_hand(sigmoids(x, w.gate), w)
    check_equal(ids, torch.tensor(expected[0]))
    check_close(weights, expected[1], 1e-13)
    if renormalize:
        check_close(weights.sum(-1), [2.5] * 4, 1e-14)


def test_scores_that_underflow_do_not_divide_by_zero() -> None:
    x, w = of_logits([-2000.0, -2000.0, -2000.0], [0.0] * 3, 2)
    check_equal(route(x, w)[1], torch.zeros(1, 2, dtype=torch.float64))


# ---- groups ----


def test_groups_hand_made() -> None:
    """Group scores by the two best: [.9 + .1, .6 + .6, .7 + .2, .5 + .55]; the best two are kept.

    The single best expert, 0, is in a group that is not.
    """
    scores = [0.9, 0.1, 0.0001, 0.6, 0.6, 0.01, 0.7, 0.2, 0.02, 0.5, 0.55, 0.03]
    x, w = of_logits([math.log(s / (1 - s)) for s in scores], [0.0] * 12, 4)
    w = replace(w, num_groups=4, topk_groups=2, renormalize=False)
    ids, weights = route(x, w)
    assert ids.tolist() == [[3, 4, 10, 9]]
    check_close(weights, [[0.6, 0.6, 0.55, 0.5]], 1e-13)


def test_group_ties_go_to_the_lower_group() -> None:
    x, w = of_logits([0.0] * 12, [0.0] * 12, 3)
    assert route(x, replace(w, num_groups=4, topk_groups=2))[0].tolist() == [[0, 1, 2]]
    x, w = of_logits([-1.0] * 3 + [0.0] * 9, [0.0] * 12, 4)
    assert route(x, replace(w, num_groups=4, topk_groups=2))[0].tolist() == [[3, 4, 5, 6]]


def test_masked_groups_lose_even_to_negative_scores() -> None:
    """A mask of 0 would beat every pick here."""
    bias = [-3.0, -3.1, -3.2, -9.0, -9.1, -9.2, -5.0, -5.1, -5.2]
    x, w = of_logits([0.0] * 9, bias, 5)
    ids, weights = route(x, replace(w, num_groups=3, topk_groups=2))
    assert ids.tolist() == [[0, 1, 2, 6, 7]]
    check_close(weights, [[0.2] * 5], 1e-14)


def test_groups_against_a_sort() -> None:
    x, w = random(8, 6, 16), router(random(9, 24, 16), random(10, 24) / 4, 5)
    for groups, kept in ((4, 2), (12, 3), (4, 4), (2, 1)):
        grouped = replace(w, num_groups=groups, topk_groups=kept)
        ids, weights = route(x, grouped)
        expected = by_hand(sigmoids(x, w.gate), grouped)
        check_equal(ids, torch.tensor(expected[0]), f"ids of {groups} groups")
        check_close(weights, expected[1], 1e-13)


# ---- what is not a number ----


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_row_gets_distinct_ids_in_range(dtype: torch.dtype, groups: int) -> None:
    inf, nan = float("inf"), float("nan")
    w = router(random(11, 16, 8).to(dtype), random(12, 16) / 4, 6)
    w = replace(w, num_groups=groups, topk_groups=max(1, groups // 2))
    x = random(13, 7, 8).to(dtype)
    x[1] = nan
    x[2, 3] = nan
    x[3], x[4], x[5] = inf, -inf, 0.0  # inf - inf is NaN too; zeros tie everywhere
    ids, weights = route(x, w)
    for row in ids.tolist():
        assert len(set(row)) == 6 and all(0 <= e < 16 for e in row)
    assert weights[1].isnan().all() and weights[2].isnan().any()
    for row in (0, 5, 6):  # the neighbours never notice
        alone = route(x[row : row + 1], w)
        check_equal(ids[row], alone[0][0])
        check_close(weights[row], alone[1][0], 1e-6)


def test_one_nan_logit_or_infinite_ones() -> None:
    nan, inf = float("nan"), float("inf")
    x, w = of_logits([0.0, 1.0, nan, 2.0], [0.0] * 4, 2)
    ids, weights = route(x, w)
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist()) and weights.isnan().any()
    x, w = of_logits([0.0, inf, -inf, inf, 2.0], [0.0] * 5, 3)
    ids, weights = route(x, w)
    assert ids.tolist() == [[1, 3, 4]] and weights.isfinite().all()
    x, w = of_logits([-inf] * 4, [0.0] * 4, 3)
    assert route(x, w)[0].tolist() == [[0, 1, 2]]
