"""`expert_down` (and the tables of `routed`) against the reference's formula in float32."""

from __future__ import annotations

import functools

import pytest
import torch
from compare import check_bf16, check_equal
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("cutlass")
from kernels.expert_cases import (
    GPU_CASES,
    SIZES,
    Matrices,
    Routing,
    Sizes,
    random_matrices,
    random_routing,
    routing_of,
)
from nanok3.dsl import ARCHS
from nanok3.kernels.expert_down import (
    MOST_BLOCKS,
    Shape,
    compile_expert_down,
    expert_down,
    pack_expert_down,
)
from nanok3.kernels.mxfp4_layout import PackedExperts


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SIZES)
def test_expert_down_compiles(name: str, arch: str) -> None:
    s = SIZES[name]
    compile_expert_down(Shape(s.num_experts, s.top_k, s.latent, s.width), arch)


@pytest.mark.parametrize("groups, part", [(1, 1), (3, 3), (6, 6), (12, 6), (13, 1), (14, 2)])
def test_a_part_divides_the_width(groups: int, part: int) -> None:
    shape = Shape(8, 2, 32, 32 * groups)
    assert shape.part_blocks == part <= MOST_BLOCKS
    assert shape.parts * shape.part_blocks == groups


@functools.cache
def experts(s: Sizes) -> tuple[Matrices, PackedExperts]:
    torch.manual_seed(1)
    m = random_matrices(s.num_experts, s.latent, s.width, "cuda")
    return m, pack_expert_down(m.packed, m.scale)


def run(s: Sizes, packed: PackedExperts, act: Tensor, r: Routing) -> Tensor:
    shape = (act.shape[0], s.latent)
    out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    expert_down(act, r.weights, r.slot_of, r.distinct, r.num_distinct, packed, out=out)
    return out


def reference(m: Matrices, act: Tensor, r: Routing, latent: int) -> Tensor:
    """Products in the dtype of act, the weighted sum in float32."""
    total = torch.zeros(act.shape[0], latent, device=act.device)
    for expert, rows, place in r.places():
        routed = linear(act[rows, place], m.of(expert, act.dtype)).float()
        total.index_add_(0, rows, routed * r.weights[rows, place].unsqueeze(-1))
    return total


def check(s: Sizes, m: Matrices, packed: PackedExperts, act: Tensor, r: Routing, what: str) -> None:
    out = run(s, packed, act, r)
    right = reference(m, act.float(), r, s.latent)
    check_bf16(out, reference(m, act, r, s.latent).bfloat16(), right, what)
    check_equal(run(s, packed, act, r), out, f"{what}, again")


@pytest.mark.gpu
@pytest.mark.parametrize("name, tokens", GPU_CASES)
def test_expert_down_matches_ref(name: str, tokens: int) -> None:
    s = SIZES[name]
    m, packed = experts(s)
    torch.manual_seed(tokens)
    act = torch.randn(tokens, s.top_k, s.width, device="cuda").bfloat16()
    check(s, m, packed, act, random_routing(s, tokens, "cuda"), f"{name}, {tokens} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 20])
def test_all_rows_on_the_same_experts_and_no_other_is_read(tokens: int) -> None:
    s = SIZES["golden"]
    m, packed = experts(s)
    torch.manual_seed(2)
    ids = torch.tensor([31, 0, 7, 8, 5, 30], device="cuda").repeat(tokens, 1)
    tiles = packed.tiles.clone()
    unused = torch.ones(s.num_experts, dtype=torch.bool, device="cuda")
    unused[ids[0]] = False
    tiles[unused] = 0xFF  # factors of NaN
    act = torch.randn(tokens, s.top_k, s.width, device="cuda").bfloat16()
    r = routing_of(ids, s.num_experts)
    check(s, m, PackedExperts(tiles, packed.layout), act, r, f"{tokens} rows")


@pytest.mark.gpu
def test_large_parts_that_cancel_are_summed_in_float32() -> None:
    """Two experts with the same matrix and act and opposite weights, and a third."""
    s = Sizes(3, 3, 64, 64)
    torch.manual_seed(3)
    m = random_matrices(3, s.latent, s.width, "cuda")
    m.packed[1], m.scale[1] = m.packed[0], m.scale[0]
    r = routing_of(torch.tensor([[2, 0, 1]], device="cuda"), 3)
    r.weights[0] = torch.tensor([1.0, 4096.0, -4096.0])
    act = torch.randn(1, 3, s.width, device="cuda").bfloat16()
    act[0, 2] = act[0, 1]
    out = run(s, pack_expert_down(m.packed, m.scale), act, r)
    right = linear(act[0, 0].float(), m.of(2, torch.float32))
    # 2^-9 for the store; float32 sums of parts 4096 times as large err by some 2^-24 of them
    assert (out[0].float() - right).abs().max() < 2**-8 * right.abs().max()


@pytest.mark.gpu
def test_nan_stays_in_its_row() -> None:
    s = SIZES["mini"]
    _, packed = experts(s)
    torch.manual_seed(4)
    act = torch.randn(8, s.top_k, s.width, device="cuda").bfloat16()
    r = random_routing(s, 8, "cuda")
    together = run(s, packed, act, r)
    act[2, 1, 5] = float("nan")
    r.weights[6] = float("nan")
    poisoned = run(s, packed, act, r)
    assert poisoned[2].isnan().all() and poisoned[6].isnan().all()
    others = [t for t in range(8) if t not in (2, 6)]
    check_equal(poisoned[others], together[others])
