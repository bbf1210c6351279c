"""`expert_up` (and the tables of `routed`) against the reference's formula in float32."""

from __future__ import annotations

import functools

import pytest
import torch
from compare import check_bf16, check_equal
from torch import Tensor
from torch.nn.functional import linear

from nanok3.reference.numerics import situ

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
from nanok3.kernels.expert_up import Shape, compile_expert_up, expert_up, pack_expert_up
from nanok3.kernels.mxfp4_layout import PackedExperts

BETAS = 4.0, 25.0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, 8])
@pytest.mark.parametrize("name", SIZES)
def test_expert_up_compiles(name: str, pass_rows: int, arch: str) -> None:
    s = SIZES[name]
    shape = Shape(s.num_experts, s.top_k, s.latent, s.width, *BETAS)
    compile_expert_up(shape, pass_rows, arch)


@functools.cache
def experts(s: Sizes) -> tuple[Matrices, PackedExperts]:
    torch.manual_seed(1)
    m = random_matrices(s.num_experts, 2 * s.width, s.latent, "cuda")
    return m, pack_expert_up(m.packed, m.scale)


def run(s: Sizes, packed: PackedExperts, x: Tensor, r: Routing) -> Tensor:
    shape = (x.shape[0], s.top_k, s.width)
    act = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    expert_up(x, r.slot_of, r.distinct, r.num_distinct, packed, *BETAS, act=act)
    return act


def reference(m: Matrices, x: Tensor, r: Routing, width: int) -> Tensor:
    """In the dtype of x."""
    act = x.new_zeros(*r.ids.shape, width)
    for expert, rows, place in r.places():
        gate, up = linear(x[rows], m.of(expert, x.dtype)).chunk(2, dim=-1)
        act[rows, place] = situ(gate, up, *BETAS).to(x.dtype)
    return act


def check(s: Sizes, m: Matrices, packed: PackedExperts, x: Tensor, r: Routing, what: str) -> None:
    act = run(s, packed, x, r)
    right = reference(m, x.float(), r, s.width)
    check_bf16(act, reference(m, x, r, s.width), right, what)


@pytest.mark.gpu
@pytest.mark.parametrize("name, tokens", GPU_CASES)
def test_expert_up_matches_ref(name: str, tokens: int) -> None:
    s = SIZES[name]
    m, packed = experts(s)
    torch.manual_seed(tokens)
    x = torch.randn(tokens, s.latent, device="cuda").bfloat16()
    check(s, m, packed, x, random_routing(s, tokens, "cuda"), f"{name}, {tokens} rows")


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
    tiles[unused] = 0xFF
    x = torch.randn(tokens, s.latent, device="cuda").bfloat16()
    r = routing_of(ids, s.num_experts)
    check(s, m, PackedExperts(tiles, packed.layout), x, r, f"{tokens} rows")


@pytest.mark.gpu
def test_a_row_alone_gives_the_same_bits_and_nan_stays_in_its_row() -> None:
    s = SIZES["k3 tp16"]
    _, packed = experts(s)
    torch.manual_seed(3)
    x = torch.randn(9, s.latent, device="cuda").bfloat16()
    r = random_routing(s, 9, "cuda")
    together = run(s, packed, x, r)
    for row in (0, 7, 8):
        alone = run(s, packed, x[row : row + 1], routing_of(r.ids[row : row + 1], s.num_experts))
        check_equal(alone[0], together[row], f"row {row}")
    x[4] = float("nan")
    poisoned = run(s, packed, x, r)
    others = [t for t in range(9) if t != 4]
    assert poisoned[4].isnan().all()
    check_equal(poisoned[others], together[others])
