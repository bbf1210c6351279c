"""`rms_norm` against the reference in float32, its row layout, and its compiling."""

from __future__ import annotations

import pytest
import torch
from compare import check_bf16, check_equal

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.rms_norm import Pieces, compile_rms_norm, rms_norm, rms_norm_ref

EPS = 1e-5
# k3-mini's and K3's routed latent, the golden model's (half a warp has a second piece), the widest
# row allowed, and the narrowest
WIDTHS = (64, 3584, 320, 8192, 8)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_compiles(width: int, arch: str) -> None:
    compile_rms_norm(width, EPS, arch)


@pytest.mark.parametrize("count", [1, 20, 32, 33, 448, 896, 1024, 2048])
def test_every_piece_has_one_thread(count: int) -> None:
    pieces = Pieces(count)
    held = [i * pieces.threads + t for i in range(pieces.per_thread) for t in range(pieces.threads)]
    assert sorted(p for p in held if p < count) == list(range(count))
    assert pieces.threads % 32 == 0 and pieces.threads <= 512


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_matches_ref(width: int) -> None:
    torch.manual_seed(width)
    weight = (1 + 0.1 * torch.randn(width)).bfloat16()
    for tokens in (1, 2, 3, 8, 9, 64):
        x = (torch.randn(tokens, width) * torch.logspace(-3, 3, tokens).unsqueeze(1)).bfloat16()
        x[-1] = 0
        wide = torch.full((tokens, width + 24), float("nan"), dtype=torch.bfloat16, device="cuda")
        wide[:, 16 : 16 + width] = x  # a column range; its neighbours must not be read
        out = torch.full((tokens + 1, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        rms_norm(wide[:, 16 : 16 + width], weight.cuda(), EPS, out=out[:-1])
        right = rms_norm_ref(x, weight.float(), EPS)
        yardstick = rms_norm_ref(x, weight, EPS).bfloat16()
        check_bf16(out[:-1], yardstick, right, f"{tokens} x {width}")
        assert out[-1].isnan().all(), "a row past the end was written"
        again = torch.empty_like(out[:-1])
        rms_norm(wide[:, 16 : 16 + width], weight.cuda(), EPS, out=again)
        check_equal(again, out[:-1], "a second run")
