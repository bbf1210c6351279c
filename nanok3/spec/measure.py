"""How long verifying and drafting take on this machine, for `budget`."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from nanok3.cache import TRASH
from nanok3.sampling import SamplingParams, rows_of
from nanok3.spec.budget import CostCurve, Costs
from nanok3.spec.drafter import Drafter
from nanok3.spec.target import Rows, Target

REPEATS = 5
CONTEXT = 256  # tokens that the dummy requests have behind them


def measure_costs(
    target: Target, drafter: Drafter, block_size: int, max_num_reqs: int, num_drafts: int
) -> Costs:
    """Dummy steps on the trash slot and block: rows of one request up to all its drafts, then of
    more requests; drafting by number of requests. A step that drafts also commits."""
    blocks = [TRASH] * -(-(CONTEXT + num_drafts + 1) // block_size)
    sizes = sorted({1, 2, max_num_reqs, *(2**i for i in range(2, 6) if 2**i < max_num_reqs)})
    verify = []
    for num_rows in range(1, num_drafts + 2):
        verify.append((num_rows, 1, num_rows))
    verify += [(n * (num_drafts + 1), n, num_drafts + 1) for n in sizes if 1 < n <= max_num_reqs]

    def pass_rows(num_reqs: int, num_rows: int) -> Callable[[], None]:
        rows = [Rows([0] * num_rows, CONTEXT, blocks, TRASH)] * num_reqs

        def run() -> None:
            passed = target.run(rows)
            if passed.recorded:
                target.commit(rows, [(num_rows + 1) // 2] * num_reqs)
            drafter.keep(
                passed.taps.flatten(0, 1), passed.positions.flatten(), passed.slots.flatten()
            )

        return run

    def draft(num_reqs: int) -> Callable[[], object]:
        options = rows_of([SamplingParams(seed=0)] * num_reqs, "cpu")
        places, tables = [CONTEXT] * num_reqs, [blocks] * num_reqs
        ids = [0] * num_reqs
        return lambda: drafter.propose(ids, places, tables, options, ids, num_drafts)

    return Costs(
        verify=CostCurve.of([(rows, timed(pass_rows(n, q))) for rows, n, q in verify], 0),
        draft=CostCurve.of([(n, timed(draft(n))) for n in sizes if n <= max_num_reqs], 0),
    )


def timed(run: Callable[[], object]) -> float:
    """Seconds, the median of a few, after one that is not counted."""
    with torch.inference_mode():
        run()
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return median(times)
