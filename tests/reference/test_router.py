"""Routing against a plain sort in Python: ties, NaN, bias, groups, and any number of experts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from compare import check_close, check_equal
from torch import Tensor

from nanok3.reference.router import RouterWeights, route_ref

Routing = tuple[list[list[int]], list[list[float]]]


def by_hand(scores: list[list[float]], w: RouterWeights) -> Routing:
    """kimi-k3.md 2.8 and 2.10 for given sigmoid scores, one row and one group at a time."""
    bias, num_experts = w.bias.tolist(), len(w.bias)
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


def sigmoids(logits: Tensor) -> list[list[float]]:
    return [[1 / (1 + math.exp(-x)) for x in row] for row in logits.tolist()]


def route(logits: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    ids = torch.full((logits.shape[0], w.top_k), -1)
    weights = torch.full((logits.shape[0], w.top_k), float("nan"), dtype=logits.dtype)
    route_ref(logits, w, out=(ids, weights))
    return ids, weights


def random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def router(bias: Tensor, top_k: int) -> RouterWeights:
    return RouterWeights(bias, top_k, 1, 1, True, 1.0)


def of_logits(logits: list[float], bias: list[float], top_k: int) -> tuple[Tensor, RouterWeights]:
    """One row."""
    row = torch.tensor([logits], dtype=torch.float64)
    return row, router(torch.tensor(bias, dtype=torch.float64), top_k)


# K3's 896, more than any power of two below it holds, the smallest, and all chosen
@pytest.mark.parametrize("experts, top_k", [(896, 16), (1024, 16), (2, 1), (5, 5)])
@pytest.mark.parametrize("rows", [1, 3])
def test_against_a_sort(rows: int, experts: int, top_k: int) -> None:
    x, w = random(0, rows, experts), router(random(2, experts) / 4, top_k)
    ids, weights = route(x, w)
    expected = by_hand(sigmoids(x), w)
    check_equal(ids, torch.tensor(expected[0]), "ids")
    check_close(weights, expected[1], 1e-13, "weights")


def test_the_last_expert_can_be_chosen() -> None:
    for experts in (896, 1024):
        bias = torch.zeros(experts, dtype=torch.float64)
        bias[-16:] = 1.0
        ids, _ = route(random(3, 2, experts), router(bias, 16))
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
    # a tie at places 16 and 17, in a row of 896
    logits = torch.zeros(1, 896)
    logits[0, 100:115], logits[0, [7, 800, 5]] = 2.0, 1.0
    ids, _ = route(logits, router(torch.zeros(896), 16))
    assert ids.tolist() == [[*range(100, 115), 5]]


@pytest.mark.parametrize("renormalize", [True, False])
def test_renormalising_and_scaling(renormalize: bool) -> None:
    x, w = random(5, 4, 12) * 3, router(random(7, 12) / 4, 3)
    w = replace(w, renormalize=renormalize, scaling=2.5)
    ids, weights = route(x, w)
    expected = by_hand(sigmoids(x), w)
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
    x, w = random(8, 6, 24) * 4, router(random(10, 24) / 4, 5)
    for groups, kept in ((4, 2), (12, 3), (4, 4), (2, 1)):
        grouped = replace(w, num_groups=groups, topk_groups=kept)
        ids, weights = route(x, grouped)
        expected = by_hand(sigmoids(x), grouped)
        check_equal(ids, torch.tensor(expected[0]), f"ids of {groups} groups")
        check_close(weights, expected[1], 1e-13)


# ---- what is not a number ----


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_row_gets_distinct_ids_in_range(dtype: torch.dtype, groups: int) -> None:
    inf, nan = float("inf"), float("nan")
    w = router(random(12, 16).to(dtype) / 4, 6)
    w = replace(w, num_groups=groups, topk_groups=max(1, groups // 2))
    x = random(13, 7, 16).to(dtype)
    x[1] = nan
    x[2, 3] = nan
    x[3], x[4], x[5] = inf, -inf, 0.0  # they tie everywhere
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
