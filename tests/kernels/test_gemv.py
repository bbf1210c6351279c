"""`gemv` against the product in float32, its packing against a plain copy, and its compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import check_bf16, check_close
from torch import Tensor
from torch.nn.functional import linear

from nanok3.reference.numerics import situ

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.gemv import compile_gemv, gemv
from nanok3.kernels.gemv_layout import BLOCK, TILE, Shape, choose_split, pack_gemv, resident_ctas

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


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pass_rows", [1, 8])
@pytest.mark.parametrize("case", CASES)
def test_gemv_compiles(case: str, pass_rows: int, arch: str) -> None:
    compile_gemv(Shape(**CASES[case]), pass_rows, arch)


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
    out = torch.full((tokens, shape.out_width), float("nan"), dtype=dtype, device="cuda")
    packed = pack_gemv(weight, situ=shape.finish == "situ")
    gemv(x, packed, shape, out=out, extra=extra if uses_extra else None)
    right = finished(shape, product(shape, x.float(), weight.float()), extra.float())
    if shape.finish == "f32":
        check_close(out, right, 1e-5, case)
    else:
        yardstick = finished(shape, product(shape, x, weight), extra).bfloat16()
        check_bf16(out, yardstick, right, case)
