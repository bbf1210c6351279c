"""`mla_latent` against the reference in float32; what a cache row copies is bit-equal."""

from __future__ import annotations

import pytest
import torch
from compare import check_bf16, check_equal

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.mla_latent import Shape, compile_mla_latent, mla_latent, mla_latent_ref
from nanok3.reference.mla import MLAWeights

EPS = 1e-5
# q_lora, kv_lora, rope: k3-mini (a warp holds both ranges), the golden model (ranges end inside a
# warp), K3
SIZES = ((64, 128, 64), (160, 512, 64), (1536, 512, 64))
NUM_SLOTS = 200


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sizes", SIZES)
def test_mla_latent_compiles(sizes: tuple[int, int, int], arch: str) -> None:
    compile_mla_latent(Shape(*sizes, EPS), arch)


def weights_of(q_norm: torch.Tensor, kv_norm: torch.Tensor) -> MLAWeights:
    unused = torch.empty(0)
    return MLAWeights(q_norm, kv_norm, unused, 0, EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_mla_latent_matches_ref(sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    q_rank, rank, rope = sizes
    width = q_rank + rank + rope + 6 * 128  # the gate of six heads is not read
    q_norm = (1 + 0.1 * torch.randn(q_rank)).bfloat16()
    kv_norm = (1 + 0.1 * torch.randn(rank)).bfloat16()
    for tokens in (1, 2, 3, 8, 9, 64):
        x = torch.randn(tokens, width)
        x[:, :q_rank] *= 30  # the two ranges must not share a norm
        x[:, q_rank + rank + rope :] = float("nan")
        x = x.bfloat16()
        slots = torch.randperm(NUM_SLOTS - 1)[:tokens]
        slots[-1] = NUM_SLOTS - 1
        out = torch.full((tokens, q_rank), float("nan"), dtype=torch.bfloat16)
        cache = torch.full((NUM_SLOTS, rank + rope), 1e30, dtype=torch.bfloat16)
        on_gpu, cache_on_gpu = out.cuda(), cache.cuda()
        mla_latent(
            *(x.cuda(), q_norm.cuda(), kv_norm.cuda(), EPS, cache_on_gpu, slots.cuda()), out=on_gpu
        )
        yardstick, yardstick_cache = out.clone(), cache.clone()
        mla_latent_ref(x, weights_of(q_norm, kv_norm), yardstick_cache, slots, out=yardstick)
        right, right_cache = out.float(), cache.float()
        wide = weights_of(q_norm.float(), kv_norm.float())
        mla_latent_ref(x.float(), wide, right_cache, slots, out=right)

        check_bf16(on_gpu, yardstick, right, "q")
        parts = (c[slots, :rank] for c in (cache_on_gpu.cpu(), yardstick_cache, right_cache))
        check_bf16(*parts, "latent")
        yardstick_cache[slots, :rank] = cache_on_gpu.cpu()[slots, :rank]
        check_equal(cache_on_gpu, yardstick_cache, "copied columns and rows of other slots")


@pytest.mark.gpu
def test_padding_writes_no_cache_row() -> None:
    q_rank, rank, rope = SIZES[0]
    x = torch.randn(4, q_rank + rank + rope + 8, device="cuda").bfloat16()
    ones = torch.ones(rank, dtype=torch.bfloat16, device="cuda")
    cache = torch.full((8, rank + rope), 1e30, dtype=torch.bfloat16, device="cuda")
    before, out = cache.clone(), torch.full((4, q_rank), float("nan"), device="cuda").bfloat16()
    slots = torch.tensor([-1, 2, 8, -(2**40)], device="cuda")
    mla_latent(x, ones[:q_rank], ones, EPS, cache, slots, out=out)
    kept = [0, 1, 3, 4, 5, 6, 7]
    check_equal(cache[kept], before[kept], "rows that no token has")
    check_equal(cache[2, rank:], x[1, q_rank + rank :][:rope], "the row of slot 2")
    assert out.isfinite().all(), "padding rows have a query latent like others"
