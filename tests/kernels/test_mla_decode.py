"""`mla_decode`, merged, against the formula in float32 on the latents; its compiling; its cuts."""

from __future__ import annotations

import pytest
import torch
from compare import check_bf16, check_equal
from torch import Tensor

from nanok3.reference.mla import attend, gather_context

pytest.importorskip("cutlass")
from nanok3.dsl import ARCHS
from nanok3.kernels.mla_decode import Shape, compile_mla_decode, mla_decode, num_splits, row_groups
from nanok3.kernels.mla_merge import mla_merge

SCALE = 192**-0.5
K3 = Shape(heads=6, rank=512, nope_dim=128, rope_dim=64, block_size=64, softmax_scale=SCALE)
K3_TP8 = Shape(heads=12, rank=512, nope_dim=128, rope_dim=64, block_size=64, softmax_scale=SCALE)
K3_ALL = Shape(heads=96, rank=512, nope_dim=128, rope_dim=64, block_size=64, softmax_scale=SCALE)
MINI = Shape(heads=4, rank=128, nope_dim=128, rope_dim=64, block_size=16, softmax_scale=SCALE)
GOLDEN = Shape(heads=2, rank=512, nope_dim=128, rope_dim=64, block_size=16, softmax_scale=SCALE)
ODD = Shape(heads=3, rank=192, nope_dim=8, rope_dim=16, block_size=5, softmax_scale=0.1)
# Rows a request, then lengths. Rows of part of a tile (6), of two, of three full ones (6 x 8), in
# two groups (12 x 8, 96 x 1, 4 x 13, of which the last is part full). Lengths of 1, around the
# borders of blocks and tiles, and with more tokens than splits times a tile.
CASES = {
    "tp16": (K3, 1, (1, 64, 1000)),
    "tp16 of 3": (K3, 3, (65, 3, 200)),
    "tp16 window": (K3, 8, (8, 129, 1000)),
    "tp16 window begins": (K3, 8, (1, 63)),  # rows before the first token are padding
    "tp8 window": (K3_TP8, 8, (100, 65)),
    "all heads": (K3_ALL, 1, (100,)),
    "mini": (MINI, 1, (1, 16, 17)),
    "mini window": (MINI, 8, (15, 300)),
    "mini many rows": (MINI, 13, (13, 66)),
    "golden": (GOLDEN, 1, (63, 65, 128)),
    "odd": (ODD, 2, (7, 64, 131)),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shape, row_tiles", [(K3, 1), (K3, 2), (K3, 3), (MINI, 1), (ODD, 1)])
def test_mla_decode_compiles(shape: Shape, row_tiles: int, arch: str) -> None:
    compile_mla_decode(shape, row_tiles, arch)


def test_every_row_is_in_one_group() -> None:
    for heads in (1, 2, 4, 6, 12, 96):
        for num_queries in range(1, 20):
            shape = Shape(heads, 512, 128, 64, 64, SCALE)
            groups, row_tiles = row_groups(shape, num_queries)
            rows = 16 * row_tiles
            assert row_tiles <= 3 and (groups - 1) * rows < num_queries * heads <= groups * rows


def test_splits_fill_the_gpu_once_and_are_not_more_than_tiles() -> None:
    assert num_splits(K3, 1, 8, 1 << 20, 132) == 132
    assert num_splits(K3, 1, 1, 1000, 132) == 16
    assert num_splits(K3, 5, 1, 1 << 20, 132) == 26
    assert num_splits(K3, 1000, 1, 1 << 20, 132) == 1
    assert num_splits(K3_ALL, 2, 1, 1 << 20, 132) == 33


class Problem:
    """Inputs on the GPU. Cache slots that no request has are `poison`; so is what a request has
    beyond its length. Block ids beyond it point nowhere."""

    def __init__(self, shape: Shape, num_queries: int, lengths: tuple[int, ...], poison: float):
        torch.manual_seed(len(lengths) + num_queries)
        size, num_reqs = shape.block_size, len(lengths)
        self.shape, self.tokens = shape, num_reqs * num_queries
        blocks = max(-(-n // size) for n in lengths) + 1
        num_blocks = num_reqs * blocks + 3
        ids = torch.randperm(num_blocks)[: num_reqs * blocks].view(num_reqs, blocks)
        width = shape.rank + shape.rope_dim
        self.cache = torch.full((num_blocks * size, width), poison, device="cuda").bfloat16()
        self.table, self.safe_table = ids.cuda(), ids.cuda()
        positions = []
        for r, n in enumerate(lengths):
            at = torch.arange(n)
            slots = ids[r, at // size] * size + at % size
            self.cache[slots.cuda()] = torch.randn(n, width, device="cuda").bfloat16()
            self.table[r, -(-n // size) :] = 1 << 40
            positions += list(range(n - num_queries, n))
        self.positions = torch.tensor(positions).clamp(min=-1).cuda()
        heads = self.tokens, shape.heads
        self.q_latent = torch.randn(*heads, shape.rank, device="cuda").bfloat16()
        self.q = torch.randn(*heads, shape.nope_dim + shape.rope_dim, device="cuda").bfloat16()
        self.q[..., : shape.nope_dim] = float("nan")  # not read: it is in q_latent

    def run(self, splits: int) -> Tensor:
        shape = self.shape
        like = {"device": "cuda", "dtype": torch.float32}
        partial = torch.full((splits, self.tokens, shape.heads, shape.rank), float("nan"), **like)
        stats = torch.full((splits, self.tokens, shape.heads, 2), float("nan"), **like)
        out = torch.full((self.tokens, shape.heads * shape.rank), float("nan"), device="cuda")
        out = out.bfloat16()
        mla_decode(
            self.q_latent.flatten(1),
            self.q.flatten(1),
            self.cache,
            self.table,
            self.positions,
            shape,
            partial=partial,
            stats=stats,
        )
        mla_merge(partial, stats, out=out)
        return out

    def formula(self, dtype: torch.dtype) -> Tensor:
        """Scores and context of nanok3.reference.mla in `dtype`; padding rows are zero."""
        shape = self.shape
        rows, visible = gather_context(
            self.cache, self.safe_table, self.positions, shape.block_size
        )
        rows = rows.to(dtype).unsqueeze(1)  # [R, 1, S, L + Dr]
        q = torch.cat([self.q_latent, self.q[..., shape.nope_dim :]], dim=-1).to(dtype)
        q = q.unflatten(0, (rows.shape[0], -1)).transpose(1, 2)  # [R, H, Q, L + Dr]
        scores = q @ rows.transpose(-1, -2) * shape.softmax_scale
        weights = attend(scores.float(), visible).nan_to_num(0.0).to(dtype)
        context = weights @ rows[..., : shape.rank]
        return context.transpose(1, 2).reshape(self.tokens, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("case", CASES)
def test_mla_decode_matches_ref(case: str, splits: int) -> None:
    shape, num_queries, lengths = CASES[case]
    problem = Problem(shape, num_queries, lengths, float("nan") if splits == 3 else 1e30)
    out = problem.run(splits)
    right = problem.formula(torch.float32)
    check_bf16(out, problem.formula(torch.bfloat16), right, case)
    padding = problem.positions < 0
    check_equal(out[padding], torch.zeros_like(out[padding]), "rows that see nothing")
    check_equal(problem.run(splits), out, "a second run")


@pytest.mark.gpu
def test_a_long_context_matches_ref() -> None:
    problem = Problem(K3, 1, (131072 - 5,), float("nan"))
    splits = num_splits(K3, 1, 1, 1 << 20, 132)
    out = problem.run(splits)
    check_bf16(out, problem.formula(torch.bfloat16), problem.formula(torch.float32), "128 K")


@pytest.mark.gpu
def test_a_nan_stays_in_its_row() -> None:
    problem = Problem(K3, 8, (200, 100), 1e30)
    before = problem.run(3)
    problem.q_latent[5, 2] = float("nan")
    after = problem.run(3).unflatten(1, (K3.heads, -1))
    assert after[5, 2].isnan().all()
    after[5, 2] = before.unflatten(1, (K3.heads, -1))[5, 2]
    check_equal(after.flatten(1), before)


@pytest.mark.gpu
def test_a_padding_request_gives_zeros() -> None:
    problem = Problem(K3, 1, (100, 64, 30), float("nan"))
    problem.positions[1] = -1
    problem.table[1] = -1
    check_equal(problem.run(3)[1], torch.zeros_like(problem.run(3)[1]))
