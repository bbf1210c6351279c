"""`route` against the reference's order of sorting, its list of experts against torch.unique."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compare import check_close, check_equal
from torch import Tensor

from nanok3.reference.router import largest

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.route import Shape, compile_route, route

# K3, k3-mini, golden; the most that is taken, with runs of two chunks and a part-full last one;
# few experts, all of them chosen.
SHAPES = {
    "k3": Shape(896, 16, True, 1.0),
    "mini": Shape(64, 8, True, 1.0),
    "golden": Shape(32, 6, True, 2.5),
    "many": Shape(1990, 32, False, 0.5),
    "few": Shape(5, 5, True, 1.0),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SHAPES)
def test_route_compiles(name: str, arch: str) -> None:
    compile_route(SHAPES[name], arch)


def test_groups_and_too_many_rows_are_refused() -> None:
    logits = torch.zeros(65, 8)
    names = ("ids", "weights", "distinct", "num_distinct", "slot_of")
    outs = dict.fromkeys(names, logits)
    with pytest.raises(AssertionError, match="expert groups"):
        route(logits, logits[0], 2, 4, 2, True, 1.0, **outs)
    with pytest.raises(AssertionError, match="65 rows"):
        route(logits, logits[0], 2, 1, 1, True, 1.0, **outs)


@dataclasses.dataclass(frozen=True)
class Routed:
    ids: Tensor
    weights: Tensor
    distinct: Tensor
    num_distinct: Tensor
    slot_of: Tensor


def run(shape: Shape, logits: Tensor, bias: Tensor) -> Routed:
    """On poisoned outputs; checks the list, which has one right answer."""
    pairs = logits.shape[0], shape.top_k
    places = pairs[0] * pairs[1] + 3
    out = Routed(
        torch.full(pairs, -1, dtype=torch.int64, device="cuda"),
        torch.full(pairs, float("nan"), device="cuda"),
        torch.full((places,), -1, dtype=torch.int32, device="cuda"),
        torch.full((1,), -1, dtype=torch.int32, device="cuda"),
        torch.full(pairs, -1, dtype=torch.int32, device="cuda"),
    )
    outs = {f.name: getattr(out, f.name) for f in dataclasses.fields(out)}
    route(logits, bias, shape.top_k, 1, 1, shape.renormalize, shape.scaling, **outs)
    assert ((out.ids >= 0) & (out.ids < shape.num_experts)).all()
    assert all(len(set(row)) == shape.top_k for row in out.ids.tolist())
    used, slot_of = out.ids.unique(return_inverse=True)
    assert out.num_distinct.tolist() == [len(used)]
    check_equal(out.distinct[: len(used)], used.int(), "distinct")
    assert (out.distinct[len(used) :] == -1).all()
    check_equal(out.slot_of, slot_of.int(), "slot_of")
    return out


def check(shape: Shape, logits: Tensor, bias: Tensor, exact: bool = False) -> Routed:
    out = run(shape, logits, bias)
    scores = torch.sigmoid(logits)
    pick = scores + bias
    right = largest(pick, shape.top_k)
    if exact:
        check_equal(out.ids, right, "ids")
    else:
        gap = (pick.gather(1, out.ids) - pick.gather(1, right)).abs()
        assert not gap.isnan().any() and float(gap.max()) < 1e-6
    weights = scores.gather(1, out.ids)
    if shape.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if weights.isfinite().all():
        check_close(out.weights, weights * shape.scaling, 2e-6, "weights")
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_route_matches_ref(name: str, tokens: int) -> None:
    shape = SHAPES[name]
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, shape.num_experts, device="cuda") * 2
    bias = torch.randn(shape.num_experts, device="cuda")  # larger than the scores
    first = check(shape, logits, bias)
    again = run(shape, logits, bias)
    for field in dataclasses.fields(first):
        check_equal(getattr(again, field.name), getattr(first, field.name), field.name)


@pytest.mark.gpu
def test_ties_go_to_the_lower_id() -> None:
    torch.manual_seed(0)
    shape = SHAPES["k3"]
    logits = torch.randint(-3, 4, (20, 896), device="cuda").float()
    logits[0] = 0
    bias = torch.zeros(896, device="cuda")
    check(shape, logits, bias, exact=True)
    check(shape, logits, bias - 2, exact=True)  # every pick negative


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k3", "many"])
def test_nan_and_infinite_logits(name: str) -> None:
    torch.manual_seed(1)
    shape = SHAPES[name]
    experts = shape.num_experts
    logits = torch.randint(-9, 9, (7, experts), device="cuda").float()
    bias = torch.zeros(experts, device="cuda")
    bias[3], bias[4] = float("inf"), -float("inf")
    logits[0] = float("nan")
    logits[1, 77] = float("nan")
    logits[2] = float("inf")
    logits[3] = -float("inf")
    logits[4, ::2] = -float("inf")
    logits[4, 1::2] = float("nan")
    logits[5] = -200.0
    out = check(shape, logits, bias, exact=True)
    assert out.ids[1, 0] == 77 and out.ids[0].tolist() == list(range(shape.top_k))
    for row in (0, 1, 4):
        assert out.weights[row, 0].isnan()
        assert out.weights[row].isnan().all() or not shape.renormalize
    assert out.weights[[2, 3, 5, 6]].isfinite().all()
