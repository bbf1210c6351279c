"""The target over the rows of drafts: logits and taps of all of them, and the commit of some.

`run` passes the model over Q rows of each request. With records in the step, KDA states stay as
they were and `commit` applies the rows that stand; without, a step has one row and moves them in
place. Latent rows need no commit: what is past a request's length is never read and written again.

In strict mode every row is a pass of its own, so that its bits are those of plain decoding; a row
then begins from the rows recorded before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from nanok3.cache import Cache
from nanok3.reference.kda_records import Commit, KDARecords, commit_ref
from nanok3.step import Buffers, Step, rows


class Target:
    """The model over its buffers; weights and caches are the engine's."""

    def __init__(
        self,
        forward: Callable[[Step, Buffers], None],
        buffers: Buffers,
        cache: Cache,
        records: KDARecords,
        commit: Commit,
        *,
        strict: bool,
        on_cpu: bool,
    ) -> None:
        """forward: of the step's rows, with taps. buffers, records: for the largest step. on_cpu:
        values may be looked at, to leave out what is padding."""
        self.records = records
        self._forward, self._buffers, self._cache, self._commit = forward, buffers, cache, commit
        self._strict, self._on_cpu = strict, on_cpu

    @property
    def logits(self) -> Tensor:
        """[T, V], of the last step's rows; padding has none."""
        return self._buffers.logits

    @property
    def taps(self) -> Tensor:
        """[T, n * C], likewise."""
        return self._buffers.taps

    def run(self, step: Step) -> None:
        if not self._strict:
            num_rows = len(step.input_ids)
            self._forward(step, rows(self._buffers, num_rows, num_rows))
            return
        num_reqs = len(step.state_slots)
        height = len(step.input_ids) // num_reqs
        for at in range(num_reqs * height):
            if not (self._on_cpu and int(step.slot_mapping[at]) < 0):
                self._one_row(step, at, at // height, at % height)

    def _one_row(self, step: Step, at: int, request: int, row: int) -> None:
        """A pass of its own, whose logits and taps lie where those of a common pass would."""
        of_row = ("input_ids", "positions", "slot_mapping")
        views = {name: getattr(step, name)[at : at + 1] for name in of_row}
        one = replace(
            step,
            **views,
            logit_rows=step.logit_rows[:1],
            block_table=step.block_table[request : request + 1],
            state_slots=step.state_slots[request : request + 1],
            records=None if step.records is None else replace(step.records, first=row),
        )
        own = {
            name: getattr(self._buffers, name)[at : at + 1]
            for name in ("logits", "logits_part", "taps")
        }
        self._forward(one, replace(rows(self._buffers, 1, 1), **own))

    def commit(self, slots: Tensor, counts: Tensor) -> None:
        """The first counts[r] recorded rows of the request at slots[r] stand."""
        states = self._cache.conv_state, self._cache.state
        self._commit(*states, self.records, slots, counts)


def commit_on_cpu(strict: bool) -> Commit:
    """Request by request, by numbers that are looked at."""

    def commit(
        conv_state: Tensor, state: Tensor, records: KDARecords, slots: Tensor, counts: Tensor
    ) -> None:
        numbers = slots.tolist(), counts.tolist()
        commit_ref(conv_state, state, records, *numbers, fold=not strict)

    return commit
