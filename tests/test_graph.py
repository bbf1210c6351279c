"""Buckets and the integers of a captured step; capture and replay need a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanok3.graph import DecodeGraph, Row, StepBuffers, buckets, capture_all
from nanok3.step import Step

ROWS = [Row(11, 5, 133, 3, [2, 9]), Row(12, 0, 64, 1, [1])]


@pytest.mark.parametrize(
    "most, sizes", [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_buckets_reach_every_number(most: int, sizes: list[int]) -> None:
    assert buckets(most) == sizes


def test_fill_writes_rows_then_padding_at_fixed_addresses() -> None:
    buffers = StepBuffers(num_reqs=3, max_blocks=2, block_size=64, device="cpu")
    step = buffers.step
    addresses = [t.data_ptr() for t in vars(step).values() if isinstance(t, Tensor)]
    buffers.fill(ROWS + ROWS[:1])
    buffers.fill(ROWS)
    assert step.input_ids.tolist() == [11, 12, 0]
    assert step.positions.tolist() == [5, 0, -1]
    assert step.slot_mapping.tolist() == [133, 64, -1]
    assert step.state_slots.tolist() == [3, 1, 0]
    assert step.block_table.tolist() == [[2, 9], [1, 0], [0, 0]]
    assert [t.data_ptr() for t in vars(step).values() if isinstance(t, Tensor)] == addresses


@pytest.mark.gpu
def test_replay_sees_new_integers_and_padding_is_not_returned() -> None:
    logits = torch.empty(4, 3, device="cuda")

    def run(step: Step) -> Tensor:
        logits[: len(step.positions)].copy_(step.positions.unsqueeze(1).float().expand(-1, 3))
        return logits[: len(step.positions)]

    graphs = capture_all(4, 2, 64, "cuda", run)
    assert sorted(graphs) == [1, 2, 4]
    assert graphs[4].replay(ROWS).tolist() == [[5.0] * 3, [0.0] * 3]
    assert graphs[1].replay(ROWS[1:]).tolist() == [[0.0] * 3]
    assert graphs[4].replay(ROWS + ROWS).shape == (4, 3)
    assert isinstance(graphs[2], DecodeGraph)
