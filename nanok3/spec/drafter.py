"""A draft at work: its weights, its cache over the engine's blocks, its buffers.

`keep` takes the taps of rows that stand; every cached token of a request must have come through
here, or the draft sees a gap, and what it proposes is poor though what is emitted stays right.
`propose` draws drafts after anchors. Both may stand in a captured graph, but on a CPU: there they
look at values, to leave out what is padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nanok3.cache import TRASH
from nanok3.sampling import OPTIONS, SamplingRows
from nanok3.spec import draft
from nanok3.spec.config import DraftConfig
from nanok3.spec.draft import (
    REFERENCE,
    DraftOps,
    allocate_draft_buffers,
    allocate_draft_cache,
    draft_rows,
)
from nanok3.spec.draft_weights import DraftWeights
from nanok3.spec.propose import Proposal, propose


class Drafter:
    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        *,
        num_blocks: int,
        block_size: int,
        max_num_reqs: int,
        max_context_rows: int,
        dtype: torch.dtype,
        device: str,
        strict: bool = False,
        ops: DraftOps = REFERENCE,
    ) -> None:
        """max_context_rows: whose taps come in one call. strict: requests are drafted and rows kept
        one by one, so that their bits do not depend on their company."""
        self.config, self._weights = config, weights
        self.cache = allocate_draft_cache(config, num_blocks, block_size, dtype, device)
        self._block_size, self._on_cpu, self._strict = block_size, device == "cpu", strict
        self._ops = ops
        self._buffers = allocate_draft_buffers(
            config, max_context_rows, max_num_reqs * config.block_size, dtype, device
        )

    def keep(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """taps [T, n * C] of rows at positions [T], into latent slots [T]; -1: not of this one."""
        if self._on_cpu:
            stand = slots >= 0
            taps, positions, slots = taps[stand], positions[stand], slots[stand]
        else:
            positions, slots = positions.clamp(min=0), slots.clamp(min=TRASH)
        num_rows = len(taps)
        height = 1 if self._strict else max(num_rows, 1)
        with torch.inference_mode():
            for begin in range(0, num_rows, height):
                own = slice(begin, begin + height)
                buf = draft_rows(self._buffers, height)
                places = positions[own], slots[own]
                draft.keep_context(self._weights, taps[own], *places, self.cache, buf, self._ops)

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        block_table: Tensor,
        options: SamplingRows,
        steps: Tensor,
        num_drafts: int,
        all_greedy: bool,
    ) -> Proposal:
        """Drafts after the ids `anchors` [R] at `positions` [R]. See `propose.propose`."""
        if self._on_cpu:
            columns = max(1, -(-int(positions.max()) // self._block_size))
            block_table = block_table[:, :columns]
        num_reqs = len(anchors)
        height = 1 if self._strict else num_reqs
        parts = []
        with torch.inference_mode():
            for begin in range(0, num_reqs, height):
                own = slice(begin, begin + height)
                views = {name: getattr(options, name)[own] for name in OPTIONS}
                parts.append(
                    propose(
                        self.config,
                        self._weights,
                        self.cache,
                        anchors[own],
                        positions[own],
                        block_table[own],
                        self._block_size,
                        replace(options, **views),
                        steps[own],
                        num_drafts,
                        all_greedy,
                        self._buffers,
                        self._ops,
                    )
                )
            if len(parts) == 1:
                return parts[0]
            names = ("ids", "lengths", "probabilities", "confidence")
            return Proposal(*(torch.cat([getattr(p, n) for p in parts]) for n in names))
