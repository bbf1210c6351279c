"""Embedding rows come out bit for bit, in the order of the ids."""

from __future__ import annotations

import pytest
import torch
from compare import check_equal

from nanok3.reference.embed import EmbedWeights, embed_ref


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows(dtype: torch.dtype) -> None:
    table = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = [6, 0, 3, 3, 6]  # first and last row, one twice, out of order
    out = torch.full((len(ids), 5), float("nan"), dtype=dtype)
    embed_ref(torch.tensor(ids), EmbedWeights(table, 0), out=out)
    for row, token in enumerate(ids):
        check_equal(out[row], table[token], f"row {row}")


def test_rows_of_other_ranks_are_zero() -> None:
    table = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    table[0] = float("nan")  # a row that is not asked for does not spoil a zero
    out = torch.full((6, 3), float("nan"))
    embed_ref(torch.tensor([7, 8, 9, 11, 12, 0]), EmbedWeights(table, 8), out=out)
    zero = torch.zeros(3)
    for row, right in enumerate((zero, table[0], table[1], table[3], zero, zero)):
        check_equal(out[row], right, f"row {row}")
