"""How long verifying and drafting take on this machine, for `budget`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from nanok3.spec.budget import CostCurve, Costs

REPEATS = 5


def measure_costs(
    verify: Mapping[int, Callable[[], None]],
    draft: Mapping[int, Callable[[], None]],
    captured: int,
    wait: Callable[[], None],
) -> Costs:
    """verify: by rows, draft: by requests, what a step of so many runs; captured: rows up to which
    a step runs as the next larger one of these; wait: until the device has done all of it."""

    def times(runs: Mapping[int, Callable[[], None]]) -> list[tuple[int, float]]:
        return [(size, timed(run, wait)) for size, run in runs.items()]

    return Costs(CostCurve.of(times(verify), captured), CostCurve.of(times(draft), captured))


def timed(run: Callable[[], None], wait: Callable[[], None]) -> float:
    """Seconds, the median of a few, after one that is not counted."""
    with torch.inference_mode():
        run()
        wait()
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            wait()
            times.append(time.perf_counter() - start)
    return median(times)
