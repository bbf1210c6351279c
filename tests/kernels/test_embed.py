"""`embed` is a copy of rows, bit by bit; ids that are no row give zeros."""

from __future__ import annotations

import pytest
import torch
from compare import check_equal

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.embed import EmbedWeights, compile_embed, embed, embed_ref

WIDTHS = (160, 7168)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", WIDTHS)
def test_embed_compiles(width: int, arch: str) -> None:
    compile_embed(width, arch)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_embed_matches_ref(width: int) -> None:
    torch.manual_seed(width)
    table = torch.randn(100, width, device="cuda").bfloat16()
    for tokens in (1, 3, 8, 64):
        ids = torch.randint(0, 100, (tokens,), device="cuda")
        ids[0] = 99
        out = torch.full((tokens + 1, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        right = out.clone()
        w = EmbedWeights(table, 0)
        embed(ids, w, out=out[:-1])
        embed_ref(ids, w, out=right[:-1])
        check_equal(out[:-1], right[:-1], f"{tokens} rows")
        assert out[-1].isnan().all(), "a row past the end was written"


@pytest.mark.gpu
def test_ids_that_are_no_row_give_zeros() -> None:
    table = torch.ones(10, 160, dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([-1, 3, 10, 2**40, -(2**40)], device="cuda")
    out = torch.full((5, 160), float("nan"), dtype=torch.bfloat16, device="cuda")
    embed(ids, EmbedWeights(table, 0), out=out)
    assert out.sum(1).tolist() == [0, 160, 0, 0, 0]


@pytest.mark.gpu
def test_rows_of_other_ranks_are_zero() -> None:
    table = torch.randn(10, 160, device="cuda").bfloat16()
    ids = torch.tensor([0, 29, 30, 34, 39, 40, -1, 2**40], device="cuda")
    out = torch.full((8, 160), float("nan"), dtype=torch.bfloat16, device="cuda")
    right = out.clone()
    w = EmbedWeights(table, 30)
    embed(ids, w, out=out)
    embed_ref(ids, w, out=right)
    check_equal(out, right)
    assert out[2:5].count_nonzero() and not out[[0, 1, 5, 6, 7]].count_nonzero()
