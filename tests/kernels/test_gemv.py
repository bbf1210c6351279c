"""`gemv` against the product in float32, its packing against a plain copy, and its compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import check_bf16, check_close
from torch import Tensor
from torch.nn.functional import linear

from nanok3.reference.linear import GateUpWeights, MoEInWeights, moe_in_ref
from nanok3.reference.numerics import situ

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.gemv import compile_gemv, gemv
from nanok3.kernels.gemv_layout import (
    BLOCK,
    TILE,
    Shape,
    choose_split,
    empty_gemv,
    pack_gemv,
    pack_moe_in,
    place_rows,
    resident_ctas,
    unpack_gemv,
)

MARGIN = 3  # columns
BETAS = {"beta": 4.0, "linear_beta": 25.0}
# A wide projection of K3 at TP16 with a part-full last tile; odd small widths of the golden model;
# SiTU with rows that do not fill a tile; block-diagonal forms; float32 logits; the two that read
# a second input.
CASES: dict[str, dict[str, Any]] = {
    "in_proj tp16": {"rows": 3220, "k": 7168, "x_width": 7168},
    "golden q_b": {"rows": 384, "k": 160, "x_width": 160},
    "one tile": {"rows": 8, "k": 32, "x_width": 32},
    "situ tp16": {"rows": 768, "k": 7168, "x_width": 7168, "finish": "situ", **BETAS},
    "situ odd": {"rows": 24, "k": 320, "x_width": 320, "finish": "situ", **BETAS},
    "absorb": {"rows": 6 * 512, "k": 128, "x_width": 6 * 192, "groups": 6, "group_stride": 192},
    "value": {
        **{"rows": 6 * 128, "k": 512, "x_width": 6 * 512, "groups": 6, "group_stride": 512},
        "finish": "gate",
    },
    "latent_down tp16": {"rows": 224, "k": 7168, "x_width": 7168, "split": 2},
    "split 7, more tiles than clusters": {"rows": 3216, "k": 7168, "x_width": 7168, "split": 7},
    "situ split": {
        **{"rows": 40, "k": 2048, "x_width": 2048, "finish": "situ", "split": 4},
        **BETAS,
    },
    "router": {"rows": 896, "k": 7168, "x_width": 7168, "finish": "f32"},
    "latent_up mini": {"rows": 160, "k": 64, "x_width": 64, "finish": "add"},
}

# Router, latent and SiTU rows (gate and up) of one product, K and split: K3 at TP16; k3-mini; sizes
# of which none fills its last tile, in one part and split; the smallest
MOE_IN_CASES = {
    "tp16": (56, 224, 768, 7168, 2),
    "mini": (64, 64, 256, 160, 1),
    "odd": (21, 40, 24, 160, 1),
    "odd split": (5, 18, 40, 1024, 2),
    "one": (1, 1, 2, 32, 1),
}


def moe_in_shape(case: str) -> Shape:
    router, latent, situ_rows, k, split = MOE_IN_CASES[case]
    rows = router + latent + situ_rows
    sizes = {"router_rows": router, "latent_rows": latent}
    return Shape(rows, k, k, finish="moe_in", split=split, **sizes, **BETAS)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, 8])
@pytest.mark.parametrize("case", CASES)
def test_gemv_compiles(case: str, pass_rows: int, arch: str) -> None:
    compile_gemv(Shape(**CASES[case]), pass_rows, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, 8])
@pytest.mark.parametrize("case", ["tp16", "mini"])
def test_moe_in_compiles(case: str, pass_rows: int, arch: str) -> None:
    compile_gemv(moe_in_shape(case), pass_rows, arch)


@pytest.mark.parametrize("rows, k", [(16, 32), (40, 96), (7, 64)])
def test_packed_blocks_hold_the_rows_as_they_lie(rows: int, k: int) -> None:
    weight = torch.randn(rows, k).bfloat16()
    packed = pack_gemv(weight)
    assert packed.shape == (-(-rows // TILE), k // BLOCK, TILE, BLOCK)
    for row in range(packed.shape[0] * TILE):
        for column in range(0, k, BLOCK):
            block = packed[row // TILE, column // BLOCK, row % TILE]
            right = weight[row, column : column + BLOCK] if row < rows else torch.zeros(BLOCK)
            assert torch.equal(block, right.bfloat16())


def test_gate_and_up_rows_share_a_tile() -> None:
    weight = torch.arange(2 * 12).unsqueeze(1).repeat(1, 32).bfloat16()  # 12 gate rows, 12 up rows
    packed = pack_gemv(weight, situ=True)[:, 0, :, 0]
    assert packed[0].tolist() == [*range(8), *range(12, 20)]
    assert packed[1].tolist() == [8, 9, 10, 11, 0, 0, 0, 0, 20, 21, 22, 23, 0, 0, 0, 0]


@pytest.mark.parametrize("rows, k, situ", [(40, 96, False), (7, 64, False), (24, 32, True)])
def test_unpacking_is_the_way_back(rows: int, k: int, situ: bool) -> None:
    """Also of some tiles, into a buffer that is longer and holds something else."""
    weight = torch.randn(rows, k).bfloat16()
    packed = pack_gemv(weight, situ)
    scratch = torch.full((packed.numel() + 64,), float("nan"), dtype=torch.bfloat16)
    lying = unpack_gemv(packed, out=scratch)
    assert lying.data_ptr() == scratch.data_ptr() and scratch[packed.numel() :].isnan().all()
    if situ:
        by_tile = lying.view(-1, 2, 8, k).transpose(0, 1).flatten(1, 2)  # [gate|up, rows, K]
        lying = by_tile[:, : rows // 2].flatten(0, 1)
    assert torch.equal(lying[:rows], weight)
    last = unpack_gemv(packed[-1:], out=scratch)
    assert torch.equal(last.view(TILE, -1, BLOCK), packed[-1].transpose(0, 1))


@pytest.mark.parametrize("situ", [False, True])
def test_rows_are_placed_in_any_pieces(situ: bool) -> None:
    weight = torch.randn(60, 64).bfloat16()
    packed = empty_gemv(60, 64, situ, "cpu")
    for first, last in [(33, 34), (0, 33), (34, 60)]:
        place_rows(packed, first, weight[first:last], 60, situ)
    assert torch.equal(packed, pack_gemv(weight, situ))


def test_matrices_of_moe_in_have_tiles_of_their_own() -> None:
    gate, down, gate_up = (torch.randn(n, 64).bfloat16() for n in (21, 40, 24))
    packed = pack_moe_in(gate, down, gate_up)
    shape = Shape(85, 64, 64, finish="moe_in", router_rows=21, latent_rows=40)
    assert packed.shape[0] == shape.tiles == 2 + 3 + 2
    assert [(r.first_tile, r.tiles, r.out_width) for r in shape.ranges] == [
        (0, 2, 21),
        (2, 3, 40),
        (5, 2, 12),
    ]
    assert torch.equal(packed[:2], pack_gemv(gate)) and torch.equal(packed[2:5], pack_gemv(down))
    assert torch.equal(packed[5:], pack_gemv(gate_up, situ=True))


@pytest.mark.parametrize(
    "rows, k, split",
    [
        *[(3220, 7168, 1), (224, 7168, 8), (768, 7168, 4), (7168, 768, 1), (160, 64, 1)],
        (1048, 7168, 2),  # 66 tiles: in four parts they would not all run at once
    ],
)
def test_few_tiles_split_k(rows: int, k: int, split: int) -> None:
    assert choose_split(rows, k) == split
    assert -(-rows // TILE) * split <= resident_ctas(split, 132) or split == 1


def product(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    """The block-diagonal product in the dtype of its inputs."""
    if shape.groups == 1:
        return linear(x, weight)
    parts = [
        linear(x[:, j * shape.group_stride :][:, : shape.k], part)
        for j, part in enumerate(weight.chunk(shape.groups))
    ]
    return torch.cat(parts, dim=1)


def finished(shape: Shape, y: Tensor, extra: Tensor) -> Tensor:
    """What the launcher's `finish` makes of the products, in their dtype."""
    if shape.finish == "situ":
        gate, up = y.chunk(2, dim=-1)
        return situ(gate, up, shape.beta, shape.linear_beta)
    if shape.finish == "add":
        return y + extra
    if shape.finish == "gate":
        return y * torch.sigmoid(extra)
    return y


def poisoned(tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """NaN, an odd number of columns wider than the output on either side."""
    return torch.full((tokens, width + 2 * MARGIN), float("nan"), dtype=dtype, device="cuda")


def columns_of(wide: Tensor) -> Tensor:
    return wide[:, MARGIN:-MARGIN]


def check_margins(wide: Tensor) -> None:
    assert wide[:, :MARGIN].isnan().all() and wide[:, -MARGIN:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 19])
@pytest.mark.parametrize("case", MOE_IN_CASES)
def test_moe_in_matches_ref(case: str, tokens: int) -> None:
    """Its three outputs are columns of wider buffers, as a rank's parts are."""
    torch.manual_seed(tokens)
    shape = moe_in_shape(case)
    x = torch.randn(tokens, shape.k, device="cuda").bfloat16()
    weight = (torch.randn(shape.rows, shape.k, device="cuda") * shape.k**-0.5).bfloat16()
    matrices = weight.split([part.rows for part in shape.ranges])
    dtypes = torch.float32, torch.bfloat16, torch.bfloat16
    sizes = [part.out_width for part in shape.ranges]
    wide = [poisoned(tokens, n, dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    outs = tuple(columns_of(w) for w in wide)
    gemv(x, pack_moe_in(*matrices), shape, out=outs)
    for w in wide:
        check_margins(w)

    def reference(dtype: torch.dtype) -> list[Tensor]:
        gate, down, gate_up = (m.to(dtype) for m in matrices)
        w = MoEInWeights(gate, down, GateUpWeights(gate_up, 4.0, 25.0))
        right = [torch.empty(tokens, n, device="cuda") for n in sizes]
        moe_in_ref(x.to(dtype), w, out=(right[0], right[1], right[2]))
        return right

    right, yardstick = reference(torch.float32), reference(torch.bfloat16)
    check_close(outs[0], right[0], 1e-5, f"{case}: router logits")
    for i, name in ((1, "latent"), (2, "shared act")):
        check_bf16(outs[i], yardstick[i].bfloat16(), right[i], f"{case}: {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 19])
@pytest.mark.parametrize("case", CASES)
def test_gemv_matches_ref(case: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    shape = Shape(**CASES[case])
    x = torch.randn(tokens, shape.x_width, device="cuda").bfloat16()
    weight = (torch.randn(shape.rows, shape.k, device="cuda") * shape.k**-0.5).bfloat16()
    extra = torch.randn(tokens, shape.out_width + 8, device="cuda").bfloat16()[:, 8:]
    uses_extra = shape.finish in ("add", "gate")
    dtype = torch.float32 if shape.finish == "f32" else torch.bfloat16
    out = poisoned(tokens, shape.out_width, dtype)
    packed = pack_gemv(weight, situ=shape.finish == "situ")
    gemv(x, packed, shape, out=columns_of(out), extra=extra if uses_extra else None)
    check_margins(out)
    out = columns_of(out)
    right = finished(shape, product(shape, x.float(), weight.float()), extra.float())
    if shape.finish == "f32":
        check_close(out, right, 1e-5, case)
    else:
        yardstick = finished(shape, product(shape, x, weight), extra).bfloat16()
        check_bf16(out, yardstick, right, case)
