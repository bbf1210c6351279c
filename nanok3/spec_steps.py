"""The calls that steps with drafts are made of, recorded by sizes: graphs on a GPU.

A call of `spec_decode.py` is bound to views of one state for a number of requests, of rows of each
and for what the requests' options use, and `record` makes of it what is run instead: the replay of
its graph, or the call as it is. Which of them a step runs, and when, is for `spec_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanok3.cache import TRASH
from nanok3.config import EngineConfig
from nanok3.graph import Run
from nanok3.sampling import SamplingRows
from nanok3.spec.budget import Costs, Fallback
from nanok3.spec.drafter import Drafter
from nanok3.spec.measure import measure_costs
from nanok3.spec.propose import Proposal
from nanok3.spec.target import Target
from nanok3.spec.verify import Rule
from nanok3.spec_decode import SpecMemory, accept, commit, compute, propose
from nanok3.step import Step

CONTEXT = 256  # tokens that dummy requests have behind them when costs are measured


class SpecSteps:
    def __init__(
        self,
        memory: SpecMemory,
        target: Target,
        drafter: Drafter,
        settings: EngineConfig,
        record: Callable[[Run], Run],
        sizes: Sequence[int] | None = None,
    ) -> None:
        """sizes: numbers of requests that calls are recorded for, here and now, with one row each
        or with all; None: any number of either, when it is asked for."""
        self.memory, self.target, self.drafter, self.settings = memory, target, drafter, settings
        self.num_drafts = memory.state.drafts.shape[1]
        self._record = record
        self._sizes = None if sizes is None else sorted(sizes)
        self._rule: Rule = "standard" if settings.acceptance == "standard" else "block"
        self._fallback = Fallback(settings.break_even)
        self._runs: dict[tuple[Any, ...], Run] = {}
        for size in reversed(self._sizes or []):  # the largest first: its memory serves all
            for is_greedy in (False, True):
                self.propose(size, is_greedy)
            for num_rows in (self.num_drafts + 1, 1):
                self.compute(size, num_rows)
                for sort in (False, True):
                    for counts in (False, True):
                        self.accept(size, num_rows, sort, counts)
                self.commit(size, num_rows)

    def size_for(self, num_reqs: int) -> int:
        """Requests of a step that has so many."""
        if self._sizes is None:
            return num_reqs
        return min(size for size in self._sizes if size >= num_reqs)

    def rows_for(self, num_drafts: int) -> int:
        """Rows of each request in a step that verifies up to so many drafts of one."""
        return (num_drafts if self._sizes is None or not num_drafts else self.num_drafts) + 1

    # ---- the calls ----

    def propose(self, size: int, is_greedy: bool) -> Run:
        def draw(
            anchors: Tensor, positions: Tensor, table: Tensor, rows: SamplingRows, steps: Tensor
        ) -> Proposal:
            drafter = self.drafter
            most = self.num_drafts
            return drafter.propose(anchors, positions, table, rows, steps, most, is_greedy)

        def make() -> Run:
            state = self.memory.first(size, 1, False, False)
            return partial(propose, state, draw, self.settings.adaptive_drafts)

        return self._recorded(("propose", size, is_greedy), make)

    def compute(self, size: int, num_rows: int) -> Run:
        def forward(step: Step) -> None:
            self.target.run(step)

        def make() -> Run:
            return partial(compute, self.memory.first(size, num_rows, False, False), forward)

        return self._recorded(("compute", size, num_rows), make)

    def accept(
        self, size: int, num_rows: int, sort: bool, counts: bool, stop_ids: Tensor | None = None
    ) -> Run:
        """stop_ids [size, any]: more than a state has room for; then nothing is recorded."""

        def make() -> Run:
            state = self.memory.first(size, num_rows, sort, counts)
            if stop_ids is not None:
                state = replace(state, options=replace(state.options, stop_ids=stop_ids))
            return partial(accept, state, self._rule, self._fallback)

        if stop_ids is not None:
            return make()
        return self._recorded(("accept", size, num_rows, sort, counts), make)

    def commit(self, size: int, num_rows: int) -> Run:
        def make() -> Run:
            state = self.memory.first(size, num_rows, False, False)
            taps = self.target.taps[: size * num_rows]
            fold = self.target.commit if num_rows > 1 else None
            return partial(commit, state, fold, partial(self.drafter.keep, taps))

        return self._recorded(("commit", size, num_rows), make)

    def _recorded(self, key: tuple[Any, ...], make: Callable[[], Run]) -> Run:
        if key not in self._runs:
            with torch.inference_mode():
                self._runs[key] = self._record(make())
        return self._runs[key]

    # ---- how long they take ----

    def measure(self) -> Costs:
        """Of the sizes that there are, with dummy requests on the trash slot and block. Overwrites
        the state."""
        most, whole = self.settings.max_num_reqs, self.num_drafts + 1
        sizes, widths = self._sizes, [1, whole]
        if sizes is None:
            sizes = sorted(n for n in {1, 2, 4, 8, 16, 32, most} if n <= most)
            widths = list(range(1, whole + 1))
        self._be_busy()
        verify = {n: self._verify(1, n) for n in widths}
        verify |= {n * q: self._verify(n, q) for n in sizes if n > 1 for q in (1, whole)}
        draft = {n: self._draft(n) for n in sizes}
        is_cuda = self.memory.state.logits.device.type == "cuda"
        wait: Run = torch.cuda.synchronize if is_cuda else lambda: None
        return measure_costs(verify, draft, 0 if self._sizes is None else most * whole, wait)

    def _be_busy(self) -> None:
        """The mirror's requests: in the middle of a reply, with all their drafts."""
        host, size = self.memory.host, self.memory.state.rows.block_size
        context = min(CONTEXT, host["block_table"].shape[1] * size // 2)
        self.memory.clear()
        host["positions"].fill_(context)
        host["state_slots"].fill_(TRASH)
        host["max_output"].fill_(2 * context)
        host["most_drafts"].fill_(self.num_drafts)

    def _verify(self, size: int, num_rows: int) -> Run:
        """The model, with the commit of half of the rows."""
        state = self.memory.state

        def run() -> None:
            self.memory.upload()
            state.lengths.fill_(num_rows - 1)
            self.compute(size, num_rows)()
            state.stand.fill_((num_rows + 1) // 2)
            state.following.fill_(-1)
            self.commit(size, num_rows)()

        return run

    def _draft(self, size: int) -> Run:
        state = self.memory.state

        def run() -> None:
            self.memory.upload()
            state.budget.fill_(size * self.num_drafts)
            self.propose(size, True)()

        return run
