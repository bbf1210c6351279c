"""Embedding rows come out bit for bit, in the order of the ids."""

from __future__ import annotations

import pytest
import torch
from compare import check_equal

from nanok3.reference.embed import embed_ref


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows(dtype: torch.dtype) -> None:
    table = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = [6, 0, 3, 3, 6]  # first and last row, one twice, out of order
    out = torch.full((len(ids), 5), float("nan"), dtype=dtype)
    embed_ref(torch.tensor(ids), table, out=out)
    for row, token in enumerate(ids):
        check_equal(out[row], table[token], f"row {row}")
