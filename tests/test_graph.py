"""Buckets and results read later; capture and replay need a GPU."""

from __future__ import annotations

import pytest
import torch

from nanok3.graph import Capture, Readback, buckets


@pytest.mark.parametrize(
    "most, sizes", [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_buckets_reach_every_number(most: int, sizes: list[int]) -> None:
    assert buckets(most) == sizes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_is_of_its_own_time(device: str) -> None:
    source = torch.tensor([1, 2, 3], device=device)
    readback = Readback(source, 2)
    readback.copy(0)
    source.add_(10)
    readback.copy(1)
    source.add_(10)
    assert readback.read(0) == [1, 2, 3]
    readback.copy(0)
    assert readback.read(1) == [11, 12, 13]
    assert readback.read(0) == [21, 22, 23]


@pytest.mark.gpu
def test_reading_waits_for_nothing_queued_later() -> None:
    source = torch.tensor([5], device="cuda")
    readback = Readback(source, 2)
    readback.copy(0)
    torch.cuda._sleep(2_000_000_000)  # clock cycles, about a second
    readback.copy(1)
    assert readback.read(0) == [5]
    assert not readback._events[1].query()
    assert readback.read(1) == [5]


@pytest.mark.gpu
def test_replays_share_memory_and_see_new_values() -> None:
    x, y, z = (torch.zeros(4, device="cuda") for _ in range(3))

    def run_first() -> None:
        y.copy_(x * 2 + 1)

    def run_second() -> None:
        z.copy_(y + x)

    record = Capture()
    double, add = record(run_first), record(run_second)
    for value in (3.0, 5.0):
        x.fill_(value)
        double()
        add()
        assert y.tolist() == [2 * value + 1] * 4
        assert z.tolist() == [3 * value + 1] * 4
