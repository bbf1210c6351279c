"""`tap` against the reference: the same bits, and nothing else of the buffer of taps."""

from __future__ import annotations

import pytest
import torch
from compare import check_equal

from nanok3.reference.attn_res import tap_ref

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.tap import compile_tap, tap


@pytest.mark.parametrize("arch", ARCHS)
def test_tap_compiles(arch: str) -> None:
    compile_tap(7168, arch)


# widths of k3-mini, of more than one CTA, of K3
@pytest.mark.gpu
@pytest.mark.parametrize("width, tokens", [(160, 1), (1032, 3), (7168, 8)])
def test_tap_matches_ref(width: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(width)
    delta, *streams = torch.randn(4, tokens, width, generator=generator).bfloat16().unbind(0)
    taps = torch.full((tokens, 3 * width), -1.0).bfloat16()
    right = taps.clone()
    tap_ref(delta, torch.stack(streams), out=right[:, width : 2 * width])
    got = taps.cuda()
    tap(delta.cuda(), torch.stack(streams).cuda(), out=got[:, width : 2 * width])
    check_equal(got.cpu(), right, "taps")
