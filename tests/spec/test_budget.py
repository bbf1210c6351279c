"""The budget of drafts: costs between measured points, the best B by trying all, prefixes, rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanok3.spec.budget import (
    CostCurve,
    Costs,
    Fallback,
    Rests,
    admit,
    best_budget,
    note_step,
    survival,
)


def test_costs_between_and_past_what_was_measured() -> None:
    curve = CostCurve.of([(8, 5.0), (1, 2.0), (2, 1.5), (16, 9.0), (32, 25.0)], captured=8)
    assert [curve(n) for n in (0, 1, 2, 3, 8)] == [0, 2, 2, 5, 5]  # never falls; steps to 8
    assert [curve(n) for n in (10, 12, 16)] == [6, 7, 9]  # lines from there on
    assert [curve(n) for n in (24, 32, 40)] == [17, 25, 33]  # and past the end
    assert CostCurve.of([(1, 0.0)], 1)(5) == 1e-6
    assert CostCurve.of([(4, 2.0)], 0)(1) == 2


def test_survival_is_the_product_of_what_is_there() -> None:
    confidence = torch.tensor([[0.5, 0.5, 0.5], [0.9, 1.0, 0.1]])
    found = survival(confidence, torch.tensor([3, 2]))
    expected = torch.tensor([[0.5, 0.25, 0.125], [0.9, 0.9, 0.0]])
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_is_the_best_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(3, 4, generator=generator).cumprod(-1)
    times = (torch.rand(15, generator=generator) + 0.3).cumsum(0).tolist()
    costs = Costs(
        CostCurve.of(list(zip(range(1, 16), times, strict=True)), 0), CostCurve.of([(3, 0.4)], 0)
    )
    old = chances.flatten().tolist()
    rates = []
    for budget in range(13):
        tokens = 3 + sum(sorted(old, reverse=True)[:budget])
        rates.append(tokens / (costs.verify(3 + budget) + (costs.draft(3) if budget else 0)))
    assert best_budget(old, 3, 3, costs) == rates.index(max(rates))


def test_admitted_drafts_are_prefixes_and_the_likeliest() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        chances = (torch.rand(4, 5, generator=generator) * 4).round() / 4  # many ties
        chances = chances.cumprod(-1)
        for budget in range(0, 21, 3):
            lengths = admit(chances, budget)
            assert lengths.sum() == min(budget, int((chances > 0).sum()))
            inside = torch.arange(5) < lengths[:, None]
            kept, dropped = chances[inside], chances[~inside]
            if len(kept) and len(dropped):
                assert kept.min() >= dropped.max()


class Resting:
    """One request's record; `others` beside it must change nothing."""

    def __init__(self, fallback: Fallback, others: int = 1) -> None:
        self.fallback, self.others = fallback, others

        def ints() -> Tensor:
            return torch.zeros(1 + others, dtype=torch.int64)

        self.rests = Rests(ints().double(), ints(), ints(), ints())

    def step(self, tokens: float) -> None:
        """Drafts if it may."""
        drafted = torch.tensor([self.resting == 0, *[True] * self.others])
        given = torch.tensor([tokens, *[3] * self.others])
        note_step(self.rests, drafted, given, self.fallback)

    @property
    def resting(self) -> int:
        return int(self.rests.resting[0])


def test_drafting_rests_longer_each_time_that_it_fails_at_once() -> None:
    one = Resting(Fallback(2.0, window=4, rest=8, longest_rest=20))
    rests = []
    for _ in range(4):
        for _ in range(4):
            assert one.resting == 0
            one.step(1.0)
        rests.append(one.resting)
        for left in reversed(range(one.resting)):
            one.step(1.0)
            assert one.resting == left
    assert rests == [8, 16, 20, 20]
    for _ in range(30):
        one.step(3.0)
    assert one.resting == 0 and float(one.rests.mean[0]) == pytest.approx(3.0, abs=0.01)
    count = 0
    while one.resting == 0:
        one.step(1.0)
        count += 1
    assert count < 10 and one.resting == 8, "the first rest after success is short again"
    assert int(one.rests.resting[1]) == 0 and float(one.rests.mean[1]) == 3.0


def test_a_good_beginning_is_not_needed() -> None:
    """The mean of the first few steps decides nothing."""
    one = Resting(Fallback(1.5, window=8))
    for tokens in (1, 1, 1, 4, 4, 1, 4, 1):
        one.step(tokens)
    assert one.resting == 0


def test_nothing_reads_a_value() -> None:
    """On the device "meta" there is none."""
    chances = torch.rand(3, 4, device="meta")
    admit(survival(chances, chances[:, 0].long()), torch.tensor(3, device="meta"))
    numbers = chances[:, 0].long()
    note_step(Rests(numbers.double(), *[numbers] * 3), numbers > 0, numbers, Fallback(2.0))
