"""The counted random numbers: splitmix64's own bits, an even spread, and nothing shared by keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanok3.uniform import ACCEPT, DRAFT, NUM_STREAMS, RESIDUAL, TARGET, uniform

MASK = 2**64 - 1


def mix(x: int) -> int:
    """splitmix64's scrambling in Python's unbounded numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def i64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_the_python_mix_is_splitmix64() -> None:
    # The first outputs of the published generator for seed 1234567.
    state = 1234567
    outputs = []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_bits_equal_the_unbounded_form() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 1234567, 42, 42]
    positions = [0, 1, 2, 1048575, 7, 0, 5, 6]
    for stream in (*range(NUM_STREAMS), DRAFT + NUM_STREAMS * 12345):
        got = uniform(i64(seeds), i64(positions), stream)
        assert got.dtype == torch.float64
        for seed, position, u in zip(seeds, positions, got.tolist(), strict=True):
            word = mix((seed + 0x9E3779B97F4A7C15) & MASK)
            word = mix((mix((word + position) & MASK) + stream) & MASK)
            assert u == (word >> 11) / 2**53


def test_a_stream_of_its_own_for_each_row_and_short_positions() -> None:
    seeds, positions = i64([3, 3, 3, 9]), torch.tensor([5, 5, 6, 5], dtype=torch.int32)
    together = uniform(seeds, positions, i64([TARGET, ACCEPT, DRAFT, RESIDUAL]))
    for row, stream in enumerate((TARGET, ACCEPT, DRAFT, RESIDUAL)):
        assert together[row] == uniform(seeds[row : row + 1], positions[row : row + 1], stream)[0]


def chi_square(cells: Tensor, expected: float) -> float:
    return float(((cells - expected) ** 2 / expected).sum())


def limit(freedom: int) -> float:
    """Chi-square that one honest run in 100000 exceeds (Wilson and Hilferty's approximation)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4.265 * (2 / (9 * freedom)) ** 0.5) ** 3)


N = 40_000


@pytest.mark.parametrize("seed", [0, 1, 2**40, -7])
def test_even_and_independent_of_neighbours(seed: int) -> None:
    positions = torch.arange(N)
    seeds = torch.full_like(positions, seed)
    u = uniform(seeds, positions, TARGET)
    assert u.min() >= 0 and u.max() < 1
    assert chi_square(torch.bincount((u * 100).long(), minlength=100), N / 100) < limit(99)
    others = {
        "next position": uniform(seeds, positions + 1, TARGET),
        "accept": uniform(seeds, positions, ACCEPT),
        "residual": uniform(seeds, positions, RESIDUAL),
        "draft": uniform(seeds, positions, DRAFT),
        "a later step's draft": uniform(seeds, positions, DRAFT + NUM_STREAMS),
        "next seed": uniform(seeds + 1, positions, TARGET),
    }
    for name, v in others.items():
        cells = torch.bincount((u * 10).long() * 10 + (v * 10).long(), minlength=100)
        assert chi_square(cells, N / 100) < limit(99), name
        assert not (u == v).any(), name


def test_even_over_seeds_at_one_position() -> None:
    u = uniform(torch.arange(N), torch.full((N,), 77), TARGET)
    assert chi_square(torch.bincount((u * 100).long(), minlength=100), N / 100) < limit(99)


def test_never_one_and_never_repeated() -> None:
    u = uniform(torch.arange(1_000_000) % 1000, torch.arange(1_000_000) // 1000, TARGET)
    assert u.max() < 1 and u.sort().values.diff().min() > 0
