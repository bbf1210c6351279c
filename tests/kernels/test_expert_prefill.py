"""`expert_prefill` and its items against the reference's formula in float32."""

from __future__ import annotations

import functools

import pytest
import torch
from compare import check_bf16, check_equal
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("cutlass")
from kernels.expert_cases import SIZES, Matrices, Sizes, random_matrices
from nanok3.dsl import ARCHS
from nanok3.kernels.expert_down import pack_expert_down
from nanok3.kernels.expert_prefill import (
    FEW,
    MANY,
    MOST_BLOCKS,
    Shape,
    columns_for,
    compile_expert_prefill,
    expert_prefill,
    make_items,
)
from nanok3.kernels.expert_up import pack_expert_up
from nanok3.kernels.mxfp4_layout import PackedExperts
from nanok3.reference.numerics import situ

BETAS = (4.0, 25.0)
# Fewer rows than an item holds; one; an item and a few more; several items an expert.
CASES = [(n, t) for n in ("mini", "golden", "odd", "one") for t in (1, 3, 70, 300)]
CASES += [("k3 tp16", 33), ("k3 tp8", 9)]


def shapes(s: Sizes, columns: int) -> tuple[Shape, Shape]:
    up = Shape(s.width // 8, s.latent // 32, columns, BETAS)
    return up, Shape(s.latent // 16, s.width // 32, columns, None)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["k3 tp16", "golden"])  # stages of 4 and 3 blocks, and of 1 and 2
@pytest.mark.parametrize("columns", [FEW, MANY])
def test_expert_prefill_compiles(name: str, columns: int, arch: str) -> None:
    for shape in shapes(SIZES[name], columns):
        compile_expert_prefill(shape, arch)


def test_sizes() -> None:
    for blocks, most in [(112, 4), (6, 3), (5, 1), (12, 4), (1, 1), (7, 1)]:
        stage = Shape(1, blocks, 16, None).stage_blocks
        assert stage == most <= MOST_BLOCKS and blocks % stage == 0
    assert [Shape(n, 1, 16, None).parts for n in (1, 8, 9)] == [1, 1, 2]
    assert columns_for(16 * 896, 896) == FEW and columns_for(16 * 896 + 1, 896) == MANY


@pytest.mark.parametrize("columns", [8, 16, 64])
@pytest.mark.parametrize("tokens, top_k, experts", [(1, 1, 1), (5, 3, 9), (100, 2, 3), (40, 4, 50)])
def test_items_hold_every_pair_once(tokens: int, top_k: int, experts: int, columns: int) -> None:
    torch.manual_seed(columns)
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    ids[: tokens // 2] = ids[0]  # some experts get many rows, some none
    items, pairs = make_items(ids, experts, columns)
    seen = []
    for expert, first, count in items.tolist():
        assert 0 <= expert < experts and 0 <= count <= columns
        members = pairs[first : first + count].tolist() if count else []
        assert len(members) == count
        assert all(ids[p // top_k, p % top_k] == expert for p in members)
        seen += members
    assert seen == pairs.tolist() and sorted(seen) == list(range(tokens * top_k))
    for expert in range(experts):  # as few items as hold its pairs
        filled = [c for e, _, c in items.tolist() if e == expert and c]
        assert len(filled) == -(-int((ids == expert).sum()) // columns)


@functools.cache
def experts(s: Sizes) -> tuple[Matrices, PackedExperts, Matrices, PackedExperts]:
    torch.manual_seed(0)
    up = random_matrices(s.num_experts, 2 * s.width, s.latent, "cuda")
    down = random_matrices(s.num_experts, s.latent, s.width, "cuda")
    return up, pack_expert_up(up.packed, up.scale), down, pack_expert_down(down.packed, down.scale)


def up_reference(m: Matrices, x: Tensor, ids: Tensor) -> Tensor:
    """[T * A, F] in the dtype of x, the activation in float32."""
    out = []
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        both = linear(x[pair // ids.shape[1]], m.of(expert, x.dtype))
        out.append(situ(*both.chunk(2), *BETAS))
    return torch.stack(out)


def down_reference(m: Matrices, act: Tensor, ids: Tensor) -> Tensor:
    out = [linear(act[p], m.of(e, act.dtype)) for p, e in enumerate(ids.reshape(-1).tolist())]
    return torch.stack(out)


def poisoned(rows: int, width: int) -> Tensor:
    return torch.full((rows, width), float("nan"), dtype=torch.bfloat16, device="cuda")


def run(s: Sizes, ids: Tensor, latent: Tensor, act: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """act and routed [T * A, ...], pairs in the order of ids; `act` in goes to the second."""
    _, up, _, down = experts(s)
    items, pairs = make_items(ids, s.num_experts, columns)
    source = pairs // ids.shape[1]
    made, routed = poisoned(len(pairs), s.width), poisoned(len(pairs), s.latent)
    expert_prefill(latent, items, source, up, pairs, columns, BETAS, out=made)
    expert_prefill(act, items, pairs, down, pairs, columns, out=routed)
    return made, routed


@pytest.mark.gpu
@pytest.mark.parametrize("name, tokens", CASES)
def test_expert_prefill_matches_ref(name: str, tokens: int) -> None:
    s = SIZES[name]
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, s.num_experts, device="cuda").argsort(1)[:, : s.top_k].contiguous()
    ids[: tokens // 2] = ids[0].clone()  # one item is not enough for them
    latent = torch.randn(tokens, s.latent, device="cuda").bfloat16()
    act = torch.randn(tokens * s.top_k, s.width, device="cuda").bfloat16()
    up, _, down, _ = experts(s)
    results = [run(s, ids, latent, act, columns) for columns in (FEW, MANY)]
    for made, routed in results:
        right = up_reference(up, latent.float(), ids)
        check_bf16(made, up_reference(up, latent, ids).bfloat16(), right, "up")
        right = down_reference(down, act.float(), ids)
        check_bf16(routed, down_reference(down, act, ids), right, "down")
    for few, many in zip(*results, strict=True):
        check_equal(few, many, "N changes no bit")


@pytest.mark.gpu
def test_other_experts_and_other_rows_are_not_read() -> None:
    s, tokens = SIZES["golden"], 40
    torch.manual_seed(3)
    ids = torch.tensor([31, 0, 7, 8, 5, 30], device="cuda").repeat(tokens, 1)
    latent = torch.randn(tokens, s.latent, device="cuda").bfloat16()
    _, up, _, _ = experts(s)
    items, pairs = make_items(ids, s.num_experts, FEW)
    source = pairs // s.top_k
    right = poisoned(len(pairs), s.width)
    expert_prefill(latent, items, source, up, pairs, FEW, BETAS, out=right)
    tiles = up.tiles.clone()
    unused = torch.ones(s.num_experts, dtype=torch.bool, device="cuda")
    unused[ids[0]] = False
    tiles[unused] = 0xFF  # factors of NaN
    latent[17] = float("nan")
    made = poisoned(len(pairs), s.width)
    poisoned_experts = PackedExperts(tiles, up.layout)
    expert_prefill(latent, items, source, poisoned_experts, pairs, FEW, BETAS, out=made)
    of_17 = torch.arange(len(pairs), device="cuda") // s.top_k == 17
    assert made[of_17].isnan().all()
    check_equal(made[~of_17], right[~of_17])
