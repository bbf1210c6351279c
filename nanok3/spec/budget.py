"""How many drafts are worth verifying: costs as measured, chances as the draft sees them.

Survival of draft j of a request is the product of the confidences up to j. A budget B of draft rows
for the whole batch admits the B largest survivals, which is a prefix of each request's drafts.
`best_budget` finds the B with the most tokens a second. It must be given confidences from *before*
the drafts that B is for: a B that looks at a draft's own confidences tells on the drafts after it,
and the output's law would shift. `Fallback` says when drafting rests because it does not pay.

`survival`, `admit` and `note_step` run on the device and wait for nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

LEAST_COST = 1e-6


@dataclass(frozen=True)
class CostCurve:
    """Measured time by number of rows or requests; never falls.

    Up to `captured` a number runs as the next measured one (graphs are captured for those); past it
    times lie on lines between measured points, and past the last point go on as the last line does.
    """

    sizes: tuple[int, ...]
    times: tuple[float, ...]
    captured: int

    @classmethod
    def of(cls, measured: Sequence[tuple[int, float]], captured: int) -> CostCurve:
        points = sorted(measured)
        times = accumulate((max(t, LEAST_COST) for _, t in points), max)
        return cls(tuple(size for size, _ in points), tuple(times), captured)

    def __call__(self, size: int) -> float:
        if size <= 0:
            return 0.0
        place = bisect_left(self.sizes, size)
        if place < len(self.sizes) and (size <= self.captured or self.sizes[place] == size):
            return self.times[place]
        if len(self.sizes) == 1:
            return self.times[0]
        right = min(max(place, 1), len(self.sizes) - 1)
        left = right - 1
        run = self.sizes[right] - self.sizes[left]
        slope = (self.times[right] - self.times[left]) / run
        return self.times[left] + slope * (size - self.sizes[left])


@dataclass(frozen=True)
class Costs:
    verify: CostCurve  # by rows of the target
    draft: CostCurve  # by requests


def survival(confidence: Tensor, lengths: Tensor) -> Tensor:
    """confidence [R, K], lengths [R] -> [R, K], 0 past the drafts that are there."""
    index = torch.arange(confidence.shape[1], device=confidence.device)
    return confidence.cumprod(-1).masked_fill(index >= lengths[:, None], 0.0)


def best_budget(old: Sequence[float], num_reqs: int, other_rows: int, costs: Costs) -> int:
    """B that maximises expected tokens over time; `old`: survivals from before these drafts.

    other_rows: rows of the step that are not drafts (anchors, prompts), num_reqs of which sample.
    """
    draft = costs.draft(num_reqs)
    best, best_rate, tokens = 0, num_reqs / costs.verify(other_rows), float(num_reqs)
    for count, chance in enumerate(sorted(old, reverse=True), 1):
        tokens += chance
        rate = tokens / (draft + costs.verify(other_rows + count))
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def admit(current: Tensor, budget: Tensor | int) -> Tensor:
    """Survivals [R, K] -> how many drafts of each request are verified, `budget` in all.

    Of equal survivals earlier places come first, then earlier requests: always prefixes.
    """
    chances = current.T.flatten()  # [K * R]
    order = torch.sort(chances, descending=True, stable=True).indices
    numbers = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order).scatter(0, order, numbers)
    admitted = (place < budget) & (chances > 0)
    return admitted.unflatten(0, current.T.shape).sum(0)


# ---- rest ----


@dataclass(frozen=True)
class Fallback:
    """Turns drafting of a request off while the mean of its recent steps is below break-even, and
    tries again.

    A step with drafts gives 1 + accepted tokens and costs (verify + draft) / plain steps: that
    ratio is `break_even`. After `window` steps below it, drafting rests for `rest` steps, twice as
    long each time that it fails again at once, up to `longest_rest`.
    """

    break_even: float
    window: int = 16
    rest: int = 64
    longest_rest: int = 1024


@dataclass(frozen=True)
class Rests:
    """What `Fallback` goes by, of each request."""

    mean: Tensor  # [R] f64, tokens a step, over about the last `window` steps with drafts
    num_steps: Tensor  # [R] i64, with drafts, since drafting last began
    resting: Tensor  # [R] i64, steps left without drafts
    next_rest: Tensor  # [R] i64, how long the last rest was; 0 after success


def note_step(rests: Rests, drafted: Tensor, tokens: Tensor, f: Fallback) -> None:
    """A step went by: tokens [R] for the requests that drafted [R] bool, no drafts for others."""
    count = rests.num_steps + drafted
    weight = drafted / count.clamp(1, f.window).double()
    mean = rests.mean + weight * (tokens - rests.mean)
    judged = drafted & (count >= f.window)
    fails = judged & (mean < f.break_even)
    longer = torch.where(rests.next_rest > 0, 2 * rests.next_rest, f.rest).clamp(max=f.longest_rest)
    next_rest = torch.where(fails, longer, torch.where(judged, 0, rests.next_rest))
    left = (rests.resting - (~drafted).long()).clamp(min=0)
    rests.resting.copy_(torch.where(fails, next_rest, left))
    rests.next_rest.copy_(next_rest)
    rests.num_steps.copy_(torch.where(fails, 0, count))
    rests.mean.copy_(mean.masked_fill(fails, 0.0))
