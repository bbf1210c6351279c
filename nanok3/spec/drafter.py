"""A draft at work: its weights, its cache over the engine's blocks, its buffers.

`keep` takes the taps of rows that stand; every cached token of a request must have come through
here, or the draft sees a gap, and what it proposes is poor though what is emitted stays right.
`propose` draws drafts after anchors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanok3.cache import TRASH
from nanok3.sampling import SamplingRows
from nanok3.spec import draft
from nanok3.spec.config import DraftConfig
from nanok3.spec.draft import REFERENCE, allocate_draft_buffers, allocate_draft_cache, draft_rows
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
    ) -> None:
        """max_context_rows: whose taps come in one call."""
        self.config, self._weights = config, weights
        self.cache = allocate_draft_cache(config, num_blocks, block_size, dtype, device)
        self._block_size, self._device = block_size, device
        self._buffers = allocate_draft_buffers(
            config, max_context_rows, max_num_reqs * config.block_size, dtype, device
        )

    def keep(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """taps [T, n * C] of rows that stand, at positions [T], into latent slots [T]."""
        buf = draft_rows(self._buffers, len(taps))
        with torch.inference_mode():
            draft.keep_context(self._weights, taps, positions, slots, self.cache, buf, REFERENCE)

    def propose(
        self,
        anchors: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[Sequence[int]],
        options: SamplingRows,
        steps: Sequence[int],
        num_drafts: int,
    ) -> Proposal:
        """Drafts after the ids `anchors` at `positions`; options: a row each. See `propose`."""
        columns = max(1, max(-(-p // self._block_size) for p in positions))
        table = [[*b[:columns], *[TRASH] * (columns - len(b))] for b in blocks]

        def ints(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._device)

        with torch.inference_mode():
            return propose(
                self.config,
                self._weights,
                self.cache,
                ints(anchors),
                ints(positions),
                ints(table),
                self._block_size,
                options,
                ints(steps),
                num_drafts,
                bool((options.temperature == 0).all()),  # the options lie on the host
                self._buffers,
                REFERENCE,
            )
