"""`attn_res` against the reference in float32; the stream's sum is bit-equal, others untouched."""

from __future__ import annotations

import pytest
import torch
from compare import check_bf16, check_equal

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.attn_res import Shape, attn_res, attn_res_ref, compile_attn_res
from nanok3.reference.attn_res import AttnResWeights

EPS = 1e-5
NAN = float("nan")
# width, streams, fresh: the first and the last of k3-mini; the golden model; K3's first, one in the
# middle, a block's first, the last; a width whose last CTA has fewer columns
CASES = (
    (160, 1, True),
    (160, 3, False),
    (320, 4, False),
    (7168, 1, True),
    (7168, 2, False),
    (7168, 9, True),
    (7168, 9, False),
    (1032, 10, False),
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width, n, fresh", CASES)
def test_attn_res_compiles(width: int, n: int, fresh: bool, arch: str) -> None:
    compile_attn_res(Shape(width, n, fresh, EPS), arch)


@pytest.mark.parametrize("width", [8, 160, 320, 1024, 1032, 3584, 7168, 16384])
def test_every_column_has_one_thread(width: int) -> None:
    shape = Shape(width, 1, True, EPS)
    threads = 32 * shape.warps
    held = [
        rank * shape.per_cta + t
        for rank in range(shape.cluster)
        for t in range(threads)
        if t < shape.per_cta and rank * shape.per_cta + t < shape.pieces
    ]
    assert sorted(held) == list(range(width // 8)) and threads <= 256


def test_small_rows_need_no_cluster() -> None:
    assert [Shape(w, 1, True, EPS).cluster for w in (160, 320, 3584, 7168)] == [1, 1, 4, 8]


@pytest.mark.gpu
@pytest.mark.parametrize("width, n, fresh", CASES)
def test_attn_res_matches_ref(width: int, n: int, fresh: bool) -> None:
    torch.manual_seed(n)
    norm = (1 + 0.1 * torch.randn(width)).bfloat16()
    for tokens in (1, 2, 3, 8, 9, 64):
        # scores of a few units, so that the softmax is neither flat nor a choice of one
        score = torch.randn(width) * 2 * width**-0.5
        delta = torch.randn(tokens, width).bfloat16()
        sizes = torch.logspace(-1, 1, n).view(n, 1, 1)
        buffer = (torch.randn(n, tokens + 3, width) * sizes).bfloat16()  # room for more rows
        if fresh:
            buffer[-1] = NAN
        streams, out = buffer[:, :tokens], torch.full((tokens + 1, width), NAN).bfloat16()
        on_gpu, out_on_gpu = buffer.cuda(), out.cuda()
        weights = (score.cuda(), norm.cuda(), EPS, fresh)
        attn_res(delta.cuda(), on_gpu[:, :tokens], *weights, out=out_on_gpu[:-1])

        yardstick = out[:-1].clone()
        attn_res_ref(delta, streams, AttnResWeights(score, norm, EPS), fresh, out=yardstick)
        check_equal(on_gpu.view(torch.int16), buffer.view(torch.int16), "streams")
        right, wide = yardstick.float(), streams.float()
        attn_res_ref(wide[-1], wide, AttnResWeights(score, norm.float(), EPS), True, out=right)
        check_bf16(out_on_gpu[:-1], yardstick, right, f"{tokens} x {width}, {n} streams")
        assert out_on_gpu[-1].isnan().all(), "a row past the end was written"


@pytest.mark.gpu
def test_a_chain_of_launches_waits_for_what_it_reads() -> None:
    """Each launch adds the last one's output: a kernel that starts before it is complete shows."""
    torch.manual_seed(0)
    width, tokens = 7168, 8
    score, norm = torch.randn(width, device="cuda"), torch.ones(width, device="cuda").bfloat16()
    start = torch.randn(3, tokens, width, device="cuda").bfloat16()
    results = []
    for synchronise in (True, False):
        streams = start.clone()
        x = [torch.full_like(streams[0], NAN) for _ in range(21)]
        x[0] = streams[0].clone()
        torch.cuda.synchronize()
        for i in range(20):
            attn_res(x[i], streams, score, norm, EPS, False, out=x[i + 1])
            if synchronise:
                torch.cuda.synchronize()
        results.append((streams, torch.stack(x)))
    check_equal(results[1][0], results[0][0], "streams")
    check_equal(results[1][1], results[0][1], "outputs")
