"""The target over the rows of drafts: logits and taps of all of them, and the commit of some.

`run` passes the model over an anchor and its drafts, for several requests of different numbers of
drafts, and leaves KDA states as they were; `commit` applies the rows that stand. Latent rows need
no commit: what is past a request's length is never read and written again. A step without drafts
moves the states in place.

In strict mode every row is a pass of its own, so that its bits are those of plain decoding; a row
then begins from the rows recorded before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanok3 import model
from nanok3.cache import TRASH, Cache
from nanok3.config import ModelConfig
from nanok3.ops import DECODE, REFERENCE, VERIFY, Ops
from nanok3.reference.kda_records import allocate_records, commit_ref
from nanok3.step import Step, allocate_buffers, rows
from nanok3.weights import Weights


@dataclass(frozen=True)
class Rows:
    """One request's part of a step."""

    ids: Sequence[int]  # the anchor, then drafts
    position: int  # of the anchor
    blocks: Sequence[int]
    state_slot: int


@dataclass(frozen=True)
class Passed:
    """What a step left; valid until the next one."""

    logits: Tensor  # [R, Q, V]; rows past a request's own mean nothing
    taps: Tensor  # [R, Q, n * C]
    positions: Tensor  # [R, Q] i64
    slots: Tensor  # [R, Q] i64, latent slots that were written
    recorded: bool  # states are as they were before


class Target:
    """Owns buffers and records; weights and caches are the engine's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: Cache,
        taps: Sequence[int],
        *,
        block_size: int,
        max_num_reqs: int,
        max_drafts: int,
        dtype: torch.dtype,
        strict: bool,
        poison: bool,
    ) -> None:
        self._config, self._weights, self._cache = config, weights, cache
        self._taps, self._block_size, self._strict = tuple(taps), block_size, strict
        most = max_num_reqs * (max_drafts + 1)
        device = str(cache.state.device)
        self._buffers = allocate_buffers(
            config, most, most, dtype, device, num_taps=len(self._taps)
        )
        # Of a step whose rows are passes of their own.
        self._logits = torch.empty_like(self._buffers.logits)
        self._taps_of_rows = torch.empty_like(self._buffers.taps)
        num_layers, num_slots = cache.state.shape[:2]
        self._records = allocate_records(
            num_layers, num_slots, max_drafts + 1, cache.conv_state, cache.state
        )
        if poison:  # what no row of this step wrote shows up as NaN
            own = vars(self._buffers) | vars(self._records)
            for tensor in (*own.values(), self._logits, self._taps_of_rows):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    def run(self, requests: Sequence[Rows]) -> Passed:
        """All rows of all requests."""
        num_rows = max(len(r.ids) for r in requests)
        step = self._step(requests, num_rows)
        recorded = num_rows > 1
        with torch.inference_mode():
            if self._strict:
                logits, taps = self._one_by_one(requests, step, num_rows)
            else:
                step = replace(step, records=self._records if recorded else None)
                ops = VERIFY if recorded else DECODE
                logits, taps = self._pass(step, ops)
        shape = (len(requests), num_rows)
        return Passed(
            logits.unflatten(0, shape),
            taps.unflatten(0, shape),
            step.positions.view(shape),
            step.slot_mapping.view(shape),
            recorded,
        )

    def _pass(self, step: Step, ops: Ops) -> tuple[Tensor, Tensor]:
        buf = rows(self._buffers, len(step.input_ids), len(step.input_ids))
        model.forward(self._config, self._weights, self._cache, step, buf, ops, taps=self._taps)
        return buf.logits, buf.taps

    def _one_by_one(
        self, requests: Sequence[Rows], step: Step, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Each row of each request in a pass of its own; padding stays as it is."""
        total = len(requests) * num_rows
        logits, taps = self._logits[:total], self._taps_of_rows[:total]
        for i, request in enumerate(requests):
            for row in range(len(request.ids)):
                at = i * num_rows + row
                columns = (request.position + row) // self._block_size + 1
                one = replace(
                    step,
                    input_ids=step.input_ids[at : at + 1],
                    positions=step.positions[at : at + 1],
                    slot_mapping=step.slot_mapping[at : at + 1],
                    block_table=step.block_table[i : i + 1, :columns],
                    state_slots=step.state_slots[i : i + 1],
                    logit_rows=step.logit_rows[:1],
                    records=replace(self._records, first=row) if num_rows > 1 else None,
                )
                logits[at : at + 1], taps[at : at + 1] = self._pass(one, REFERENCE)
        return logits, taps

    def commit(self, requests: Sequence[Rows], counts: Sequence[int]) -> None:
        """The first counts[r] rows of each request stand, after a step that was recorded."""
        slots = [r.state_slot for r in requests]
        with torch.inference_mode():
            commit_ref(
                self._cache.conv_state,
                self._cache.state,
                self._records,
                slots,
                counts,
                fold=not self._strict,
            )

    def _step(self, requests: Sequence[Rows], num_rows: int) -> Step:
        """Rows past a request's own repeat its last position and write to trash."""
        size = self._block_size
        ids, positions, slots = [], [], []
        for r in requests:
            for i in range(num_rows):
                real = i < len(r.ids)
                position = r.position + min(i, len(r.ids) - 1)
                ids.append(r.ids[i] if real else 0)
                positions.append(position)
                slots.append(r.blocks[position // size] * size + position % size if real else TRASH)
        columns = max(positions) // size + 1
        device = self._cache.state.device
        table = [[*r.blocks[:columns], *[TRASH] * (columns - len(r.blocks))] for r in requests]
        return Step(
            input_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            block_table=torch.tensor(table, device=device),
            state_slots=torch.tensor([r.state_slot for r in requests], device=device),
            logit_rows=torch.arange(len(ids), device=device),
            block_size=size,
        )
