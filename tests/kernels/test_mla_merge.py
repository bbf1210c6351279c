"""`mla_merge` against the weighted sum in float64; empty splits hold NaN; its compiling."""

from __future__ import annotations

import pytest
import torch
from compare import check_bf16, check_equal
from torch import Tensor

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.mla_merge import MAX_SPLITS, compile_mla_merge, mla_merge


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rank, few", [(512, False), (512, True), (64, True), (128, False)])
def test_mla_merge_compiles(rank: int, few: bool, arch: str) -> None:
    compile_mla_merge(rank, few, arch)


def merged(partial: Tensor, stats: Tensor) -> Tensor:
    top, total = stats.double().unbind(-1)
    weights = 2.0 ** (top - top.amax(0)) * (total > 0)
    weights = (weights / (weights * total).sum(0)).nan_to_num(0.0)
    return (weights.unsqueeze(-1) * partial.double().nan_to_num(0.0)).sum(0).flatten(1)


# one split, both sides of the border between the two forms, a part-full and a full round of the
# 16 groups, one split an SM of two GPUs, the most
@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 4, 5, 16, 132, 148, MAX_SPLITS])
@pytest.mark.parametrize("rank", [128, 512])
def test_mla_merge_matches_ref(splits: int, rank: int) -> None:
    torch.manual_seed(splits)
    tokens, heads = 3, 6
    partial = torch.randn(splits, tokens, heads, rank, device="cuda") * 50
    stats = torch.randn(splits, tokens, heads, 2, device="cuda") * 10
    stats[..., 1] = stats[..., 1].abs() + 1
    empty = torch.rand(splits, tokens, heads, device="cuda") < 0.3
    empty[splits // 2 + 1 :, 1] = True  # a short request uses the first splits
    empty[:, 2, 3] = True  # a padding row uses none
    stats[empty] = torch.tensor([float("-inf"), 0.0], device="cuda")
    partial[empty] = float("nan")
    out = torch.full((tokens, heads * rank), float("nan"), device="cuda").bfloat16()
    mla_merge(partial, stats, out=out)
    right = merged(partial, stats)
    check_bf16(out, right.bfloat16(), right, f"{splits} splits")
    assert not out.unflatten(1, (heads, -1))[2, 3].any()
    again = torch.empty_like(out)
    mla_merge(partial, stats, out=again)
    check_equal(again, out, "a second run")


@pytest.mark.gpu
def test_a_nan_is_shown() -> None:
    partial = torch.ones(5, 1, 2, 64, device="cuda")
    stats = torch.ones(5, 1, 2, 2, device="cuda")
    stats[3, 0, 1, 1] = float("nan")
    out = torch.empty(1, 128, device="cuda").bfloat16()
    mla_merge(partial, stats, out=out)
    assert out[0, :64].eq(1).all() and out[0, 64:].isnan().all()
