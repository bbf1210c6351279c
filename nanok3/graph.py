"""Decode steps captured as CUDA graphs, one for each number of requests in `buckets`.

A graph holds addresses, so each owns the buffers of its `Step` for ever and is given new integers
by one copy from pinned memory. Rows past the running requests are padding: slot_mapping and
position -1, state slot 0; they write nothing that anyone reads. Knows nothing of what the callable
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanok3.cache import TRASH
from nanok3.step import Step

WARM_UPS = 2  # runs before capture: compiling and first-use set-up must not be captured


@dataclass(frozen=True)
class Row:
    """One decode row, as integers."""

    input_id: int
    position: int
    slot: int  # latent slot it writes
    state_slot: int
    blocks: Sequence[int]


def buckets(max_num_reqs: int) -> list[int]:
    """Powers of two up to the number of requests, and that number."""
    sizes = [1]
    while sizes[-1] * 2 < max_num_reqs:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == max_num_reqs else [*sizes, max_num_reqs]


class StepBuffers:
    """The integers of a decode step at fixed addresses, and their pinned mirror on the host."""

    def __init__(self, num_reqs: int, max_blocks: int, block_size: int, device: str) -> None:
        self.num_reqs, self.max_blocks = num_reqs, max_blocks
        size = num_reqs * (4 + max_blocks)
        pinned = torch.device(device).type == "cuda"
        self._host = torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.empty(size, dtype=torch.int64, device=device)
        parts = self._device.split([num_reqs] * 4 + [num_reqs * max_blocks])
        self.step = Step(
            input_ids=parts[0],
            positions=parts[1],
            slot_mapping=parts[2],
            state_slots=parts[3],
            block_table=parts[4].view(num_reqs, max_blocks),
            logit_rows=torch.arange(num_reqs, device=device),
            block_size=block_size,
        )

    def fill(self, rows: Sequence[Row]) -> None:
        """The rows, then padding; the copy is queued on the current stream."""
        padding = self.num_reqs - len(rows)
        table = [
            block
            for row in rows
            for block in (*row.blocks, *[TRASH] * (self.max_blocks - len(row.blocks)))
        ]
        values = [
            *([r.input_id for r in rows] + [0] * padding),
            *([r.position for r in rows] + [-1] * padding),
            *([r.slot for r in rows] + [-1] * padding),
            *([r.state_slot for r in rows] + [TRASH] * padding),
            *(table + [TRASH] * (padding * self.max_blocks)),
        ]
        self._host.copy_(torch.tensor(values, dtype=torch.int64))
        self._device.copy_(self._host, non_blocking=True)


class DecodeGraph:
    """One captured decode step of `num_reqs` rows."""

    def __init__(self, buffers: StepBuffers, run: Callable[[Step], Tensor], pool: Any) -> None:
        """`run` takes the step to its logits [R, V], at an address that does not change."""
        self.buffers = buffers
        self._graph = torch.cuda.CUDAGraph()
        buffers.fill([])  # all padding: the warm-up touches no request's state
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run(buffers.step)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = run(buffers.step)

    def replay(self, rows: Sequence[Row]) -> Tensor:
        """Logits [len(rows), V] of these rows; valid until the next replay."""
        # The host mirror may be overwritten only when the last copy from it is done; reading the
        # drawn ids of a step synchronises, so it is.
        self.buffers.fill(rows)
        self._graph.replay()
        return self._logits[: len(rows)]


def capture_all(
    max_num_reqs: int,
    max_blocks: int,
    block_size: int,
    device: str,
    run: Callable[[Step], Tensor],
) -> dict[int, DecodeGraph]:
    """A graph for every bucket, the largest first, all in one memory pool."""
    pool = torch.cuda.graph_pool_handle()
    graphs = {}
    for num_reqs in reversed(buckets(max_num_reqs)):
        buffers = StepBuffers(num_reqs, max_blocks, block_size, device)
        graphs[num_reqs] = DecodeGraph(buffers, run, pool)
    return graphs
